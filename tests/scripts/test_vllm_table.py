"""docs/vllm.md is what scripts/vllm_table.py writes of the code's tables."""

from importlib import import_module
from types import ModuleType

import pytest
from ranks import REPOSITORY

from spmd_worker.compat.keywords import KEYWORDS
from spmd_worker.compat.methods import ENGINE_METHODS, LLM_ABSENT, LLM_METHODS
from spmd_worker.replica.sequence.sampling_params import SamplingParams

WRITTEN = (REPOSITORY / "docs" / "vllm.md").read_text(encoding="utf-8")


@pytest.fixture
def vllm_table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return import_module("vllm_table")


@pytest.mark.guarantee("docs/vllm.md is written from the code's table")
def test_the_table_in_the_docs_is_current(vllm_table: ModuleType):
    assert vllm_table.document() == WRITTEN, "run python scripts/vllm_table.py"


def test_every_name_stands_in_it():
    for name in (*KEYWORDS, *SamplingParams.__struct_fields__, *LLM_METHODS, *LLM_ABSENT, *ENGINE_METHODS):
        assert WRITTEN.count(f"`{name}`") >= 1, name


@pytest.mark.control("docs/vllm.md is written from the code's table")
def test_that_comparison_sees_another_table(vllm_table: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    left = {name: row for name, row in KEYWORDS.items() if name != "quantization"}
    monkeypatch.setattr(vllm_table, "KEYWORDS", left)
    assert vllm_table.document() != WRITTEN
