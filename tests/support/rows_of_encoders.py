"""Rows of decoders with encoders, for models without engine: rows of the encoder are given, so no encoder runs."""

from typing import Final

import torch
from image_rows import ImageRow
from our_model import BLOCK_SIZE
from torch import Tensor

from spmd_worker.replica.sequence.encoder_input import encoder_text

HIDDEN_SIZE: Final = 64
VOCAB_SIZE: Final = 160


def encoder_rows(num_rows: int, hidden_size: int = HIDDEN_SIZE) -> Tensor:
    """Float32 [num_rows, hidden], other ones for another number."""
    return torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(num_rows))


def cross_row(num_rows: int, num_tokens: int, hidden_size: int = HIDDEN_SIZE) -> ImageRow:
    """A row with so many rows of the encoder, before so many tokens of the decoder."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(10, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    given = encoder_text([3] * num_rows)
    all_ids, item = given.before(ids, BLOCK_SIZE)
    rows = encoder_rows(num_rows, hidden_size)
    return ImageRow(all_ids, (item,), rows, num_virtual=given.num_positions(BLOCK_SIZE))
