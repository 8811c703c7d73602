"""Rows of images in plans: made before they are read, made once, dropped when others need their memory.

A mirror checks every plan (`scheduler_runs.py`), and here a model of the workers' store does, which knows only lists of
plans. Random histories preempt, abort, swap, find prefixes and have several steps in flight.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_runs import Row, Run, without_block_check

from spmd_worker.replica.mirror.mirror import MirrorError
from spmd_worker.replica.scheduler.media_rows import MediaRowLimits, MediaRows
from spmd_worker.replica.sequence.events import Abort, ResetMediaRows, ResetPrefixCache, SetWeightVersion
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.request import RequestId

IMAGE = 7
"""The token id of images."""
MAX_ROWS = 10


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def image(number: int, start: int, num_rows: int, num_patches: int | None = None) -> MediaItem:
    return MediaItem(name_of(number), ((start, num_rows),), num_patches or 4 * num_rows)


def limits(num_rows: int = 40, max_encode_patches: int = 1000, **others: Any) -> MediaRowLimits:
    return MediaRowLimits(num_rows, max_encode_patches, **{"max_num_tokens": 100, **others})


def prompt_with(*items: MediaItem, num_tokens: int) -> tuple[int, ...]:
    places = [place for item in items for start, count in item.runs for place in range(start, start + count)]
    return tuple([IMAGE if place in places else 1 + place % 3 for place in range(num_tokens)])


def admit(run: Run, *items: MediaItem, num_tokens: int, max_tokens: int = 2) -> int:
    return run.admit(0, prompt_with(*items, num_tokens=num_tokens), media=items, max_tokens=max_tokens)


def encoded(run: Run) -> list[EncodeMedia]:
    return list(run.last_plan.encode)


def test_image_is_encoded_once_in_its_first_step():
    run = Run(media=limits(), max_num_batched_tokens=6)
    admit(run, image(1, 2, 8), num_tokens=12)
    assert run.step() == [Row(0, 0, 0, 6, 0)]
    assert (encoded(run), run.last_plan.drop_rows) == ([EncodeMedia(0, 0, 0)], ())
    # The rest of it, and then nothing of it.
    assert run.step() == [Row(0, 0, 6, 6, 1)]
    assert encoded(run) == []
    run.finish()
    assert run.scheduler.media_rows.names == [name_of(1)]
    assert (run.scheduler.counters.num_images, run.scheduler.counters.num_image_tokens) == (1, 8)


@pytest.mark.parametrize(
    ("given", "counts"),
    [({}, (2, 0)), ({"hears": True}, (0, 2)), ({"hears": True, "sees": True}, (1, 1))],
    ids=["sees", "hears", "both"],
)
def test_recordings_are_counted_apart_from_images(given: dict[str, bool], counts: tuple[int, int]):
    run = Run(media=limits(**given))
    admit(run, image(1, 0, 4), MediaItem(name_of(2), ((5, 4),), 16, (2, 2)), num_tokens=12)
    run.finish()
    counters = run.scheduler.counters
    assert (counters.num_images, counters.num_recordings) == counts
    assert (counters.num_image_tokens, counters.num_recording_tokens) == (4 * counts[0], 4 * counts[1])


def test_images_go_to_owners_largest_first():
    run = Run(media=limits(num_owners=2))
    admit(run, image(1, 0, 4), image(2, 5, 8), image(3, 14, 3), num_tokens=18)
    run.step()
    assert [(each.index, each.owner) for each in encoded(run)] == [(0, 1), (1, 0), (2, 1)]


def test_patches_of_a_step_end_a_chunk_before_an_image():
    run = Run(media=limits(max_encode_patches=50))
    admit(run, image(1, 2, 8), image(2, 11, 8), num_tokens=22)
    admit(run, image(3, 0, 2), num_tokens=4)
    # 32 patches, then 32 more would be too many; 8 of the other row fit.
    assert run.step() == [Row(0, 0, 0, 11, 0), Row(1, 0, 0, 4, 1)]
    assert encoded(run) == [EncodeMedia(0, 0, 0), EncodeMedia(1, 0, 0)]
    assert run.step()[0] == Row(0, 0, 11, 11, 1)
    # An image beyond the budget is the first of its step.
    large = Run(media=limits(max_encode_patches=5))
    admit(large, image(1, 0, 8), num_tokens=9)
    assert large.step() == [Row(0, 0, 0, 9, 1)]


def test_least_recently_used_rows_give_their_memory():
    run = Run(media=limits(num_rows=20))
    for number in (1, 2, 1, 3):
        admit(run, image(number, 0, 8), num_tokens=10, max_tokens=1)
        run.finish()
    assert run.scheduler.media_rows.names == [name_of(1), name_of(3)]
    assert run.last_plan.drop_rows == (name_of(2),)
    assert (run.scheduler.counters.num_rows_encoded, run.scheduler.counters.num_rows_reused) == (24, 8)


def test_rows_that_a_step_reads_are_kept():
    run = Run(media=limits(num_rows=10))
    admit(run, image(1, 0, 8), num_tokens=10)
    admit(run, image(2, 2, 8), num_tokens=12)
    # The second row goes up to its image, whose rows the first row's leave no memory for.
    assert run.step() == [Row(0, 0, 0, 10, 1), Row(1, 0, 0, 2, 0)]
    assert run.step() == [Row(0, 0, 10, 1, 1), Row(1, 0, 2, 10, 1)]
    assert (run.last_plan.drop_rows, encoded(run)) == ((name_of(1),), [EncodeMedia(1, 0, 0)])


def test_families_with_sight_compute_an_image_in_one_step():
    run = Run(media=limits(sees_whole_image=True), max_num_batched_tokens=10)
    admit(run, image(1, 6, 8), num_tokens=16)
    assert [run.step() for _ in range(3)] == [[Row(0, 0, 0, 6, 0)], [Row(0, 0, 6, 10, 1)], [Row(0, 0, 16, 1, 1)]]


def test_prefix_hit_inside_an_image_computes_the_rest_at_once():
    run = Run(media=limits(sees_whole_image=True), caching=True)
    for num_tokens in (11, 14):
        admit(run, image(1, 2, 9), num_tokens=num_tokens, max_tokens=1)
        rows = run.step()
        run.finish()
    # Two blocks of 4 are found; the rows are still there.
    assert rows == [Row(1, 0, 8, 6, 1)]
    assert run.scheduler.counters.num_rows_encoded == 9


def test_images_found_in_the_cache_are_not_encoded():
    run = Run(media=limits(), caching=True)
    admit(run, image(1, 0, 8), num_tokens=10, max_tokens=1)
    run.finish()
    run.scheduler.handle(ResetMediaRows())
    admit(run, image(1, 0, 8), num_tokens=10, max_tokens=1)
    assert run.step() == [Row(1, 0, 8, 2, 1)]
    assert (encoded(run), run.last_plan.drop_rows) == ([], (name_of(1),))


@pytest.mark.guarantee("a block with image tokens is found by the same images alone")
def test_other_images_behind_the_same_tokens_share_no_block():
    def cached(first: tuple[MediaItem, ...], then: tuple[MediaItem, ...]) -> int:
        run = Run(media=limits(), caching=True)
        tokens = prompt_with(*(first or then), num_tokens=24)
        for items in (first, then):
            run.admit(0, tokens, media=items, max_tokens=1)
            run.finish()
        return run.scheduler.counters.num_cached_prompt_tokens

    items = (image(1, 2, 6), image(2, 10, 6))
    assert cached(items, items) == 20
    # The first block has the first image's token, the second image begins in the third.
    assert [cached(items, (image(3, 2, 6), items[1])), cached(items, (items[0], image(3, 10, 6)))] == [0, 8]
    # Nor in another order, nor the same ids without images.
    assert [cached(items, (image(2, 2, 6), image(1, 10, 6))), cached(items, ()), cached((), items)] == [0, 0, 0]


@pytest.mark.control("a block with image tokens is found by the same images alone")
def test_names_without_images_would_share_blocks(monkeypatch: pytest.MonkeyPatch):
    from spmd_worker.replica.scheduler import allocator

    monkeypatch.setattr(allocator, "given_rows", lambda request, first: [])
    with pytest.raises(MirrorError, match="request 1, sample 0: field block_ids is 4, with tokens of request 0"):
        test_other_images_behind_the_same_tokens_share_no_block()
    without_block_check(monkeypatch)
    with pytest.raises(AssertionError):
        test_other_images_behind_the_same_tokens_share_no_block()


@pytest.mark.parametrize("event", [ResetMediaRows(), ResetPrefixCache(keeps_names=True), SetWeightVersion(3)], ids=repr)
def test_events_drop_rows_in_the_next_step(event: Any):
    run = Run(media=limits(), max_num_batched_tokens=6)
    admit(run, image(1, 0, 8), num_tokens=12)
    run.step()
    run.scheduler.handle(event)
    run.scheduler.check_integrity()
    # Dropped, and made again for the rest of the image.
    run.step()
    assert (run.last_plan.drop_rows, encoded(run)) == ((name_of(1),), [EncodeMedia(0, 0, 0)])


def test_aborted_requests_leave_rows_to_others():
    run = Run(media=limits(num_rows=10), max_num_batched_tokens=6)
    admit(run, image(1, 0, 8), num_tokens=12)
    admit(run, image(2, 0, 8), num_tokens=12)
    run.step()
    run.scheduler.handle(Abort(RequestId(0)))
    run.step()
    assert (run.last_plan.drop_rows, encoded(run)) == ((name_of(1),), [EncodeMedia(1, 0, 0)])


@pytest.mark.parametrize(
    ("given", "items", "code", "words"),
    [
        (MediaRowLimits(), [image(1, 0, 4)], "images_unsupported", "takes no images"),
        (limits(num_rows=10), [image(1, 0, 11)], "image_too_long", "raise cache.media_rows_gib"),
        (
            *(limits(sees_whole_image=True, max_num_tokens=8), [image(1, 0, 9)]),
            *("image_too_long", "scheduler.max_num_batched_tokens is 8"),
        ),
        (
            *(limits(num_rows=10, is_chunked=False), [image(1, 0, 6), image(2, 6, 6)]),
            *("image_too_long", "12 tokens"),
        ),
        (limits(num_rows=10, hears=True), [image(1, 0, 11)], "audio_too_long", "a recording of 11 tokens"),
        (limits(num_rows=10, is_chunked=False), [image(1, 0, 6), image(1, 6, 6)], "", ""),
        (limits(num_rows=10), [image(1, 0, 6), image(2, 6, 6)], "", ""),
    ],
)
def test_images_that_never_fit_are_refused(given: MediaRowLimits, items: list[MediaItem], code: str, words: str):
    found, message = given.refusal(items)
    assert found == code
    assert words in message


class Store:
    """The workers' rows, as the lists of plans say: drops first, then what is made, then what is read."""

    def __init__(self, num_rows: int) -> None:
        self.capacity, self.rows = num_rows, dict[bytes, int]()

    def run_step(self, run: Run, rows: list[Row], media: dict[int, tuple[MediaItem, ...]]) -> None:
        for name in run.last_plan.drop_rows:
            del self.rows[name]
        for each in run.last_plan.encode:
            item = media[each.request_id][each.index]
            assert item.media_id not in self.rows, "made twice"
            self.rows[item.media_id] = item.num_rows
        assert sum(self.rows.values()) <= self.capacity
        for row in rows:
            end = row.first + row.num_tokens
            for item in media[row.request]:
                assert item.media_id in self.rows or not [*item.rows_between(row.first, end)], "read before it is made"
                assert not run.limits.media.sees_whole_image or not item.start < end < item.end, "cut"


