"""Images or audio of one call: prepared once for prompts that have the same ones, and held within a bound of bytes.

All of a call are prepared before its first step, because they decide whether a prompt can be answered. Pixels and
features beyond the bound are dropped then, and made again shortly before their prompt is admitted.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spmd_worker.compat.image_prompts import GivenMedium, ImagePrompts, PendingImages, Preparer, num_media_bytes
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.errors import MediaError
from spmd_worker.media.media_sizes import AbsentFeatures, AbsentPixels
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.tokenizer.video_parts import VideoPart

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DroppedPixels(AbsentPixels):
    """Sizes of pixels that `prompt` makes again."""

    prompt: "CallPrompt | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class DroppedFeatures(AbsentFeatures):
    """Sizes of features that `prompt` makes again."""

    prompt: "CallPrompt | None" = None


def without_content(media: PreparedMedia, prompt: "CallPrompt") -> PreparedMedia:
    """The image or audio with the sizes of its content alone."""
    if isinstance(media, PreparedAudio):
        nothing = np.empty((0, 0), np.float32)
        return replace(media, features=DroppedFeatures(nothing, media.features.sizes, prompt))
    pixels = media.pixels
    return replace(media, pixels=DroppedPixels((), pixels.grid, pixels.size, pixels.frame, pixels.shapes, prompt))


def with_content_again(media: Sequence[PreparedMedia]) -> tuple[PreparedMedia, ...]:
    """The images or audio of a prompt; what was dropped of them is made again. Raises MediaError if it cannot be, or
    has changed.
    """
    prompt = _dropped(media)
    if prompt is None:
        return tuple(media)
    # A prompt may have its media in another order than it was given them.
    made = {each.media_id: each for each in prompt.again()}
    for index, old in enumerate(media):
        if old.media_id not in made:
            words = f"{index} changed while the call ran: its tokens are of another"
            if isinstance(old, PreparedImage):
                raise MediaError("image_changed", f"image {words}")
            raise MediaError("audio_changed", f"audio {words}")
    return tuple([made[each.media_id] for each in media])


def prepare_ahead(media: Sequence[PreparedMedia]) -> None:
    """Begin to make dropped contents of a prompt again, for `with_content_again`."""
    prompt = _dropped(media)
    if prompt is not None:
        prompt.begin()


def _dropped(media: Sequence[PreparedMedia]) -> "CallPrompt | None":
    """The maker of a prompt's images or audio; None if they were not dropped here."""
    first = media[0].content if media else None
    return first.prompt if isinstance(first, DroppedPixels | DroppedFeatures) else None


@dataclass(slots=True, eq=False)
class CallPrompt:
    """Images of one or several prompts of a call. `sources` are held: the id of an object is its own as long as it
    exists.
    """

    sources: tuple[Any, ...]
    call: "CallPreparer"
    pending: PendingImages | None = None
    images: tuple[PreparedMedia, ...] | None = None
    """Images handed out, perhaps without their pixels since."""

    def begin(self) -> PendingImages:
        if self.pending is None:
            self.pending = self.call.preparer.submit(self.sources)
        return self.pending

    def again(self) -> tuple[PreparedMedia, ...]:
        """The images with their pixels, which are held until others are made: prompts with the same images often follow
        each other. Raises MediaError.
        """
        if self.call.last is not self and self.call.last is not None:
            self.call.last.pending = None
        self.call.last = self
        return tuple(self.begin().result())


@dataclass(slots=True, eq=False)
class CallPreparer:
    """Preparer of one call, which holds at most `max_bytes` of pixels."""

    preparer: Preparer
    max_bytes: float
    num_bytes: int = 0
    last: CallPrompt | None = None
    _prompts: dict[Hashable, CallPrompt] = field(default_factory=dict)

    def prepare(self, sources: Sequence[Any]) -> Sequence[PreparedMedia]:
        prompt = self._prompt_of(sources)
        if prompt.images is None:
            made = prompt.again()
            num_bytes = num_media_bytes(made)
            if self.num_bytes + num_bytes > self.max_bytes:
                made = tuple([without_content(each, prompt) for each in made])
            else:
                self.num_bytes += num_bytes
            prompt.images = made
        return prompt.images

    def submit(self, sources: Sequence[Any]) -> PendingImages:
        """Begin to prepare images that were not prepared in this call."""
        prompt = self._prompt_of(sources)
        return _Made(prompt.images) if prompt.images is not None else prompt.begin()

    def close(self) -> None:
        self.preparer.close()

    def _prompt_of(self, sources: Sequence[Any]) -> CallPrompt:
        # The images of a prompt together: how one is prepared may depend on their number.
        key = tuple(map(_key, sources))
        if key not in self._prompts:
            self._prompts[key] = CallPrompt(tuple(sources), self)
        return self._prompts[key]


def _key(source: Any) -> Hashable:
    """The same for a source that is read from a prompt again."""
    if isinstance(source, GivenMedium):
        return source.medium, _key(source.source)
    if isinstance(source, VideoPart):
        # A file is not the list of it alone, which is a frame.
        frames = tuple(map(_key, source.video)) if isinstance(source.video, list | tuple) else _key(source.video)
        bounds = (source.num_frames, source.min_frames, source.max_frames)
        return (frames, source.fps, source.indices, source.total, *bounds)
    return source if isinstance(source, str | bytes) else _object_key(source)


def _object_key(source: Any) -> Hashable:
    """The memory of an array: parts of a larger one are new objects each time that they are read."""
    if isinstance(source, np.ndarray):
        return source.__array_interface__["data"][0], source.shape, source.strides, source.dtype.str
    if hasattr(source, "data_ptr") and hasattr(source, "stride"):
        return source.data_ptr(), tuple(source.shape), source.stride(), str(source.dtype)
    return id(source)


@dataclass(frozen=True, slots=True)
class _Made:
    images: tuple[PreparedMedia, ...]

    def done(self) -> bool:
        return True

    def result(self) -> Sequence[PreparedMedia]:
        return self.images


def images_of_call(images: ImagePrompts, max_bytes: float) -> ImagePrompts:
    """The images of a run, for the prompts of one call."""
    return replace(images, preparer=CallPreparer(images.preparer, max_bytes))


def half_window_bytes(media_window_gib: float) -> float:
    """Bytes of pixels that a call holds of prompts that wait, and as many of prompts that run."""
    return media_window_gib * _GIB / 2
