"""Videos through the tiny models of `image_models.py`: prompts, and transformers' ids and log-probabilities."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from image_models import image_reference, tokenizer_of_images
from media_models import MODELS, noise
from media_oracle import one_axis_a_call, oracle_inputs, oracle_texts
from torch import Tensor
from video_oracle import oracle_video, oracle_video_text

from spmd_worker.media.prepared import Pixels

VIDEO_KINDS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen4")
FPS: Final = 8.0
"""Frames a second of which pairs are one position apart in the Qwen2.5-VL of these tests."""
NUM_TOKENS: Final = 4


@dataclass(frozen=True)
class Video:
    frames: tuple[Pixels, ...]
    fps: float = FPS

    @property
    def given(self) -> Any:
        return np.stack(self.frames), {"fps": self.fps}


def video(num_frames: int, height: int, width: int, seed: int, fps: float = FPS) -> Video:
    return Video(tuple([noise(height, width, seed + index) for index in range(num_frames)]), fps)


def media_row(kind: str) -> str:
    return "qwen3_vl" if kind in ("qwen3_5", "qwen4") else kind


Media = Sequence[Video | Pixels]


def text_of_media(media: Media) -> str:
    """A prompt with each of them between words."""
    pads = ["video" if isinstance(each, Video) else "image" for each in media]
    return "Look:" + "and ".join([f"<|vision_start|><|{pad}_pad|><|vision_end|>" for pad in pads]) + "What is it?"


def prompt_of_media(media: Media) -> dict[str, Any]:
    """As `LLM.generate` takes it."""
    videos = [each.given for each in media if isinstance(each, Video)]
    images = [each for each in media if not isinstance(each, Video)]
    return {"prompt": text_of_media(media), "multi_modal_data": {"video": videos, "image": images}}


def their_inputs(kind: str, media: Media) -> tuple[list[int], dict[str, Tensor]]:
    """Ids and tensors of transformers' processors. The text of a video of Qwen3-VL replaces the tokens around it too,
    as in the model's own code and in vLLM; transformers 5.23 keeps them.
    """
    row, text = media_row(kind), text_of_media(media)
    found: dict[str, list[Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[Tensor]] = {"image": [], "video": []}
    seconds = []
    for each in media:
        if isinstance(each, Video):
            made = oracle_video(row, each.frames, MODELS[row].settings)
            indices = range(len(each.frames))
            found["video"].append(made["pixel_values_videos"])
            grids["video"].append(made["video_grid_thw"])
            given = (made["video_grid_thw"][0].tolist(), indices, each.fps, len(each.frames))
            own, step = oracle_video_text(row, *given)
            seconds.append(step)
            marker = "<|video_pad|>" if row != "qwen3_vl" else "<|vision_start|><|video_pad|><|vision_end|>"
        else:
            with one_axis_a_call():
                image = oracle_inputs(row, [each])
            found["image"].append(torch.as_tensor(image["pixel_values"]))
            grids["image"].append(torch.as_tensor(image["image_grid_thw"]))
            (own,), marker = oracle_texts(row, image, 1), "<|image_pad|>"
        text = text.replace(marker, own.replace("<|", "\0"), 1)
    tokenizer = tokenizer_of_images(kind)
    ids = list(tokenizer.encode(text.replace("\0", "<|")).ids)
    types = [1 if each == tokenizer.token_to_id("<|image_pad|>") else 0 for each in ids]
    types = [2 if each == tokenizer.token_to_id("<|video_pad|>") else one for each, one in zip(ids, types)]
    given = {"mm_token_type_ids": torch.tensor([types]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    for name, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if found[name]:
            given |= {key: torch.cat(found[name]), f"{name}_grid_thw": torch.cat(grids[name])}
    if row == "qwen2_5_vl" and seconds:
        given["second_per_grid_ts"] = torch.tensor(seconds)
    return ids, given


@contextmanager
def _positions_of_qwen(kind: str) -> Iterator[None]:
    """Block in which text behind a video begins where its last time ends, too, as in Qwen's own code, vLLM, and
    transformers before 5.3 (https://github.com/huggingface/transformers/issues/45381 shows both).
    """
    body: Any = image_reference(kind).model
    theirs, side = body.get_rope_index, body.config.vision_config.spatial_merge_size

    def positions(input_ids: Tensor, mm_token_type_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        found, _ = theirs(input_ids, mm_token_type_ids, **given)
        types, grids = mm_token_type_ids[0].tolist(), iter(given["video_grid_thw"].tolist())
        starts = [at for at, each in enumerate(types) if each == 2 and (at == 0 or types[at - 1] != 2)]
        for start in starts:
            pairs, lines, columns = next(grids)
            end = start + pairs * lines * columns // side**2
            last = int(found[0, 0, end - 1] - found[0, 0, start])
            found[:, 0, end:] += max(0, last + 1 - max(lines, columns) // side)
        return found, found.max() + 1 - input_ids.shape[1] + torch.zeros(1, 1, dtype=torch.int64)

    if media_row(kind) == "qwen3_vl":
        yield
        return
    with patch.object(body, "get_rope_index", positions):
        yield


@torch.no_grad()
def their_video_answer(kind: str, media: Media) -> tuple[list[int], list[int], list[float]]:
    """transformers' ids of the prompt, greedy ids after it, and their log-probabilities."""
    ids, given = their_inputs(kind, media)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with _positions_of_qwen(kind):
        made: Any = image_reference(kind).generate(torch.tensor([ids]), **given, **options)
    chosen = made.sequences[0, len(ids) :].tolist()
    logprobs = [logits[0].log_softmax(0)[token].item() for logits, token in zip(made.logits, chosen, strict=True)]
    return ids, chosen, logprobs