@st.composite
def histories(draw: Callable[[Any], Any]) -> tuple[dict[str, Any], int]:
    chunked, whole = draw(st.booleans()), draw(st.booleans())
    num_tokens = draw(st.sampled_from([MAX_ROWS, 16, 40])) if chunked else 48
    media = limits(
        draw(st.sampled_from([MAX_ROWS, 17, 60])) if chunked else 40,
        draw(st.sampled_from([1, 60, 1000])),
        num_owners=draw(st.sampled_from([1, 2, 4])),
        sees_whole_image=whole,
        max_num_tokens=num_tokens,
        is_chunked=chunked,
    )
    engines, caching = draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans())
    return {
        "media": media,
        "chunked": chunked,
        "max_num_batched_tokens": num_tokens,
        "virtual_engines": engines,
        "ahead": int(engines == 1 and draw(st.booleans())),
        "caching": caching,
        "num_tier_blocks": draw(st.sampled_from([0, 6, 30])) if caching else 0,
        "verify_hits": draw(st.sampled_from([0, 1, 2])) if caching and chunked else 0,
        "preemption": draw(st.sampled_from(["auto", "swap", "recompute"])),
        "num_host_blocks": draw(st.sampled_from([0, 6, 40])),
        # Of a hybrid, whose chunks end at snapshots too.
        "snapshot_slots": None if whole else draw(st.sampled_from([None, 2, 20])),
        "host_slots": draw(st.sampled_from([0, 6])),
        "num_blocks": draw(st.sampled_from([13, 16, 40])),
        "max_num_seqs": 6,
        "max_model_len": 48,
    }, draw(st.integers(0, 2**32))


