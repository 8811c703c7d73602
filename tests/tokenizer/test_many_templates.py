"""Hostile chat templates by the hundred: a text or an error in words each, within the processor's seconds, and the
next row is rendered. 82 that are written down, 200 that are drawn from TESTS_SEED.
"""

import random
import re
import resource
from collections import Counter

import pytest
from hostile_templates import TEMPLATES, drawn_template
from stress_seed import SEED

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.tokenizer import template_process
from spmd_worker.tokenizer.chat_template import MAX_OUTPUT_CHARACTERS
from spmd_worker.tokenizer.template_process import IsolatedTemplate

NUM_DRAWN, NUM_PARTS = 200, 10
BESIDE_S = 2.0
"""CPU time: a process starts, ends, and another starts."""
ONE, TWO = [{"role": "user", "content": "x"}], [{"role": "user", "content": "x"}] * 2


def used_s() -> float:
    """Seconds of the processor of all processes of this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check(source: str, limit_s: float) -> str:
    """Result: `text`, or the beginning of the error."""
    before_s = used_s()
    template = IsolatedTemplate(f"{{% if messages | length > 1 %}}{source}{{% else %}}fine{{% endif %}}", {})
    try:
        text = template.render(TWO)
        assert len(text) <= MAX_OUTPUT_CHARACTERS, source
        ending = "text"
    except ChatTemplateError as error:
        ending = str(error)
        assert len(ending) > 20, source
        assert "\n" not in ending.strip(), (source, ending)
        assert "Traceback" not in ending, (source, ending)
    if ending.endswith("are not supported"):
        # Said of the template, whatever it is given.
        with pytest.raises(ChatTemplateError, match=re.escape(ending)):
            template.render(ONE)
    else:
        assert template.render(ONE) == "fine", source
    for renderer in template._process._children:
        renderer.end()
    assert used_s() - before_s < limit_s + BESIDE_S, (source, used_s() - before_s)
    return ending


def said(endings: list[str]) -> Counter[str]:
    kinds = ("512 MiB", "s of computing", "text")
    return Counter(next((kind for kind in kinds if kind in ending), "another error") for ending in endings)


@pytest.mark.stress
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_hostile_templates_leave_the_next_row_working(part: int):
    """Each ends in a text or an error."""
    endings = [check(source, template_process.CPU_S) for source in TEMPLATES[part::NUM_PARTS]]
    print(f"\nTEMPLATES part {part}: {len(endings)}, {dict(said(endings).most_common())}", end="")


@pytest.mark.stress
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_templates_leave_the_next_row_working(part: int, monkeypatch: pytest.MonkeyPatch):
    """Each ends in a text or an error."""
    # Most that pass one second pass five.
    monkeypatch.setattr(template_process, "CPU_S", 1)
    chance = random.Random(f"{SEED} templates {part}")
    endings = [check(drawn_template(chance), template_process.CPU_S) for _ in range(NUM_DRAWN // NUM_PARTS)]
    print(f"\nTEMPLATES drawn of seed {SEED}, part {part}: {dict(said(endings).most_common())}", end="")


@pytest.mark.control("Chat templates are bounded (SECURITY.md)")
@pytest.mark.stress
def test_template_check_detects_a_larger_time_limit(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control."""
    monkeypatch.setattr(template_process, "CPU_S", 6)
    (slow,) = [source for source in TEMPLATES if "sort" in source]
    with control("sort"):
        check(slow, 1)


def test_template_corpus_is_complete_and_reproducible():
    assert len(set(TEMPLATES)) == len(TEMPLATES) == 82
    assert [drawn_template(random.Random(3)) for _ in range(2)] == [drawn_template(random.Random(3))] * 2
