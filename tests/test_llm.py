"""`LLM` in one process: what goes in, what comes out, and what is left behind. Ranks are in tests/parallel."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm_calls import GREEDY, NAME, PROMPTS, SAMPLED, run, tokens
from reference_models import (
    checkpoint_folder,
    random_prompt,
    reference_model,
    write_text_checkpoint,
)

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError, ModelConfigError, PromptsRefusedError
from spmd_worker.engine.calls import call_runner
from spmd_worker.engine.calls.call_runner import CallRunner
from spmd_worker.engine.engine import Engine
from spmd_worker.worker.memory import host
from spmd_worker.worker.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(checkpoint_folder(NAME), num_blocks=300) as made:
        yield made
        scheduler = made.llm_engine.scheduler
        scheduler.check_integrity()
        assert scheduler.cache.num_used_blocks == 0
        assert not made.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer and a chat template."""
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def text_llm(text_folder: Path) -> Iterator[LLM]:
    with LLM(text_folder, num_blocks=300) as made:
        yield made


# What goes in.


def test_prompts_may_be_ids_lists_or_mappings(llm: LLM):
    expected = tokens(run(llm, [PROMPTS[0]]))
    for form in (PROMPTS[0], tuple(PROMPTS[0]), {"prompt_token_ids": PROMPTS[0]}, [{"prompt_token_ids": PROMPTS[0]}]):
        assert tokens(run(llm, form)) == expected
    assert run(llm, []) == []


def test_text_comes_alone_in_lists_and_in_mappings(text_llm: LLM):
    (expected,) = run(text_llm, "hello world")
    assert expected.prompt == "hello world"
    assert expected.prompt_token_ids == text_llm.get_tokenizer().encode("hello world")
    for form in (["hello world"], {"prompt": "hello world"}, [{"prompt": "hello world"}]):
        assert run(text_llm, form) == [expected]


def test_outputs_keep_prompt_order_and_own_parameters(llm: LLM):
    lengths = [9, 2, 5, 1, 12, 3, 7, 4]
    outputs = run(llm, PROMPTS, [replace(GREEDY, max_tokens=length) for length in lengths])
    assert [output.request_id for output in outputs] == [str(index) for index in range(8)]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_parameters_must_match_prompts(llm: LLM):
    with pytest.raises(ValueError, match=r"^3 sampling .*8 prompts"):
        run(llm, PROMPTS, [GREEDY] * 3)
    with pytest.raises(TypeError, match=r"sampling_params\[1\] is a dict"):
        run(llm, PROMPTS[:2], [GREEDY, {"temperature": 0}])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(run(llm, PROMPTS)) == 8


def test_generate_and_chat_reject_invalid_argument_types(llm: LLM):
    # A set has another order in each process.
    for prompts in (5, None, b"hello", {"a", "b"}):
        with pytest.raises(TypeError, match=r"prompts is a \w+"):
            run(llm, prompts)
    for messages in ("hello", None, {"role": "user"}):
        with pytest.raises(TypeError, match=r"^messages is .*: .*list"):
            llm.chat(messages, GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params is a dict"):
        run(llm, PROMPTS, {"temperature": 0})
    assert tokens(run(llm, (each for each in PROMPTS))) == tokens(run(llm, PROMPTS))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"multi_modal_data": {"image": b""}}, "this run takes no images"),
        ({"prompt_embeds": None, 3: 4}, "no key 3: give prompt, prompt_token_ids, prompt_embeds"),
    ],
)
def test_unknown_prompt_key_is_an_error(llm: LLM, extra: dict[object, object], words: str):
    """An image once was dropped in silence, and the text alone answered."""
    prompts = [{"prompt_token_ids": PROMPTS[0], **extra}, {"prompt_token_ids": PROMPTS[0]}]
    outputs = run(llm, prompts, on_error="row")
    assert words in (outputs[0].error or "")
    assert outputs[0].outputs == []
    assert outputs[1].error is None
    assert tokens(outputs[1:]) == tokens(run(llm, PROMPTS[0]))


def test_prompt_without_text_or_ids_is_an_error(llm: LLM):
    for prompt in ({}, {"prompt": None}):
        (output,) = run(llm, prompt, on_error="row")
        assert (
            output.error
            == f"a prompt needs text under prompt, prompt_token_ids or prompt_embeds; this one has {[*prompt]}"
        )
    (output,) = run(llm, {"prompt": [1, 2]}, on_error="row")
    assert output.error == "prompt=[1, 2] must be text: token ids are given as prompt_token_ids"


