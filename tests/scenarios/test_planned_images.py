"""Rows of images through an engine, from a table in place of a tower: an answer depends on its prompt and its pictures.

Alone, batched, cut inside pictures, cold, warm, preempted both ways, on several ranks: the same bits. Other pictures
behind the same ids give other answers.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from encoded_rows import noted_owners, shift_rows, store_of
from exact_answers import ids_and_entries
from injected_tower import HIDDEN_SIZE, Picture, injected, picture, prompt, table_rows
from layouts_of_two import on_two_ranks
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM, PromptsRefusedError, SamplingParams
from spmd_worker.base.errors import CacheMismatchError
from spmd_worker.engine.data_parallel import per_rank_prompts
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.media.sent_image import SentImage
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA

PROMPTS = [
    prompt(picture(1, 2, 11), num_tokens=17),
    prompt(picture(2, 0, 8), picture(1, 12, 11), num_tokens=26),
    # The same picture twice, one with plain tokens between its lines.
    prompt(picture(3, 3, 6), Picture(4, ((12, 4), (17, 4))), picture(3, 21, 6), num_tokens=27),
    prompt(num_tokens=9),
    # The first prompt's ids behind another picture.
    prompt(picture(5, 2, 11), num_tokens=17),
    prompt(picture(2, 0, 8), picture(5, 12, 11), num_tokens=26),
]
PARAMS = [
    SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, max_tokens=8, n=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True),
]
ROOMY: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_blocks": 80, "max_model_len": 48, "max_num_seqs": 6}


def row_gib(num_rows: int) -> float:
    return (num_rows * HIDDEN_SIZE * 4 + 1) / 2**30


# Chunks of 5 tokens, memory for one or two pictures, too few blocks for all rows.
SMALL = {**ROOMY, "num_blocks": 8, "max_num_batched_tokens": 6, "media_rows_gib": row_gib(12)}
SWAPPING = {**SMALL, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 13}
TIERED = {**ROOMY, "num_blocks": 8, "max_num_seqs": 2, "host_tier_gib": 0.01}
RECOMPUTING = {**SMALL, "preemption_mode": "recompute", "max_num_batched_tokens": 9, "max_encode_patches": 20}


def answers(llm: LLM, prompts: list[Any] = PROMPTS, params: list[SamplingParams] = PARAMS, **options: Any) -> list[Any]:
    return ids_and_entries(llm.generate(prompts, params, use_tqdm=False, **options))


def with_rows(table: Tensor, given: dict[str, Any]) -> Tensor:
    """A prompt's embeddings, those of its pictures in their places."""
    rows = table[given["prompt_token_ids"]].clone()
    for each in given["pictures"]:
        places = [place for start, count in each.runs for place in range(start, start + count)]
        rows[places] = table_rows(each.number, len(places))
    return rows


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with injected(), LLM(model, dtype="float32", **ROOMY) as made:
        yield made
        made.llm_engine.step()
        made.llm_engine.scheduler.check_integrity()
        assert store_of(made).num_held_bytes == 0


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """Each prompt alone and cold."""
    found = []
    for given, params in zip(PROMPTS, PARAMS, strict=True):
        llm.reset_prefix_cache()
        found += answers(llm, [given], [params])
    return found


@pytest.mark.guarantee("answers about images are the same in every batch, chunk and cache")
def test_batched_and_cached_prompts_have_the_bits_of_alone(llm: LLM, expected: list[Any]):
    llm.reset_prefix_cache()
    counters = llm.llm_engine.counters
    before, cached = counters.num_rows_encoded, counters.num_cached_prompt_tokens
    assert answers(llm) == expected
    # Picture 3 comes twice, 1, 2 and 5 in two prompts.
    assert counters.num_rows_encoded - before == 11 + 8 + 6 + 8 + 11
    cold = counters.num_cached_prompt_tokens
    assert answers(llm) == expected
    assert counters.num_cached_prompt_tokens - cold > cold - cached
    # Rows are made again, for the tokens that are not in the cache.
    llm.reset_mm_cache()
    assert answers(llm) == expected
    # Pictures decide.
    assert expected[0] != expected[4]
    assert expected[1] != expected[5]


