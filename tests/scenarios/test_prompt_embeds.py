"""`prompt_embeds`: a prompt's own embeddings have the bits of its ids, and its blocks the names of their contents."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from exact_answers import ids_and_entries
from layouts_of_two import on_two_ranks
from safetensors.torch import load_file
from torch import Tensor

from spmd_worker import LLM, PromptsRefusedError, SamplingParams
from spmd_worker.worker.runner.row_store import RowStore

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46], [9], list(range(60, 100)), [*range(60, 90), 3, 4]]
PARAMS = [
    SamplingParams(temperature=1, seed=1, max_tokens=60, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=50, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9, max_tokens=3, n=2, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=3, presence_penalty=0.5, max_tokens=20, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True),
]
# Few tokens a step, and too few blocks for all rows: prompts are cut into chunks, rows are preempted.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 12,
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
}


def table_of(model: Path) -> Tensor:
    return load_file(model / "model.safetensors")["model.embed_tokens.weight"]


def prompts_of(table: Tensor, places: tuple[int, ...]) -> list[Any]:
    """`PROMPTS`, those at `places` as embeddings."""
    return [{"prompt_embeds": table[ids]} if place in places else ids for place, ids in enumerate(PROMPTS)]


def answers(llm: LLM, prompts: list[Any], **options: Any) -> list[Any]:
    return ids_and_entries(llm.generate(prompts, PARAMS, use_tqdm=False, **options))


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(model, dtype="float32", **SMALL) as made:
        yield made
        made.llm_engine.scheduler.check_integrity()
        assert made.llm_engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.gate("(0, 1, 2, 3, 4)")
@pytest.mark.guarantee("a prompt's own embeddings give the bits of its ids")
@pytest.mark.parametrize("places", [(0, 1, 2, 3, 4), (0, 3)], ids=str)
def test_own_embeddings_give_the_bits_of_ids(llm: LLM, model: Path, places: tuple[int, ...]):
    expected = answers(llm, PROMPTS)
    before = llm.llm_engine.counters.num_preemptions
    llm.reset_prefix_cache()
    assert answers(llm, prompts_of(table_of(model), places)) == expected
    assert llm.llm_engine.counters.num_preemptions > before
    # Blocks of the first call are found.
    assert answers(llm, prompts_of(table_of(model), places)) == expected


@pytest.mark.stress
@pytest.mark.control("a prompt's own embeddings give the bits of its ids")
def test_comparison_detects_rows_of_other_tokens(llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: rows looked up one place too early."""
    expected, table = answers(llm, PROMPTS), table_of(model)
    of_step = RowStore.of_step

    def shifted(store: RowStore, scheduled: Any) -> Any:
        given = of_step(store, scheduled)
        return given and given._replace(rows=given.rows.roll(1, 0))

    monkeypatch.setattr(RowStore, "of_step", shifted)
    found = answers(llm, prompts_of(table, (0, 1, 2, 3, 4)))
    assert [mine == theirs for mine, theirs in zip(found, expected)].count(True) <= 1
    # Later tests must not find what was computed wrongly.
    llm.reset_prefix_cache()


