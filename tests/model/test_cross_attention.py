"""Decoders with an encoder against transformers, and in any steps: the encoder's rows are given.

Float32, 1e-4 of the largest logit.
"""

from functools import cache
from typing import Any

import pytest
import torch
from cross_rows import CASES, LENGTHS, cross_folder, cross_logits, cross_stages, with_layers
from image_rows import ImageRow, ImageRun
from leaf_shards import shard
from our_model import load_model
from reference_models import relative_error
from rows_of_encoders import VOCAB_SIZE, cross_row
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import Stage
from spmd_worker.worker.runner import batch, cross_step

TOLERANCE = 1e-4
IN_GATE = ("bart", "whisper", "t5", "marian")
CASE_MARKS = [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.stress) for name in CASES]
WHOLE = Stage(0, 3, is_first=True, is_last=True)


@cache
def rows() -> tuple[ImageRow, ...]:
    return tuple(cross_row(*lengths) for lengths in LENGTHS)


@cache
def model_of(name: str, dtype: str = "float32") -> DecoderForCausalLM:
    return load_model(cross_folder(name), dtype=dtype)


@cache
def theirs(name: str) -> list[Tensor]:
    return [cross_logits(name, row) for row in rows()]


def own_logits(models: list[DecoderForCausalLM], chunk: int | None = None) -> list[Tensor]:
    """Logits of the decoder's tokens of each row."""
    found = ImageRun(models, rows()).finish(chunk)
    return [logits[row.num_virtual :] for logits, row in zip(found, rows(), strict=True)]


def error_of(name: str, models: list[DecoderForCausalLM]) -> float:
    """The largest relative error of all rows."""
    return max(map(relative_error, own_logits(models), theirs(name)))


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.parametrize("name", CASE_MARKS)
def test_decoders_with_encoders_are_transformers(name: str):
    assert error_of(name, [model_of(name)]) < TOLERANCE


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("change", [{"scale": 0.26}, {"norms_sums": False}])
def test_comparison_detects_other_layers(change: dict[str, Any]):
    config = with_layers(model_of("bart").model_config, **change)
    assert error_of("bart", [load_model(cross_folder("bart"), config)]) > 20 * TOLERANCE


@pytest.mark.control("Models compute what transformers computes")
def test_comparison_detects_a_row_too_few(monkeypatch: pytest.MonkeyPatch):
    num_rows = cross_step._num_rows
    monkeypatch.setattr(cross_step, "_num_rows", lambda request: max(num_rows(request) - 1, 1))
    assert error_of("bart", [model_of("bart")]) > 20 * TOLERANCE


@pytest.mark.control("Models compute what transformers computes")
def test_comparison_detects_positions_of_the_cache(monkeypatch: pytest.MonkeyPatch):
    split = batch.with_cross_step
    monkeypatch.setattr(batch, "with_cross_step", lambda *inputs: (split(*inputs)[0], inputs[2]))
    assert error_of("bart", [model_of("bart")]) > 20 * TOLERANCE


@pytest.mark.gate("whisper-bfloat16", "t5-bfloat16", "bart-bfloat16", "marian-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASE_MARKS)
def test_chunks_give_the_same_bits(name: str, dtype: str):
    model = model_of(name, dtype)
    complete = own_logits([model])
    for chunk in (1, 3, 20):
        assert all(map(torch.equal, own_logits([model], chunk), complete))


@pytest.mark.parametrize("name", CASE_MARKS)
def test_rows_alone_give_the_same_bits(name: str):
    model = model_of(name)
    for row, together in zip(rows(), own_logits([model]), strict=True):
        (alone,) = ImageRun([model], [row]).finish()
        assert torch.equal(alone[row.num_virtual :], together)


@pytest.mark.parametrize("name", CASE_MARKS)
def test_shards_and_stages_are_transformers(name: str):
    stages = Stage(0, 1, is_first=True, is_last=False), Stage(1, 3, is_first=False, is_last=True)

    def run(group: GroupHandle) -> list[Tensor]:
        return own_logits(cross_stages(name, *stages, group=group))

    of_ranks = on_ranks(2, run)
    logits = [torch.cat(each, dim=1)[:, :VOCAB_SIZE] for each in zip(*of_ranks, strict=True)]
    assert max(map(relative_error, logits, theirs(name))) < TOLERANCE
    (one,) = cross_stages(name, WHOLE)
    assert all(map(torch.equal, own_logits(cross_stages(name, *stages)), own_logits([one])))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.stress)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "t5" else pytest.mark.stress) for name in CASES]
)
def test_decoder_has_same_bits_on_two_ranks(name: str, dtype: torch.dtype):
    """Both attentions and the feed-forward have leaves."""

    def run(group: GroupHandle) -> list[Tensor]:
        return own_logits([shard(cross_folder(name), dtype, group)])

    of_ranks = on_ranks(2, run, adds_by_tree=True)
    logits = [torch.cat(each, dim=1)[:, :VOCAB_SIZE] for each in zip(*of_ranks, strict=True)]
    assert all(map(torch.equal, logits, run(single_group())))


def test_updates_change_the_bias_of_distances():
    model = load_model(cross_folder("t5"))
    name, before = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", own_logits([model])
    with model.as_checkpoint() as view:
        table = view.state_dict()[name].clone()
    model.load_weights([(name, 2 * table)])
    assert not torch.equal(own_logits([model])[0], before[0])
    model.load_weights([(name, table)])
    assert all(map(torch.equal, own_logits([model]), before))


@pytest.mark.parametrize("name", CASE_MARKS)
def test_found_blocks_change_no_bit(name: str):
    """Rows that hits of the prefix cache leave: behind the encoder's, inside them, inside the decoder's."""
    run = ImageRun([model_of(name)], rows())
    complete = run.finish()
    firsts = (rows()[0].num_virtual, 16, rows()[2].num_virtual + 16)
    for sequence, first in zip(run.sequences, firsts, strict=True):
        sequence.num_computed_tokens = first
    for found, logits, first, row in zip(run.finish(7), complete, firsts, rows(), strict=True):
        assert torch.equal(found[max(row.num_virtual - first, 0) :], logits[max(first, row.num_virtual) :])
