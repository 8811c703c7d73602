"""Numbers of a tower's parameters, and of an encoder's activations, from sizes: a plan of a run counts memory by them.
A test compares them with the parameters of real towers.
"""

from spmd_worker.model_config.encoder_part import AudioInput, EncoderPart
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig

_ROW_STEP = 16
"""Gates are padded to multiples of so many rows."""


def tower_elements(vision: VisionConfig, hidden_size: int) -> int:
    """Elements of all parameters of the tower and its projector, for a text of `hidden_size`; 0 without a tower."""
    config = vision.tower
    if config is None:
        return 0
    if vision.kind == "gemma4":
        return _gemma4_elements(config, hidden_size)
    if vision.audio is not None:
        return _audio_elements(vision, vision.audio, config, hidden_size)
    if vision.kind == "gemma4_unified":
        inputs = config.num_patch_numbers * vision.merge_size**2
        return 2 * inputs + config.hidden_size * (inputs + 5 + 2 * config.num_positions + hidden_size)
    names, size = config.names, config.hidden_size
    patches = size * (config.num_patch_numbers + config.has_patch_bias)
    positions = size * (config.num_positions + bool(names.class_token))
    # The last norm of squares is always a LayerNorm.
    last = 2 * size if config.crop_size else _norm_elements(config, size)
    norms = bool(names.first_norm) * _norm_elements(config, size) + bool(names.last_norm) * last
    around = patches + positions + norms
    return around + config.num_layers * _layer_elements(config) + _projector_elements(vision, config, hidden_size)


def _gemma4_elements(config: TowerConfig, hidden_size: int) -> int:
    size, inner = config.hidden_size, config.num_heads * config.head_size
    linears = size * (4 * inner + 3 * config.intermediate_size) + _NUM_LINEARS * _NUM_BOUNDS * config.clips
    layers = config.num_layers * (linears + 4 * size + 2 * config.head_size)
    around = config.num_patch_numbers + 2 * config.num_positions + 2 * config.standardises + hidden_size
    return layers + size * around


_NUM_LINEARS, _NUM_BOUNDS = 7, 4


def _audio_elements(vision: VisionConfig, audio: AudioInput, config: TowerConfig, hidden_size: int) -> int:
    size, channels, inner = config.hidden_size, audio.num_channels, config.projector_size or hidden_size
    frames = _frame_elements(audio, size, has_table=config.names.positions != "")
    if channels:
        frames = channels * (9 * (1 + 2 * channels) + 3) + size * channels * audio.num_bands
    bias, inputs = config.projector_has_bias, size * (vision.merge_size if audio.joins else 1)
    projector = inner * (inputs + bias) + bool(config.projector_size) * hidden_size * (inner + bias)
    return frames + _norm_elements(config, size) + projector + config.num_layers * _layer_elements(config)


def _frame_elements(audio: AudioInput, size: int, *, has_table: bool = True) -> int:
    """Elements of the convolutions over frames, and of the positions behind them."""
    return size * (_NUM_TAPS * (audio.num_mel_bins + size) + 2 + audio.num_rows * has_table)


def frame_activations(audio: AudioInput, size: int) -> int:
    """Elements for each row behind the convolutions: frames, unfolded, convolved and activated."""
    if audio.num_channels:
        # Chunks are convolved one after the other, and all rows are held.
        return 8 * audio.num_mel_bins + audio.num_channels * audio.num_bands + 2 * size
    return 2 * (_NUM_TAPS + 1) * audio.num_mel_bins + (4 + _NUM_TAPS + 2) * size


def _norm_elements(config: TowerConfig, size: int) -> int:
    return size * (2 if config.norm == "layer" else 1)


def _layer_elements(config: TowerConfig) -> int:
    size, inner, bias = config.hidden_size, config.intermediate_size, config.has_bias
    qkv = (size + 2 * config.num_key_heads * config.head_size) * (size + config.has_qkv_bias)
    gates = 2 * _gate_rows(inner) * (size + bias) if config.is_gated else inner * (size + bias)
    linears = qkv + size * (size + bias) + gates + size * (inner + bias)
    of_norm = config.head_size if config.norms_heads else size
    others = 2 * bool(config.names.query_norm) * of_norm + len(config.names.scales) * size
    return linears + others + 2 * _norm_elements(config, size)


def _gate_rows(size: int) -> int:
    return size + -size % _ROW_STEP