def test_invalid_prompt_gets_error_row_among_answers(llm: LLM):
    bad = [
        random_prompt(512, 0),
        [],
        [5, 211],
        [5, -1],
        {"text": "hello"},
        "hello",
        {"prompt_token_ids": ["a"]},
        None,
    ]
    given = [prompt for pair in zip(PROMPTS, bad, strict=True) for prompt in pair]
    outputs = run(llm, given, on_error="row")
    words = [
        "has 512 tokens but max_model_len is 512",
        "has no tokens",
        "211 is outside the vocabulary of 211",
        "-1 is outside the vocabulary",
        "a prompt has no key text: give prompt, prompt_token_ids, prompt_embeds, multi_modal_data and nothing else",
        "no tokenizer.json",
        "prompt_token_ids[0]='a' is a str: give a whole number",
        "prompt_token_ids is a NoneType: give a list of whole numbers",
    ]
    for output, expected in zip(outputs[1::2], words, strict=True):
        assert expected in (output.error or ""), output
        assert output.finished
        assert output.outputs == []
    assert tokens(outputs[::2]) == tokens(run(llm, PROMPTS))
    assert all(output.error is None for output in outputs[::2])


@pytest.mark.guarantee("Prompts that can never be answered are named before anything is computed")
def test_invalid_prompts_raise_one_error_naming_all(llm: LLM):
    prompts = [PROMPTS[0], [5, 211], PROMPTS[1], []]
    expected, num_steps = tokens(run(llm, PROMPTS, replace(SAMPLED, seed=4))), llm.llm_engine.counters.num_steps
    with pytest.raises(PromptsRefusedError) as refused:
        run(llm, prompts)
    assert isinstance(refused.value, ValueError)
    assert list(refused.value.reasons) == [1, 3]
    assert str(refused.value) == (
        "2 of 4 prompts cannot be answered, and none was:\n"
        "  prompt 1: token id 211 is outside the vocabulary of 211 tokens\n"
        "  prompt 3: the prompt has no tokens: give at least one\n"
        "leave them out, or call generate(..., on_error='row'), which answers the others and gives these an output "
        "with error"
    )
    with pytest.raises(PromptsRefusedError, match=r"1 of 1 prompts(.|\n)*tokenizer\.json(.|\n)*on_error"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="on_error='rows'"):
        run(llm, PROMPTS, on_error="rows")
    assert llm.llm_engine.counters.num_steps == num_steps, "nothing ran"
    assert tokens(run(llm, PROMPTS, replace(SAMPLED, seed=4))) == expected


@pytest.mark.control("Prompts that can never be answered are named before anything is computed")
def test_control_answers_before_rejection_are_detected(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    control,
):
    """Negative control: the same words, and steps that were for nothing."""
    right = CallRunner.run

    def answer_first(self: CallRunner, call: str, encode: Any, sampling: Any, on_error: Any, *rest: Any) -> Any:
        right(self, call, encode, sampling, "row", *rest)
        return right(self, call, encode, sampling, on_error, *rest)

    monkeypatch.setattr(CallRunner, "run", answer_first)
    with control("nothing ran"):
        test_invalid_prompts_raise_one_error_naming_all(llm)


def test_control_error_naming_one_prompt_is_detected(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""

    def first_alone(call: str, num_prompts: int, reasons: dict[int, str], **how: bool) -> PromptsRefusedError:
        return PromptsRefusedError(call, num_prompts, dict(list(reasons.items())[:1]), **how)

    monkeypatch.setattr(call_runner, "PromptsRefusedError", first_alone)
    with pytest.raises(AssertionError):
        test_invalid_prompts_raise_one_error_naming_all(llm)


def test_many_invalid_prompts_are_named_first_with_reasons(llm: LLM):
    with pytest.raises(PromptsRefusedError) as refused:
        run(llm, [[]] * 23)
    lines = str(refused.value).splitlines()
    assert lines[20].startswith("  prompt 19: the prompt has no tokens")
    assert lines[21] == "  and those of index 20, 21, 22: see reasons"
    assert list(refused.value.reasons) == list(range(23))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (replace(GREEDY, stop=("x",)), "stop strings need a tokenizer.json"),
        (replace(GREEDY, logit_bias={211: 1.0}), "logit_bias: token id 211"),
        (replace(GREEDY, stop_token_ids=(500,)), "stop_token_ids: token id 500"),
    ],
)
def test_unsupported_parameters_are_an_error_of_their_row(llm: LLM, sampling: SamplingParams, words: str):
    outputs = run(llm, PROMPTS[:2], [sampling, GREEDY], on_error="row")
    assert words in (outputs[0].error or "")
    assert outputs[1].error is None


