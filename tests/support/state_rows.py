"""Rows for models with recurrent states, and answers in all digits."""

import random
from collections.abc import Sequence
from typing import Any

from spmd_worker import RequestOutput, SamplingParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_blocks": 160,
    "num_state_snapshots": 16,
}


def state_rows(
    num_rows: int = 6, num_samples: int = 1, lengths: Sequence[int] = (1, 58, 90, 121, 33, 5, 60, 12)
) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Rows that share 70 tokens, more than the 64 after which a state is kept, two lengths of which end on the grid.
    `lengths`: of what each has after them.
    """
    chance = random.Random(3)
    head = [chance.randrange(5, 90) for _ in range(70)]
    rows, params = [], []
    for index, length in enumerate(lengths[:num_rows]):
        tail = [chance.randrange(5, 90) for _ in range(length)]
        rows.append({"prompt_token_ids": (head if index % 3 else head[:10]) + tail})
        params.append(
            SamplingParams(
                n=num_samples, temperature=0.8, max_tokens=12 + 3 * index, ignore_eos=True, seed=index, logprobs=1
            )
        )
    return rows, params


def answers_of(outputs: list[RequestOutput]) -> list[Any]:
    """Ids and logprobs of each sample of each row, all digits."""
    return [
        [[each.token_ids, [entry.logprob for step in each.logprobs for entry in step.values()]] for each in row.outputs]
        for row in outputs
    ]
