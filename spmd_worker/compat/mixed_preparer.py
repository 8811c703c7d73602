"""MixedPreparer: images and recordings of prompts that may have both, each prepared as in models that take one."""

from collections.abc import Sequence
from typing import NamedTuple

from spmd_worker.compat.image_prompts import GivenMedium, PendingImages, Preparer
from spmd_worker.media.placeholders import by_source
from spmd_worker.media.sent_audio import PreparedMedia


class PendingMixed(NamedTuple):
    """Images and recordings of one prompt that are being prepared; `order` has, for each, which of the two."""

    images: PendingImages
    audio: PendingImages
    order: tuple[bool, ...]

    def done(self) -> bool:
        return self.images.done() and self.audio.done()

    def result(self) -> list[PreparedMedia]:
        """All in the caller's order. Raises MediaError."""
        # A video has an image for each step of its frames.
        images, audio = (iter(by_source(each.result())) for each in (self.images, self.audio))
        return [one for is_audio in self.order for one in next(audio if is_audio else images)]


class _Nothing:
    """No images, or no recordings: nothing is opened for them."""

    def done(self) -> bool:
        return True

    def result(self) -> list[PreparedMedia]:
        return []


class MixedPreparer:
    """A `Preparer` of `GivenMedium`s."""

    def __init__(self, images: Preparer, audio: Preparer) -> None:
        self._images, self._audio = images, audio

    def prepare(self, sources: Sequence[GivenMedium]) -> list[PreparedMedia]:
        return self.submit(sources).result()

    def submit(self, sources: Sequence[GivenMedium]) -> PendingMixed:
        order = tuple([each.medium == "audio" for each in sources])
        pending: list[PendingImages] = []
        for preparer, is_audio in ((self._images, False), (self._audio, True)):
            own = [each.source for each, is_own in zip(sources, order) if is_own == is_audio]
            pending.append(preparer.submit(own) if own else _Nothing())
        return PendingMixed(pending[0], pending[1], order)

    def close(self) -> None:
        self._images.close()
        self._audio.close()
