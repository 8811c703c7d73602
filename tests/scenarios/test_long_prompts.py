"""Calls of an LLM and of its engine reject texts that are far too long without encoding them."""

from collections.abc import Callable
from typing import Any

import pytest
import ranks
from context_fixtures import fixture_of
from encoder_models import encoder_folder
from pooling_models import pooling_folder

from spmd_worker import LLM, BeamSearchParams, PoolingParams, SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
CHARACTERS = 1_000_000
TEXT = "word and more " * (CHARACTERS // 14)
PARAMS = SamplingParams(temperature=0, max_tokens=2)
CUT = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=8)
CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(TEXT, PARAMS),
    "the second of two, whose own is not cut": lambda llm: llm.generate(["copy a =", TEXT], [CUT, PARAMS]),
    "TextPrompt": lambda llm: llm.generate({"prompt": TEXT, "cache_salt": "one"}, PARAMS),
    "default parameters": lambda llm: llm.generate(TEXT),
    "chat": lambda llm: llm.chat([{"role": "user", "content": TEXT}], PARAMS),
    "score_tokens": lambda llm: llm.score_tokens(TEXT, [[1]], CUT),
    "beam_search": lambda llm: llm.beam_search(TEXT, BeamSearchParams(beam_width=2, max_tokens=2)),
    "add_request": lambda llm: llm.llm_engine.add_request("one", TEXT, PARAMS),
}
POOLED: dict[str, Callable[[LLM], Any]] = {
    "embed": lambda llm: llm.embed(TEXT),
    "encode": lambda llm: llm.encode([TEXT], PoolingParams()),
    "score": lambda llm: llm.score("one", ["two", TEXT]),
    "add_request": lambda llm: llm.llm_engine.add_request("one", TEXT, PoolingParams(task="embed")),
}

llm = fixture_of(lambda: LLM(str(MODEL), num_blocks=64))

pooled = fixture_of(lambda: LLM(str(pooling_folder("last")), num_blocks=64))


@pytest.fixture
def encodes_no_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("encode", "encode_inside"):
        encode = getattr(Tokenizer, name)

        def short_alone(tokenizer: Tokenizer, *given: Any, _encode: Any = encode, **more: Any) -> Any:
            assert all(len(each) < CHARACTERS // 2 for each in given if isinstance(each, str)), "a long text is encoded"
            return _encode(tokenizer, *given, **more)

        monkeypatch.setattr(Tokenizer, name, short_alone)


@pytest.mark.finding(number="B1")
@pytest.mark.parametrize("call", CALLS)
def test_call_refuses_a_long_text_unencoded(llm: LLM, encodes_no_long_text: None, call: str):
    with pytest.raises(ValueError, match=r"least \d+ tokens .*max_model_len is 256"):
        CALLS[call](llm)


@pytest.mark.finding(number="B1")
@pytest.mark.parametrize("call", POOLED)
def test_pooling_call_refuses_a_long_text_unencoded(pooled: LLM, encodes_no_long_text: None, call: str):
    with pytest.raises(ValueError, match=r"least \d+ tokens .*max_model_len is "):
        POOLED[call](pooled)


@pytest.mark.finding(number="B1")
def test_pair_refuses_a_long_text_unencoded(encodes_no_long_text: None):
    words = r"prompt 1: .*least \d+ tokens"
    with LLM(str(encoder_folder("bert_pairs")), num_blocks=64) as pairs, pytest.raises(ValueError, match=words):
        pairs.score("one", ["two", TEXT])


@pytest.mark.finding(number="B1")
def test_long_text_costs_the_others_nothing(llm: LLM, encodes_no_long_text: None):
    alone, refused = llm.generate(["copy a =", TEXT], PARAMS, on_error="row")
    assert (refused.prompt, refused.outputs, alone.error) == (TEXT, [], None)
    assert "the prompt has at least " in refused.error


@pytest.mark.parametrize("is_listed", [False, True])
def test_long_text_that_is_cut_is_answered(llm: LLM, encodes_no_long_text: None, is_listed: bool):
    """Negative control: it needs its text encoded."""
    with pytest.raises(AssertionError, match=r"^a long text .*encoded"):
        llm.generate([TEXT], [CUT] if is_listed else CUT)


def test_text_that_is_cut_has_its_last_tokens(llm: LLM, pooled: LLM):
    text = "add 1 2 = " * 2000
    assert len(llm.generate(text, CUT)[0].prompt_token_ids) == 8
    assert len(pooled.embed(text, truncate_prompt_tokens=4)[0].prompt_token_ids) == 4
    assert len(pooled.embed([text], pooling_params=[PoolingParams(truncate_prompt_tokens=4)])[0].prompt_token_ids) == 4
