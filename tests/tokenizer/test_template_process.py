"""Templates in their own process: the same text as in this one, and an end for those that no rule of ours sees."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs_of_rows import answers_of_job
from ranks import REPOSITORY
from test_chat_template import BOMBS, CHATML, CONVERSATIONS, MISTRAL_LIKE, ODDITIES
from waiting import wait_until

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.base.process import children_of, start_time_of
from spmd_worker.tokenizer import bounded_process, template_process
from spmd_worker.tokenizer.chat_template import ChatTemplate
from spmd_worker.tokenizer.template_process import IsolatedTemplate

MODEL = REPOSITORY / "scripts" / "demo" / "model"

# What the counting of loop turns, calls and characters does not see.
LARGE = {
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) | length }}",
    "join": "{{ (['a' * 99999] * 99999) | join(',') | length }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(99999) | length }}",
    "indent": "{{ ('\n' * 99999) | indent(99999, true, true) | length }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) | length }}",
    "format": "{{ ('{0}' * 9999).format('b' * 999999) | length }}",
    "zfill": "{% set ns = namespace(x=[]) %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x + ['x'.zfill(99999)] %}{% endfor %}",
}
SLOW = {
    "pprint": "{% set ns = namespace(x=[1]) %}{% for i in range(24) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | pprint | length }}",
    "lists": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [i] %}{% endfor %}",
    "sort": "{% for i in range(9999) %}{% if range(99999) | sort | length %}{% endif %}{% endfor %}",
    "find": "{% for i in range(9999) %}{% if ('a' * 99999 + 'b').count('a' * 4999 + 'b') %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("source", [CHATML, MISTRAL_LIKE, ODDITIES], ids=["chatml", "mistral", "oddities"])
def test_isolated_template_equals_rendering_in_this_process(source: str):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    isolated, here = IsolatedTemplate(source, tokens), ChatTemplate(source, tokens)
    odd = [
        {"role": "user", "content": "half \ud800, \u2028 and \x00", "tool_calls": [{"n": 1.5, "x": None, "y": True}]}
    ]
    for messages in [*CONVERSATIONS, odd]:
        for generates in (True, False):
            given = (messages, generates, {"date_string": "now", "more": [1, {"a": "b"}]})
            assert isolated.render(*given) == here.render(*given)


@pytest.mark.parametrize("name", ["loops", "repeat", "format method"])
def test_isolated_template_keeps_the_more_specific_errors(name: str):
    with pytest.raises(ChatTemplateError) as here:
        ChatTemplate(BOMBS[name], {}).render(CONVERSATIONS[0])
    with pytest.raises(ChatTemplateError) as isolated:
        IsolatedTemplate(BOMBS[name], {}).render(CONVERSATIONS[0])
    assert str(isolated.value) == str(here.value)


def test_oversized_conversation_is_named_and_next_row_runs(
    monkeypatch: pytest.MonkeyPatch,
):
    """The error claimed that jinja2 was missing."""
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 256 << 20)
    template = IsolatedTemplate("fine", {})
    with pytest.raises(ChatTemplateError, match="more than 256 MiB"):
        template.render(CONVERSATIONS[0], variables={"x": [{"": 0}] * 1_500_000})
    assert template.render(CONVERSATIONS[0]) == "fine"


def test_conversation_beyond_process_memory_is_named(monkeypatch: pytest.MonkeyPatch):
    """Its process has ended before all of it is sent."""
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 128 << 20)
    template = IsolatedTemplate("fine", {})
    with pytest.raises(ChatTemplateError, match="more than 128 MiB"):
        template.render(CONVERSATIONS[0], variables={"x": "x" * (160 << 20)})
    assert template.render(CONVERSATIONS[0]) == "fine"


@pytest.mark.gate("expandtabs", "format", "indent", "join", "replace")
@pytest.mark.guarantee("Chat templates are bounded (SECURITY.md)")
@pytest.mark.parametrize(
    "name",
    ["replace", *(pytest.param(name, marks=pytest.mark.matrix) for name in LARGE if name != "replace")],
)
def test_template_exceeding_memory_fails_and_next_row_runs(name: str):
    template = IsolatedTemplate(f"{{% if messages | length > 1 %}}{LARGE[name]}{{% else %}}fine{{% endif %}}", {})
    assert template.render(CONVERSATIONS[0]) == "fine"
    with pytest.raises(ChatTemplateError, match="more than 512 MiB"):
        template.render(CONVERSATIONS[1])
    assert template.render(CONVERSATIONS[0]) == "fine"


@pytest.mark.gate("find")
@pytest.mark.parametrize(
    "name", ["lists", *(pytest.param(name, marks=pytest.mark.matrix) for name in SLOW if name != "lists")]
)
def test_template_exceeding_cpu_time_fails_and_next_runs(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_process, "CPU_S", 0)
    template = IsolatedTemplate(f"{{% if messages | length > 1 %}}{SLOW[name]}{{% else %}}fine{{% endif %}}", {})
    assert template.render(CONVERSATIONS[0]) == "fine"
    with pytest.raises(ChatTemplateError, match=r"more than \d s .*computing"):
        template.render(CONVERSATIONS[1])
    assert template.render(CONVERSATIONS[0]) == "fine"


@pytest.mark.control("Chat templates are bounded (SECURITY.md)")
def test_template_bound_check_detects_unbounded_rendering():
    assert (
        ChatTemplate("{{ ('a' * 9999).replace('a', 'b' * 9999) | length }}", {}).render(CONVERSATIONS[0]) == "99980001"
    )


def process_of(template: IsolatedTemplate) -> int:
    pid = template._process.pid
    assert pid is not None
    return pid


def test_template_process_is_reused_until_it_ends():
    template = IsolatedTemplate("{{ messages | length }}", {})
    assert template._process.pid is None, "none before it is needed"
    template.render(CONVERSATIONS[0])
    first = process_of(template)
    with pytest.raises(ChatTemplateError, match="division"):
        IsolatedTemplate("{{ 1 / 0 }}", {}).render(CONVERSATIONS[0])
    template.render(CONVERSATIONS[0])
    assert process_of(template) == first
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: start_time_of(first) is None)
    assert template.render(CONVERSATIONS[1]) == "2"
    assert process_of(template) != first


FOR_THE_OWNER = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize("number", FOR_THE_OWNER)
def test_group_signal_does_not_fail_the_row(number: signal.Signals):
    """torchrun ends its ranks by their groups, and a job goes on for a while to keep what is finished."""
    template = IsolatedTemplate("{{ messages | length }}", {})
    template.render(CONVERSATIONS[0])
    first = process_of(template)
    os.kill(first, number)
    assert template.render(CONVERSATIONS[1]) == "2"
    assert process_of(template) == first


def end_as_they_start(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, most: int) -> list[int]:
    """The first processes, `most` of them, get the signal before they look away. Returns those that were started."""
    started: list[int] = []
    start = subprocess.Popen

    # By itself, and whatever is ignored here: a program in the background of a shell may ignore Ctrl-C.
    heeds = "" if number == signal.SIGKILL else f"signal.signal({number:d}, signal.SIG_DFL); "
    source = f"import os, signal; {heeds}os.kill(os.getpid(), {number:d})"
    ends = [sys.executable, "-S", "-c", source]

    def start_one(command: list[str], **settings: Any) -> "subprocess.Popen[bytes]":
        process = start(ends if len(started) < most else command, **settings)
        started.append(process.pid)
        return process

    monkeypatch.setattr(bounded_process.subprocess, "Popen", start_one)
    return started


@pytest.mark.parametrize("number", FOR_THE_OWNER)
def test_early_group_signal_does_not_fail_the_row(monkeypatch: pytest.MonkeyPatch, number: signal.Signals):
    """The signal comes before the process ignores it."""
    started = end_as_they_start(monkeypatch, number, most=1)
    assert IsolatedTemplate("{{ messages | length }}", {}).render(CONVERSATIONS[1]) == "2"
    assert len(started) == 2
    assert start_time_of(started[0]) is None


@pytest.mark.parametrize(("number", "tries"), [(signal.SIGTERM, 2), (signal.SIGKILL, 1)])
def test_process_killed_each_time_is_an_error(monkeypatch: pytest.MonkeyPatch, number, tries: int):
    """The control: one more try, and no more; and none for what may be the template's own doing."""
    started = end_as_they_start(monkeypatch, number, most=9)
    with pytest.raises(ChatTemplateError, match=rf"ended by {number.name}"):
        IsolatedTemplate("x", {}).render(CONVERSATIONS[0])
    assert len(started) == tries