def _projector_elements(vision: VisionConfig, config: TowerConfig, hidden_size: int) -> int:
    size = config.hidden_size
    width = size * vision.merge_size**2
    if vision.kind.startswith(("qwen", "paddleocr", "kimi", "exaone")):
        linears = width * (width + 1) + hidden_size * (width + 1)
        merger = linears + _norm_elements(config, size)
        return merger + vision.num_added * (linears + _norm_elements(config, width))
    if config.num_unmerged:
        return _minicpm_elements(config, hidden_size)
    if config.merge_sizes:
        return _paths_elements(config, hidden_size)
    if vision.kind == "glm4v":
        inner = config.projector_size
        gates, downsample = 2 * _gate_rows(inner), hidden_size * (width + 1)
        return downsample + hidden_size * (hidden_size + 2 + gates + inner)
    if vision.kind == "llama4":
        return config.projector_size * (width + config.projector_size + hidden_size)
    if vision.kind == "gemma3":
        return size + size * hidden_size
    if vision.kind == "smolvlm":
        return hidden_size * width
    if vision.kind in ("aya_vision", "cohere2_vision"):
        inner = config.projector_size
        return 2 * _gate_rows(inner) * (width + 1) + hidden_size * (inner + 1) + 2 * width * config.norms_tokens
    inner, bias = config.projector_size, config.projector_has_bias
    inputs = width if vision.kind in ("internvl", "lfm2_vl") else size
    linears = inner * (inputs + bias) + hidden_size * (inner + bias)
    merger = size + size * width
    norms = 2 * width
    others = {"internvl": norms, "lfm2_vl": norms * config.norms_tokens, "mistral3": merger, "lighton_ocr": merger}
    return linears + others.get(vision.kind, hidden_size * bool(config.pinpoints))


def _minicpm_elements(config: TowerConfig, hidden_size: int) -> int:
    """Elements of the merger between layers, of windows of four patches, and of the one behind them."""
    size, width, inner = config.hidden_size, 4 * config.hidden_size, 4 * config.intermediate_size
    between = 4 * size * (size + 1) + 2 * size + 2 * width + inner * (width + 1) + size * (inner + 1)
    return between + 2 * width + width * (width + 1) + hidden_size * (width + 1)


def _paths_elements(config: TowerConfig, hidden_size: int) -> int:
    """Elements of a connector with layers for several sizes of tokens."""
    size, elements = hidden_size, 2 * config.hidden_size + hidden_size * (hidden_size + 4)
    for merge_size in config.merge_sizes:
        width = config.hidden_size * merge_size**2
        merger = 2 * width + size * (width + 1) + size * (size + 1)
        elements += size * width + len(config.added_layers) * merger
    return elements


def encoder_elements(part: EncoderPart) -> int:
    """Elements of all parameters of an encoder, but for a table of embeddings that is the decoder's."""
    stack, audio = part.stack, part.audio
    table: int = stack.vocab_size * stack.embedding_size
    layers: int = stack.num_parameters - table * (part.shares_embedding or audio is not None)
    if audio is None:
        return layers
    return layers + _frame_elements(audio, stack.hidden_size)


def encoder_activations(part: EncoderPart, num_rows: int) -> int:
    """Elements of the model's dtype that an encoder holds at its peak for an input of `num_rows`.

    It has the residual stream, its norm, an output, queries, keys and values, these two in blocks, what is attended, or
    columns of the feed-forward. Before the first layer it has frames: unfolded, convolved and activated.
    """
    stack, frames = part.stack, 0
    size: int = stack.hidden_size
    heads: int
    (heads,) = {(layer.num_heads + 2 * layer.num_kv_heads) * layer.head_size for layer in stack.layers}
    columns: int = max(layer.intermediate_size * (2 + layer.is_gated) for layer in stack.layers)
    if part.audio is not None:
        frames = frame_activations(part.audio, size)
    return num_rows * max(4 * size + max(2 * heads, columns), frames)


def chunk_activations(audio: AudioInput) -> int:
    """Elements of a chunk in its largest convolution, the second: its input padded and unfolded, its output twice."""
    lines, columns, channels = -(-audio.num_mel_bins // 2), -(-audio.chunk_frames // 2), audio.num_channels
    numbers = (-(-lines // 2)) * (-(-columns // 2))
    first = lines * columns * (9 + 3 * channels)
    return max(first, channels * ((lines + 2) * (columns + 2) * 2 + numbers * (2 * 9 + 3)))


_NUM_TAPS = 3
"""Frames that an output of a convolution over audio sees."""
