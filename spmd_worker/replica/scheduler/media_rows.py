"""Rows of images on the workers as every replica plans them: which images a step makes rows of, and which it drops.

An image's rows are there from the step that makes them until others need their memory. A step drops, then makes, then
computes; it drops nothing that it reads. Nothing is held from one step to the next: a chunk ends where the rows of its
tokens are neither there nor fit the step, so sequences that are preempted, resumed or aborted have nothing to release.
Tokens that are found in the prefix cache need no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.request import Request


@dataclass(frozen=True, slots=True)
class MediaRowLimits:
    """Rows that the workers keep, at most `num_rows`, and patches that a step's towers read, at most
    `max_encode_patches` but for the first image of a step. The `num_owners` ranks of a tensor group make rows.
    `sees_whole_image`: what is not computed of an image is computed in one step, of `max_num_tokens` at most. Images
    are recordings if the model `hears`, or without a grid if it also `sees`.
    """

    num_rows: int = 0
    max_encode_patches: int = 0
    num_owners: int = 1
    sees_whole_image: bool = False
    max_num_tokens: int = 0
    is_chunked: bool = True
    hears: bool = False
    sees: bool = False

    def is_recording(self, item: MediaItem) -> bool:
        return self.hears and not (self.sees and item.grid[0])

    def refusal(self, media: Sequence[MediaItem]) -> tuple[str, str]:
        """Code and text of why a prompt's images can never be computed; empty if they can."""
        if not self.num_rows:
            return "images_unsupported", "this model takes no images: leave them out, or use a model with a tower"
        largest = max(media, key=lambda item: item.num_rows)
        is_heard, most = self.is_recording(largest), largest.num_rows
        code, one = ("audio_too_long", "a recording") if is_heard else ("image_too_long", "an image")
        if most > self.num_rows:
            return code, (
                f"{one} of {most} tokens is larger than the {self.num_rows} rows that are kept: raise "
                f"cache.media_rows_gib, or make it smaller"
            )
        span = max(item.end - item.start for item in media)
        if self.sees_whole_image and span > self.max_num_tokens:
            return code, (
                f"{one} of {span} tokens is computed in one step, and scheduler.max_num_batched_tokens is "
                f"{self.max_num_tokens}: raise it"
            )
        num_rows = sum({item.media_id: item.num_rows for item in media}.values())
        if not self.is_chunked and num_rows > self.num_rows:
            return code, (
                f"the {' and '.join(self._names)} have {num_rows} tokens, which one step computes with scheduler."
                f"enable_chunked_prefill=false, and {self.num_rows} of their rows are kept: raise cache.media_rows_gib"
            )
        return "", ""

    @property
    def _names(self) -> list[str]:
        return [*(["images"] if self.sees or not self.hears else []), *(["recordings"] if self.hears else [])]


NO_MEDIA = MediaRowLimits()


class _Encode(NamedTuple):
    request: Request
    number: int

    @property
    def item(self) -> MediaItem:
        return self.request.media[self.number]


class _Chunk(NamedTuple):
    """End of a chunk, and the images whose rows it reads and no earlier chunk of the step, by name."""

    end: int
    images: dict[bytes, int]


