"""Videos through the tiny models of `image_models.py`: prompts, and transformers' ids and log-probabilities."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from image_models import image_reference, media_kind, tokenizer_of_images
from media_models import MODELS, noise
from media_oracle import one_axis_a_call, oracle_inputs, oracle_texts
from torch import Tensor
from video_oracle import oracle_video, oracle_video_text

from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.media.prepared import Pixels
from spmd_worker.media.video_rules import RULES

VIDEO_KINDS: Final = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen4",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "internvl",
    "smolvlm",
    "llava_onevision",
)
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


def layout_of(kind: str) -> str:
    """The row of rules of videos."""
    return {"qwen3_5": "qwen3_vl", "qwen4": "qwen3_vl", "glm4v_moe": "glm4v"}.get(kind, kind)


Media = Sequence[Video | Pixels]


def written_video(kind: str) -> str:
    """What a template writes for a video."""
    token = PLACEHOLDERS[media_kind(kind)].video_token
    begin, end = {"qwen": "<|vision_start|> <|vision_end|>", "glm4": "<|begin_of_video|> <|end_of_video|>"}.get(
        kind[:4], " "
    ).split(" ")
    return f"{begin}{token}{end}"


def text_of_media(kind: str, media: Media) -> str:
    """A prompt with each of them between words."""
    written = (PLACEHOLDERS[media_kind(kind)].written, written_video(kind))
    return "Look:" + "and ".join([written[isinstance(each, Video)] for each in media]) + "What is it?"


def prompt_of_media(kind: str, media: Media) -> dict[str, Any]:
    """As `LLM.generate` takes it."""
    videos = [each.given for each in media if isinstance(each, Video)]
    images = [each for each in media if not isinstance(each, Video)]
    return {"prompt": text_of_media(kind, media), "multi_modal_data": {"video": videos, "image": images}}


def their_inputs(kind: str, media: Media) -> tuple[list[int], dict[str, Any]]:
    """Ids and tensors of transformers' processors. The text of a video of Qwen3-VL replaces the tokens around it too,
    as in the model's own code and in vLLM; transformers 5.23 keeps them.
    """
    layout, row, text = layout_of(kind), media_kind(kind), text_of_media(kind, media)
    found: list[tuple[str, dict[str, Tensor]]] = []
    seconds = []
    pictures = [each for each in media if not isinstance(each, Video)]
    # Of several at once where their number matters, else alone.
    images = iter(_images(row, [pictures] if row == "llava_onevision" else [[each] for each in pictures]))
    for each in media:
        if isinstance(each, Video):
            made = oracle_video(layout, each.frames, MODELS[row].settings)
            own, step = oracle_video_text(layout, made, range(len(each.frames)), each.fps, len(each.frames))
            seconds.append(step)
            marker = PLACEHOLDERS[row].video_marker
            found.append(("video", made))
        else:
            (own, image), marker = next(images), PLACEHOLDERS[row].marker
            found += [("image", image)] if image else []
        text = text.replace(marker, own.replace("<", "\0"), 1)
    ids = list(tokenizer_of_images(kind).encode(text.replace("\0", "<")).ids)
    tensors = _tensors_of_squares(kind, found) if RULES[layout].is_square else _tensors_of_grids(kind, found, ids)
    given = {"attention_mask": torch.ones(1, len(ids), dtype=torch.int64), **tensors}
    if layout == "qwen2_5_vl" and seconds:
        given["second_per_grid_ts"] = torch.tensor(seconds)
    return ids, given


def _images(row: str, groups: Sequence[list[Pixels]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Text of each image, and tensors of its group with the first."""
    for pictures in groups:
        if pictures:
            with one_axis_a_call():
                made = oracle_inputs(row, pictures)
            tensors = {name: torch.as_tensor(each) for name, each in made.items()}
            for index, text in enumerate(oracle_texts(row, made, len(pictures))):
                yield text, {} if index else tensors


def _tensors_of_grids(kind: str, found: Sequence[tuple[str, dict[str, Tensor]]], ids: list[int]) -> dict[str, Tensor]:
    """Patches and grids of models whose positions follow lines and columns, and the types of tokens."""
    given: dict[str, Tensor] = {}
    for name, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        own = [made for medium, made in found if medium == name]
        if own:
            given |= {each: torch.cat([made[each] for made in own]) for each in (key, f"{name}_grid_thw")}
    tokenizer, placeholders = tokenizer_of_images(kind), PLACEHOLDERS[media_kind(kind)]
    types, is_inside = [], False
    for each in map(tokenizer.id_to_token, ids):
        is_inside = is_inside if each not in _ENDS_OF_VIDEOS else each == _ENDS_OF_VIDEOS[0]
        is_video = each == placeholders.row_token and (is_inside or not placeholders.frame_token)
        types.append(2 if is_video else int(each == placeholders.image_token))
    return {**given, "mm_token_type_ids": torch.tensor([types])}


