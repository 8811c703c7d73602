"""Rows of `table.py`: decoders of encoder-decoder models, and the rows of their encoders, read from the same file.

A decoder's layer attends to the encoder's rows between self-attention and feed-forward.
"""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.family import (
    Attention,
    Embedding,
    Encoder,
    EncoderDecoder,
    Family,
    FeedForward,
    Head,
    Names,
    Norms,
)

_SHARED: Final = "model.shared"
_BART_PARTS: Final = {
    "self_attn.o_proj": "self_attn.out_proj",
    "cross_attn.q_proj": "encoder_attn.q_proj",
    "cross_attn.k_proj": "encoder_attn.k_proj",
    "cross_attn.v_proj": "encoder_attn.v_proj",
    "cross_attn.o_proj": "encoder_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_BART_DEFAULTS: Final = {
    "vocab_size": 50265,
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": True,
    **{f"{part}_layers": 12 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 16 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 4096 for part in ("encoder", "decoder")},
}


def _keys_of(part: str) -> dict[str, str]:
    """The file's keys of the encoder's or the decoder's sizes."""
    return {
        "hidden_size": "d_model",
        "num_hidden_layers": f"{part}_layers",
        "num_attention_heads": f"{part}_attention_heads",
        "num_key_value_heads": "",
        "head_dim": "",
        "intermediate_size": f"{part}_ffn_dim",
    }


_BART: Final = Family(
    models="BART",
    names=Names(
        embedding=_SHARED,
        positions="model.decoder.embed_positions",
        embedding_norm="model.decoder.layernorm_embedding",
        layers="model.decoder.layers",
        norm="",
        norms=("", "self_attn_layer_norm", "", "final_layer_norm"),
        cross_norms=("", "encoder_attn_layer_norm"),
        parts=_BART_PARTS,
        head_bias="final_logits_bias",
        ignored=("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"),
        ignored_prefixes=("model.encoder.",),
    ),
    attention=Attention(qkv_bias=True, output_bias=True),
    rope=None,
    norms=Norms(kind="layer", has_bias=True, eps_key="", eps=1e-5, are_of_sums=True),
    feed_forward=FeedForward(bias=True, activation_key="activation_function", is_gated=False),
    embedding=Embedding(root_key="scale_embedding", position_offset=2, has_norm=True),
    head=Head(has_bias=True),
    encoder_part=EncoderDecoder("BartEncoder", max_rows_key="max_position_embeddings"),
    file_keys=_keys_of("decoder"),
    defaults=_BART_DEFAULTS,
)

ENCODER_DECODER_ROWS: Final[dict[str, Family]] = {"BartForConditionalGeneration": _BART}


def _encoder_of(decoder: Family) -> Family:
    """The row of the encoder of a model whose decoder has that row: its names have the one word for the other."""
    names = decoder.names
    own = {
        each: getattr(names, each).replace("decoder", "encoder") for each in ("positions", "embedding_norm", "layers")
    }
    norms = replace(names, **own, norm=names.norm.replace("decoder", "encoder"), cross_norms=("", ""), head_bias="")
    return replace(
        decoder,
        names=replace(norms, ignored=(), ignored_prefixes=()),
        head=Head(),
        encoder=Encoder(),
        encoder_part=None,
        file_keys=_keys_of("encoder"),
    )


ENCODER_PARTS: Final[dict[str, Family]] = {"BartEncoder": _encoder_of(_BART)}
"""Encoders of these models, by the name of their class in transformers."""
