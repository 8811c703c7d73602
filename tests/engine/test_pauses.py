"""Pauses: what is kept goes on as a request would that the new weights were given with its tokens so far, and nobody
waits for what a pause keeps.
"""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import ranks
from context_fixtures import fixture_of
from image_models import image_folder, prompt_of
from PIL import Image
from safetensors.torch import load_file
from slow_device import NAME, slow_device
from state_models import state_folder
from test_weight_updates import LAYER_NORM, MODEL, NORM, PROMPTS, in_words, new_tensors, open_llm

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import MissingWeightsError
from spmd_worker.engine.calls import queue_calls
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind
from spmd_worker.replica.sequence.sleep_tags import MODES

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
PAUSED = r"^generation is paused: call resume_generation\(\) before anything is computed$"
ANSWERING = r"^\d+ requests are being answered with the weights that are there: .* or pause_generation, before"

llm = fixture_of(open_llm, "function")


def run_steps(llm: LLM, count: int) -> list[Any]:
    return [output for _ in range(count) for output in llm.llm_engine.step()]


def drain(llm: LLM) -> list[Any]:
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return outputs


def changed(llm: LLM) -> list[tuple[str, Any]]:
    """Other weights for any model."""
    return [(name, tensor * 0.9) for name, tensor in load_file(llm.llm_engine.resolved.model_folder / FILE).items()]


FILE = "model.safetensors"


def check_kept(llm: LLM, prompts: list[Any]) -> None:
    """Update below kept requests; then their tokens are those of the new weights after the prompt and the tokens of the
    old ones, bit for bit.
    """
    ids = llm.enqueue(prompts, PARAMS)
    run_steps(llm, 4)
    llm.pause_generation("keep")
    llm.load_weights(changed(llm))
    llm.resume_generation()
    kept = llm.wait_for_completion(ids, use_tqdm=False)
    for output, prompt in zip(kept, prompts, strict=True):
        (completion,) = output.outputs
        (_, old), (first, new) = completion.weight_versions
        assert (old, new) == (0, llm.weight_version)
        assert 0 < first < len(completion.token_ids)
        rest = replace(PARAMS, max_tokens=PARAMS.max_tokens - first)
        longer = with_tokens(llm, output, prompt, completion.token_ids[:first])
        (again,) = llm.generate([longer], rest, use_tqdm=False)
        assert in_words([again])[0][0] == completion.token_ids[first:]
        assert [next(iter(each.values())).logprob for each in again.outputs[0].logprobs] == [
            next(iter(each.values())).logprob for each in completion.logprobs[first:]
        ]


def with_tokens(llm: LLM, output: RequestOutput, prompt: Any, token_ids: list[int]) -> Any:
    if isinstance(prompt, dict) and "multi_modal_data" in prompt:
        # Ids already have the places of the images: the text gets the answer's.
        return {**prompt, "prompt": prompt["prompt"] + llm.llm_engine.tokenizer.decode(token_ids)}
    return {"prompt_token_ids": [*output.prompt_token_ids, *token_ids]}


@pytest.mark.guarantee("Kept requests go on with the new weights alone")
@pytest.mark.parametrize("num_blocks", [64, 6], ids=["room", "preempted"])
@pytest.mark.parametrize("is_async", [False, True], ids=["one at a time", "ahead"])
def test_kept_rows_go_on_by_new_weights(is_async: bool, num_blocks: int):
    options = {"worker_cls": NAME, "async_scheduling": True} if is_async else {}
    limits = {"num_blocks": num_blocks, "max_model_len": 64, "swap_space": 0.01}
    with slow_device() if is_async else contextlib.nullcontext(), open_llm(**options, **limits) as llm:
        check_kept(llm, PROMPTS)


def test_kept_states_start_again():
    with open_llm(state_folder("qwen3_next"), max_model_len=128, num_state_snapshots=4) as llm:
        check_kept(llm, [{"prompt_token_ids": [7 + index % 40 for index in range(length)]} for length in (70, 9)])


def test_kept_images_are_encoded_again():
    picture = Image.linear_gradient("L").resize((40, 40)).convert("RGB")
    with open_llm(image_folder("qwen3_vl"), max_model_len=256) as llm:
        ids = llm.enqueue([prompt_of("qwen3_vl", [picture])] * 2, PARAMS)
        run_steps(llm, 3)
        llm.pause_generation("keep")
        llm.load_weights(changed(llm))
        llm.resume_generation()
        kept = llm.wait_for_completion(ids, use_tqdm=False)
        num_before = kept[0].outputs[0].weight_versions[1][0]
        assert num_before > 0
        # As if the weights had been there before the pause: all is computed by them.
        ids = llm.enqueue([prompt_of("qwen3_vl", [picture])], PARAMS)
        run_steps(llm, 3)
        llm.pause_generation("keep")
        llm.resume_generation()
        (again,) = llm.wait_for_completion(ids, use_tqdm=False)
        assert again == replace(llm.generate([prompt_of("qwen3_vl", [picture])], PARAMS)[0], request_id="2")