@pytest.mark.gate("float32-gpt2", "bfloat16-gemma2", "float32-granite", "bfloat16-opt_350m")
@pytest.mark.parametrize("family", ["gemma2", "granite", "gpt2", "opt_350m"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_embeddings_give_ids_bits_in_families(family: str, dtype: str):
    """Multipliers, learned positions and projections: what transformers' `inputs_embeds` enter before."""
    from family_checkpoints import family_folder, family_reference

    prompts, params = [[5, 6, 7], list(range(30, 51))], SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    reference = family_reference(family)
    embedding = reference.get_input_embeddings().to(getattr(torch, dtype))
    with torch.inference_mode():
        rows = [embedding(torch.tensor(ids)).clone() for ids in prompts]
    embedding.to(torch.float32)
    with LLM(family_folder(family), device="cpu", dtype=dtype, num_blocks=64, block_size=8) as made:
        by_ids, by_rows = (
            [output.outputs for output in made.generate(given, params, use_tqdm=False)]
            for given in (prompts, [{"prompt_embeds": each} for each in rows])
        )
    assert by_rows == by_ids
    if dtype == "float32":
        # Noise that no token has: as transformers computes it.
        noise = torch.randn(9, rows[0].shape[1], generator=torch.Generator().manual_seed(3)) * rows[0].std()
        with torch.inference_mode():
            logits = reference(inputs_embeds=noise.unsqueeze(0)).logits[0, -1]
        with LLM(family_folder(family), device="cpu", dtype=dtype, num_blocks=64, block_size=8) as made:
            one = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
            ((position,),) = [
                output.outputs[0].logprobs for output in made.generate({"prompt_embeds": noise}, one, use_tqdm=False)
            ]
        theirs = logits.log_softmax(-1)
        assert next(iter(position)) == int(logits.argmax())
        assert all(abs(entry.logprob - float(theirs[token])) < 1e-4 for token, entry in position.items())


@pytest.mark.guarantee("blocks of embeddings are found by equal embeddings and by nothing else")
def test_equal_embeddings_share_blocks_others_never(llm: LLM, model: Path):
    table, greedy = table_of(model), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    ids = list(range(100, 124))
    other = table[ids].clone()
    other[10, 3] += 1e-4

    def cached(prompt: Any) -> int:
        (output,) = llm.generate([prompt], greedy, use_tqdm=False)
        return output.num_cached_tokens

    llm.reset_prefix_cache()
    assert [cached({"prompt_embeds": table[ids]}) for _ in range(2)] == [0, 16]
    # Ids, and placeholders; a prompt that begins with the same rows; rows of which the second block has another.
    assert [cached(prompt) for prompt in (ids, [0] * 24, {"prompt_embeds": table[[*ids, 1]]})] == [0, 0, 24]
    assert [cached({"prompt_embeds": other}), cached({"prompt_embeds": other[8:]})] == [8, 0]
    assert cached({"prompt_embeds": table[ids].double().float().numpy()}) == 16
    assert cached({"prompt_embeds": table[ids], "cache_salt": "a"}) == 0


@pytest.mark.control("blocks of embeddings are found by equal embeddings and by nothing else")
def test_names_without_contents_find_foreign_blocks(llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: blocks named by placeholders alone."""
    from spmd_worker.replica.scheduler import allocator

    hash_blocks, table = allocator.hash_blocks, table_of(model)
    monkeypatch.setattr(allocator, "hash_blocks", lambda *args: hash_blocks(*args[:3]))
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.reset_prefix_cache()
    outputs = [llm.generate({"prompt_embeds": table[first : first + 20]}, one, use_tqdm=False)[0] for first in (20, 60)]
    assert [output.num_cached_tokens for output in outputs] == [0, 16]
    llm.reset_prefix_cache()


def test_prompts_of_embeddings_are_reported_as_placeholders(llm: LLM, model: Path):
    table = table_of(model)
    params = SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3, logprobs=0, ignore_eos=True)
    (output,) = llm.generate({"prompt_embeds": table[[7, 8]][None], "prompt": "two"}, params, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids, output.prompt_logprobs) == ("two", [0, 0], None)
    # Penalties count no placeholder: the penalty of token 0 would be another answer's.
    (scores,) = llm.score_tokens([{"prompt_embeds": table[[7, 8]]}], [output.outputs[0].token_ids])
    reported = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
    assert scores == reported


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda table: table[:3].double(), "is float64: give float32, bfloat16, float16"),
        (lambda table: table[:3].long(), "is int64"),
        (lambda table: table[:3, :5], r"shape \[3, 5\]: give \[tokens, 64\]"),
        (lambda table: table[0], r"shape \[64\]"),
        (lambda table: table[:0], "no rows"),
        (lambda table: table[[1] * 97], "97 rows but max_model_len is 96"),
        (lambda table: table[:3] * torch.nan, r"\[0\]\[0\] is not finite"),
        (lambda table: [[0.0] * 64], "is a list"),
    ],
    ids=["float64", "integers", "narrow", "vector", "empty", "long", "nan", "list"],
)
def test_invalid_embeddings_are_error_outputs(llm: LLM, model: Path, value: Any, reason: str):
    given = {"prompt_embeds": value(table_of(model))}
    with pytest.raises(PromptsRefusedError, match=reason):
        llm.generate([[1], given], SamplingParams(max_tokens=1), use_tqdm=False)
    outputs = llm.generate([[1], given], SamplingParams(max_tokens=1), use_tqdm=False, on_error="row")
    assert [output.error is None for output in outputs] == [True, False]


@pytest.mark.parametrize(
    ("extra", "params", "reason"),
    [
        ({}, {"prompt_logprobs": 1}, "prompt_logprobs are those of token ids"),
        ({}, {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens cuts token ids"),
        ({"prompt_token_ids": [1]}, {}, "prompt_token_ids or prompt_embeds"),
    ],
)
def test_what_needs_ids_is_rejected(llm: LLM, model: Path, extra: Any, params: dict[str, int], reason: str):
    prompt = {"prompt_embeds": table_of(model)[:4], **extra}
    with pytest.raises(PromptsRefusedError, match=reason):
        llm.generate(prompt, SamplingParams(max_tokens=1, **params), use_tqdm=False)


def test_rows_are_released_with_their_request(llm: LLM, model: Path):
    store = llm.llm_engine.executor.driver_worker.model_runner.rows
    engine, params = llm.llm_engine, SamplingParams(max_tokens=2, ignore_eos=True)
    prompt = {"prompt_embeds": table_of(model)[:9]}
    for name in ("a", "b"):
        engine.add_request(name, prompt, params)
    assert store.num_bytes == 2 * 9 * 64 * 4
    engine.abort_request("b")
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()
    assert store.num_bytes == 0


def main(model: Path, folder: Path, **layout: Any) -> None:
    """Writes a rank's report to a file: by ids, by embeddings, by embeddings of its own in another order."""
    table = table_of(model)
    with LLM(model, **SMALL, **layout) as made:
        rank = made.llm_engine.engine_channel.rank
        seen = [
            answers(made, PROMPTS),
            answers(made, prompts_of(table, (0, 1, 2, 3, 4))),
            made.llm_engine.counters.num_preemptions,
            [len(each.prompt_token_ids) for each in made.generate([{"prompt_embeds": table[:3]}], gather=True)],
        ]
        mine = {"prompt_embeds": table[:2] if rank else table[1:3]}
        try:
            made.generate([mine], use_tqdm=False)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        (folder / str(rank)).write_text(json.dumps(seen))


@on_two_ranks
def test_embeddings_on_ranks_give_the_bits_of_ids(model: Path, layout: dict[str, int], tmp_path: Path):
    ranks.run_forked([__file__, json.dumps(layout), model, tmp_path], 2, timeout_s=240).checked()
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()))
    assert first[:2] == second[:2]
    by_ids, by_rows, num_preemptions, lengths, problem = first
    assert lengths == [3]
    assert by_rows == by_ids
    assert num_preemptions or "data_parallel_size" in layout
    assert "prompts[0].prompt_embeds" in problem


@pytest.mark.stress
def test_embeddings_reach_worker_processes(model: Path):
    with LLM(model, distributed_executor_backend="mp", tensor_parallel_size=2, **SMALL) as made:
        assert answers(made, prompts_of(table_of(model), (0, 1, 2, 3, 4))) == answers(made, PROMPTS)


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]), **json.loads(sys.argv[1]))
