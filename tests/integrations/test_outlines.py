"""outlines' calls of an LLM, in its order, with the classes that it imports from vLLM when it is asked.

outlines itself is not installed here; docs/guides/tools_and_formats.md says what was run with it.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ranks

from spmd_worker import LLM, SamplingParams

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
MODULE = "spmd_worker.integrations.outlines"
pytestmark = pytest.mark.matrix


@pytest.fixture
def _vllm() -> Iterator[None]:
    """Modules of that name that are gone afterwards."""
    assert "vllm" not in sys.modules
    yield
    for name in [each for each in sys.modules if each == MODULE or each.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_vllm")
def test_requested_names_exist_and_parameters_survive_a_copy():
    importlib.import_module(MODULE)
    names = importlib.import_module("vllm.sampling_params")
    assert names.SamplingParams is SamplingParams
    with LLM(MODEL, device="cpu", num_blocks=32) as llm:
        tokenizer = llm.get_tokenizer()
        assert hasattr(tokenizer, "chat_template") or hasattr(tokenizer, "apply_chat_template")
        given = names.SamplingParams(max_tokens=6, temperature=0.0, stop=["7"])
        copied = names.SamplingParams(**{name: getattr(given, name) for name in given.__struct_fields__})
        assert copied == given
        messages = [{"role": "user", "content": "add 3 4 ="}]
        (one,) = llm.chat(messages=messages, sampling_params=copied, use_tqdm=False)
        several = llm.chat(messages=[messages] * 2, sampling_params=copied, use_tqdm=False)
        assert [each.outputs[0].text for each in several] == [one.outputs[0].text] * 2
        assert llm.generate(prompts="add 3 4 =", sampling_params=copied, use_tqdm=False)[0].outputs[0].text


@pytest.mark.guarantee("outlines: an output type is a form")
@pytest.mark.usefixtures("_vllm")
def test_output_type_constrains_the_answer():
    importlib.import_module(MODULE)
    names = importlib.import_module("vllm.sampling_params")
    with LLM(MODEL, device="cpu", num_blocks=32) as llm:
        given = names.SamplingParams(max_tokens=20, temperature=1.0)
        form = names.StructuredOutputsParams(regex="[0-9]{2,4}x")
        copied = names.SamplingParams(
            **{name: getattr(given, name) for name in given.__struct_fields__ if name != "structured_outputs"},
            structured_outputs=form,
        )
        (output,) = llm.generate(prompts="add 3 4 =", sampling_params=copied, use_tqdm=False)
    assert re.fullmatch("[0-9]{2,4}x", output.outputs[0].text)


@pytest.mark.control("outlines: an output type is a form")
@pytest.mark.usefixtures("_vllm")
def test_output_test_detects_forgotten_output_type(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control."""

    def forgetful(structured_outputs: object = None, **given: Any) -> SamplingParams:
        return SamplingParams(**given)

    importlib.import_module(MODULE)
    monkeypatch.setattr(importlib.import_module("vllm.sampling_params"), "SamplingParams", forgetful)
    with control("fullmatch"):
        test_output_type_constrains_the_answer()


@pytest.mark.usefixtures("_vllm")
def test_other_imported_vllm_is_not_mixed_with_ours():
    sys.modules["vllm"] = importlib.import_module("string")
    with pytest.raises(ImportError, match=rf"^vllm .*imported.*: import {MODULE} "):
        importlib.import_module(MODULE)