@pytest.mark.control("Kept requests go on with the new weights alone")
def test_kept_keys_are_of_old_weights(llm: LLM):
    """With `clear_cache=False` they stay, and answer no other request."""
    ids = llm.enqueue(PROMPTS, PARAMS)
    run_steps(llm, 4)
    llm.pause_generation("keep", clear_cache=False)
    llm.load_weights(new_tensors().items())
    llm.resume_generation()
    kept = llm.wait_for_completion(ids, use_tqdm=False)
    after = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    first = kept[0].outputs[0].weight_versions[1][0]
    longer = {"prompt_token_ids": [*kept[0].prompt_token_ids, *kept[0].outputs[0].token_ids[:first]]}
    (again,) = llm.generate([longer], replace(PARAMS, max_tokens=PARAMS.max_tokens - first), use_tqdm=False)
    assert again.outputs[0].logprobs != kept[0].outputs[0].logprobs[first:]
    with open_llm() as fresh:
        fresh.load_weights(new_tensors().items())
        assert in_words(fresh.generate(PROMPTS, PARAMS, use_tqdm=False)) == in_words(after)


@pytest.mark.parametrize("mode", MODES)
def test_modes_end_or_keep_requests(mode: str):
    with open_llm(max_num_seqs=2) as llm:
        engine = llm.llm_engine
        for number in range(4):
            engine.add_request(f"r{number}", PROMPTS[number % 2], PARAMS)
        run_steps(llm, 3)
        with pytest.raises(RuntimeError, match=ANSWERING):
            llm.load_weights(new_tensors().items())
        llm.reset_prefix_cache()
        engine.pause_generation(mode=mode)
        assert (llm.is_paused, engine.is_paused(), llm.is_sleeping) == (True, True, False)
        reasons = {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
        names = {"keep": "", "wait": "01", "abort": "0123"}[mode]
        assert reasons == {f"r{number}": "abort" if mode == "abort" else "length" for number in names}
        engine.add_request("late", PROMPTS[0], PARAMS)
        assert engine.step() == []
        engine.abort_request("late")
        assert [output.request_id for output in engine.step()] == ["late"]
        engine.resume_generation()
        assert len(drain(llm)) == 4 - len(names)
        engine.resume_generation()
        assert not llm.is_paused


def test_second_pause_changes_the_mode(llm: LLM):
    ids = llm.enqueue(PROMPTS, PARAMS)
    run_steps(llm, 2)
    llm.pause_generation("keep", clear_cache=False)
    llm.pause_generation("keep")
    llm.pause_generation("wait")
    assert [each.outputs[0].finish_reason for each in llm.wait_for_completion(ids, use_tqdm=False)] == ["length"] * 2
    ids = llm.enqueue(PROMPTS, PARAMS)
    llm.pause_generation("abort")
    llm.resume_generation()
    assert [each.outputs[0].finish_reason for each in llm.wait_for_completion(ids, use_tqdm=False)] == ["abort"] * 2


def test_paused_engine_refuses_what_would_wait_for_ever(llm: LLM, caplog: pytest.LogCaptureFixture):
    for call, error, words in (
        (lambda: llm.pause_generation("hold"), ValueError, r"^mode='hold' must be one of 'abort', 'wait', 'keep'$"),
        (lambda: llm.pause_generation("keep", "no"), TypeError, r"^clear_cache is a str: give True or False$"),
        (lambda: llm.start_weight_update(partial=5), TypeError, r"^partial is a int: give True or False$"),
        (lambda: llm.weight_update(partial=5).__enter__(), TypeError, r"^partial is a int: give True or False$"),
        (lambda: llm.load_weights([], verify="no"), TypeError, r"^verify is a str: give True or False$"),
        (lambda: llm.reset_prefix_cache(0), TypeError, r"^reset_running_requests is a int: give True or False$"),
    ):
        with pytest.raises(error, match=words):
            call()
    with llm.turns(), pytest.raises(RuntimeError, match="pause_generation is a call that all ranks make together"):
        llm.pause_generation()
    llm.pause_generation("keep")
    for call in (
        lambda: llm.generate(PROMPTS, PARAMS),
        lambda: llm.score_tokens(PROMPTS[:1], [[3]]),
        lambda: llm.reinitialize_distributed(),
    ):
        with pytest.raises(RuntimeError, match=PAUSED):
            call()
    with pytest.raises(RuntimeError, match=PAUSED), llm.turns():
        llm.generate(PROMPTS, PARAMS)
    ids = llm.enqueue(PROMPTS, PARAMS)
    # Not that steps would answer the others.
    with pytest.raises(RuntimeError, match=PAUSED):
        llm.generate(PROMPTS, PARAMS)
    with pytest.raises(RuntimeError, match="generation is paused, and 2 of 2 enqueued prompts wait"):
        llm.wait_for_completion(ids, use_tqdm=False)
    run_steps(llm, 2)
    assert caplog.text.count("steps compute nothing until resume_generation() is called") == 1
    llm.start_weight_update()
    llm.update_weights([(NORM, new_tensors()[NORM])])
    with pytest.raises(RuntimeError, match="a weight update was begun"):
        llm.resume_generation()
    with pytest.raises(MissingWeightsError, match=LAYER_NORM):
        llm.finish_weight_update()
    with pytest.raises(MissingWeightsError, match=LAYER_NORM):
        llm.resume_generation()
    with pytest.raises(MissingWeightsError, match=LAYER_NORM):
        llm.pause_generation("wait")
    assert llm.is_paused
    llm.load_weights(new_tensors().items())
    llm.resume_generation()
    outputs = llm.wait_for_completion(ids, use_tqdm=False)
    assert [each.outputs[0].weight_versions for each in outputs] == [[(0, llm.weight_version)]] * 2


def test_closing_a_paused_engine_is_no_error():
    with open_llm() as llm:
        llm.enqueue(PROMPTS, PARAMS)
        run_steps(llm, 2)
        llm.pause_generation("keep")
    with pytest.raises(RuntimeError, match="this LLM was closed"):
        llm.resume_generation()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_keeps_requests(llm: LLM, level: int):
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ids = llm.enqueue(PROMPTS, PARAMS)
    run_steps(llm, 4)
    if level:
        with pytest.raises(
            RuntimeError, match=r"^2 requests of llm_engine.add_request or enqueue are not answered yet"
        ):
            llm.sleep(level)
    llm.sleep(level, mode="keep" if level else None)
    assert (llm.is_sleeping, llm.is_paused) == (True, True)
    assert bool(llm.sleeping_tags) == (level > 0)
    if level:
        with pytest.raises(RuntimeError, match="asleep"):
            llm.resume_generation()
        llm.wake_up(["weights"])
        assert llm.is_paused
    if level == 2:
        llm.load_weights(load_file(MODEL / FILE).items())
    llm.wake_up(["scheduling", "kv_cache"])
    assert (llm.is_sleeping, llm.is_paused) == (False, False)
    assert in_words(llm.wait_for_completion(ids, use_tqdm=False)) == in_words(expected)


def test_kept_requests_wait_for_missing_weights(llm: LLM):
    ids = llm.enqueue(PROMPTS, PARAMS)
    run_steps(llm, 2)
    llm.pause_generation("keep", clear_cache=False)
    llm.sleep(2)
    llm.wake_up()
    assert llm.is_paused
    llm.load_weights(load_file(MODEL / FILE).items())
    llm.resume_generation()
    llm.sleep(2, mode="keep")
    llm.wake_up()
    assert llm.is_paused, "else no weight could be loaded"
    llm.load_weights(load_file(MODEL / FILE).items())
    llm.resume_generation()
    assert len(llm.wait_for_completion(ids, use_tqdm=False)) == 2
    llm.sleep(2, mode="abort")
    llm.wake_up()
    assert not llm.is_paused


def test_partial_outputs_share_out_their_spans(llm: LLM):
    engine = llm.llm_engine
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        engine.add_request(kind.name, PROMPTS[0], replace(PARAMS, output_kind=kind))
    outputs = run_steps(llm, 3)
    llm.pause_generation("keep")
    llm.set_weight_version(5)
    llm.resume_generation()
    outputs += drain(llm)
    by_name = {name: [each for each in outputs if each.request_id == name] for name in ("DELTA", "CUMULATIVE")}
    # The step of the pause has computed a token too, which came with the next.
    deltas = [(len(each.outputs[0].token_ids), each.outputs[0].weight_versions) for each in by_name["DELTA"]]
    assert deltas == [(1, [(0, 0)])] * 2 + [(2, [(0, 0), (1, 5)])] + [(1, [(0, 5)])] * 6
    assert by_name["CUMULATIVE"][-1].outputs[0].weight_versions == [(0, 0), (3, 5)]


def test_prompt_scores_name_their_weights():
    with open_llm(max_num_batched_tokens=16, max_num_seqs=1) as llm:
        ids = llm.enqueue(PROMPTS[:1], replace(PARAMS, prompt_logprobs=0))
        run_steps(llm, 1)
        # Its step computes 16 tokens, which score as many after the first.
        llm.pause_generation("keep", clear_cache=False)
        llm.set_weight_version(5)
        llm.resume_generation()
        (output,) = llm.wait_for_completion(ids, use_tqdm=False)
        assert output.prompt_weight_versions == [(0, 0), (17, 5)]
        assert output.outputs[0].weight_versions == [(0, 5)]
        assert llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)[0].prompt_weight_versions is None