def test_template_process_ends_with_its_template():
    template = IsolatedTemplate("x", {})
    template.render(CONVERSATIONS[0])
    pid = process_of(template)
    del template
    gc.collect()
    assert start_time_of(pid) is None


def test_template_process_ends_with_its_owner():
    """A SIGKILL of the owner ends it too."""
    source = (
        "from spmd_worker.tokenizer.template_process import IsolatedTemplate as T; import time; t = T('x', {}); "
        "t.render([]); print(t._process.pid, flush=True); time.sleep(3600)"
    )
    command = [sys.executable, "-c", source]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert children_of(owner.pid) == [pid]
        owner.kill()
        owner.wait()
        wait_until(lambda: start_time_of(pid) is None)


def test_forked_owner_starts_its_own_template_process(monkeypatch: pytest.MonkeyPatch):
    template = IsolatedTemplate("x", {})
    template.render(CONVERSATIONS[0])
    first = template._process._children[0]
    pid, own = first.process.pid, os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(bounded_process.os, "getpid", lambda: own + 1)
        assert template.render(CONVERSATIONS[0]) == "x"
        assert process_of(template) != pid
        assert start_time_of(pid) is not None, "the parent's is left alone"
        bounded_process._end_all(template._process._children)
    first.end()


def test_objects_with_methods_are_not_sent():
    with pytest.raises(ChatTemplateError, match=r"JSON .*not object$"):
        IsolatedTemplate("{{ messages }}", {}).render([{"role": "user", "content": object()}])


