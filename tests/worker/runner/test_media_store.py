"""The worker's rows of images: made by a table from the pixels that arrived, found again by token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.media.prepared import AudioFeatures, ImagePixels, PreparedImage
from spmd_worker.media.sent_audio import SentAudio
from spmd_worker.media.sent_image import SentImage
from spmd_worker.model.towers.tower import Tower, TowerRows, TwoTowers
from spmd_worker.ranks.communicator import single_group
from spmd_worker.replica.mirror.records import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.worker.runner import media_store
from spmd_worker.worker.runner.media_store import MediaStore

FIRST, SECOND = (bytes([number]) * 16 for number in (1, 2))
# 3 rows in two runs, then 2.
ITEMS = (MediaItem(FIRST, ((1, 1), (3, 2)), 9), MediaItem(SECOND, ((6, 2),), 4))
REQUEST = Request(5, (0, 7, 0, 7, 7, 0, 7, 7, 0), SamplingParams(), 0, media=ITEMS)


def image(media_id: bytes, first: int, num_rows: int) -> SentImage:
    """An image whose pixels are the numbers from `first` on."""
    pixels = np.arange(first, first + 3 * num_rows, dtype=np.uint8).reshape(1, num_rows, 3)
    return SentImage.of(PreparedImage(media_id, ImagePixels((pixels,), (1, 1), (2, 3)), "", 0, 0, (0, 0), b""))


def table(pixels: ImagePixels) -> TowerRows:
    """A row is its pixel; what layers add are multiples of it."""
    rows = torch.from_numpy(pixels.crops[0][0].astype(np.float32))
    return TowerRows(rows, (10 * rows, 100 * rows))


def new_store(make_rows: Any = table, num_added: int = 2) -> MediaStore:
    return MediaStore(make_rows, single_group(), 3, num_added, torch.float32, torch.device("cpu"))


def filled() -> MediaStore:
    store = new_store()
    store.hold(5, 0, image(FIRST, 0, 3))
    store.hold(5, 1, image(SECOND, 50, 2))
    store.apply(StepPlan(1, encode=(EncodeMedia(5, 1, 0), EncodeMedia(5, 0, 0))), lambda request_id: REQUEST)
    return store


def scheduled(first: int, count: int) -> list[ScheduledSequence]:
    text = MirroredSequence(Request(6, (1, 2, 3), SamplingParams(), 0), 0, [], [], 0, 2)
    shown = MirroredSequence(REQUEST, 0, [], [], first, count)
    return [ScheduledSequence(text, 2, 0), ScheduledSequence(shown, count, 0)]


def test_rows_stand_at_their_tokens():
    media = filled().of_step(scheduled(2, 5))
    assert media is not None
    # Tokens 3, 4 and 6 of the second sequence, whose first of the step is token 2.
    assert media.places.tolist() == [3, 4, 6]
    assert media.rows[:, 0].tolist() == [3, 6, 50]
    assert [each[:, 1].tolist() for each in media.added] == [[40, 70, 510], [400, 700, 5100]]


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 1), (5, 1), (8, 1)])
def test_steps_without_image_tokens_have_no_rows(first: int, count: int):
    assert filled().of_step(scheduled(first, count)) is None


def test_plans_drop_rows_and_pixels_leave():
    store = filled()
    assert store.names == [SECOND, FIRST]
    assert (store.num_bytes, store.num_held_bytes) == (5 * 3 * 3 * 4, 15)
    store.apply(StepPlan(2, drop_rows=(FIRST,)), lambda request_id: REQUEST)
    assert store.names == [SECOND]
    # After sleep the plan drops what is gone.
    store.clear()
    store.apply(StepPlan(3, drop_rows=(SECOND,)), lambda request_id: REQUEST)
    store.forget([5])
    assert (store.num_bytes, store.num_held_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("store", "held", "words"),
    [
        (new_store(), [], "request 5: this rank does not hold the content of image 0"),
        (new_store(), [image(SECOND, 0, 3)], "does not hold the content of image 0"),
        (new_store(None), [image(FIRST, 0, 3)], "no tower"),
        (new_store(), [image(FIRST, 0, 4)], r"rows of shape \(3, 4, 3\) .* \(3, 3, 3\)"),
        (new_store(num_added=0), [image(FIRST, 0, 3)], r"rows of shape \(3, 3, 3\) .* \(1, 3, 3\)"),
    ],
)
def test_rows_that_cannot_be_made_are_errors(store: MediaStore, held: list[SentImage], words: str):
    for each in held:
        store.hold(5, 0, each)
    with pytest.raises(RuntimeError, match=words):
        store.apply(StepPlan(1, encode=(EncodeMedia(5, 0, 0),)), lambda request_id: REQUEST)


class LayeredTower:
    """The table with two layers, behind which a tower tells; `seen` are the calls of all ranks, in order."""

    def __init__(self, rank: int, seen: list[tuple[int, str]]) -> None:
        self.trunk, self._rank, self._seen = SimpleNamespace(layers=range(2), on_layer=lambda: None), rank, seen

    def __call__(self, pixels: ImagePixels) -> TowerRows:
        for _ in self.trunk.layers:
            self._seen.append((self._rank, "layer"))
            self.trunk.on_layer()
        return table(pixels)


@pytest.mark.parametrize("is_long", [True, False])
def test_ranks_that_wait_hear_of_each_layer(is_long: bool, monkeypatch: pytest.MonkeyPatch):
    """Regression: those that waited for the rows of a large image looked dead after `timeout_s`. Ranks with few patches
    do not meet: one would wait for the other's larger image.
    """
    monkeypatch.setattr(media_store, "_MANY_PATCHES", 12 if is_long else 13)
    seen: list[tuple[int, str]] = []

    def run(group: Any) -> Tensor:
        store = MediaStore(LayeredTower(group.rank, seen), group, 3, 2, torch.float32, torch.device("cpu"))
        store.on_layer = lambda: seen.append((group.rank, "heard"))
        store.hold(5, 0, image(FIRST, 0, 3))
        store.hold(5, 1, image(SECOND, 50, 2))
        # Rank 1 makes both, rank 0 none.
        store.apply(StepPlan(1, encode=(EncodeMedia(5, 0, 1), EncodeMedia(5, 1, 1))), lambda request_id: REQUEST)
        return store._rows[FIRST]

    first, second = on_ranks(2, run)
    assert first.equal(second)
    assert first.equal(filled()._rows[FIRST])
    if not is_long:
        assert seen == [(1, "layer")] * 4
        return
    assert [what for rank, what in seen if rank == 0] == ["heard"] * 4
    assert [what for rank, what in seen if rank == 1] == ["layer", "heard"] * 4
    # Rank 1 has begun no layer before rank 0 heard of the one before.
    begun = [index for index, each in enumerate(seen) if each == (1, "layer")]
    assert all(seen[:index].count((0, "heard")) >= layer - 1 for layer, index in enumerate(begun))


class DeepTower(Tower):
    """Rows of 7s behind `depth` layers."""

    def __init__(self, depth: int, num_added: int) -> None:
        super().__init__()
        self.trunk, self._num_added = SimpleNamespace(layers=range(depth), on_layer=lambda: None), num_added

    def forward(self, given: Any) -> TowerRows:
        for _ in self.trunk.layers:
            self.trunk.on_layer()
        rows = torch.full((2 if isinstance(given, AudioFeatures) else 3, 3), 7.0)
        return TowerRows(rows, (rows,) * self._num_added)


def test_towers_of_other_depths_meet_on_two_ranks(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 makes an image in five layers, rank 1 a recording in two, which adds nothing to later layers."""
    monkeypatch.setattr(media_store, "_MANY_PATCHES", 1)
    heard = []

    def run(group: Any) -> list[Tensor]:
        towers = TwoTowers(DeepTower(5, 2), DeepTower(2, 0))
        store = MediaStore(towers, group, 3, 2, torch.float32, torch.device("cpu"), "image or audio")
        store.on_layer = lambda: heard.append(group.rank)
        store.hold(5, 0, image(FIRST, 0, 3))
        store.hold(5, 1, SentAudio(SECOND, (4, 6), bytes(4 * 6 * 4)))
        store.apply(StepPlan(1, encode=(EncodeMedia(5, 0, 0), EncodeMedia(5, 1, 1))), lambda request_id: REQUEST)
        return [store._rows[FIRST], store._rows[SECOND]]

    for picture, recording in on_ranks(2, run):
        assert picture.eq(7).all()
        assert (recording[0].eq(7).all(), recording[1:].eq(0).all()) == (True, True)
    assert sorted(heard) == [0] * 5 + [1] * 5
