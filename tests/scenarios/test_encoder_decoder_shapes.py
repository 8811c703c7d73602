"""Encoder-decoder models with the sizes of released ones: transformers' greedy ids in float32.

The same bits in every batch, chunk, preemption and pipeline; tensor parallelism gives the same ids.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from full_size_models import (
    BLOCK_SIZE,
    NUM_TOKENS,
    PENALTY,
    SHAPES,
    are_double_ids,
    full_size,
    full_size_prompts,
    greedy_ids,
)

from spmd_worker import LLM, SamplingParams

LAYOUTS = ("tensor_parallel_size", "pipeline_parallel_size")


def opened(folder: Path, name: str, **options: Any) -> LLM:
    is_audio = name.startswith("whisper")
    return LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        max_num_seqs=8,
        max_model_len=40,
        max_encoder_len=None if is_audio else 416,
        skip_tokenizer_init=is_audio,
        block_size=BLOCK_SIZE,
        **{"num_blocks": 1600, **options},
    )


def answers(llm: LLM, prompts: list[dict[str, Any]]) -> list[Any]:
    """Ids and log-probabilities of each."""
    penalty = 1.0 if "multi_modal_data" in prompts[0] else PENALTY
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, repetition_penalty=penalty
    )
    found = []
    for each in llm.generate(prompts, params, use_tqdm=False):
        assert each.outputs[0].logprobs is not None, each.error
        scores = [next(iter(position.values())).logprob for position in each.outputs[0].logprobs]
        found.append([[*each.outputs[0].token_ids], scores])
    return found


def ids_of(found: list[Any]) -> list[list[int]]:
    return [each[0] for each in found]


@pytest.mark.guarantee("encoder-decoder models of released sizes: transformers' ids", is_control_inside=True)
@pytest.mark.stress
@pytest.mark.parametrize("name", SHAPES)
def test_full_sizes_give_transformers_ids_everywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    shape = full_size(name)
    wanted = [greedy_ids(shape, each) for each in shape.inputs]
    assert are_double_ids(shape, wanted), "transformers' float32 is not its float64"
    with opened(shape.folder, name) as llm:
        alone = [answers(llm, [each])[0] for each in shape.prompts]
        # Negative control: another input, other numbers.
        assert len({str(each) for each in wanted}) > len(wanted) // 2
        assert len({str(scores) for _, scores in alone}) == len(alone)
        assert ids_of(alone) == wanted
        assert answers(llm, shape.prompts) == alone
        llm.reset_prefix_cache()
        assert answers(llm, shape.prompts) == alone
    for mode, swap_space in (("recompute", 0), ("swap", 1)):
        # Each has one block more than it began with, and wants three.
        options = {"num_blocks": shape.num_blocks_at_start + 12, "preemption_mode": mode, "max_encode_patches": 3000}
        with opened(shape.folder, name, swap_space=swap_space, max_num_batched_tokens=shape.chunk, **options) as llm:
            assert answers(llm, shape.prompts) == alone
            counters = llm.llm_engine.counters
            assert counters.num_preemptions > 0
            assert bool(counters.num_swapped_in) == (mode == "swap")
    for layout in LAYOUTS:
        done = ranks.run_forked([__file__, name, layout, shape.folder, tmp_path], 2, timeout_s=400)
        assert done.returncode == 0, done.output
        first, second = (json.loads((tmp_path / f"{layout} {rank}").read_text()) for rank in range(2))
        assert first == second
        assert ids_of(first) == wanted
        if layout == "pipeline_parallel_size":
            assert first == alone
    lengths = sorted({len(each) for each in wanted})
    print(f"\nSHAPE {name}: {len(wanted)} inputs, answers of {lengths} tokens, transformers' in every layout", end="")


def main(name: str, layout: str, model: Path, folder: Path) -> None:
    """Writes a rank's answers."""
    with opened(model, name, **{layout: 2}) as llm:
        rank = llm.llm_engine.engine_channel.rank
        (folder / f"{layout} {rank}").write_text(json.dumps(answers(llm, full_size_prompts(name))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