@pytest.mark.gate("recompute")
@pytest.mark.parametrize(
    ("options", "vision"),
    [
        pytest.param(RECOMPUTING, {}, id="recompute"),
        pytest.param(SWAPPING, {"sees_whole_image": True}, id="swap complete"),
        pytest.param(SWAPPING, {}, id="swap", marks=pytest.mark.stress),
        pytest.param(RECOMPUTING, {"sees_whole_image": True}, id="recompute complete", marks=pytest.mark.stress),
        pytest.param({**RECOMPUTING, "async_scheduling": True}, {}, id="ahead", marks=pytest.mark.stress),
    ],
)
def test_preempted_and_chunked_prompts_have_the_same_bits(
    model: Path, expected: list[Any], options: dict[str, Any], vision: dict[str, bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    options = {**options, "max_num_batched_tokens": 13} if vision else options
    if vision:
        with injected(**vision), LLM(model, dtype="float32", **ROOMY) as roomy:
            expected = answers(roomy)
    with injected(**vision), LLM(model, dtype="float32", **options) as made:
        assert answers(made) == expected
        counters, warm = made.llm_engine.counters, answers(made)
        assert warm == expected
        assert counters.num_preemptions > 0
        assert bool(counters.num_swapped_in) == (options["preemption_mode"] == "swap")
        # Some were dropped, and made again.
        assert counters.num_rows_encoded > 11 + 8 + 6 + 8 + 11
        store = store_of(made)
        assert store.names == [*made.llm_engine.scheduler.media_rows.names]
        assert 0 < store.num_bytes <= 20 * HIDDEN_SIZE * 4


@pytest.mark.stress
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
def test_chunks_of_any_size_have_the_same_bits(model: Path, expected: list[Any], num_tokens: int):
    options = {**ROOMY, "max_num_seqs": 1, "max_num_batched_tokens": num_tokens, "enable_prefix_caching": False}
    with injected(), LLM(model, dtype="float32", **options) as made:
        assert answers(made, PROMPTS[:2], PARAMS[:2]) == expected[:2]


@pytest.mark.control("answers about images are the same in every batch, chunk and cache")
def test_names_without_images_give_another_pictures_answer(
    llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """Negative control: blocks named by ids alone. The prompt behind another picture gets the first one's keys."""
    from spmd_worker.replica.scheduler import allocator

    llm.reset_prefix_cache()
    monkeypatch.setattr(allocator, "given_rows", lambda request, first: [])
    assert answers(llm, PROMPTS[1:2], PARAMS[1:2]) == expected[1:2]
    found = answers(llm, PROMPTS[5:], PARAMS[5:])
    assert found != expected[5:]
    assert found == expected[1:2]
    llm.reset_prefix_cache()


def answers_in_turn(llm: LLM, numbers: list[int]) -> list[Any]:
    """Answers of prompts, one call each: with few blocks the blocks of those before go to the host tier."""
    return [answers(llm, [PROMPTS[number]], [PARAMS[number]])[0] for number in numbers]


def test_blocks_of_the_host_tier_keep_pictures(model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Every second hit is computed again and compared."""
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    order = [1, 5, 0, 4, 2, 3] * 4
    with injected(), LLM(model, dtype="float32", verify_hits=2, **TIERED) as made:
        assert answers_in_turn(made, order) == [expected[number] for number in order]
        counters = made.llm_engine.counters
        assert counters.num_loaded_blocks > 0
        assert counters.num_verified_hits > 0


@pytest.mark.control("answers about images are the same in every batch, chunk and cache")
@pytest.mark.parametrize("verify_hits", [0, 1])
def test_tier_names_without_images_are_found(
    model: Path, expected: list[Any], verify_hits: int, monkeypatch: pytest.MonkeyPatch
):
    """Negative control: a prompt behind another picture gets the first one's keys from the host, and where hits are
    verified that is an error.
    """
    from spmd_worker.replica.scheduler import allocator

    monkeypatch.setattr(allocator, "given_rows", lambda request, first: [])
    with injected(), LLM(model, dtype="float32", verify_hits=verify_hits, **TIERED) as made:
        assert answers_in_turn(made, [1, 3, 2]) == [expected[number] for number in (1, 3, 2)]
        assert made.llm_engine.counters.num_loaded_blocks == 0
        if verify_hits:
            with pytest.raises(CacheMismatchError):
                answers_in_turn(made, [5])
        else:
            assert answers_in_turn(made, [5]) == expected[1:2] != expected[5:]
            assert made.llm_engine.counters.num_loaded_blocks > 0


@pytest.mark.control("answers about images are the same in every batch, chunk and cache")
def test_comparison_detects_rows_of_other_tokens(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    llm.reset_prefix_cache()
    shift_rows(monkeypatch)
    assert [mine == alone for mine, alone in zip(answers(llm), expected)] == [False, False, False, True, False, False]
    llm.reset_prefix_cache()


def test_rows_given_as_embeddings_have_the_same_bits(llm: LLM, expected: list[Any], model: Path):
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert answers(llm, [{"prompt_embeds": with_rows(table, each)} for each in PROMPTS]) == expected


def test_pixels_leave_with_their_request(llm: LLM):
    engine, store, params = llm.llm_engine, store_of(llm), SamplingParams(max_tokens=2, ignore_eos=True)
    images = tuple(each.prepared for each in PROMPTS[0]["pictures"])
    items = tuple(each.item for each in PROMPTS[0]["pictures"])
    # Those of the last requests leave with the next plan.
    engine.step()
    for _ in range(2):
        prompt = PromptContent(PROMPTS[0]["prompt_token_ids"], media=images, media_items=items)
        number = engine.requests.add(prompt, params)
    assert store.num_held_bytes == 2 * len(SentImage.of(images[0]).data)
    engine.requests.abort(number)
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()
    assert store.num_held_bytes == 0


@pytest.mark.parametrize("change", ["sleep", "weights", "reset"])
def test_rows_are_dropped_by_changes(llm: LLM, expected: list[Any], change: str):
    store = store_of(llm)
    answers(llm, PROMPTS[:1], PARAMS[:1])
    assert store.num_bytes > 0
    if change == "sleep":
        llm.sleep()
        assert store.num_bytes == 0
        llm.wake_up()
    elif change == "weights":
        llm.set_weight_version(5)
    else:
        llm.reset_mm_cache()
        llm.reset_prefix_cache()
    before = llm.llm_engine.counters.num_rows_encoded
    assert answers(llm, PROMPTS[:1], PARAMS[:1]) == expected[:1]
    assert llm.llm_engine.counters.num_rows_encoded == before + 11


def test_receiver_cache_follows_plans_alone(llm: LLM, expected: list[Any]):
    """The names of vLLM's worker have nothing to do: a plan says which rows are made and dropped."""
    wrapper, engine = llm.llm_engine.executor.driver_worker, llm.llm_engine
    store = store_of(llm)
    llm.reset_mm_cache()
    llm.reset_prefix_cache()
    assert answers(llm, PROMPTS[:1], PARAMS[:1]) == expected[:1]
    names, num_encoded = store.names, engine.counters.num_rows_encoded
    assert len(names) > 0
    rows = {name: store._rows[name].clone() for name in names}
    assert wrapper._apply_mm_cache(None) is None
    assert wrapper.worker.reset_mm_cache() is None
    assert store.names == names == [*engine.scheduler.media_rows.names]
    assert all(torch.equal(store._rows[name], each) for name, each in rows.items())
    # The tokens are in the prefix cache: no step needs rows, and none drops them.
    assert answers(llm, PROMPTS[:1], PARAMS[:1]) == expected[:1]
    assert (store.names, engine.counters.num_rows_encoded) == (names, num_encoded)
    # Negative control: the executor's call is the engine's, whose next plan drops all.
    engine.executor.reset_mm_cache()
    assert store.names == names
    assert answers(llm, PROMPTS[:1], PARAMS[:1]) == expected[:1]
    assert store.names == [*engine.scheduler.media_rows.names] == []


def test_images_that_never_fit_are_refused(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    limits = llm.llm_engine.limits
    for media, reason in (
        (replace(limits.media, num_rows=10), "11 tokens is larger than the 10 rows"),
        (NO_MEDIA, "this model takes no images"),
    ):
        monkeypatch.setattr(llm.llm_engine.requests, "limits", replace(limits, media=media))
        with pytest.raises(PromptsRefusedError, match=reason):
            answers(llm, PROMPTS[:1], PARAMS[:1])
        assert answers(llm, PROMPTS[3:4], PARAMS[3:4]) == expected[3:4]


def test_prompts_that_images_do_not_fit_are_refused(llm: LLM):
    short = {**PROMPTS[0], "prompt_token_ids": PROMPTS[0]["prompt_token_ids"][:12]}
    with pytest.raises(PromptsRefusedError, match="ends at 13, the prompt has 12 tokens"):
        answers(llm, [short], PARAMS[:1])
    with pytest.raises(PromptsRefusedError, match="truncate_prompt_tokens and images or audio exclude each other"):
        answers(llm, PROMPTS[:1], [SamplingParams(truncate_prompt_tokens=15)])


def main(model: Path, folder: Path, **layout: Any) -> None:
    """Writes a rank's report to a file: answers, owners of what was made, and a call of one rank's own prompts."""
    owners = noted_owners()
    received: list[int] = []
    receive = per_rank_prompts._received

    def noting(*args: Any) -> Any:
        image = receive(*args)
        received.append(int(image.pixels.crops[0][0, 0, 0]))
        return image

    per_rank_prompts._received = noting
    with injected(), LLM(model, dtype="float32", **ROOMY, **layout) as made:
        rank = made.llm_engine.engine_channel.rank
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        embeddings = [{"prompt_embeds": with_rows(table, each)} for each in PROMPTS]
        own = [PROMPTS[1], PROMPTS[5], PROMPTS[0]]
        seen = [answers(made), answers(made, embeddings), answers(made, own, PARAMS[1]), owners]
        seen += [answers(made, own if rank else [], PARAMS[1], gather=True), received]
        try:
            answers(made, [PROMPTS[4 * rank]], PARAMS[0])
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        (folder / str(rank)).write_text(json.dumps(seen))


@pytest.mark.stress
@on_two_ranks
def test_images_on_ranks_give_the_same_bits(model: Path, expected: list[Any], layout: dict[str, int], tmp_path: Path):
    ranks.run_forked([__file__, json.dumps(layout), model, tmp_path], 2, timeout_s=240).checked()
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()))
    # Text too has other bits on two tensor ranks.
    assert first[0] == second[0] == first[1]
    assert "tensor_parallel_size" in layout or first[0] == json.loads(json.dumps(expected))
    # All prompts are rank 1's: one of the three runs in the other replica.
    assert (first[4], second[4]) == ([], second[2])
    assert (first[5], second[5]) == ([1] if "data_parallel_size" in layout else [2, 1, 2, 5, 1], [])
    assert sorted(set(first[3])) == [0, 1] or "tensor_parallel_size" not in layout
    assert "prompts[0].images" in first[6]


@pytest.mark.stress
def test_images_reach_worker_processes(model: Path, expected: list[Any]):
    options = {"distributed_executor_backend": "mp", "worker_cls": "injected_tower.TableWorker"}
    with injected(), LLM(model, dtype="float32", **options, **ROOMY) as made:
        assert answers(made) == expected


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]), **json.loads(sys.argv[1]))
