"""ImagePreparer: images and videos of prompts, prepared ahead of time in helper processes."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from spmd_worker.media.decode import check_pillow, checked_array, pixels_of
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_processor import ImageProcessor
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.placeholders import Placeholders
from spmd_worker.media.prepare_process import IsolatedPreparer
from spmd_worker.media.prepared import Pixels, PreparedImage
from spmd_worker.media.source import VIDEO, ImageSource, read_source
from spmd_worker.media.video_preparing import prepare_video
from spmd_worker.media.video_process import IsolatedVideoDecoder
from spmd_worker.media.video_processor import VideoProcessor
from spmd_worker.media.video_sampling import Sampling
from spmd_worker.media.video_source import GivenVideo, given_video
from spmd_worker.tokenizer.video_parts import VideoPart

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = ImageSource | VideoPart
_GivenImage: TypeAlias = bytes | str | Path | Pixels


class _Helpers(NamedTuple):
    """Processes of one thread, which start when they are asked first."""

    images: IsolatedPreparer
    videos: IsolatedVideoDecoder | None

    @property
    def pid(self) -> int | None:
        """Id of the process of images; None without one."""
        return self.images.pid

    def close(self) -> None:
        self.images.close()
        if self.videos is not None:
            self.videos.close()


class ImagePreparer:
    """Images and videos of prompts -> PreparedImages, `num_processes` prompts at a time. Threads may share it.

    Paths are below `root`; without it there are none. Without `video` there are no videos. Close it, or leave its
    `with`, to end threads and processes.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        placeholders: Placeholders,
        limits: MediaLimits,
        root: Path | None,
        num_processes: int = 2,
        video: VideoProcessor | None = None,
    ) -> None:
        check_pillow()
        self.processor, self.placeholders, self.limits = processor, placeholders, limits
        self._root, self._video, self._is_closed = root, video, False
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="images")
        self._idle: queue.SimpleQueue[_Helpers] = queue.SimpleQueue()
        for _ in range(num_processes):
            decoder = None if video is None else IsolatedVideoDecoder(video, limits)
            self._idle.put(_Helpers(IsolatedPreparer(processor, limits, video), decoder))

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

    def prepare(self, sources: Sequence[Source]) -> list[PreparedImage]:
        """All images of one prompt, those of a video's frames in its place. Raises MediaError, whose message has the
        number of the image or video.
        """
        return self.submit(sources).result()

    def submit(self, sources: Sequence[Source]) -> Future[list[PreparedImage]]:
        """`prepare` ahead of time: prompts are prepared in the order in which they are submitted. Pixels of Pillow's
        images are read here, in the caller's thread; files are read when their turn comes.
        """
        try:
            self._check_numbers(sources)
            given = [self._given_source(*each) for each in _numbers(sources)]
        except MediaError as error:
            failed: Future[list[PreparedImage]] = Future()
            failed.set_exception(error)
            return failed
        return self._threads.submit(self._prepare_all, given)

    def _check_numbers(self, sources: Sequence[Source]) -> None:
        num_videos = sum([isinstance(each, VideoPart) for each in sources])
        if num_videos and self._video is None:
            reason = (
                "the model's kind has none here, its folder does not say how they are prepared, or limits.max_videos"
            )
            raise MediaError("videos_unsupported", f"this run takes no videos: {reason} is 0: leave videos out")
        num_images = len(sources) - num_videos
        if num_images > self.limits.max_images:
            rule = f"limits.max_images={self.limits.max_images}"
            raise MediaError("too_many_images", f"the prompt has {num_images} images, more than {rule}")
        if num_videos > self.limits.max_videos:
            rule = f"limits.max_videos={self.limits.max_videos}"
            raise MediaError("too_many_videos", f"the prompt has {num_videos} videos, more than {rule}")

    def _given_source(self, name: str, source: Source) -> "tuple[str, _GivenImage | GivenVideo | VideoPart]":
        with _named(name):
            if isinstance(source, VideoPart):
                return name, source if source.is_file else given_video(source, self.limits, self._given)
            return name, self._given(source)

    def _given(self, source: ImageSource) -> _GivenImage:
        if isinstance(source, bytes | str | Path):
            return source
        if isinstance(source, np.ndarray):
            return checked_array(source, self.limits)
        if _is_pillow_image(source):
            return pixels_of(source, self.limits)
        kinds = "bytes, a path, a data URL, a uint8 array [height, width, 3] or a PIL image"
        raise MediaError("image_unreadable", f"{type(source).__name__} is not an image: give {kinds}")

    def _prepare_all(self, given: "list[tuple[str, _GivenImage | GivenVideo | VideoPart]]") -> list[PreparedImage]:
        helper = self._idle.get()
        try:
            made: list[PreparedImage] = []
            num_images = sum([not isinstance(each, GivenVideo | VideoPart) for _, each in given])
            for name, each in given:
                with _named(name):
                    if isinstance(each, GivenVideo):
                        made += self._prepare_video(helper.images, each)
                    elif isinstance(each, VideoPart):
                        made += self._prepare_file(helper, each)
                    else:
                        made.append(helper.images.prepare(*self._read(each), is_alone=num_images == 1))
            return made
        finally:
            self._idle.put(helper)

    def _prepare_video(self, helper: IsolatedPreparer, given: GivenVideo) -> list[PreparedImage]:
        frames, digest, size = [], sha256(), None
        for index, frame in enumerate(given.frames):
            with _named(f"frame {index}"):
                source, source_digest = self._read(frame)
                digest.update(source_digest)
                pixels, own_size = helper.prepare_frame(source, len(given.frames))
                if size not in (None, own_size):
                    sizes = f"{own_size[1]} x {own_size[0]} pixels, and those before it {size[1]} x {size[0]}"
                    raise MediaError("video_unreadable", f"it has {sizes}: frames of a video have one size")
                size = own_size
                frames.append(pixels)
        assert size is not None, "a video has frames"
        assert self._video is not None, "numbers of videos were checked"
        return given.prepared(frames, size, self._video, digest.digest())

    def _prepare_file(self, helper: "_Helpers", part: VideoPart) -> list[PreparedImage]:
        assert self._video is not None, "numbers of videos were checked"
        assert helper.videos is not None, "a run with videos decodes them"
        self._check_open()
        data = read_source(part.video, self._root, self.limits.max_video_bytes, VIDEO)
        sampling = Sampling(part.fps, part.num_frames, part.min_frames, part.max_frames)
        found = helper.videos.decode(data, sampling)
        numbers = (found.indices, found.fps, found.total)
        return prepare_video(found.frames, found.size, *numbers, self._video, sha256(data).digest())

    def _check_open(self) -> None:
        if self._is_closed:
            raise MediaError("image_unreadable", "the run has ended before it was prepared")

    def _read(self, given: _GivenImage) -> tuple[bytes | Pixels, bytes]:
        """Bytes or pixels, and their digest."""
        self._check_open()
        if isinstance(given, np.ndarray):
            return given, sha256(b"%d %d\n" % given.shape[:2] + given.tobytes()).digest()
        data = read_source(given, self._root, self.limits.max_image_bytes)
        return data, sha256(data).digest()


def _is_pillow_image(source: "Image") -> bool:
    from PIL import Image

    return isinstance(source, Image.Image)


def _numbers(sources: Sequence[Source]) -> list[tuple[str, Source]]:
    """Each source behind its name: images and videos are counted apart."""
    counts = {"image": 0, "video": 0}
    found = []
    for source in sources:
        kind = "video" if isinstance(source, VideoPart) else "image"
        found.append((f"{kind} {counts[kind]}", source))
        counts[kind] += 1
    return found


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except MediaError as error:
        raise MediaError(error.code, f"{name}: {error}") from None
