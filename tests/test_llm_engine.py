"""An engine driven by hand with vLLM's names: requests with names, prompts in any form, outputs as they come."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from reference_models import checkpoint_folder, mixed_prompts, write_text_checkpoint

from spmd_worker import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, RequestOutputKind, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.engine.partial_outputs import PartialOutputs
from spmd_worker.tokenizer.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=4)
PROMPTS = mixed_prompts(5, 40, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    made = LLMEngine.from_engine_args(EngineArgs(model=str(folder), num_blocks=300, disable_log_stats=True))
    yield made
    assert not made.has_unfinished_requests()
    assert made.scheduler.cache.num_used_blocks == 0
    made.shutdown()


def drain(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def add(engine: LLMEngine, prompts: dict[str, Any], params: SamplingParams) -> None:
    for name, prompt in prompts.items():
        assert engine.add_request(name, prompt, params) == name


def test_outputs_have_the_names_that_requests_were_given(engine: LLMEngine):
    add(engine, {"7": "hello", "b": {"prompt": "hello"}, "c": {"prompt_token_ids": [5, 6]}, "d": [5, 6]}, GREEDY)
    assert engine.get_num_unfinished_requests() == 4
    outputs = {output.request_id: output for output in drain(engine)}
    assert sorted(outputs) == ["7", "b", "c", "d"]
    assert all(output.finished for output in outputs.values())
    assert outputs["7"].outputs == outputs["b"].outputs
    assert outputs["c"].outputs == outputs["d"].outputs != outputs["b"].outputs
    assert (outputs["7"].prompt, outputs["c"].prompt) == ("hello", None)
    add(engine, {"7": "hello"}, GREEDY)
    (again,) = drain(engine)
    assert again.outputs == outputs["7"].outputs


def test_a_request_is_aborted_by_its_name(engine: LLMEngine):
    add(engine, {"1": "hello", "0": "world", "x": "cache"}, replace(GREEDY, max_tokens=50))
    engine.step()
    engine.step()
    engine.abort_request("1")
    engine.abort_request(["x", "nobody"])
    ended = {output.request_id: output.outputs[0].finish_reason for output in drain(engine)}
    assert ended == {"1": "abort", "0": "length", "x": "abort"}
    engine.abort_request("1")


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"request_id": 3}, TypeError, "request_id=3 is a int: give text"),
        ({"params": {}}, TypeError, r"^sampling .*dict: .*SamplingParams"),
        ({"prompt": {"prompt": "a", "multi_modal_data": 1}}, ValueError, "multi_modal_data=1 must be a dict"),
        ({"prompt": []}, ValueError, r"prompt .*no tokens"),
        ({"prompt": "hello " * 999}, ValueError, "but max_model_len is"),
        ({"lora_request": "x"}, TypeError, "lora_request='x' is a str: give LoRARequest"),
        ({"lora_request": LoRARequest("a", 1, "/a")}, ConfigError, "no LoRA adapters: set enable_lora=True"),
        ({"priority": 1}, ValueError, "^priority=1 needs scheduling_policy=priority"),
        ({"trace_headers": {"a": "b"}}, ValueError, "trace_headers={'a': 'b'}"),
    ],
)
def test_invalid_request_is_rejected_immediately(engine: LLMEngine, arguments: Any, kind: Any, words: str):
    with pytest.raises(kind, match=words):
        engine.add_request(**{"request_id": "a", "prompt": "hello", "params": GREEDY, **arguments})
    assert not engine.has_unfinished_requests()


def test_open_requests_have_unique_names(engine: LLMEngine):
    add(engine, {"a": "hello"}, GREEDY)
    with pytest.raises(ValueError, match="request_id='a'"):
        engine.add_request("a", "world", GREEDY)
    assert [output.request_id for output in drain(engine)] == ["a"]


KINDS = {
    "plain": SAMPLED,
    "several": replace(SAMPLED, n=3),
    "log-probabilities": replace(SAMPLED, logprobs=2),
    "stop string": replace(SAMPLED, stop=("e", " the", "zzz"), max_tokens=60),
    "stop string kept": replace(SAMPLED, stop=("e",), include_stop_str_in_output=True, max_tokens=60),
    "stop token": replace(SAMPLED, stop_token_ids=tuple(range(40, 60)), max_tokens=60, n=2),
    "special tokens": replace(SAMPLED, skip_special_tokens=False, ignore_eos=False, logit_bias={2: 5.0}),
    "no text": replace(SAMPLED, detokenize=False),
    "ranked": replace(SAMPLED, best_of=3),
}


@pytest.mark.gate("stop string", "log-probabilities", "several", "special tokens", "stop token", "no text")
@pytest.mark.parametrize("name", KINDS)
def test_partial_outputs_add_up_to_the_final(engine: LLMEngine, name: str):
    prompts = {"a": "hello world", "b": "naïve café 你好", "c": [9, 8, 7]}
    params = KINDS[name]
    add(engine, prompts, params)
    expected = {output.request_id: output for output in drain(engine)}

    params.output_kind = RequestOutputKind.CUMULATIVE
    add(engine, prompts, params)
    seen: dict[tuple[str, int], Any] = {}
    finals: dict[str, RequestOutput] = {}
    for output in drain(engine):
        if output.finished:
            finals[output.request_id] = output
        for each in output.outputs:
            before = seen.get((output.request_id, each.index))
            if before is not None and params.best_of is None:
                assert each.text.startswith(before.text)
                assert each.token_ids[: len(before.token_ids)] == before.token_ids
            seen[output.request_id, each.index] = each
    assert {key: output.outputs for key, output in finals.items()} == {
        key: output.outputs for key, output in expected.items()
    }

    params.output_kind = RequestOutputKind.DELTA
    add(engine, prompts, params)
    joined: dict[tuple[str, int], Any] = {}
    num_outputs = 0
    for output in drain(engine):
        num_outputs += not output.finished
        for each in output.outputs:
            whole = joined.setdefault(
                (output.request_id, each.index), replace(each, text="", token_ids=[], logprobs=[])
            )
            whole.text += each.text
            whole.token_ids += each.token_ids
            whole.logprobs += each.logprobs or []
            whole.finish_reason, whole.stop_reason = each.finish_reason, each.stop_reason
            whole.cumulative_logprob = each.cumulative_logprob
    for key, output in expected.items():
        for each in output.outputs:
            assert joined[key, each.index] == replace(each, logprobs=each.logprobs or [])
    assert (num_outputs == 0) == (params.best_of is not None)
    params.output_kind = RequestOutputKind.FINAL_ONLY


def test_outputs_may_be_mutated_by_the_caller(engine: LLMEngine):
    """The tokens of a sample that had ended were the engine's own list: what a reader did with it was in the later
    outputs of its request.
    """
    params = replace(KINDS["stop token"], n=8, output_kind=RequestOutputKind.CUMULATIVE)
    add(engine, {"a": "hello world"}, params)
    expected = drain(engine)[-1]
    add(engine, {"a": "hello world"}, params)
    num_ended_before = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]
                continue
            num_ended_before += sum(each.finish_reason is not None for each in output.outputs)
            for each in output.outputs:
                each.token_ids.clear()
    assert num_ended_before > 0


def test_partial_output_decodes_new_tokens_only(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    """Every log-probability so far was spelled anew in each step: a stream's cost grew with its length's square."""
    spelled: list[int] = []
    token_text = Tokenizer.token_text
    monkeypatch.setattr(
        Tokenizer, "token_text", lambda self, token: (spelled.append(token), token_text(self, token))[1]
    )
    params = replace(GREEDY, max_tokens=40, logprobs=0, output_kind=RequestOutputKind.CUMULATIVE)
    add(engine, {"a": "hello world"}, params)
    outputs = drain(engine)
    assert [len(output.outputs[0].logprobs or []) for output in outputs] == list(range(1, 41))
    # Once as they come, and once for the last output, which is made as where nothing is streamed.
    ids = outputs[-1].outputs[0].token_ids
    assert spelled == ids[:-1] + ids


def test_control_shown_stop_string_prefix_is_detected(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    """Negative control: shown at once, the beginning of a stop string is taken back when it is whole."""
    longer = replace(GREEDY, max_tokens=40)
    engine.add_request("a", "hello world", longer)
    (written,) = drain(engine)
    stop = written.outputs[0].text[2:14]
    assert len(stop) == 12
    params = replace(longer, stop=(stop,), output_kind=RequestOutputKind.CUMULATIVE)

    def takes_back() -> bool:
        engine.add_request("a", "hello world", params)
        texts = [output.outputs[0].text for output in drain(engine)]
        return not all(later.startswith(earlier) for earlier, later in pairwise(texts))

    assert not takes_back()
    monkeypatch.setattr(PartialOutputs, "_certain_text", lambda _self, sequence: sequence.text or "")
    assert takes_back()


def test_partial_outputs_come_each_step_if_requested(engine: LLMEngine):
    engine.add_request("asks", "hello", replace(GREEDY, output_kind=RequestOutputKind.DELTA))
    engine.add_request("waits", "hello", GREEDY)
    outputs = drain(engine)
    asked = [output for output in outputs if output.request_id == "asks"]
    assert [len(output.outputs[0].token_ids) for output in asked] == [1] * 8
    assert [output.finished for output in asked] == [False] * 7 + [True]
    assert [output.outputs[0].finished() for output in asked] == [False] * 7 + [True]
    assert [output.metrics.num_generation_tokens for output in asked] == list(range(1, 9))
    assert len(outputs) == 9


def test_unseeded_requests_sample_differently(engine: LLMEngine):
    found = []
    for _ in range(2):
        add(engine, {"a": "hello"}, replace(SAMPLED, seed=None))
        found += [output.outputs[0].token_ids for output in drain(engine)]
    assert found[0] != found[1]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_blocks=300) as made:
        yield made


@pytest.mark.finding(number="D1")
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_engine_of_an_llm_takes_vllms_requests(llm: LLM, kind: RequestOutputKind):
    """It had a request's tokens and parameters as arguments, no other names, and nothing before the end."""
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    prompts = {"a": "hello world", "b": {"prompt_token_ids": [9, 8, 7]}}
    expected = llm.generate(list(prompts.values()), SAMPLED, use_tqdm=False)
    seen: dict[str, list[RequestOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        # Behind `params`: arrival_time, lora_request, tokenization_kwargs, trace_headers, priority, prompt_text.
        params = replace(SAMPLED, output_kind=kind)
        assert engine.add_request(name, prompt, params, 5.0, None, None, None, 0, "said") == name
    assert engine.get_num_unfinished_requests() == 2
    for output in drain(engine):
        assert output.prompt == "said"
        assert output.metrics is not None
        assert output.metrics.arrival_time == 5.0
        seen[output.request_id].append(output)
    lengths = [len(output.outputs[0].token_ids) for output in seen["a"]]
    shown = {RequestOutputKind.FINAL_ONLY: [24], RequestOutputKind.DELTA: [1] * 24}
    assert lengths == shown.get(kind, list(range(1, 25)))
    for found, whole in zip(seen.values(), expected, strict=True):
        parts = found if kind is RequestOutputKind.DELTA else found[-1:]
        assert "".join(each.outputs[0].text for each in parts) == whole.outputs[0].text
        assert [token for each in parts for token in each.outputs[0].token_ids] == whole.outputs[0].token_ids
        assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.finding(number="D1")
def test_requests_without_names_have_numbers_and_partial_outputs(llm: LLM):
    engine = llm.llm_engine
    engine.add_request("named", "hello", replace(GREEDY, max_tokens=50))
    number = engine.add_request([5, 6], replace(GREEDY, output_kind=RequestOutputKind.DELTA), index=3)
    assert isinstance(number, int)
    engine.step()
    assert [output.request_id for output in engine.step()] == [str(number)]
    # The number of a request with a name is no name of it.
    engine.abort_request([str(number - 1), "nobody", 2**60])
    engine.step()
    assert engine.get_num_unfinished_requests() == 2
    engine.abort_request(["named", str(number)])
    assert {output.request_id for output in drain(engine)} == {"named", str(number)}


@pytest.mark.finding(number="D1")
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda engine: engine.add_request("a", "hello"),
            TypeError,
            "params is missing: give add_request a name, a pr",
        ),
        (lambda engine: engine.add_request(3, "hello", GREEDY), TypeError, "request_id=3 is a int: give text"),
        (
            lambda engine: engine.add_request("a", "hello", GREEDY, "x"),
            TypeError,
            "arrival_time is a str: give seconds",
        ),
        (lambda engine: engine.add_request("a", "hello", GREEDY, prompt_text=3), TypeError, "prompt_text is a int"),
        (
            lambda engine: engine.add_request("a", "hello", GREEDY, prioritty=1),
            TypeError,
            "LLMEngine.add_request has no keyword prioritty: did you mean priority?",
        ),
        (
            lambda engine: engine.add_request("a", "hello", GREEDY, index=3),
            ValueError,
            "custom_id and index",
        ),
        (
            lambda engine: engine.add_request("a", "hello", GREEDY, tokenization_kwargs={"a": 1}),
            ValueError,
            "tokenization_kwargs={'a': 1}",
        ),
        (lambda engine: engine.add_lora(3), ConfigError, "this run has no LoRA adapters: set "),
        (lambda engine: engine.vllm_config, AttributeError, "'vllm_config': the configuration is `config`"),
        (lambda engine: engine.add_requests, AttributeError, "'add_requests': did you mean add_request?"),
        (lambda engine: engine.sleep(levle=1), TypeError, "LLMEngine.sleep has no keyword levle: did you mean level?"),
    ],
)
def test_engine_rejects_unsupported_arguments(llm: LLM, call: Any, kind: type[Exception], words: str):
    with pytest.raises(kind) as refused:
        call(llm.llm_engine)
    assert words in str(refused.value)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.finding(number="D1")
def test_engine_of_an_llm_has_the_llms_names(llm: LLM):
    engine = llm.llm_engine
    assert LLMEngine(engine) is engine
    assert engine.get_tokenizer() is llm.get_tokenizer()
    assert [each.name for each in engine.get_metrics()] == [each.name for each in llm.get_metrics()]
    assert engine.reset_prefix_cache() is True
    assert engine.reset_mm_cache() is engine.reset_encoder_cache() is None
    assert engine.collective_rpc("get_supported_tasks") == llm.collective_rpc("get_supported_tasks")
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = engine.nothing


def test_engine_args_errors_equal_llm_errors(folder: Path):
    with pytest.raises(ConfigError, match=r"^quantization=fp8 .*GPUs.*int8"):
        LLMEngine.from_engine_args(EngineArgs(str(folder), quantization="fp8"))
    engine = LLMEngine.from_engine_args(EngineArgs(checkpoint_folder("llama3"), num_blocks=64), usage_context=None)
    assert engine.watchdog is not None
    thread = engine.watchdog._thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
