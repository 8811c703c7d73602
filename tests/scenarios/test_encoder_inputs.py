"""A model with an encoder through an engine: an answer depends on its decoder's prompt and what its encoder read.

Alone, batched, cut inside the encoder's rows, cold, warm, preempted both ways, on several ranks: the same bits. Other
inputs behind the same ids give other answers.
"""

import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
import transformers
from cross_rows import CASES, cross_folder, cross_reference
from encoded_rows import noted_owners, shift_rows, store_of
from encoder_prompts import encoder_prompts, given, heard
from exact_answers import ids_and_entries
from plain_beams import plain_beams
from rows_of_encoders import HIDDEN_SIZE, VOCAB_SIZE

from spmd_worker import LLM, BeamSearchParams, PromptsRefusedError, SamplingParams
from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.request_error import RequestError
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.leaves import num_leaves
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind


def ids(num_tokens: int, seed: int) -> list[int]:
    generator = random.Random(f"{seed}:{num_tokens}")
    return [4 + generator.randrange(10, VOCAB_SIZE) % (VOCAB_SIZE - 4) for _ in range(num_tokens)]


FOLLOWING = [2, *ids(10, 40)]
PROMPTS = [
    given(ids(13, 1), [2]),
    given(ids(16, 2), FOLLOWING),
    given(ids(1, 3), [2, *ids(4, 41)]),
    heard(3, 11, FOLLOWING),
    # The second prompt behind another text, the fourth behind other audio of as many rows.
    given(ids(16, 4), FOLLOWING),
    heard(5, 11, FOLLOWING),
]
PARAMS = [
    SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, max_tokens=8, n=2, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True, repetition_penalty=1.5),
    SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True, repetition_penalty=1.5),
]
TEXTS = [*[each for each in PROMPTS if not each["media"]]]
OTHERS = [each for each in CASES if each not in ("bart", "t5", "whisper")]
NUM_ROWS = 13 + 16 + 1 + 11 + 16 + 11
ROOMY: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_blocks": 80, "max_model_len": 48, "max_num_seqs": 6}
# Chunks of few tokens, memory for one input or two, too few blocks for all rows.
SMALL = {
    **ROOMY,
    "num_blocks": 10,
    "max_encoder_len": 16,
    "media_rows_gib": (20 * HIDDEN_SIZE * 4 + 1) / 2**30,
}
SWAPPING = {**SMALL, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 13}
# Blocks of another size: random numbers do not count the padding.
RECOMPUTING = {
    **SMALL,
    "block_size": 16,
    "num_blocks": 5,
    "preemption_mode": "recompute",
    "max_num_batched_tokens": 7,
    "max_encode_patches": 20,
}


def answers(llm: LLM, prompts: list[Any] = PROMPTS, params: Any = PARAMS, **options: Any) -> list[Any]:
    return ids_and_entries(llm.generate(prompts, params, use_tqdm=False, **options))


@pytest.fixture(scope="module")
def model() -> Path:
    return cross_folder("bart")


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with encoder_prompts(), LLM(model, dtype="float32", **ROOMY) as made:
        yield made
        made.llm_engine.step()
        made.llm_engine.scheduler.check_integrity()
        assert store_of(made).num_held_bytes == 0


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """Each prompt alone and cold."""
    found = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.reset_prefix_cache()
        found += answers(llm, [prompt], [params])
    return found


@pytest.mark.guarantee("answers of encoder-decoder models are the same in every batch, chunk and cache")
def test_batched_and_cached_rows_equal_alone(llm: LLM, expected: list[Any]):
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    counters = llm.llm_engine.counters
    before = counters.num_rows_encoded
    assert answers(llm) == expected
    assert counters.num_rows_encoded - before == NUM_ROWS
    # All of the encoder's rows are found, and made no more.
    llm.reset_mm_cache()
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(llm) == expected
    assert counters.num_rows_encoded - before == NUM_ROWS
    assert [each.num_cached_tokens for each in outputs] == [13, 16 + 8, 1, 8, 16 + 8, 8]
    # What was read decides.
    assert expected[1] != expected[4]
    assert expected[3] != expected[5]


