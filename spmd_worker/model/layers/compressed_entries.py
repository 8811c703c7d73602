"""Entries of complete groups of tokens, in a cache of blocks: compressed keys of DeepSeek V4's attention.

An entry is a mean of its group's projected tokens, by a softmax of gates over them, each number by itself; one that
overlaps is also of the group before, with other projections of its tokens. It belongs to its group's last token: it
lies in that token's block, and whatever keeps, moves or finds that block has it. What tokens of unfinished groups
contribute is kept of every token beside its key, so an entry is computed from the cache when its last token is, and its
bits depend on neither chunks nor batches.

T: tokens of the step; G: groups that the step completes; m: tokens of a group; D: numbers of an entry; R: numbers of a
token's row, m parts of which, one behind the other, are its values and its gates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.choice_bytes import GROUPS
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model.layers.rotary import RotaryEmbedding
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.layer_config import CompressedConfig, NormConfig
from spmd_worker.ops.attention.listed import ListedKeys
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.host_copies import send


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups that a step completes: sequences in the step, and numbers of groups, int64 [G] each."""

    sequences: Tensor
    numbers: Tensor


def completed_groups(metadata: AttentionMetadata, rate: int) -> Groups | None:
    """Groups of `rate` tokens whose last token is in the step; None if there are none."""
    sequences: list[int] = []
    numbers: list[int] = []
    for sequence, end in enumerate(metadata.context_lengths):
        start = end - (metadata.query_starts[sequence + 1] - metadata.query_starts[sequence])
        found = range(start // rate, end // rate)
        sequences += [sequence] * len(found)
        numbers += found
    if not numbers:
        return None
    device = metadata.block_tables.device
    return Groups(on_device(sequences, device), on_device(numbers, device))


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the host, int64, copied without waiting."""
    return send((np.array(numbers, dtype=np.int64),), device)[0]


def row_places(tables: Tensor, sequences: Tensor, positions: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks and offsets, int64, of positions of tokens, in `tables` [S, B] of sequences."""
    return tables[sequences, positions // block_size].long(), positions % block_size


def entry_places(
    tables: Tensor, sequences: Tensor, numbers: Tensor, rate: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Blocks, and places among the entries of a block, of entries: no two of a block have the same."""
    blocks, offsets = row_places(tables, sequences, (numbers + 1) * rate - 1, block_size)
    return blocks, offsets // rate


def clear(entries: Tensor, metadata: AttentionMetadata) -> None:
    """Zeros in all places of the blocks that the step begins: some places of a block stay without an entry."""
    entries[metadata.token_blocks[metadata.token_offsets == 0]] = 0


class GateBias(CheckpointLayer):
    """Numbers that are added to the gates of a group's tokens, float32 [m, n]. Replicated."""

    is_float32 = True

    def __init__(self, context: LayerContext, rate: int, size: int) -> None:
        super().__init__()
        self.values = replace(context, dtype=torch.float32).parameter(rate, size)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = f"{prefix.rpartition('.')[0]}.position_bias"
        yield replicated(name, self.shape_of("values"), f"{prefix}.values")


class Compressor(torch.nn.Module):
    """Projections, gates, norm and rotation of entries of D numbers."""

    def __init__(
        self, context: LayerContext, config: CompressedConfig, size: int, hidden_size: int, norm: NormConfig
    ) -> None:
        super().__init__()
        assert config.rope is not None, config
        self._rate, self._overlaps, self._size = config.rate, config.overlaps, size
        self._kernels, self._dtype, self._listed = context.kernels, context.dtype, context.attention.listed_keys()
        width = size * (1 + config.overlaps)
        parts = tuple([OutputPart(name, width, 0, width) for name in ("kv_proj", "gate_proj")])
        self.row_proj = ColumnParallelLinear(context, hidden_size, parts, has_bias=False)
        self.gate_bias = GateBias(context, config.rate, width)
        self.kv_norm = new_norm(context, size, norm)
        # No rope here depends on the length of the model.
        self._rotary = RotaryEmbedding(config.rope, 1, context.device)

    def write(
        self,
        x: Tensor,
        rows: Tensor,
        entries: Tensor,
        metadata: tuple[AttentionMetadata, AttentionMetadata],
        groups: Groups | None,
        adapters: StepAdapters | None,
    ) -> None:
        """Write rows [T, R] of hidden states [T, hidden], then the entries of completed `groups`. `rows` and `entries`
        are caches [blocks, block size, R] and [blocks, places, D], with `metadata` of each.
        """
        of_rows, of_entries = metadata
        if self._listed is not None:
            self._write_on_device(self._listed(of_rows, rows.shape[1]), self.row_proj(x, adapters), rows, entries)
            return
        rows[of_rows.token_blocks, of_rows.token_offsets] = self.row_proj(x, adapters)
        clear(entries, of_entries)
        if groups is None:
            return
        for first in range(0, len(groups.numbers), GROUPS):
            sequences, numbers = groups.sequences[first : first + GROUPS], groups.numbers[first : first + GROUPS]
            places = entry_places(of_entries.block_tables, sequences, numbers, self._rate, rows.shape[1])
            entries[places] = self._entries(rows, of_rows.block_tables, sequences, numbers)

    def _entries(self, rows: Tensor, tables: Tensor, sequences: Tensor, numbers: Tensor) -> Tensor:
        """[G, D]."""
        values, gates = self._members(rows, tables, sequences, numbers, is_before=False)
        if self._overlaps:
            before, their_gates = self._members(rows, tables, sequences, numbers - 1, is_before=True)
            # The first group has none before it.
            their_gates = their_gates.masked_fill((numbers == 0).view(-1, 1, 1), -torch.inf)
            values, gates = torch.cat((before, values), dim=1), torch.cat((their_gates, gates), dim=1)
        weights = (gates - gates.amax(dim=1, keepdim=True)).exp()
        # Tokens of no group may be anything: they are left out, not multiplied by 0.
        products = torch.where(weights > 0, weights * values, 0.0)
        total, mean = weights[:, 0].clone(), products[:, 0].clone()
        for member in range(1, weights.shape[1]):
            total += weights[:, member]
            mean += products[:, member]
        return self._finished((mean / total).to(self._dtype), numbers * self._rate)

    def _write_on_device(self, listed: ListedKeys, values: Tensor, rows: Tensor, entries: Tensor) -> None:
        """Every token computes an entry, and those that end a group write it: what a step launches does not depend on
        its groups.
        """
        block_size = rows.shape[1]
        listed.write(values, rows, block_size, cleared=entries)
        sizes, overlaps = (self._rate, self._size), self._overlaps
        means = listed.compress(rows, self.gate_bias.values, *sizes, overlaps=overlaps, dtype=self._dtype)
        firsts = listed.positions.long() // self._rate * self._rate
        listed.write(self._finished(means, firsts), entries, block_size, self._rate)

    def _finished(self, means: Tensor, positions: Tensor) -> Tensor:
        """Means [G, D] of groups, normed, and rotated by their first `positions`, int64 [G]."""
        normed = self.kv_norm(means)
        angles = self._rotary.angles(positions, torch.zeros_like(positions), self._dtype)
        return angles.rotate_last(self._kernels, normed.unsqueeze(1)).squeeze(1)

    def _members(
        self, rows: Tensor, tables: Tensor, sequences: Tensor, numbers: Tensor, *, is_before: bool
    ) -> tuple[Tensor, Tensor]:
        """Values and biased gates of the tokens of groups, float32 [G, m, D]; of a group before, its first halves."""
        positions = numbers.unsqueeze(1) * self._rate + torch.arange(self._rate, device=numbers.device)
        places = row_places(tables, sequences.unsqueeze(1), positions.clamp(min=0), rows.shape[1])
        values, gates = rows[places].float().chunk(2, dim=-1)
        gates = gates + self.gate_bias.values
        part = slice(0, self._size) if is_before else slice(-self._size, None)
        return values[..., part], gates[..., part]
