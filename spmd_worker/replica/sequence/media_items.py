"""Images of a prompt as the ranks know them: a name, a size, and the tokens that take their rows. A video is an image
for each two of its frames.

Pixels do not travel with requests: the leader's worker holds them, and a plan says in which step a tower makes an
image's rows, on which rank of the tensor group, and which rows are dropped before (`StepPlan.encode`, `drop_rows`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spmd_worker.replica.sequence.record_checks import CheckedRecord

NUM_MEDIA_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class MediaItem(CheckedRecord):
    """One image of a prompt. `media_id` names all that its rows depend on but the weights: 16 bytes.

    `runs` are (start, count) of the tokens that take its rows, in order of the rows: one run in most families; others
    have plain tokens between lines or tiles. `grid` is the number of lines and columns of its tokens where positions
    follow them, (0, 0) otherwise. `num_patches` is what the tower reads of it: the cost of making its rows.

    `frame` counts the images of a video, from 1 on; 0 is an image of its own. `time` is its position in time behind the
    first one of its video. With `goes_on` the next one begins at the same position. The name covers both.
    """

    media_id: bytes
    runs: tuple[tuple[int, int], ...]
    num_patches: int
    grid: tuple[int, int] = (0, 0)
    frame: int = 0
    time: int = 0
    goes_on: bool = False

    @property
    def num_positions(self) -> int:
        """Positions from the first of its tokens to that of the token behind, of an image with a grid."""
        return 0 if self.goes_on else max(*self.grid, self.time + 1)

    @property
    def start(self) -> int:
        """The first token that takes a row."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The token behind the last that takes a row."""
        start, count = self.runs[-1]
        return start + count

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.runs)

    def rows_between(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(token, row, count) of the runs of consecutive tokens in [first, end) that take consecutive rows."""
        row = 0
        for start, count in self.runs:
            begin, stop = max(start, first), min(start + count, end)
            if begin < stop:
                yield begin, row + begin - start, stop - begin
            row += count


@dataclass(frozen=True, slots=True)
class EncodeMedia(CheckedRecord):
    """The rows of image `index` of a request are made in this step, by the tower of rank `owner` of the tensor group
    of the first stage, which gives them to the others.
    """

    request_id: int
    index: int
    owner: int


def shifted(media: Sequence[MediaItem], num_tokens: int) -> tuple[MediaItem, ...]:
    """The images of a prompt that follows `num_tokens` others."""
    return tuple(
        [replace(item, runs=tuple([(num_tokens + start, count) for start, count in item.runs])) for item in media]
    )


def check_media(media: Sequence[MediaItem], num_tokens: int) -> None:
    """Raise ValueError unless the runs of `media` are in order, apart, and inside a prompt of `num_tokens` tokens."""
    end = 0
    for item in media:
        is_named = len(item.media_id) == NUM_MEDIA_ID_BYTES and item.num_patches >= 1 and item.frame >= 0 <= item.time
        if not is_named or not item.runs:
            raise ValueError(f"Request.media has {item}: give a name of 16 bytes, patches and runs")
        for start, count in item.runs:
            if start < end or count < 1:
                raise ValueError(f"Request.media has {item}: give runs in order, without overlap")
            end = start + count
        lines, columns = item.grid
        if (lines or columns) and lines * columns != item.num_rows:
            raise ValueError(f"Request.media has {item}: {lines} lines of {columns} are not {item.num_rows} tokens")
    if end > num_tokens:
        raise ValueError(f"Request.media ends at {end}, the prompt has {num_tokens} tokens")