@pytest.mark.gate("swap")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(RECOMPUTING, id="recompute"),
        pytest.param(SWAPPING, id="swap"),
        pytest.param({**RECOMPUTING, "async_scheduling": True}, id="ahead", marks=pytest.mark.stress),
        pytest.param({**SWAPPING, "host_tier_gib": 0.01, "verify_hits": 1}, id="tier", marks=pytest.mark.stress),
    ],
)
def test_preempted_and_chunked_rows_equal_alone(
    model: Path, expected: list[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    with encoder_prompts(), LLM(model, dtype="float32", **options) as made:
        assert answers(made) == expected
        assert answers(made) == expected
        counters, store = made.llm_engine.counters, store_of(made)
        assert counters.num_preemptions > 0
        assert bool(counters.num_swapped_in) == (options["preemption_mode"] == "swap")
        # Some were dropped, and made again.
        assert counters.num_rows_encoded > NUM_ROWS
        assert store.names == [*made.llm_engine.scheduler.media_rows.names]


SAMPLED = [
    SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=0, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=1, max_tokens=16, logprobs=0, top_k=40, ignore_eos=True, n=2),
    SamplingParams(
        temperature=0.7, seed=3, max_tokens=14, logprobs=0, min_p=0.02, ignore_eos=True, repetition_penalty=1.2
    ),
    SamplingParams(temperature=1, seed=2, max_tokens=24, logprobs=0, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=16, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1, seed=7, max_tokens=24, logprobs=0, ignore_eos=True),
]
"""All are drawn, some by the same seed."""


@pytest.mark.gate("bart recompute")
@pytest.mark.guarantee("answers of encoder-decoder models are the same in every batch, chunk and cache")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name} {kind}")
        for name in ("bart", "t5 with gates", "m2m100")
        for kind, options in {"batched": {}, "recompute": RECOMPUTING, "swap": SWAPPING}.items()
    ],
)
def test_sampled_text_is_the_same_in_any_order(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    with encoder_prompts(), LLM(cross_folder(name), dtype="float32", **ROOMY) as made:
        alone = [answers(made, [prompt], [params])[0] for prompt, params in zip(PROMPTS, SAMPLED, strict=True)]
        # Negative control: other seeds, other answers.
        others = [replace(each, seed=100 + each.seed) for each in SAMPLED]
        assert not any(mine == other for mine, other in zip(alone, answers(made, PROMPTS, others), strict=True))
    order = [4, 0, 5, 2, 3, 1]
    with encoder_prompts(), LLM(cross_folder(name), dtype="float32", **{**ROOMY, **options}) as made:
        assert answers(made, PROMPTS, SAMPLED) == alone
        shuffled = [[given[index] for index in order] for given in (PROMPTS, SAMPLED, alone)]
        assert answers(made, *shuffled[:2]) == shuffled[2]
        counters = made.llm_engine.counters
        assert bool(counters.num_preemptions) == bool(options)
        assert bool(counters.num_swapped_in) == (options.get("preemption_mode") == "swap")


@pytest.mark.control("answers of encoder-decoder models are the same in every batch, chunk and cache")
def test_blocks_named_by_ids_give_others_answers(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Negative control: without the input's name a row behind other audio gets the first one's keys."""
    from spmd_worker.replica.scheduler import allocator

    llm.reset_prefix_cache()
    monkeypatch.setattr(allocator, "given_rows", lambda request, first: [])
    assert answers(llm, PROMPTS[3:4], PARAMS[3:4]) == expected[3:4]
    found = answers(llm, PROMPTS[5:], PARAMS[5:])
    assert found != expected[5:]
    assert found == expected[3:4]
    llm.reset_prefix_cache()


@pytest.mark.control("answers of encoder-decoder models are the same in every batch, chunk and cache")
def test_comparison_detects_rows_of_others(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    llm.reset_prefix_cache()
    shift_rows(monkeypatch)
    assert not any(mine == alone for mine, alone in zip(answers(llm), expected))
    llm.reset_prefix_cache()


@pytest.mark.parametrize("name", ["bart", "t5", *[pytest.param(each, marks=pytest.mark.stress) for each in OTHERS]])
def test_greedy_ids_equal_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch):
    """With a repetition penalty, which counts the decoder's tokens alone, and texts longer than T5's default."""
    num_tokens = 16
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, repetition_penalty=1.5)
    options = {"max_encoder_len": 600, "num_blocks": 90} if name.startswith("t5") else {}
    reference = cross_reference(name)
    # Rules of the folder's settings are of other tests.
    plain = transformers.GenerationConfig(
        max_new_tokens=num_tokens, repetition_penalty=1.5, pad_token_id=1, decoder_start_token_id=2, use_cache=False
    )
    monkeypatch.setattr(reference, "generation_config", plain)
    prompts = [*TEXTS, given(ids(520 if options else 90, 7), [2])]
    with encoder_prompts(), LLM(cross_folder(name), dtype="float32", **{**ROOMY, **options}) as made:
        found = made.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, found, strict=True):
        text, started = (torch.tensor([each]) for each in (prompt["encoder"].token_ids, prompt["ids"]))
        wanted = reference.generate(text, decoder_input_ids=started)
        assert output.outputs[0].token_ids == wanted[0, len(prompt["ids"]) :].tolist()


def test_outputs_have_both_prompts(llm: LLM):
    text, audio = llm.generate([PROMPTS[1], PROMPTS[3]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert (text.prompt_token_ids, text.encoder_prompt_token_ids) == (FOLLOWING, [*PROMPTS[1]["encoder"].token_ids])
    assert (audio.prompt_token_ids, audio.encoder_prompt_token_ids) == (FOLLOWING, None)
    assert (text.num_prompt_tokens, audio.num_prompt_tokens) == (16 + 11, 11)
    assert llm.llm_engine.model_config.is_encoder_decoder


def test_partial_outputs_have_both_prompts(llm: LLM, expected: list[Any]):
    engine, encoder_ids = llm.llm_engine, [*PROMPTS[1]["encoder"].token_ids]
    prompt = {"encoder_prompt": {"prompt_token_ids": encoder_ids}, "decoder_prompt": {"prompt_token_ids": FOLLOWING}}
    # The folder's rules force the last token.
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("streamed", prompt, params)
    parts: list[Any] = []
    while engine.has_unfinished_requests():
        parts += engine.step()
    assert len(parts) > 2
    assert [each for part in parts for each in part.outputs[0].token_ids][:16] == expected[1][0][0]
    assert {(*part.encoder_prompt_token_ids, *part.prompt_token_ids) for part in parts} == {(*encoder_ids, *FOLLOWING)}


def test_scores_are_those_of_sampling(llm: LLM, expected: list[Any]):
    completions = [each[0][0] for each in expected[:2]]
    wanted = [[positions[0][1].logprob for positions in each[0][1]] for each in expected[:2]]
    llm.reset_prefix_cache()
    for _ in range(2):
        assert llm.score_tokens(PROMPTS[:2], completions) == wanted
    (output,) = llm.generate(
        PROMPTS[1:2], SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False), use_tqdm=False
    )
    assert output.prompt_logprobs is not None
    assert [position and next(iter(position)) for position in output.prompt_logprobs] == [None, *FOLLOWING[1:]]


def test_beams_are_the_same_beside_others(llm: LLM):
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    together = [[each.tokens for each in one.sequences] for one in llm.beam_search(PROMPTS, params)]
    llm.reset_prefix_cache()
    alone = [[each.tokens for each in llm.beam_search([one], params)[0].sequences] for one in PROMPTS]
    assert together == alone
    assert [beams[0][: len(one["ids"])] for beams, one in zip(alone, PROMPTS)] == [one["ids"] for one in PROMPTS]
    assert alone[1] != alone[4]
    assert alone[3] != alone[5]


@torch.no_grad()
def their_beams(reference: Any, prompt: dict[str, Any], width: int) -> tuple[list[list[int]], list[float]]:
    """Beams of six tokens, none of which ends, by `generate` of transformers."""
    settings = transformers.GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=6,
        length_penalty=0.0,
        pad_token_id=1,
        decoder_start_token_id=2,
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=False,
    )
    text, started = (torch.tensor([each]) for each in (prompt["encoder"].token_ids, prompt["ids"]))
    # Where the settings have none, transformers would take the model's.
    with patch.object(reference, "generation_config", settings):
        made = reference.generate(text, decoder_input_ids=started)
    return made.sequences[:, len(prompt["ids"]) :].tolist(), made.sequences_scores.tolist()


def log_probs(reference: Any, prompt: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    """transformers', of the token behind the tokens of an answer."""
    text, started = (torch.tensor([each]) for each in (prompt["encoder"].token_ids, [*prompt["ids"], *tokens]))
    found: torch.Tensor = reference(text, decoder_input_ids=started, use_cache=False).logits[0, -1]
    return found.log_softmax(-1)


@pytest.mark.gate("bart")
@pytest.mark.parametrize("name", ["bart", "t5", *OTHERS])
def test_beams_equal_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch):
    """`generate` does not count a prompt in a beam's length: where beams end, a plain search is compared."""
    reference, ends = cross_reference(name), tuple(range(4, VOCAB_SIZE, 3))
    with encoder_prompts(), LLM(cross_folder(name), dtype="float32", **ROOMY) as made:
        for width in (2, 3):
            params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
            for prompt, output in zip(TEXTS, made.beam_search(TEXTS, params), strict=True):
                wanted, scores = their_beams(reference, prompt, width)
                assert [each.tokens for each in output.sequences] == [[*prompt["ids"], *each] for each in wanted]
                assert [each.cum_logprob for each in output.sequences] == pytest.approx(scores, abs=1e-4)
        engine, has_ended = made.llm_engine, set[bool]()
        ending = replace(engine.resolved.model_config, eos_token_ids=ends)
        monkeypatch.setattr(engine, "resolved", replace(engine.resolved, model_config=ending))
        for width, penalty in ((2, 0.0), (3, 1.0), (3, 8.0)):
            params = BeamSearchParams(beam_width=width, max_tokens=5, length_penalty=penalty)
            for prompt, output in zip(TEXTS, made.beam_search(TEXTS, params), strict=True):
                given = partial(log_probs, reference, prompt)
                wanted = plain_beams(given, len(prompt["ids"]), width, 5, penalty, ends)
                assert [each.tokens for each in output.sequences] == [[*prompt["ids"], *each] for each in wanted]
                has_ended |= {each.finish_reason == "stop" for each in output.sequences}
        assert has_ended == {True, False}


@pytest.mark.parametrize("change", ["sleep", "weights"])
def test_encoded_rows_are_dropped_by_changes(llm: LLM, expected: list[Any], change: str):
    store, counters = store_of(llm), llm.llm_engine.counters
    answers(llm, PROMPTS[:1], PARAMS[:1])
    if change == "sleep":
        llm.sleep()
        assert store.num_bytes == 0
        llm.wake_up()
    else:
        llm.set_weight_version(7)
    before = counters.num_rows_encoded
    assert answers(llm, PROMPTS[:1], PARAMS[:1]) == expected[:1]
    assert counters.num_rows_encoded == before + 13


def test_audio_leaves_with_its_request(llm: LLM):
    engine, store, prompt = llm.llm_engine, store_of(llm), PROMPTS[3]
    engine.step()
    content = PromptContent(tuple(prompt["ids"]), encoder=prompt["encoder"], media=prompt["media"])
    numbers = [engine.requests.add(content, PARAMS[3]) for _ in range(2)]
    assert store.num_held_bytes == 2 * prompt["media"][0].features.features.nbytes
    engine.requests.abort(numbers[1])
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()
    assert store.num_held_bytes == 0


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (given(ids(97, 1), [2]), "the encoder's text has 97 tokens but max_encoder_len is 96: shorten it"),
        (given([], [2]), "the encoder's text is empty"),
        (given([VOCAB_SIZE], [2]), f"token id {VOCAB_SIZE} of the encoder's text is outside the vocabulary"),
        (given([5], []), "the prompt has no tokens"),
        (given([5], [2] * 48), "the prompt has 48 tokens but max_model_len is 48"),
    ],
)
def test_inputs_that_never_fit_are_refused(llm: LLM, prompt: dict[str, Any], words: str):
    with pytest.raises(PromptsRefusedError, match=words):
        llm.generate([prompt], use_tqdm=False)


