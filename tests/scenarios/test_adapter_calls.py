"""Calls of `LLM` and `LLMEngine` with adapters: each prompt is answered as with its adapter alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import DEMO, adapter_tensors, demo_adapters, write_adapter
from context_fixtures import fixture_of
from pooling_models import pooling_folder

from spmd_worker import LLM, BeamSearchParams, LoRARequest, PromptAdapterRequest, RequestOutput, SamplingParams
from spmd_worker.base.errors import AdapterError, ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
NAMES = ("a", "b", "c", "d", "e")
PROMPT = "add 123 + 456 ="
TALK = [{"role": "user", "content": "sort 42 17 99 ="}]
REQUESTS = [LoRARequest(name, number, path) for number, (name, path) in enumerate(demo_adapters(*NAMES).items(), 1)]
MIXED: list[LoRARequest | None] = [None, *REQUESTS, REQUESTS[2], None]

llm = fixture_of(lambda: LLM(DEMO, enable_lora=True, max_loras=3, max_cpu_loras=5, num_blocks=256, device="cpu"))


def bits(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, float]]]:
    """Ids and log-probabilities of each answer."""
    return [
        [(token, position[token].logprob) for token, position in zip(each.token_ids, each.logprobs, strict=True)]
        for output in outputs
        for each in output.outputs
    ]


def generated(llm: LLM, adapters: Any, prompts: Any = PROMPT, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False, **options)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str | None, list[tuple[int, float]]]:
    """The answer with each adapter, of a call of its own."""
    answers = {None if each is None else each.lora_name: bits(generated(llm, each))[0] for each in (None, *REQUESTS)}
    assert len({str(answer) for answer in answers.values()}) == 6, "every adapter changes the answer"
    return answers


def expected(alone: dict[str | None, Any], adapters: Sequence[LoRARequest | None]) -> list[Any]:
    return [alone[None if each is None else each.lora_name] for each in adapters]


@pytest.mark.guarantee("A list of adapters: each prompt as alone")
def test_list_of_adapters_answers_each_as_alone(llm: LLM, alone: dict[str | None, Any]):
    outputs = generated(llm, MIXED, [PROMPT] * len(MIXED))
    assert bits(outputs) == expected(alone, MIXED)
    assert [output.lora_request for output in outputs] == MIXED
    assert [output.outputs[0].lora_request for output in outputs] == MIXED
    assert bits(generated(llm, REQUESTS[1], [PROMPT] * 2)) == [alone["b"]] * 2


@pytest.mark.control("A list of adapters: each prompt as alone")
def test_comparison_detects_adapters_in_another_order(llm: LLM, alone: dict[str | None, Any]):
    other = [REQUESTS[1], REQUESTS[0]]
    assert bits(generated(llm, other, [PROMPT] * 2)) != expected(alone, other[::-1])


def test_model_without_adapters_has_the_same_bits(alone: dict[str | None, Any]):
    with LLM(DEMO, num_blocks=64, device="cpu") as plain:
        assert bits(plain.generate(PROMPT, GREEDY, use_tqdm=False)) == [alone[None]]
        with pytest.raises(ConfigError, match=r"no LoRA adapters: set enable_lora=True"):
            generated(plain, REQUESTS[0])


def test_trainers_tensors_are_the_folders_adapter(llm: LLM, alone: dict[str | None, Any]):
    tensors, config = adapter_tensors(DEMO, sum(b"d"))
    given = LoRARequest("policy", 4, lora_tensors=tensors, peft_config=config, load_inplace=True)
    assert bits(generated(llm, given)) == [alone["d"]]
    generated(llm, replace(REQUESTS[3], load_inplace=True))


def test_chat_beams_and_scores_take_adapters(llm: LLM):
    pair = [REQUESTS[0], None]
    chats = llm.chat([TALK, TALK], GREEDY, use_tqdm=False, lora_request=pair)
    one_by_one = [llm.chat(TALK, GREEDY, use_tqdm=False, lora_request=each)[0] for each in pair]
    assert bits(chats) == bits(one_by_one)
    assert bits(chats)[0] != bits(chats)[1]
    beams = llm.beam_search([PROMPT] * 2, BeamSearchParams(beam_width=2, max_tokens=3), lora_request=pair)
    single = [llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=3), each)[0] for each in pair]
    assert [[each.tokens for each in output.sequences] for output in beams] == [
        [each.tokens for each in output.sequences] for output in single
    ]
    assert [output.sequences[0].lora_request for output in beams] == pair
    outputs = generated(llm, pair, [PROMPT] * 2)
    ids = [output.outputs[0].token_ids for output in outputs]
    scores = llm.score_tokens([output.prompt_token_ids for output in outputs], ids, lora_request=pair)
    assert scores == [[logprob for _, logprob in answer] for answer in bits(outputs)]
    assert llm.score_tokens([outputs[0].prompt_token_ids], ids[:1]) != scores[:1]


def test_engine_requests_have_their_adapters(llm: LLM, alone: dict[str | None, Any]):
    engine, outputs = llm.llm_engine, dict[str, Any]()
    for number, each in enumerate(MIXED):
        engine.add_request(str(number), PROMPT, GREEDY, lora_request=each)
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    ordered = [outputs[str(number)] for number in range(len(MIXED))]
    assert bits(ordered) == expected(alone, MIXED)
    assert [output.lora_request for output in ordered] == MIXED
    with pytest.raises(ValueError, match="adapters are for requests with a name"):
        engine.add_request([1, 2], GREEDY, lora_request=REQUESTS[0])


@pytest.mark.parametrize(
    ("adapters", "kind", "message"),
    [
        ("a", TypeError, "lora_request='a' is a str: give LoRARequest, None"),
        ([None, object()], TypeError, "is a object: give LoRARequest"),
        (REQUESTS[:3], ValueError, "3 lora requests for 2 prompts: give one"),
        ([REQUESTS[0], replace(REQUESTS[1], lora_int_id=1)], AdapterError, "lora_int_id=1 is that of .*: give each"),
        (replace(REQUESTS[0], lora_path="/nowhere"), AdapterError, "give another id"),
        (LoRARequest("none", 9, "/nowhere"), AdapterError, "/nowhere"),
    ],
)
def test_wrong_adapters_are_refused_in_words(
    llm: LLM, alone: dict[str | None, Any], adapters: Any, kind: type[Exception], message: str
):
    with pytest.raises(kind, match=message):
        generated(llm, adapters, [PROMPT] * 2)
    assert bits(generated(llm, REQUESTS[0])) == [alone["a"]]


def test_per_rank_prompts_need_loaded_adapters(llm: LLM, alone: dict[str | None, Any], tmp_path: Path):
    assert bits(generated(llm, [REQUESTS[0], None], [PROMPT] * 2, gather=True)) == [alone["a"], alone[None]]
    other = LoRARequest("f", 6, write_adapter(tmp_path, DEMO, 6))
    with pytest.raises(ValueError, match="call add_lora before"):
        generated(llm, other, gather=True)


@pytest.mark.parametrize(("name", "call"), [("last", "embed"), ("labels", "classify"), ("reward", "score")])
def test_pooling_calls_take_adapters(tmp_path: Path, name: str, call: str):
    folder = pooling_folder(name)
    adapters = [
        LoRARequest(each, number, write_adapter(tmp_path / each, folder, number)) for number, each in enumerate("ab", 1)
    ]
    given: list[LoRARequest | None] = [None, *adapters]
    first = ("a text",) if call == "score" else ()
    with LLM(folder, enable_lora=True, max_loras=2, num_blocks=64, device="cpu") as llm:
        with pytest.raises(ValueError, match="prompt_adapter_request is for generated text: leave it out"):
            getattr(llm, call)(*first, "text", prompt_adapter_request=PromptAdapterRequest("a", 1, "b", 3))

        def pooled(texts: list[str], lora_request: Any) -> list[Any]:
            outputs = getattr(llm, call)(*first, texts, lora_request=lora_request, use_tqdm=False)
            return [output.outputs for output in outputs]

        together = pooled(["hello world"] * 3, given)
        assert together == [pooled(["hello world"], each)[0] for each in given]
        assert len({str(each) for each in together}) == 3
        if call == "embed":
            with pytest.raises(ValueError, match="vectors of two adapters cannot be compared"):
                llm.score("a", "b", lora_request=adapters, use_tqdm=False)
            assert llm.score("a", "a", lora_request=adapters[0], use_tqdm=False)[0].outputs.score > 0.99