def test_longest_prompt_gets_one_token(llm: LLM):
    (output,) = run(llm, random_prompt(511, 0))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_rows_without_parameters_follow_the_models_generation_config(llm: LLM, tmp_path: Path):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
    assert tokens(llm.generate(PROMPTS, use_tqdm=False)) == tokens(run(llm, PROMPTS, SamplingParams(temperature=0)))
    folder = tmp_path / "advised"
    shutil.copytree(checkpoint_folder(NAME), folder)
    advice = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    with LLM(folder, num_blocks=300) as advised:
        expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=5)
        assert advised.get_default_sampling_params() == expected
    (folder / "generation_config.json").write_text('{"temperature": -0.5}')
    with pytest.raises(ConfigError, match=r"^generation_config.json of the model: temperature=-0.5 must be 0 .*mend"):
        LLM(folder, num_blocks=300)


# What comes out.


def test_the_text_is_the_tokens_decoded(text_llm: LLM):
    tokenizer = text_llm.get_tokenizer()
    for output in run(text_llm, ["hello world", "the cache", "naïve café 你好"]):
        (completion,) = output.outputs
        text = tokenizer.decode([*output.prompt_token_ids, *completion.token_ids])
        assert text == output.prompt + completion.text
    (silent,) = run(text_llm, "hello world", replace(GREEDY, detokenize=False))
    assert silent.outputs[0].text == ""
    assert len(silent.outputs[0].token_ids) == 12


def test_stop_string_spanning_tokens_ends_a_row(text_llm: LLM):
    (whole,) = run(text_llm, "hello world", replace(GREEDY, max_tokens=30))
    text = whole.outputs[0].text
    pieces = [text_llm.get_tokenizer().decode([token]) for token in whole.outputs[0].token_ids]
    # The end of one token and the beginning of the next, at a place where this text is found first.
    place = next(
        index for index in range(5, 25) if pieces[index].isascii() and pieces[index + 1].isascii() and pieces[index]
    )
    stop_string = pieces[place][-1] + pieces[place + 1][:1]
    expected = text[: text.index(stop_string)]
    for include in (False, True):
        sampling = replace(GREEDY, max_tokens=30, stop=(stop_string,), include_stop_str_in_output=include)
        (stopped,) = run(text_llm, "hello world", sampling)
        (completion,) = stopped.outputs
        assert completion.text == expected + stop_string * include
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_string)
        assert len(completion.token_ids) < 30


def test_stop_token_is_in_ids_and_optionally_text(text_llm: LLM):
    tokenizer = text_llm.get_tokenizer()
    (whole,) = run(text_llm, "hello world")
    ids = whole.outputs[0].token_ids
    place = next(index for index, token in enumerate(ids) if token not in ids[:index] and index > 3)
    for stop in ((), ("never found",)):
        for include in (False, True):
            sampling = replace(GREEDY, stop=stop, stop_token_ids=(ids[place],), include_stop_str_in_output=include)
            (completion,) = run(text_llm, "hello world", sampling)[0].outputs
            assert (completion.token_ids, completion.stop_reason) == (ids[: place + 1], ids[place])
            expected = tokenizer.decode([*whole.prompt_token_ids, *ids[: place + include]])
            assert whole.prompt + completion.text == expected


def test_a_chat_is_its_rendered_template(text_llm: LLM):
    messages = [{"role": "user", "content": "hello"}]
    (output,) = text_llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    rendered = text_llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids == rendered
    both = text_llm.chat([messages, [{"role": "user", "content": "world"}]], GREEDY, use_tqdm=False)
    assert tokens(both[:1]) == tokens([output])
    (open_end,) = text_llm.chat(messages, GREEDY, add_generation_prompt=False, use_tqdm=False)
    assert open_end.prompt == "<|im_start|>user\nhello<|im_end|>\n"


def test_chat_without_template_or_tokenizer_is_an_error(llm: LLM):
    (output,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, on_error="row", use_tqdm=False)
    assert "no tokenizer.json" in (output.error or "")


# What is left behind.


