"""Logits processors: masks, bias, penalties.

Each row is changed by its own parameters and tokens only. The order is vLLM's: allowed tokens, minimum length, bad
words, bias, penalties. A mask that would leave no token is not applied. The grammar of a row (`token_masks.py`) comes
before all of these.

K: rows; V: vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import MAX_LOGIT
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.read_back import reads_are_free


def process_logits(logits: Tensor, rows: list[SampleRow], eos_token_ids: tuple[int, ...]) -> None:
    """Change float32 [K, V] in place; row i belongs to `rows[i]`."""
    for row, values in zip(rows, logits, strict=True):
        if row.sampling.allowed_token_ids is not None:
            _allow_only(values, row.sampling.allowed_token_ids)
        if row.must_not_stop:
            _forbid(values, (*eos_token_ids, *row.sampling.stop_token_ids))
        if row.sampling.bad_words_ids:
            _forbid(values, row.bad_token_ids)
        if row.sampling.logit_bias:
            _add_bias(values, row.sampling.logit_bias)
        if row.sampling.has_penalties:
            _penalise(values, row)


def _allow_only(values: Tensor, token_ids: tuple[int, ...]) -> None:
    allowed = _index(token_ids, values)
    kept = values[allowed]
    if not reads_are_free(values):
        only = torch.full_like(values, -torch.inf).index_copy_(0, allowed, kept)
        values.copy_(torch.where(kept.max() == -torch.inf, values, only))
    elif kept.max() != -torch.inf:
        values.fill_(-torch.inf)
        values[allowed] = kept


def _forbid(values: Tensor, token_ids: Sequence[int]) -> None:
    if not token_ids:
        return
    forbidden = _index(token_ids, values)
    before = values[forbidden]
    values[forbidden] = -torch.inf
    if not reads_are_free(values):
        values[forbidden] = before.masked_fill(values.max() != -torch.inf, -torch.inf)
    elif values.max() == -torch.inf:
        values[forbidden] = before


def _add_bias(values: Tensor, biases: tuple[tuple[int, float], ...]) -> None:
    amounts = torch.tensor([bias for _, bias in biases], dtype=values.dtype)
    values[_index([token_id for token_id, _ in biases], values)] += to_device(amounts, values.device)


def _penalise(values: Tensor, row: SampleRow) -> None:
    """Repetition counts prompt and output (https://arxiv.org/abs/1909.05858), the others the output only."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        # On the host: the size of the result depends on the values.
        seen = torch.unique(torch.tensor([*row.prompt_token_ids, *row.output_token_ids], dtype=torch.int64))
        # Image tokens may be beyond the vocabulary.
        seen = to_device(seen[seen < len(values)], values.device)
        chosen = values[seen]
        penalty = min(max(sampling.repetition_penalty, 1 / MAX_LOGIT), MAX_LOGIT)
        penalised = torch.where(chosen > 0, chosen / penalty, chosen * penalty).clamp(-MAX_LOGIT, MAX_LOGIT)
        values[seen] = torch.where(chosen == -torch.inf, chosen, penalised)
    if row.output_token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        outputs = torch.tensor(row.output_token_ids, dtype=torch.int64)
        seen, counts = (to_device(each, values.device) for each in torch.unique(outputs, return_counts=True))
        values[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(values.dtype)


def _index(token_ids: object, values: Tensor) -> Tensor:
    return to_device(torch.tensor(token_ids, dtype=torch.int64), values.device)
