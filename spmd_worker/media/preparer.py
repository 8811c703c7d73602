"""ImagePreparer: images of prompts, prepared ahead of time in helper processes."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spmd_worker.media.decode import check_pillow, checked_array, pixels_of
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.placeholders import Placeholders
from spmd_worker.media.prepare_process import IsolatedPreparer
from spmd_worker.media.prepared import Pixels, PreparedImage
from spmd_worker.media.source import ImageSource, read_source

if TYPE_CHECKING:
    from PIL.Image import Image


class ImagePreparer:
    """Images of prompts -> PreparedImages, `num_processes` prompts at a time. Threads may share it.

    Paths are below `root`; without it there are none. Close it, or leave its `with`, to end threads and processes.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        placeholders: Placeholders,
        limits: MediaLimits,
        root: Path | None,
        num_processes: int = 2,
    ) -> None:
        check_pillow()
        self.processor, self.placeholders, self.limits = processor, placeholders, limits
        self._root, self._is_closed = root, False
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="images")
        self._idle: queue.SimpleQueue[IsolatedPreparer] = queue.SimpleQueue()
        for _ in range(num_processes):
            self._idle.put(IsolatedPreparer(processor, limits))

    def __enter__(self) -> "ImagePreparer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Prompts that have not begun are cancelled; those that have end as errors, behind the image they are at."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def prepare(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """All images of one prompt. Raises MediaError, whose message has the number of the image."""
        return self.submit(sources).result()

    def submit(self, sources: Sequence[ImageSource]) -> Future[list[PreparedImage]]:
        """`prepare` ahead of time: prompts are prepared in the order in which they are submitted. Pixels of Pillow's
        images are read here, in the caller's thread; files are read when their turn comes.
        """
        try:
            if len(sources) > self.limits.max_images:
                rule = f"limits.max_images={self.limits.max_images}"
                raise MediaError("too_many_images", f"the prompt has {len(sources)} images, more than {rule}")
            given = [self._given(index, source) for index, source in enumerate(sources)]
        except MediaError as error:
            failed: Future[list[PreparedImage]] = Future()
            failed.set_exception(error)
            return failed
        return self._threads.submit(self._prepare_all, given)

    def _given(self, index: int, source: ImageSource) -> bytes | str | Path | Pixels:
        with _numbered(index):
            if isinstance(source, bytes | str | Path):
                return source
            if isinstance(source, np.ndarray):
                return checked_array(source, self.limits)
            if _is_pillow_image(source):
                return pixels_of(source, self.limits)
            kinds = "bytes, a path, a data URL, a uint8 array [height, width, 3] or a PIL image"
            raise MediaError("image_unreadable", f"{type(source).__name__} is not an image: give {kinds}")

    def _prepare_all(self, given: list[bytes | str | Path | Pixels]) -> list[PreparedImage]:
        helper = self._idle.get()
        try:
            return [self._prepare(helper, index, each, len(given) == 1) for index, each in enumerate(given)]
        finally:
            self._idle.put(helper)

    def _prepare(
        self, helper: IsolatedPreparer, index: int, given: bytes | str | Path | Pixels, is_alone: bool
    ) -> PreparedImage:
        with _numbered(index):
            if self._is_closed:
                raise MediaError("image_unreadable", "the run has ended before it was prepared")
            if isinstance(given, np.ndarray):
                digest = sha256(b"%d %d\n" % given.shape[:2] + given.tobytes()).digest()
                return helper.prepare(given, digest, is_alone=is_alone)
            data = read_source(given, self._root, self.limits.max_image_bytes)
            return helper.prepare(data, sha256(data).digest(), is_alone=is_alone)


def _is_pillow_image(source: "Image") -> bool:
    from PIL import Image

    return isinstance(source, Image.Image)


@contextlib.contextmanager
def _numbered(index: int) -> Iterator[None]:
    try:
        yield
    except MediaError as error:
        raise MediaError(error.code, f"image {index}: {error}") from None