def test_enqueued_prompts_are_answered_as_generate_answers(llm: LLM):
    params = replace(PARAMS, temperature=0.8)
    with open_llm() as other:
        expected = [other.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
    first, second = llm.enqueue(PROMPTS, params), llm.enqueue(PROMPTS, params)
    assert [*first, *second] == ["0", "1", "2", "3"]
    llm.llm_engine.add_request("own", PROMPTS[0], replace(PARAMS, max_tokens=3))
    (last,) = llm.wait_for_completion(second[1:], use_tqdm=False)
    assert (last.request_id, in_words([last])) == ("3", in_words(expected[1][1:]))
    assert llm.llm_engine.has_unfinished_requests()
    assert [each.request_id for each in llm.llm_engine.step()] == ["own"]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [each.request_id for each in outputs] == ["0", "1", "2"]
    assert in_words(outputs) == in_words([*expected[0], expected[1][0]])
    assert llm.wait_for_completion(use_tqdm=False) == []


@pytest.mark.parametrize("wants_all", [True, False])
def test_prompts_returned_elsewhere_are_forgotten(llm: LLM, wants_all: bool, monkeypatch: pytest.MonkeyPatch):
    """Another replica's `llm_engine.step` has returned the first: this rank hears of it in the call."""
    ids = llm.enqueue(PROMPTS, PARAMS)
    own = queue_calls.exchange
    with monkeypatch.context() as patch:
        patch.setattr(queue_calls, "exchange", lambda *given: (own(*given)[0], [[None, ids[:1]]]))
        if wants_all:
            assert len(llm.wait_for_completion(use_tqdm=False)) == 1
        else:
            with pytest.raises(ValueError, match=f"^request_ids has '{ids[0]}': give ids of enqueue"):
                llm.wait_for_completion(ids, use_tqdm=False)
    llm.llm_engine.abort_request(ids)
    drain(llm)


STEPS_AND_WAITS = """
import sys
from spmd_worker import LLM, SamplingParams
prompts = [{"prompt_token_ids": [5, 6, count]} for count in (7, 8, 9)]
params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (20, 1, 20)]
with LLM(sys.argv[1], dtype="float32", device="cpu", num_blocks=40, data_parallel_size=2) as llm:
    llm.enqueue(prompts, params)
    returned = [output.request_id for _ in range(3) for output in llm.llm_engine.step()]
    assert returned == (["1"] if llm.llm_engine.engine_channel.rank == 1 else []), returned
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [each.prompt_token_ids[-1] for each in outputs] == [7, 9]
"""


@pytest.mark.matrix
def test_prompts_that_a_step_returned_are_no_disagreement():
    completed = ranks.run_ranks(STEPS_AND_WAITS, 2, 120, [MODEL])
    assert completed.returncode == 0, completed


def test_wrong_ids_and_prompts_are_named(llm: LLM):
    with pytest.raises(ValueError, match="1 of 2 prompts cannot be answered"):
        llm.enqueue([PROMPTS[0], {"prompt_token_ids": [999]}], PARAMS)
    (name,) = llm.enqueue(PROMPTS[0], PARAMS)
    for ids in (["7"], [name, "7"]):
        with pytest.raises(ValueError, match=r"^request_ids has '7': give ids of enqueue"):
            llm.wait_for_completion(ids)
    with pytest.raises(TypeError, match=r"^request_ids is '0': give a list of ids"):
        llm.wait_for_completion(name)
    # Another may step too: it gets the output then.
    assert [each.request_id for each in drain(llm)] == [name]
    with pytest.raises(ValueError, match=r"^request_ids has '0'"):
        llm.wait_for_completion([name])
    llm.llm_engine.add_request("1", PROMPTS[0], PARAMS)
    with pytest.raises(ValueError, match=r"^request_id='1' is the name of an open request"):
        llm.enqueue(PROMPTS[0], PARAMS)