def media_of(chance: random.Random) -> tuple[tuple[MediaItem, ...], int]:
    """Up to four images, some twice, of one run or with a token in the middle; and the number of tokens."""
    items, place = [], chance.randrange(4)
    for _ in range(chance.randrange(4)):
        number = chance.randrange(6)
        num_rows, first = 3 + number, chance.randrange(1, 3 + number)
        gap = number % 2
        runs = ((place, first), (place + first + gap, num_rows - first)) if gap else ((place, num_rows),)
        items.append(MediaItem(name_of(number), runs, 4 * num_rows))
        place += num_rows + gap + chance.randrange(3)
    return tuple(items), place + chance.randrange(1, 4)


def play(options: dict[str, Any], seed: int) -> list[Any]:
    """A random history; returns its plans."""
    chance, run, media, plans = random.Random(seed), Run(**options), dict[int, tuple[MediaItem, ...]](), []
    store, prompts = Store(options["media"].num_rows), list[tuple[tuple[MediaItem, ...], int]]()
    for number in range(600):
        if number < 40 and chance.random() < 0.4:
            # Some come again.
            is_new = not prompts or chance.random() < 0.6
            items, num_tokens = media_of(chance) if is_new else chance.choice(prompts)
            prompts.append((items, num_tokens))
            samples = {"n": chance.choice((1, 1, 1, 2))}
            prompt = prompt_with(*items, num_tokens=num_tokens)
            media[run.admit(0, prompt, media=items, max_tokens=chance.randrange(1, 9), **samples)] = items
        if media and chance.random() < 0.05:
            run.abort(chance.randrange(len(media)))
        if chance.random() < 0.04:
            run.scheduler.handle(ResetMediaRows())
        if chance.random() < 0.02:
            run.reset_prefix_cache()
        rows = run.step()
        store.run_step(run, rows, media)
        plans.append(run.last_plan)
        if number >= 40 and not run.scheduler.has_unfinished:
            break
    else:
        raise AssertionError("it does not end")
    run.settle()
    return plans


