"""Answers of models to recordings and pictures in prompts: how tests ask for them by calls and bodies, hold them
against others, and where files are that prompts name.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ranks
from exact_answers import ids_and_logprobs

from spmd_worker import LLM, SamplingParams
from spmd_worker.compat.call_images import CallPrompt
from spmd_worker.engine.calls import call_runner
from spmd_worker.engine.data_parallel import prompts as data_parallel_prompts

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)
SAMPLING: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "What is it?"}


def answers(llm: LLM, given: list[Any]) -> list[Any]:
    return ids_and_logprobs(llm.generate(given, GREEDY, use_tqdm=False))


def cold_answers(llm: LLM, given: list[Any]) -> list[Any]:
    """Each prompt's answer, alone and cold."""
    found = []
    for each in given:
        llm.reset_prefix_cache()
        found += answers(llm, [each])
    return found


def noted_again(monkeypatch: pytest.MonkeyPatch) -> list[CallPrompt]:
    """Prompts whose media are prepared, also again in a call that holds the media of no prompt that waits."""
    again, made = CallPrompt.again, list[CallPrompt]()
    for module in (call_runner, data_parallel_prompts):
        monkeypatch.setattr(module, "half_window_bytes", lambda gib: 1.0)
    monkeypatch.setattr(CallPrompt, "again", lambda prompt: made.append(prompt) or again(prompt))
    return made


def write_answers(llm: LLM, given: list[Any], folder: Path) -> None:
    """Write a rank's answers."""
    (folder / str(llm.llm_engine.engine_channel.rank)).write_text(json.dumps(answers(llm, given)))


def check_two_ranks(script: str, kind: str, layout: str, expected: list[Any], folder: Path) -> None:
    """Two ranks of a script, which calls `write_answers`, answer as one."""
    ranks.run_forked([script, kind, folder, layout], 2, timeout_s=240).checked()
    first, second = (json.loads(each.read_text()) for each in sorted(folder.iterdir()))
    assert first == second
    if layout == "pipeline":
        assert first == json.loads(json.dumps(expected))
    # Two tensor ranks add in another order.
    assert [each[:2] for each in first] == [each[:2] for each in expected]


def audio_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def conversation(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, TEXT]}]


def body(*parts: Any) -> dict[str, Any]:
    return {"messages": conversation(*parts), **SAMPLING}


def content_of(answer: dict[str, Any]) -> tuple[str, int]:
    """Text of an answer, and tokens of its prompt."""
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def with_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """The folder with the files in it."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