def test_blocks_are_free_after_answers_errors_and_aborts(llm: LLM):
    engine = llm.llm_engine
    run(llm, [*PROMPTS, []], replace(SAMPLED, n=3), on_error="row")
    first = engine.add_request(tuple(PROMPTS[0]), replace(GREEDY, max_tokens=100))
    second = engine.add_request(tuple(PROMPTS[1]), GREEDY)
    assert engine.step() == []
    assert engine.step() == []
    assert engine.scheduler.cache.num_used_blocks > 0
    engine.abort_request(first)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs[str(first)].outputs[0].finish_reason == "abort"
    assert outputs[str(first)].outputs[0].token_ids == tokens(run(llm, PROMPTS[0]))[0][0][:2]
    assert tokens([outputs[str(second)]]) == tokens(run(llm, PROMPTS[1]))
    assert engine.scheduler.cache.num_used_blocks == 0
    engine.scheduler.check_integrity()


WRONG_CALLS = {
    "abort a float": (lambda engine: engine.abort_request(1.5), "1.5 is not a request id: give the number"),
    "abort None in a list": (lambda engine: engine.abort_request([None]), "None is not a request id: give the number"),
    "version of text": (lambda engine: engine.set_weight_version("x"), "version='x' is a str: give a whole number"),
    "version too large": (lambda engine: engine.set_weight_version(2**70), "must fit 64 bits"),
    "prompt of text": (lambda engine: engine.add_request("hello", GREEDY), "prompt_token_ids is a str: give a list"),
    "token of text": (lambda engine: engine.add_request([1, "2"], GREEDY), "prompt_token_ids[1]='2' is a str: give"),
    "params of a dict": (lambda engine: engine.add_request([1], {}), "sampling is a dict: give SamplingParams"),
    "index of text": (lambda engine: engine.add_request([1], GREEDY, index="x"), "index='x' is a str: give"),
    "custom id of a number": (lambda engine: engine.add_request([1], GREEDY, custom_id=5), "custom_id is a int: give"),
    "steps to nobody": (lambda engine: engine.watch_steps("x"), "watch_steps('x')"),
}


@pytest.mark.parametrize(("call", "words"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_invalid_call_argument_is_rejected_immediately(llm: LLM, call: Callable[[Engine], object], words: str):
    """`set_weight_version("x")` once was accepted, and ended the engine a step later."""
    with pytest.raises((TypeError, ValueError)) as refused:
        call(llm.llm_engine)
    assert words in str(refused.value)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.step() == []
    assert len(run(llm, PROMPTS[:1])) == 1


def test_abort_takes_numbers_texts_and_iterables(llm: LLM):
    engine = llm.llm_engine
    ids = [engine.add_request(prompt, replace(GREEDY, max_tokens=100)) for prompt in PROMPTS[:6]]
    with pytest.raises(TypeError, match=r"^None .*request id"):
        engine.abort_request([ids[5], None])
    engine.abort_request(ids[0])
    engine.abort_request(str(ids[1]))
    engine.abort_request(each for each in (ids[2], str(ids[3])))
    engine.abort_request(["no such request", 2**70, -1, ids[0]])
    aborted = [output for _ in range(3) for output in engine.step()]
    assert [output.request_id for output in aborted] == [str(each) for each in ids[:4]]
    assert {output.outputs[0].finish_reason for output in aborted} == {"abort"}
    engine.abort_request([*ids, "9" * 5000])
    rest = [output for _ in range(2) for output in engine.step()]
    assert [output.request_id for output in rest] == [str(each) for each in ids[4:]]
    engine.abort_request(ids)
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


@pytest.mark.guarantee("close() gives back what was taken")
def test_close_releases_weight_memory(monkeypatch: pytest.MonkeyPatch):
    """A trainer goes on: what the C library keeps for another engine would be lost to it."""
    llm, seen = LLM(checkpoint_folder(NAME), num_blocks=32), []
    model = weakref.ref(llm.llm_engine.model_executor.driver_worker.model_runner.model)
    assert model() is not None
    monkeypatch.setattr(host, "give_back_freed", lambda: seen.append(model()))
    llm.close()
    assert seen == [None]


def test_close_is_idempotent_and_later_calls_raise():
    llm = LLM(checkpoint_folder(NAME), num_blocks=300)
    expected = tokens(run(llm, PROMPTS))
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="was closed"):
        run(llm, PROMPTS)
    with LLM(checkpoint_folder(NAME), num_blocks=300) as second:
        assert tokens(run(second, PROMPTS)) == expected


def test_two_engines_live_side_by_side(llm: LLM):
    expected = tokens(run(llm, PROMPTS))
    with LLM(checkpoint_folder("qwen2"), num_blocks=300) as other:
        different = tokens(run(other, PROMPTS))
        assert different != expected
        assert tokens(run(llm, PROMPTS)) == expected
        assert tokens(run(other, PROMPTS)) == different


def test_failed_engine_rejects_calls(monkeypatch: pytest.MonkeyPatch):
    """A Ctrl-C in a notebook once left half a step behind, and the next call answered with a KeyError."""
    llm = LLM(checkpoint_folder(NAME), num_blocks=300)

    def interrupt(self: ModelRunner) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS)
    with pytest.raises(RuntimeError, match="make a new one"):
        run(llm, PROMPTS)
    llm.close()