def test_rows_without_input_are_refused(llm: LLM, model: Path):
    check, plain = llm.llm_engine.requests.check, SamplingParams()
    with pytest.raises(RequestError, match="this model's encoder reads text: give its text under encoder_prompt"):
        check(PromptContent((2,)), plain)
    adapter = PromptAdapterRequest("a", 1, "folder", 3)
    with pytest.raises(RequestError, match="a prompt adapter and an encoder's input exclude each other"):
        check(Encoded((2,), prompt_adapter=adapter, encoder=PROMPTS[0]["encoder"]), plain)


def test_answers_end_at_the_decoders_length(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for output in llm.generate([given(ids(40, 1), [2, 7]), given([9], [2])], params, use_tqdm=False):
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 48
        assert output.outputs[0].finish_reason == "length"


def main(model: Path, folder: Path, **layout: Any) -> None:
    """Writes a rank's report to a file: answers, owners of what was made, and a call of one rank's own prompts."""
    owners = noted_owners()
    with encoder_prompts(), LLM(model, dtype="float32", **ROOMY, **layout) as made:
        rank = made.llm_engine.engine_channel.rank
        own = [PROMPTS[3], PROMPTS[2], PROMPTS[5]]
        mine = own[2:] if rank else own[:2]
        seen = [answers(made), answers(made, mine, PARAMS[1], gather=True), owners]
        try:
            answers(made, [PROMPTS[1 + 3 * rank]], PARAMS[0])
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        seen.append(answers(made, own, PARAMS[1]))
        (folder / str(rank)).write_text(json.dumps(seen))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.stress),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_encoder_inputs_on_ranks_give_the_same_bits(
    model: Path, expected: list[Any], layout: dict[str, int], tmp_path: Path
):
    ranks.run_forked([__file__, json.dumps(layout), model, tmp_path], 2, timeout_s=240).checked()
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()))
    assert first[0] == second[0]
    wanted = json.loads(json.dumps(expected))
    # Its sums have two leaves.
    assert num_leaves(read_model_files(model).model_config, 8) == 2
    assert first[0] == wanted
    if "tensor_parallel_size" in layout:
        assert sorted(set(first[2])) == [0, 1]
    # The audio of rank 1 has come to the replica that answers it.
    assert first[1] + second[1] == first[4]
    assert [len(each[1]) for each in (first, second)] == [2, 1]
    assert "prompts[0].encoder_input" in first[3]


@pytest.mark.stress
def test_audio_reaches_worker_processes(model: Path, expected: list[Any]):
    options = {"distributed_executor_backend": "mp", "worker_cls": "encoder_prompts.HearingWorker"}
    with encoder_prompts(), LLM(model, dtype="float32", **options, **ROOMY) as made:
        assert answers(made) == expected


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]), **json.loads(sys.argv[1]))
