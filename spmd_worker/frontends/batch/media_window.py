"""Rows between a job's input and its engine: in their order, while their images or audio are prepared.

A row is handed out when its media are prepared and those before it were; what rows hold is bounded in bytes, and rows
without media wait only for those before them.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from spmd_worker.compat.encoder_prompts import AudioReader, PendingAudio
from spmd_worker.compat.image_prompts import ImagePrompts, PendingImages, num_media_bytes
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.openai.row import AudioPrompt, Row, RowError, images_of_row, media_of_row, row_error
from spmd_worker.media.errors import MediaError
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.tokenizer.video_parts import is_open, num_source_bytes

_GIB: Final = 1 << 30
_MAX_ROWS: Final = 64
_MAX_SOURCE_BYTES: Final = 256 << 20
"""Bounds of the rows that wait: data URLs are part of them."""
_MAX_AHEAD: Final = 8
"""Prompts whose media are being prepared."""


class PreparedRow(NamedTuple):
    """A row, or the error of its media, and the images or windows of audio; None for those that the model takes none
    of.
    """

    row: Row | RowError
    media: tuple[PreparedMedia, ...] | None


@dataclass(slots=True)
class _Waiting:
    row: Row
    pending: PendingImages | PendingAudio | None = None
    ready: PreparedRow | None = None

    @property
    def num_source_bytes(self) -> int:
        audio = self.row.prompt.source if isinstance(self.row.prompt, AudioPrompt) else ""
        return len(audio) + sum(map(num_source_bytes, images_of_row(self.row)))

    def finish(self) -> None:
        """Take the media when they are prepared."""
        if self.pending is None or self.ready is not None or not self.pending.done():
            return
        try:
            self.ready = PreparedRow(self.row, tuple(self.pending.result()))
        except MediaError as error:
            # Images are numbered.
            key = f"{self.row.prompt.key}: " if isinstance(self.row.prompt, AudioPrompt) else ""
            self.ready = PreparedRow(row_error(self.row, error.code, f"{key}{error}"), ())


class MediaWindow:
    """Rows of one engine, whose prepared media, those of rows that run included, take at most `max_bytes`, or are one
    row's. `images` is None for a model without images, and `audio` for one without audio, which reject rows with any.
    """

    def __init__(self, images: ImagePrompts | None, max_bytes: float, audio: AudioReader | None = None) -> None:
        self._images, self._audio, self._max_bytes = images, audio, max_bytes
        self._rows: deque[_Waiting] = deque()
        self._num_source_bytes = 0
        self.wait_s = 0.0
        """Seconds without a row to compute while images or audio were prepared."""

    @staticmethod
    def of(engine: Engine) -> "MediaWindow":
        """The window of an engine's rows."""
        limits = engine.limits
        audio = None if limits.encoder_prompts is None else limits.encoder_prompts.audio
        return MediaWindow(limits.images, engine.config.job.media_window_gib * _GIB, audio)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_room(self) -> bool:
        """Whether another row may be put."""
        return len(self._rows) < _MAX_ROWS and self._num_source_bytes < _MAX_SOURCE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the media that are prepared and wait."""
        return sum(num_media_bytes(each.ready.media or ()) for each in self._rows if each.ready is not None)

    def put(self, row: Row) -> None:
        waiting = _Waiting(row)
        if not self._is_prepared(row):
            waiting.ready = PreparedRow(row, None)
        self._num_source_bytes += waiting.num_source_bytes
        self._rows.append(waiting)

    def _is_prepared(self, row: Row) -> bool:
        """Whether a row has media that the model takes."""
        if isinstance(row.prompt, AudioPrompt):
            return self._audio is not None
        if self._images is None or not images_of_row(row) or any(map(is_open, images_of_row(row))):
            return False
        return self._images.takes(media_of_row(row))

    def _submit(self, row: Row) -> PendingImages | PendingAudio:
        if isinstance(row.prompt, AudioPrompt):
            assert self._audio is not None, "rows without audio are ready"
            return self._audio.submit(row.prompt.source)
        assert self._images is not None, "rows without images are ready"
        return self._images.submit(images_of_row(row), media_of_row(row))

    def next_ready(self, num_held_bytes: int) -> PreparedRow | None:
        """The first row, once it is prepared; None while it is not, or while `num_held_bytes` of the media of running
        rows leave no room for its own. Media of the rows behind it are prepared meanwhile.
        """
        self._prepare_ahead(num_held_bytes)
        first = self._rows[0] if self._rows else None
        if first is None or first.ready is None:
            return None
        num_bytes = num_media_bytes(first.ready.media or ())
        if num_held_bytes and num_bytes and num_held_bytes + num_bytes > self._max_bytes:
            return None
        self._rows.popleft()
        self._num_source_bytes -= first.num_source_bytes
        return first.ready

    def pause(self, pause_s: float) -> None:
        """Sleep: no row can be computed."""
        started_s = time.perf_counter()
        time.sleep(pause_s)
        if self._rows:
            self.wait_s += time.perf_counter() - started_s

    def _prepare_ahead(self, num_held_bytes: int) -> None:
        for each in self._rows:
            each.finish()
        num_running = sum(each.pending is not None and each.ready is None for each in self._rows)
        num_bytes = num_held_bytes + self.num_bytes
        for index, each in enumerate(self._rows):
            if each.ready is not None or each.pending is not None:
                continue
            if index and (num_running >= _MAX_AHEAD or num_bytes >= self._max_bytes):
                return
            each.pending = self._submit(each.row)
            num_running += 1
