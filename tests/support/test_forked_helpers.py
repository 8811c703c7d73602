"""Forked helper processes: the answer, limits and environment of fresh ones, and an end with their owner's word."""

import os
from pathlib import Path

import forked_helpers
import pytest
import ranks

from spmd_worker.base.process import children_of, start_time_of
from spmd_worker.tokenizer.template_process import IsolatedTemplate


def shown(template: IsolatedTemplate) -> tuple[str, str, bool, list[bytes]]:
    """A rendered text; the limit of memory, whether one of computing is set, and what numpy reads, of the process."""
    text = template.render([{"role": "user", "content": "hello"}])
    folder = Path(f"/proc/{template._process.pid}")
    limits = {line[:26].strip(): line[26:47].strip() for line in (folder / "limits").read_text().splitlines()}
    variables = [each for each in (folder / "environ").read_bytes().split(b"\0") if each.startswith(b"OPENBLAS_NUM")]
    return text, limits["Max address space"], limits["Max cpu time"] != "unlimited", variables


def test_forked_helper_is_limited_as_a_fresh_one(monkeypatch: pytest.MonkeyPatch):
    found = []
    for about in ((), ("tests/support/test_forked_helpers.py",)):
        monkeypatch.setattr(forked_helpers, "ABOUT_HELPERS", about)
        template = IsolatedTemplate("{{ messages[0].content }}", {})
        found.append(shown(template))
        pid = template._process.pid
        # Without it the two would be the same.
        assert (pid in children_of(os.getpid())) == bool(about)
        template._process.close()
        assert start_time_of(pid) is None
    assert found == [("hello", str(512 << 20), True, [b"OPENBLAS_NUM_THREADS=1"])] * 2


def test_listed_files_about_helpers_are_there():
    assert all((ranks.REPOSITORY / name).is_file() for name in forked_helpers.ABOUT_HELPERS)