class MediaRows:
    """The rows that are kept, least recently used first, and what the step that is being planned makes and drops."""

    def __init__(self, limits: MediaRowLimits, counters: SchedulerCounters) -> None:
        self.limits, self._counters = limits, counters
        self.longest_whole = 0
        """Tokens of the longest image so far that must be computed in one step."""
        self._rows: dict[bytes, int] = {}
        self._encode: list[_Encode] = []
        self._drop: list[bytes] = []
        # Images of the step that is being planned, and their rows in total.
        self._read: dict[bytes, None] = {}
        self._num_read = 0
        self._num_patches = limits.max_encode_patches

    @property
    def names(self) -> list[bytes]:
        """Images whose rows the workers keep after the steps planned so far, least recently used first."""
        return list(self._rows)

    def admit(self, request: Request) -> None:
        """Take note of a new request."""
        if self.limits.sees_whole_image:
            self.longest_whole = max([self.longest_whole, *[item.end - item.start for item in request.media]])

    def num_tokens_now(self, request: Request, first: int, num_tokens: int) -> int:
        """Number of the `num_tokens` tokens from `first` on that the step can compute, perhaps 0: the rows of their
        images are there, or fit the step. Changes nothing.
        """
        return self._chunk(request, first, num_tokens).end - first

    def take(self, request: Request, first: int, num_tokens: int) -> int:
        """`num_tokens_now` of tokens that the step computes: it makes their rows, and keeps them."""
        end, images = self._chunk(request, first, num_tokens)
        if end == first:
            return 0
        self._read |= dict.fromkeys(images)
        for media_id, index in images.items():
            item = request.media[index]
            self._num_read += item.num_rows
            if media_id in self._rows:
                # Last in the order of use.
                self._rows[media_id] = self._rows.pop(media_id)
                self._counters.num_rows_reused += item.num_rows if item.start >= first else 0
            else:
                self._make(_Encode(request, index))
        return end - first

    def take_plan(self) -> tuple[tuple[EncodeMedia, ...], tuple[bytes, ...]]:
        """`StepPlan.encode` and `drop_rows` of the step; the next one begins."""
        if not (self._drop or self._read):
            return (), ()
        encode, drop = self._shares(), tuple(self._drop)
        self._encode, self._drop, self._read, self._num_read = [], [], {}, 0
        self._num_patches = self.limits.max_encode_patches
        return encode, drop

    def drop_all(self) -> None:
        """Drop all rows, in the next step. Call between steps."""
        assert not self._read, self._read
        self._drop += self._rows
        self._rows = {}

    def check_integrity(self) -> None:
        """Raise AssertionError, with the values, at a contradiction. Call between steps."""
        num_rows = sum(self._rows.values())
        assert num_rows <= self.limits.num_rows, (num_rows, self.limits.num_rows)
        assert (len(self._encode), len(self._read), self._num_read) == (0, 0, 0), "a step is being planned"
        assert not [media_id for media_id in self._drop if media_id in self._rows], self._drop

    def _chunk(self, request: Request, first: int, num_tokens: int) -> _Chunk:
        end, images = first + num_tokens, dict[bytes, int]()
        if not request.media or first >= request.media[-1].end:
            return _Chunk(end, images)
        if self.limits.sees_whole_image:
            end = _end_outside(request.media, first, end)
        num_rows, num_patches, num_new = self._num_read, self._num_patches, len(self._encode)
        for index, item in enumerate(request.media):
            media_id = item.media_id
            if item.end <= first or media_id in self._read or media_id in images:
                continue
            if item.start >= end:
                break
            is_new = media_id not in self._rows
            num_rows, num_patches = num_rows + item.num_rows, num_patches - item.num_patches * is_new
            # The first image of a step is made however large it is; so are all of a prompt that is not divided.
            is_over = is_new and num_new > 0 and num_patches < 0 and (self.limits.is_chunked or bool(self._encode))
            if num_rows > self.limits.num_rows or is_over:
                # Up to the image, and no further in this step.
                return _Chunk(max(item.start, first), images)
            images[media_id] = index
            num_new += is_new
        return _Chunk(end, images)

    def _make(self, encode: _Encode) -> None:
        """Make the rows of an image, in the memory of those that the step does not read."""
        item = encode.item
        num_over = sum(self._rows.values()) + item.num_rows - self.limits.num_rows
        for media_id in [each for each in self._rows if each not in self._read]:
            if num_over <= 0:
                break
            num_over -= self._rows.pop(media_id)
            self._drop.append(media_id)
        assert num_over <= 0, (item, self._rows)
        self._rows[item.media_id] = item.num_rows
        self._encode.append(encode)
        self._num_patches -= item.num_patches
        self._counters.num_rows_encoded += item.num_rows

    def _shares(self) -> tuple[EncodeMedia, ...]:
        """Complete images to ranks, the largest first to the rank with the least patches; ties by order."""
        loads, owners = [0] * self.limits.num_owners, [0] * len(self._encode)
        for index in sorted(range(len(owners)), key=lambda each: -self._encode[each].item.num_patches):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += self._encode[index].item.num_patches
        return tuple(
            [EncodeMedia(each.request.request_id, each.number, owner) for each, owner in zip(self._encode, owners)]
        )


def _end_outside(media: Sequence[MediaItem], first: int, end: int) -> int:
    """End of a chunk that ends inside no image: at most `end`, and perhaps `first`."""
    for item in media:
        if item.start < end < item.end:
            return max(item.start, first)
    return end
