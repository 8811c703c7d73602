"""Ids that a row could get, as bits: those whose logits the filters have not set to minus infinity.

K: rows; V: vocabulary; W: 64-bit words of a row of bits.
"""

from typing import Final

import torch
from torch import Tensor

from spmd_worker.ops.sampling.read_back import Awaited, ReadBack
from spmd_worker.replica.sequence.sampling_mask import pack_bits

_BYTE: Final = 8
_WORD: Final = 64


def launch_kept_ids(logits: Tensor, read_back: ReadBack) -> Awaited[list[bytes]]:
    """[K, V] after the filters -> each row's ids, packed. The device packs bits: the copy has V / 8 bytes a row."""
    return read_back.later(_packed_rows, kept_words(logits))


def kept_words(logits: Tensor) -> Tensor:
    """[K, V] -> int64 [K, W]: bit t % 64 of word t / 64 says whether logit t is above minus infinity."""
    num_rows, num_ids = logits.shape
    num_words = -(-num_ids // _WORD)
    bits = torch.zeros((num_rows, num_words * _WORD), dtype=torch.uint8, device=logits.device)
    bits[:, :num_ids] = logits > -torch.inf
    bits = bits.view(num_rows, num_words * _BYTE, _BYTE)
    packed = bits[:, :, 0].clone()
    for index in range(1, _BYTE):
        packed |= bits[:, :, index] << index
    return packed.view(torch.int64)


def _packed_rows(words: Tensor) -> list[bytes]:
    return [pack_bits(row) for row in words.numpy().view("uint64")]
