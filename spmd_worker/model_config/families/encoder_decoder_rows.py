"""Rows of `table.py`: decoders of encoder-decoder models, and the rows of their encoders, read from the same file.

A decoder's layer attends to the encoder's rows between self-attention and feed-forward.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.family import (
    Attention,
    AudioNames,
    ClassifierFamily,
    Embedding,
    Encoder,
    EncoderDecoder,
    Family,
    FeedForward,
    Head,
    Names,
    Norms,
    Variant,
)
from spmd_worker.model_config.layer_config import LayerConfig, RelativeBias
from spmd_worker.model_config.pooling import CLASSIFIER

_PARTS: Final = ("encoder", "decoder")
_PRE_NORMS: Final = ("self_attn_layer_norm", "", "final_layer_norm", "")
_PRE_CROSS_NORMS: Final = ("encoder_attn_layer_norm", "")
_POSITIONS: Final = "max_position_embeddings"


def _keys_of(part: str, positions: str = _POSITIONS) -> dict[str, str]:
    """The file's keys of the encoder's or the decoder's sizes."""
    return {
        "hidden_size": "d_model",
        "num_hidden_layers": f"{part}_layers",
        "num_attention_heads": f"{part}_attention_heads",
        "num_key_value_heads": "",
        "head_dim": "",
        "intermediate_size": f"{part}_ffn_dim",
        _POSITIONS: positions,
    }


def _defaults(num_layers: int, num_heads: int, inner_size: int, **others: Any) -> dict[str, Any]:
    """Defaults of sizes that encoder and decoder have each, and `others`."""
    sizes = {"layers": num_layers, "attention_heads": num_heads, "ffn_dim": inner_size}
    of_parts = {f"{part}_{key}": size for part in _PARTS for key, size in sizes.items()}
    return {"activation_function": "gelu", "tie_word_embeddings": True, **of_parts, **others}


