"""Encodes a prompt of a call within the limits of an engine, of a decoder alone or of an encoder and a decoder."""

from typing import Any

from spmd_worker.compat.encoder_decoder_prompts import EncoderDecoderReader
from spmd_worker.compat.image_prompts import ImagePrompts
from spmd_worker.compat.prompts import Encoded, PromptReader
from spmd_worker.engine.calls.prompt_tensors import row_reading
from spmd_worker.engine.engine import Engine


def encode_given(prompt: Any, engine: Engine, *, is_truncated: bool, images: ImagePrompts | None = None) -> Encoded:
    """Encode a prompt; `images` are those of its call, None for the engine's."""
    limits = engine.limits
    if limits.encoder_prompts is not None:
        given = (limits.encoder_prompts, engine.need_tokenizer, engine.tokenizer, limits.check_text, is_truncated)
        return EncoderDecoderReader(*given).encode(prompt)
    check_text = None if is_truncated else limits.check_text
    given_images = (images or limits.images, limits.architecture)
    return PromptReader(engine.need_tokenizer, check_text, row_reading(limits), *given_images).encode(prompt)
