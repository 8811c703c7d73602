"""Decoders with encoders, and encoders of embedded distances, by kernels for GPUs, interpreted: see triton_cases.py.

TRITON_INTERPRET=1 python tests/ops/kernels/triton_cross_cases.py          prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_cross_cases.py cuda                        the same on a GPU
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from image_rows import ImageRun
from our_model import encoder_states
from rows_of_encoders import cross_row
from torch import Tensor
from triton_cases import assert_near, in_gate, report, set_device

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ranks.communicator import single_group

_SIZES: dict[str, Any] = {"vocab_size": 160, "d_model": 32, "max_position_embeddings": 48}
_SIZES |= {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
_SIZES |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "decoder_start_token_id": 2}
_ROWS = tuple(cross_row(*lengths, hidden_size=32) for lengths in ((3, 2), (18, 4)))


def model_of(architecture: str, sizes: dict[str, Any], *, is_triton: bool) -> DecoderForCausalLM:
    """With dummy weights."""
    kernels = (TritonKernels(), TritonBackend()) if is_triton else (ReferenceKernels(), SdpaBackend())
    context = LayerContext(single_group(), *kernels, torch.float32, torch.get_default_device())
    model = build_model(context, model_config_of({"architectures": [architecture], **sizes}, Path("config.json")))
    model.weights.fill(model.weights.dummy())
    model.pack_weights()
    return model


def check(architecture: str, sizes: dict[str, Any]) -> None:
    """Logits of plain torch, and the same bits in chunks."""
    model = model_of(architecture, sizes, is_triton=True)
    complete, plain = own_logits(model), own_logits(model_of(architecture, sizes, is_triton=False))
    for mine, expected in zip(complete, plain, strict=True):
        assert_near(mine, expected, torch.float32)
    for mine, expected in zip(own_logits(model, 18), complete, strict=True):
        assert torch.equal(mine, expected), "chunks change bits"


def own_logits(model: DecoderForCausalLM, chunk: int | None = None) -> list[Tensor]:
    found = ImageRun([model], _ROWS).finish(chunk)
    return [logits[row.num_virtual :] for logits, row in zip(found, _ROWS, strict=True)]


def decoders_of_text_have_the_logits_of_plain_torch() -> None:
    check("BartForConditionalGeneration", _SIZES)


def decoders_with_relative_bias_have_the_logits_of_plain_torch() -> None:
    sizes = {"d_kv": 16, "d_ff": 48, "num_heads": 2, "num_layers": 1, "relative_attention_num_buckets": 4}
    check("T5ForConditionalGeneration", {**_SIZES, **sizes, "relative_attention_max_distance": 6})


def encoders_of_embedded_distances_have_the_states_of_plain_torch() -> None:
    sizes = {"vocab_size": 160, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 40, "position_buckets": 8, "share_att_key": True}
    sizes |= {"relative_attention": True, "pos_att_type": "c2p|p2c", "norm_rel_ebd": "layer_norm"}
    prompts = [[5, 6, 7], [*range(30)], [9]]
    model, plain = (model_of("DebertaV2Model", sizes, is_triton=each) for each in (True, False))
    found = encoder_states(model, prompts)
    for mine, expected in zip(found, encoder_states(plain, prompts), strict=True):
        assert_near(mine, expected, torch.float32)
    assert torch.equal(encoder_states(model, prompts[:1])[0], found[0]), "neighbours change bits"
    # Control: embedded distances count.
    model.model.distances.weight.zero_()
    assert not torch.allclose(encoder_states(model, prompts)[1], found[1], rtol=1e-2, atol=1e-2)


CASES: tuple[Callable[[], None], ...] = (
    decoders_of_text_have_the_logits_of_plain_torch,
    decoders_with_relative_bias_have_the_logits_of_plain_torch,
    encoders_of_embedded_distances_have_the_states_of_plain_torch,
)


def main() -> None:
    set_device()
    report(CASES[:1] if in_gate() else CASES)


if __name__ == "__main__":
    main()