_OLDER: Final = ("encoder.version", "decoder.version")
_COMPUTED: Final = ("embed_positions.weights",)
"""Endings of tensors that older files have."""
_BART: Final = Family(
    models="BART: bart-large-cnn, distilbart",
    names=Names(
        embedding="model.shared",
        embedding_copies=("model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"),
        positions="model.decoder.embed_positions",
        embedding_norm="model.decoder.layernorm_embedding",
        layers="model.decoder.layers",
        norm="",
        norms=("", "self_attn_layer_norm", "", "final_layer_norm"),
        cross_norms=("", "encoder_attn_layer_norm"),
        parts={
            "self_attn.o_proj": "self_attn.out_proj",
            **{f"cross_attn.{each}_proj": f"encoder_attn.{each}_proj" for each in "qkv"},
            "cross_attn.o_proj": "encoder_attn.out_proj",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
        },
        head_bias="final_logits_bias",
        head_dense="classification_head.dense",
        classifier="classification_head.out_proj",
        optional_prefix="model.",
        ignored=_OLDER,
    ),
    attention=Attention(qkv_bias=True, output_bias=True),
    rope=None,
    norms=Norms(kind="layer", has_bias=True, eps_key="", eps=1e-5, are_of_sums=True),
    feed_forward=FeedForward(bias=True, activation_key="activation_function", is_gated=False),
    embedding=Embedding(root_key="scale_embedding", position_offset=2, has_norm=True),
    head=Head(has_bias=True),
    encoder_part=EncoderDecoder("BartEncoder", max_rows_key=_POSITIONS, classifier=ClassifierFamily()),
    file_keys=_keys_of("decoder"),
    defaults=_defaults(
        *(12, 16, 4096), vocab_size=50265, d_model=1024, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2
    )
    | {_POSITIONS: 1024},
)
_BEFORE: Final = replace(_BART.names, norms=_PRE_NORMS, cross_norms=_PRE_CROSS_NORMS, norm="model.decoder.layer_norm")
_MBART: Final = replace(
    _BART,
    models="mBART: mbart-large-50-many-to-many-mmt",
    names=_BEFORE,
    norms=replace(_BART.norms, are_of_sums=False),
    encoder_part=EncoderDecoder(
        "MBartEncoder", max_rows_key=_POSITIONS, classifier=ClassifierFamily(), starts_with_last=True
    ),
    defaults={**_BART.defaults, "decoder_start_token_id": None, "pad_token_id": 1},
)
_PEGASUS: Final = replace(
    _MBART,
    models="Pegasus: pegasus-xsum, pegasus-cnn_dailymail",
    names=replace(_BEFORE, embedding_norm=""),
    embedding=Embedding(root_key="scale_embedding", sinusoid="exact"),
    encoder_part=EncoderDecoder("PegasusEncoder", max_rows_key=_POSITIONS),
    defaults={**_BART.defaults, "eos_token_id": 1, "decoder_start_token_id": 0},
)
_BLENDERBOT: Final = replace(
    _PEGASUS,
    models="Blenderbot: blenderbot-400M-distill, blenderbot-3B",
    embedding=Embedding(root_key="scale_embedding"),
    encoder_part=EncoderDecoder("BlenderbotEncoder", max_rows_key=_POSITIONS),
    defaults=_defaults(*(2, 32, 10240), vocab_size=8008, d_model=2560, eos_token_id=2, decoder_start_token_id=1)
    | {_POSITIONS: 128, "decoder_layers": 24},
)
_MARIAN: Final = replace(
    _BART,
    models="Marian: opus-mt",
    names=replace(_BART.names, embedding_norm=""),
    embedding=Embedding(root_key="scale_embedding", sinusoid="exact"),
    encoder_part=EncoderDecoder("MarianEncoder", max_rows_key=_POSITIONS),
    required={"share_encoder_decoder_embeddings": True},
    defaults={**_BART.defaults, "vocab_size": 58101, "eos_token_id": 0, "decoder_start_token_id": 58100},
)
_M2M100: Final = replace(
    _MBART,
    models="M2M100, NLLB-200, dense",
    names=replace(_BEFORE, embedding_norm="", positions="", head_bias="", ignored=_OLDER + _COMPUTED),
    embedding=Embedding(root_key="scale_embedding", position_offset=2, sinusoid="fairseq"),
    head=Head(),
    encoder_part=EncoderDecoder("M2M100Encoder", max_rows_key=_POSITIONS),
    required={"pad_token_id": 1},
    defaults={**_BART.defaults, "vocab_size": 128112, "activation_function": "relu", "scale_embedding": True},
)
_WHISPER: Final = replace(
    _MBART,
    models="Whisper, Distil-Whisper",
    names=replace(
        _BEFORE,
        embedding="model.decoder.embed_tokens",
        embedding_copies=(),
        embedding_norm="",
        head="proj_out",
        head_bias="",
    ),
    attention=Attention(qkv_bias=True, output_bias=True, has_key_bias=False),
    embedding=Embedding(root_key="scale_embedding"),
    head=Head(),
    encoder_part=EncoderDecoder("WhisperEncoder", max_rows_key="max_source_positions", mel_bins_key="num_mel_bins"),
    file_keys=_keys_of("decoder", "max_target_positions"),
    defaults=_defaults(
        *(4, 6, 1536),
        vocab_size=51865,
        d_model=384,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        bos_token_id=50256,
        eos_token_id=50256,
        decoder_start_token_id=50257,
    ),
)