def _tensors_of_squares(kind: str, found: Sequence[tuple[str, dict[str, Tensor]]]) -> dict[str, Any]:
    """Squares of images and frames in their order."""
    if kind == "llava_onevision":
        videos = [made["pixel_values_videos"] for medium, made in found if medium == "video"]
        images = [made for medium, made in found if medium == "image"]
        names = ("pixel_values", "image_sizes", "batch_num_images")
        return {"videos": videos, **{name: images[0][name] for name in names if images}}
    squares = [made["frames" if "frames" in made else "pixel_values"] for _, made in found]
    pixels = torch.cat([each.flatten(0, -4) for each in squares])
    return {"pixel_values": pixels.unsqueeze(0) if kind == "smolvlm" else pixels}


_ENDS_OF_VIDEOS: Final = ("<|begin_of_video|>", "<|end_of_video|>")


@contextmanager
def _corrected(kind: str, given: dict[str, Any]) -> Iterator[None]:
    """Block in which transformers' model is right where 5.23 is not, of a prompt's tensors."""
    if kind == "llava_onevision":
        with _videos_one_by_one(given):
            yield
        return
    if not kind.startswith("glm"):
        with _positions_of_qwen(kind):
            yield
        return
    # Rows of images and frames have one token, and a prompt with both is an error there.
    types = given["mm_token_type_ids"]
    masks = tuple([(types == each).unsqueeze(-1) for each in (1, 2)])
    with patch.object(image_reference(kind).model, "get_placeholder_mask", lambda *_, **__: masks):
        yield


@contextmanager
def _videos_one_by_one(given: dict[str, Any]) -> Iterator[None]:
    """Block in which LLaVA-OneVision takes videos of several numbers of frames."""
    videos, model = given.pop("videos"), image_reference("llava_onevision").model
    given["pixel_values_videos"] = videos[0]
    theirs = model.get_video_features

    @wraps(theirs)
    def features(pixel_values_videos: Tensor, **options: Any) -> Any:
        del pixel_values_videos
        made = [theirs(each, **options).pooler_output for each in videos]
        return SimpleNamespace(pooler_output=torch.cat(made, dim=1))

    with patch.object(model, "get_video_features", features):
        yield


@contextmanager
def _positions_of_qwen(kind: str) -> Iterator[None]:
    """Block in which text behind a video begins where its last time ends, too, as in Qwen's own code, vLLM, and
    transformers before 5.3 (https://github.com/huggingface/transformers/issues/45381 shows both).
    """
    body: Any = image_reference(kind).model

    def positions(input_ids: Tensor, mm_token_type_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        side = body.config.vision_config.spatial_merge_size
        found, _ = theirs(input_ids, mm_token_type_ids, **given)
        types, grids = mm_token_type_ids[0].tolist(), iter(given["video_grid_thw"].tolist())
        starts = [at for at, each in enumerate(types) if each == 2 and (at == 0 or types[at - 1] != 2)]
        for start in starts:
            pairs, lines, columns = next(grids)
            end = start + pairs * lines * columns // side**2
            last = int(found[0, 0, end - 1] - found[0, 0, start])
            found[:, 0, end:] += max(0, last + 1 - max(lines, columns) // side)
        return found, found.max() + 1 - input_ids.shape[1] + torch.zeros(1, 1, dtype=torch.int64)

    if layout_of(kind) not in ("qwen2_vl", "qwen2_5_vl"):
        yield
        return
    theirs = body.get_rope_index
    with patch.object(body, "get_rope_index", positions):
        yield


@torch.no_grad()
def their_video_answer(kind: str, media: Media) -> tuple[list[int], list[int], list[float]]:
    """transformers' ids of the prompt, greedy ids after it, and their log-probabilities."""
    ids, given = their_inputs(kind, media)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with _corrected(kind, given):
        made: Any = image_reference(kind).generate(torch.tensor([ids]), **given, **options)
    chosen = made.sequences[0, len(ids) :].tolist()
    logprobs = [logits[0].log_softmax(0)[token].item() for logits, token in zip(made.logits, chosen, strict=True)]
    return ids, chosen, logprobs