@pytest.mark.guarantee("rows of images are made before they are read, and fit their memory")
@settings(max_examples=15)
@given(histories())
def test_random_histories_read_rows_that_are_there(history: tuple[dict[str, Any], int]):
    play(*history)


@settings(max_examples=3)
@given(histories())
def test_two_replicas_plan_rows_alike(history: tuple[dict[str, Any], int]):
    assert play(*history) == play(*history)


@pytest.mark.stress
@settings(max_examples=2_000)
@given(histories())
def test_many_random_histories_read_rows_that_are_there(history: tuple[dict[str, Any], int]):
    play(*history)


TIERED = {
    "media": limits(num_rows=17),
    "caching": True,
    "num_blocks": 13,
    "num_tier_blocks": 30,
    "verify_hits": 2,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
    "max_model_len": 48,
}


def test_histories_load_and_verify_blocks_of_images():
    """Histories load from the host tier: prompts come again when their blocks have left the device."""
    plans = [plan for seed in range(10) for plan in play(TIERED, seed)]
    assert sum(len(plan.block_ops.load) for plan in plans) > 20
    assert sum(len(each.blocks) for plan in plans for each in plan.hit_comparisons) > 20


CROWDED = {"media": limits(num_rows=10), "max_num_batched_tokens": 20, "max_model_len": 48}


def crowd(run: Run) -> None:
    for number in range(4):
        admit(run, image(number, 1, 6), image(number + 1, 9, 6), num_tokens=18)
    run.finish()


def drop_what_is_read(rows: MediaRows, encode: Any) -> None:
    """The oldest rows give their memory, read or not."""
    rows._read.clear()
    real_make(rows, encode)


def forget_what_is_made(rows: MediaRows, encode: Any) -> None:
    real_make(rows, encode)
    del rows._rows[encode.item.media_id]


def keep_too_much(rows: MediaRows, encode: Any) -> None:
    rows._rows[encode.item.media_id] = encode.item.num_rows
    rows._encode.append(encode)


real_make = MediaRows._make


@pytest.mark.control("rows of images are made before they are read, and fit their memory")
@pytest.mark.parametrize(
    ("planted", "error", "words"),
    [
        (drop_what_is_read, MirrorError, "to read rows that are kept"),
        (forget_what_is_made, AssertionError, "keeps other rows than the replica"),
        (keep_too_much, AssertionError, r"\(\d+, 10\)"),
    ],
)
def test_planted_faults_of_rows_are_found(
    planted: Any, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
):
    crowd(Run(**CROWDED))
    monkeypatch.setattr(MediaRows, "_make", planted)
    with pytest.raises(error, match=words):
        crowd(Run(**CROWDED))
