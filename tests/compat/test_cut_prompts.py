"""A prompt that is pooled is cut, and what is said of its first tokens with it."""

from dataclasses import replace

import pytest

from spmd_worker.compat.prompts import Encoded, apply_pooling
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

CONFIG = replace(PoolingConfig("embed", "mean", 8), is_encoder=True, has_token_types=True)


def no_tokenizer() -> Tokenizer:
    raise AssertionError("ids need none")


@pytest.mark.parametrize(
    ("length", "kept", "num_first"),
    [
        (None, range(10), 6),
        (20, range(10), 6),
        (10, range(10), 6),
        (7, range(3, 10), 3),
        (4, range(6, 10), 0),
        (3, range(7, 10), 0),
        (-1, range(1, 10), 5),
    ],
)
def test_truncated_prompt_reduces_first_text_tokens(length: int | None, kept: range, num_first: int):
    encoded, params = Encoded(tuple(range(10))), PoolingParams(num_first_tokens=6, truncate_prompt_tokens=length)
    apply_pooling(encoded, params, CONFIG, 9 if length == -1 else 100, no_tokenizer)
    assert encoded.token_ids == tuple(kept)
    assert encoded.pooling is not None
    assert encoded.pooling.num_first_tokens == num_first
