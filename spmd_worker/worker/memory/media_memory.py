"""Rows of images, or of an encoder's inputs, that a run keeps, and their memory: from the settings alone, so that every
rank has the same.
"""

from typing import Final

from spmd_worker.model_config.model_config import DTYPE_BYTES
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA, MediaRowLimits
from spmd_worker.resolved import ResolvedRun

_MOST_SOFT_TOKENS: Final = 1120
"""Most tokens of an image of Gemma 4, whatever its processor's files say."""


def media_row_limits(resolved: ResolvedRun) -> MediaRowLimits:
    """Limits of a run's images or encoder inputs; none in a model that takes neither."""
    config, vision = resolved.config, resolved.model_config.vision
    if vision is None and resolved.model_config.encoder_part is None:
        return NO_MEDIA
    max_num_tokens, gib = config.scheduler.max_num_batched_tokens, config.cache.media_rows_gib
    num_rows = max(2 * max_num_tokens, resolved.max_tower_rows)
    if gib is not None:
        num_rows = int(gib * 2**30) // media_row_bytes(resolved)
    return MediaRowLimits(
        num_rows,
        config.scheduler.max_encode_patches,
        resolved.layout.tensor_parallel_size,
        vision is not None and vision.sees_whole_image,
        max_num_tokens,
        config.scheduler.enable_chunked_prefill,
        hears=resolved.max_audio_tokens > 0 or resolved.model_config.hears,
        sees=min(resolved.max_image_tokens, resolved.max_audio_tokens) > 0,
    )


def longest_media(resolved: ResolvedRun) -> dict[str, int]:
    """Limits of a row's images or encoder input that follow from memory and batch sizes, by words: rows beyond them are
    error rows. Empty in a model that takes neither.
    """
    limits, vision = media_row_limits(resolved), resolved.model_config.vision
    if resolved.max_encoder_len:
        return {"scheduler.max_encoder_len": resolved.max_encoder_len}
    if vision is None:
        return {}
    # Rows for the largest image bound none.
    longest = max(resolved.max_image_tokens, resolved.max_audio_tokens)
    longest = longest if limits.num_rows >= resolved.max_tower_rows else min(longest, limits.num_rows)
    # A step holds all of an image. Images of such models are squares of one size, or have so many tokens at most.
    if vision.tower is not None and limits.sees_whole_image:
        most = vision.tower.num_crop_tokens or _MOST_SOFT_TOKENS
        longest = min(longest, limits.max_num_tokens) if limits.max_num_tokens < most else longest
    found = {"tokens of the longest image": longest}
    if not limits.is_chunked and limits.num_rows < limits.max_num_tokens:
        found["tokens of the images of a row"] = limits.num_rows
    return found


def media_row_bytes(resolved: ResolvedRun) -> int:
    """Bytes of one row, and of those that layers add."""
    model_config = resolved.model_config
    num_added = 0 if model_config.vision is None else model_config.vision.num_added
    return int((1 + num_added) * model_config.hidden_size * DTYPE_BYTES[resolved.dtype])


def media_rows_bytes_of(resolved: ResolvedRun, rank: int) -> int:
    """Bytes of all rows that a rank keeps: the ranks of the first stage keep the same."""
    num_rows = media_row_limits(resolved).num_rows
    return num_rows * media_row_bytes(resolved) if resolved.layout.pipeline_rank(rank) == 0 else 0