def test_job_completes_other_rows_despite_template_bomb(tmp_path: Path):
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(LARGE["replace"])
    rows = [{"prompt": "add 1 2 ="}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt": "add 3 4 ="}]
    asked = [{**row, "max_tokens": 2} for row in rows]
    answers = answers_of_job(tmp_path, tmp_path / "model", asked, dtype="auto", num_blocks=64)
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [None, "chat_template_error", None]
    assert "more than 512 MiB of memory" in answers[1]["error"]["message"]


LONG_ERRORS = {
    "raised": "{{ raise_exception('x' * 4000000) }}",
    "raised, of a list": "{% set a = 'x' * 4000000 %}{{ raise_exception([a] * 16) }}",
    "raised, of messages": "{{ raise_exception(messages[0].content * 1000) }}",
    "a name": "{{ messages['x' * 100000] + 1 }}",
    "an attribute": "{{ ('x' * 100000).y.z }}{{ messages[0]['k' * 99999].z }}",
    "a filter": "{{ messages | " + "f" * 100_000 + " }}",
    "a conversion": "{{ ('9' * 99999) | int(base=1) + messages }}{{ ['x' * 99999] + 'y' * 99999 }}",
    "a format": "{{ '%d' % ('x' * 99999) }}{{ {}['x' * 99999].a }}",
}


@pytest.mark.finding(number="D17")
@pytest.mark.parametrize("name", LONG_ERRORS)
def test_template_error_length_is_bounded(name: str):
    with pytest.raises(ChatTemplateError, match="chat template: ") as raised:
        IsolatedTemplate(LONG_ERRORS[name], {}).render([{"role": "user", "content": "hello " * 20}])
    assert 20 < len(str(raised.value)) < 700


NESTED = {
    "loops": "{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25,
    "conditions": "{% if 1 %}" * 120 + "x" + "{% endif %}" * 120,
    "both": "{% for a in [1] %}{% if a %}" * 22 + "x" + "{% endif %}{% endfor %}" * 22,
}


@pytest.mark.finding(number="D17")
def test_uncompilable_template_is_named_as_such():
    """They were told that there was no jinja2."""
    for source in NESTED.values():
        with pytest.raises(ChatTemplateError, match=r"loops .*nested too"):
            IsolatedTemplate(source, {}).render(CONVERSATIONS[0])
    for source, words in {
        "{% break %}": "compiled: 'break' outside",
        "{{ f(a=1, a=2) }}": r"compiled: .*argument repeated: a\b",
        "{{ " + "[" * 3000 + "1" + "]" * 3000 + " }}": "it is nested, or its macros call each other, too deeply",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "it is nested, or its macros call each other, too deeply",
    }.items():
        template = IsolatedTemplate(source, {})
        for _ in range(2):
            with pytest.raises(ChatTemplateError, match=words):
                template.render(CONVERSATIONS[0])
    nineteen = "{% for a in [1] %}" * 19 + "x" + "{% endfor %}" * 19
    assert IsolatedTemplate(nineteen, {}).render(CONVERSATIONS[0]) == "x"
