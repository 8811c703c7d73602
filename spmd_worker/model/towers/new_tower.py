"""Builds the tower of a model that takes images or audio, or the encoder of an encoder-decoder model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.attention import BLOCK_SIZE
from spmd_worker.model.towers.audio import Qwen3AsrTower, WhisperTower
from spmd_worker.model.towers.encoder import EncoderTower, NewStack
from spmd_worker.model.towers.gemma4 import Gemma4Embedder, Gemma4Tower
from spmd_worker.model.towers.glm import GlmTower
from spmd_worker.model.towers.granite import GraniteDoclingTower
from spmd_worker.model.towers.kimi import KimiTower
from spmd_worker.model.towers.llama4 import Llama4Tower
from spmd_worker.model.towers.minicpm import MiniCpmTower
from spmd_worker.model.towers.naflex import NaflexTower
from spmd_worker.model.towers.pixtral import LightonTower, Mistral3Tower, PixtralTower
from spmd_worker.model.towers.qwen import PaddleocrTower, Qwen2_5Tower, Qwen2Tower, Qwen3Tower
from spmd_worker.model.towers.squares import (
    CohereTower,
    DeepseekTower,
    Gemma3Tower,
    InternvlTower,
    LlavaTower,
    OnevisionTower,
    SmolvlmTower,
)
from spmd_worker.model.towers.tower import Tower, TwoTowers
from spmd_worker.model_config.encoder_part import EncoderPart
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ranks.communicator import single_group

_CLASSES: Final[dict[str, Callable[[LayerContext, VisionConfig, int], Tower]]] = {
    "qwen3_vl": Qwen3Tower,
    "qwen3_omni": Qwen3Tower,
    "qwen2_vl": Qwen2Tower,
    "qwen2_5_vl": Qwen2_5Tower,
    "exaone4_5": Qwen2_5Tower,
    "qwen2_5_omni": Qwen2_5Tower,
    "glm4v": GlmTower,
    "paddleocr_vl": PaddleocrTower,
    "kimi_k25": KimiTower,
    "llama4": Llama4Tower,
    "gemma3": Gemma3Tower,
    "gemma4": Gemma4Tower,
    "gemma4_unified": Gemma4Embedder,
    "llava": LlavaTower,
    "deepseek_vl": DeepseekTower,
    "llava_next": OnevisionTower,
    "llava_onevision": OnevisionTower,
    "aya_vision": CohereTower,
    "cohere2_vision": CohereTower,
    "internvl": InternvlTower,
    "mistral3": Mistral3Tower,
    "lighton_ocr": LightonTower,
    "pixtral": PixtralTower,
    "smolvlm": SmolvlmTower,
    "granite_docling": GraniteDoclingTower,
    "lfm2_vl": NaflexTower,
    "minicpmv4_6": MiniCpmTower,
    "qwen2_audio": WhisperTower,
    "audioflamingo3": WhisperTower,
    "glmasr": WhisperTower,
    "voxtral": WhisperTower,
    "qwen3_asr": Qwen3AsrTower,
    "qwen2_5_omni_audio": WhisperTower,
    "qwen3_omni_audio": Qwen3AsrTower,
}


def new_tower(context: LayerContext, vision: VisionConfig, hidden_size: int) -> Tower:
    """The tower, or both of a model that takes images and audio, complete on this rank and uninitialised.
    `hidden_size` is the text's.
    """
    if vision.beside is not None:
        images, audio = (new_tower(context, replace(each, beside=None), hidden_size) for each in vision.parts)
        return TwoTowers(images, audio)
    assert vision.tower is not None, vision
    return _CLASSES[vision.kind](_own_context(context, vision.tower.padded_head_size), vision, hidden_size)


def new_encoder(context: LayerContext, part: EncoderPart, new_stack: NewStack) -> EncoderTower:
    """The encoder, complete on this rank and uninitialised."""
    return EncoderTower(_own_context(context, part.stack.head_size), part, new_stack)


def _own_context(context: LayerContext, head_size: int) -> LayerContext:
    """The context of one rank, with kernels that quantise nothing and attention over blocks of an image."""
    return replace(
        context,
        tensor_group=single_group(context.tensor_group.ranks[context.tensor_group.rank]),
        kernels=context.kernels.plain,
        quantised=None,
        attention=context.attention.of_sequences(head_size, BLOCK_SIZE),
        num_leaves=1,
        expert_layout=None,
        stored={},
    )