def _with_bias(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers with relative positions, and scores that are not scaled."""
    buckets, distance = (reader.count(f"relative_attention_{each}") for each in ("num_buckets", "max_distance"))
    least = 4
    if buckets % 2 or buckets < least or distance <= buckets // 2:
        rule = f"must be even, {least} or more, and less than twice relative_attention_max_distance={distance}"
        raise reader.error("relative_attention_num_buckets", rule)
    return tuple([replace(layer, scale=1.0, relative_bias=RelativeBias(buckets, distance)) for layer in layers])


def _with_own_bias(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers with relative positions, each with a table of its own."""

    def own(bias: RelativeBias | None) -> RelativeBias | None:
        return None if bias is None else replace(bias, is_of_layer=True)

    return tuple([replace(layer, relative_bias=own(layer.relative_bias)) for layer in _with_bias(reader, layers)])


def _t5_keys(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Files of T5 1.1 say that the head is not tied, which also means that outputs are not scaled; files of newer
    releases of transformers say so by `scale_decoder_outputs`.
    """
    del path
    scales = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    num_layers = {"num_decoder_layers": config["num_layers"]} if config.get("num_layers") is not None else {}
    given = {key: value for key, value in config.items() if value is not None}
    return {**num_layers, **given, "scale_decoder_outputs": scales, "tie_word_embeddings": scales}


def _mt5_keys(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    return {**_t5_keys(config, path), "scale_decoder_outputs": False, "tie_word_embeddings": False}


def _t5_names(part: str, *, is_gated: bool, has_one_bias: bool = True) -> Names:
    """`has_one_bias`: all layers have the table of the first."""
    bias = "layer.0.SelfAttention.relative_attention_bias"
    last = f"layer.{2 if part == 'decoder' else 1}"
    up = {"mlp.up_proj": f"{last}.DenseReluDense.wi"}
    if is_gated:
        up = {"mlp.gate_proj": f"{last}.DenseReluDense.wi_0", "mlp.up_proj": f"{last}.DenseReluDense.wi_1"}
    return Names(
        embedding="shared",
        embedding_copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        layers=f"{part}.block",
        norm=f"{part}.final_layer_norm",
        norms=("layer.0.layer_norm", "", f"{last}.layer_norm", ""),
        cross_norms=("layer.1.layer_norm" if part == "decoder" else "", ""),
        relative_bias=f"{part}.block.0.{bias}" if has_one_bias else "",
        parts={
            **({} if has_one_bias else {"relative_bias": bias}),
            **{f"self_attn.{each}_proj": f"layer.0.SelfAttention.{each}" for each in "qkvo"},
            **{f"cross_attn.{each}_proj": f"layer.1.EncDecAttention.{each}" for each in "qkvo"},
            **up,
            "mlp.down_proj": f"{last}.DenseReluDense.wo",
        },
        ignored=("EncDecAttention.relative_attention_bias.weight",),
        aliases={"transformer.": ""},
        head_dense="classification_head.dense",
        classifier="classification_head.out_proj",
    )


def _t5_keys_of(part: str) -> dict[str, str]:
    return {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_decoder_layers" if part == "decoder" else "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        _POSITIONS: "n_positions",
    }


_T5: Final = Family(
    models="T5 1.0",
    names=_t5_names("decoder", is_gated=False),
    attention=Attention(qkv_bias=False, output_bias=False),
    rope=None,
    norms=Norms(eps_key="layer_norm_epsilon"),
    feed_forward=FeedForward(
        bias=False,
        is_gated=False,
        activation_key="feed_forward_proj",
        activation_words={"gated-gelu": "gelu_new", "gated-silu": "silu"},
    ),
    head=Head(root_key="scale_decoder_outputs", ties_by_files=True),
    encoder_part=EncoderDecoder("T5Encoder", classifier=ClassifierFamily()),
    file_keys=_t5_keys_of("decoder"),
    defaults={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": 6,
        "num_heads": 8,
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
    layers=_with_bias,
    newer=_t5_keys,
)


def _gated(family: Family) -> Family:
    """The row with gates, of T5 1.1 and later."""
    return replace(
        family,
        names=_t5_names("decoder", is_gated=True, has_one_bias=family.names.relative_bias != ""),
        feed_forward=replace(family.feed_forward, is_gated=True),
        variants=(),
    )


def _of_gates(family: Family, models: str) -> Family:
    """The row of both kinds, by the file's activation."""
    kinds = family.feed_forward.activation_words
    variants = tuple([Variant({"feed_forward_proj": kind}, _gated(family)) for kind in kinds])
    return replace(family, models=models, variants=variants)


_MT5: Final = replace(
    _T5,
    encoder_part=EncoderDecoder("MT5Encoder", classifier=ClassifierFamily()),
    defaults={
        **_T5.defaults,
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
    newer=_mt5_keys,
)
_UMT5: Final = replace(
    _MT5,
    names=_t5_names("decoder", is_gated=False, has_one_bias=False),
    encoder_part=EncoderDecoder("UMT5Encoder", classifier=ClassifierFamily()),
    layers=_with_own_bias,
    # As releases of transformers before 5 read it, and its authors: newer ones scale the outputs of all files.
    newer=_t5_keys,
)

ENCODER_DECODER_ROWS: Final[dict[str, Family]] = {
    "BartForConditionalGeneration": _BART,
    "MBartForConditionalGeneration": _MBART,
    "PegasusForConditionalGeneration": _PEGASUS,
    "BlenderbotForConditionalGeneration": _BLENDERBOT,
    "MarianMTModel": _MARIAN,
    "M2M100ForConditionalGeneration": _M2M100,
    "WhisperForConditionalGeneration": _WHISPER,
    "T5ForConditionalGeneration": _of_gates(_T5, "T5, T5 1.1, Flan-T5, Flan-UL2"),
    "MT5ForConditionalGeneration": _of_gates(_MT5, "mT5"),
    "UMT5ForConditionalGeneration": _of_gates(_UMT5, "UMT5"),
}

_OLDER_ARCHITECTURES: Final = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}


def generating_of(architecture: object) -> str | None:
    """The row of a model whose files name the class without a head, as bart-base, or an older one, as t5-large: both
    generate, as AutoModelForSeq2SeqLM reads them; None for other names.
    """
    if not isinstance(architecture, str):
        return None
    base = architecture.removesuffix("Model")
    names = (_OLDER_ARCHITECTURES.get(architecture), f"{base}ForConditionalGeneration", f"{base}MTModel")
    return next((each for each in names if each in ENCODER_DECODER_ROWS and base != architecture), None)


def classifying_of(architecture: object) -> str | None:
    """The row of a model that classifies by the states of its decoder, by name; None for other names."""
    if not isinstance(architecture, str) or not architecture.endswith(CLASSIFIER):
        return None
    name = f"{architecture.removesuffix(CLASSIFIER)}ForConditionalGeneration"
    part = ENCODER_DECODER_ROWS[name].encoder_part if name in ENCODER_DECODER_ROWS else None
    return None if part is None or part.classifier is None else name


def _encoder_of(decoder: Family) -> Family:
    """The row of the encoder of a model whose decoder has that row: its names have the one word for the other."""
    names = decoder.names
    own = {
        each: getattr(names, each).replace("decoder", "encoder")
        for each in ("positions", "embedding_norm", "layers", "norm")
    }
    names = replace(names, **own, cross_norms=("", ""), head="", head_bias="")
    positions = decoder.file_keys[_POSITIONS].replace("target", "source")
    return replace(
        decoder,
        names=names,
        head=Head(),
        encoder=Encoder(),
        encoder_part=None,
        file_keys=_keys_of("encoder", positions),
    )


def _audio_encoder_of(decoder: Family) -> Family:
    found = _encoder_of(decoder)
    audio = AudioNames(("model.encoder.conv1", "model.encoder.conv2"), found.names.positions)
    # It has no table of tokens, and positions behind the convolutions.
    return replace(found, names=replace(found.names, embedding="", positions="", audio=audio))


def _t5_encoder_of(decoder: Family) -> Family:
    kind = {"is_gated": decoder.feed_forward.is_gated, "has_one_bias": decoder.names.relative_bias != ""}
    return replace(
        decoder,
        names=replace(_t5_names("encoder", **kind), head=""),
        head=Head(),
        encoder=Encoder(),
        encoder_part=None,
        file_keys=_t5_keys_of("encoder"),
        variants=tuple([replace(each, family=_t5_encoder_of(each.family)) for each in decoder.variants]),
    )


_ENCODER_OF: Final = {
    "WhisperEncoder": _audio_encoder_of,
    **dict.fromkeys(("T5Encoder", "MT5Encoder", "UMT5Encoder"), _t5_encoder_of),
}
ENCODER_PARTS: Final[dict[str, Family]] = {
    family.encoder_part.row: _ENCODER_OF.get(family.encoder_part.row, _encoder_of)(family)
    for family in ENCODER_DECODER_ROWS.values()
    if family.encoder_part is not None
}
"""Encoders of these models, by the name of their class in transformers."""


def _encoder_keys(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Files of encoders alone have one table of tokens, by either name."""
    return {**_t5_keys(config, path), "tie_word_embeddings": True}


def encoder_alone(row: str, models: str) -> Family:
    """The row of this encoder of T5's kind as a model of its own, whose files may have the decoder too."""
    found = ENCODER_PARTS[row]

    def without_decoder(family: Family) -> Family:
        names = replace(family.names, ignored_prefixes=("decoder.", "lm_head."))
        return replace(family, models=models, names=names, newer=_encoder_keys)

    variants = tuple([replace(each, family=without_decoder(each.family)) for each in found.variants])
    return replace(without_decoder(found), variants=variants)
