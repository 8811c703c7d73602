"""Images of a prompt: which tokens take which rows, and which records are refused."""

import pytest

from spmd_worker.replica.sequence.media_items import MediaItem, check_media, shifted

NAME = bytes(range(16))
ITEM = MediaItem(NAME, ((2, 3), (6, 2)), 20)


def test_runs_are_rows_in_order():
    assert (ITEM.start, ITEM.end, ITEM.num_rows) == (2, 8, 5)
    assert [*ITEM.rows_between(0, 20)] == [(2, 0, 3), (6, 3, 2)]
    assert [*ITEM.rows_between(4, 7)] == [(4, 2, 1), (6, 3, 1)]
    assert [*ITEM.rows_between(5, 6)] == []


def test_images_move_behind_virtual_tokens():
    other = MediaItem(NAME[::-1], ((9, 1),), 4)
    assert [each.runs for each in shifted((ITEM, other), 10)] == [((12, 3), (16, 2)), ((19, 1),)]
    assert shifted((), 10) == ()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (MediaItem(NAME[:15], ((2, 3),), 20), "a name of 16 bytes"),
        (MediaItem(NAME, (), 20), "runs"),
        (MediaItem(NAME, ((2, 3),), 0), "patches"),
        (MediaItem(NAME, ((2, 3), (4, 1)), 20), "without overlap"),
        (MediaItem(NAME, ((2, 0),), 20), "without overlap"),
        (MediaItem(NAME, ((2, 3),), 20, (2, 2)), "2 lines of 2 are not 3 tokens"),
        (MediaItem(NAME, ((8, 3),), 20), "ends at 11, the prompt has 10 tokens"),
    ],
)
def test_wrong_images_are_refused(item: MediaItem, words: str):
    with pytest.raises(ValueError, match=words):
        check_media((item,), 10)