def test_generate_rejects_open_requests(llm: LLM):
    llm.llm_engine.add_request(tuple(PROMPTS[0]), GREEDY)
    with pytest.raises(RuntimeError, match=r"^1 requests .*not answered"):
        run(llm, PROMPTS)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert len(run(llm, PROMPTS)) == 8


def test_collective_rpc_takes_names_and_functions(llm: LLM):
    assert llm.collective_rpc("get_cache_block_size_bytes") == [2 * 3 * 2 * 16 * 16 * 4]
    assert llm.collective_rpc(lambda worker, factor: worker.vocab_size * factor, args=(2,)) == [422]
    (num_parameters,) = llm.apply_model(func=lambda model: model.model_config.num_parameters)
    assert num_parameters == sum(parameter.numel() for parameter in reference_model(NAME).parameters())
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        llm.collective_rpc("nothing")
    for name, given in (("args", 5), ("args", "ab"), ("kwargs", [1])):
        with pytest.raises(TypeError, match=f"^{name} is a {type(given).__name__}: give a"):
            llm.collective_rpc("check_health", **{name: given})
    with pytest.raises(TypeError, match=r"^func is a int: give a function that gets the model"):
        llm.apply_model(5)


def test_apply_model_invalidates_the_prefix_cache(llm: LLM):
    prompt = [list(range(10, 60))]
    run(llm, prompt)
    found = [run(llm, prompt)[0].num_cached_tokens]
    llm.apply_model(lambda model: None)
    found.append(run(llm, prompt)[0].num_cached_tokens)
    with pytest.raises(ZeroDivisionError):
        llm.apply_model(lambda model: 1 / 0)
    found.append(run(llm, prompt)[0].num_cached_tokens)
    # The first is the control: without such a function the prompt is found.
    assert found == [48, 0, 0]


# What is refused.


def test_unsupported_models_are_rejected_before_weights_are_read(tmp_path: Path):
    with pytest.raises(ModelConfigError, match="is not a folder"):
        LLM(tmp_path / "missing")
    folder = checkpoint_folder(NAME)
    with pytest.raises(ConfigError, match=r"^num_blocks=4 .*max_model_len.*at least 32"):
        LLM(folder, num_blocks=4)
    with pytest.raises(ConfigError, match=r"^max_model_len=513"):
        LLM(folder, max_model_len=513)
    with pytest.raises(ConfigError, match=r"^dtype=float16 .*not .*CPU"):
        LLM(folder, dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=3 .* 1, 2 and 4"):
        LLM(folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="torchrun"):
        LLM(folder, distributed_executor_backend="uni", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"llama_nine_heads|1, 3 and 9"):
        LLM(checkpoint_folder("llama_nine_heads"), tensor_parallel_size=2)


WRONG_ARGUMENTS = [
    ({"seed": "x"}, "seed='x' must be a whole number"),
    ({"max_num_seqs": "8"}, "max_num_seqs='8' must be a whole number or None"),
    ({"max_num_seqs": True}, "max_num_seqs=True must be a whole number or None"),
    ({"swap_space": "4"}, "swap_space='4' must be a number or None"),
    ({"enable_chunked_prefill": "no"}, "enable_chunked_prefill='no' must be True or False"),
    ({"pipeline_layers": 3}, "pipeline_layers=3 must be a list of whole numbers, such as [10,8] or None"),
    ({"model": 5}, "model=5 must be text or None"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG_ARGUMENTS, ids=[next(iter(each)) for each, _ in WRONG_ARGUMENTS]
)
def test_argument_type_error_equals_command_line_error(arguments: dict[str, object], message: str):
    with pytest.raises(ConfigError) as refused:
        LLM(**{"model": checkpoint_folder(NAME), **arguments})
    assert str(refused.value) == message


def test_cache_size_comes_from_memory_unless_set():
    with LLM(checkpoint_folder(NAME), max_num_seqs=4) as llm:
        # As much as four sequences of 512 tokens can use, which is far less than this machine has.
        assert llm.llm_engine.scheduler.cache.num_blocks == 4 * 512 // 16
        assert len(run(llm, PROMPTS)) == 8
