"""A set of digests on disk: exact whatever comes, with a few bytes of memory for each."""

from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from spmd_worker.base.digest_set import DigestSet


def digest_of(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


@settings(max_examples=50, deadline=None)
@given(some.lists(some.integers(0, 40)), some.integers(1, 9))
def test_digest_is_found_near_and_far(numbers: list[int], most_recent: int):
    digests = DigestSet(None, most_recent)
    found = [digests.add(digest_of(number)) for number in numbers]
    assert found == [number in numbers[:place] for place, number in enumerate(numbers)]
    digests.close()


def test_bytes_across_two_digests_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The search is for bytes, which may lie across two digests."""
    first, second = b"\1" * 8 + b"\1\3" * 4, b"\1" * 8 + b"\1\4" * 4
    across = (first + second)[8:24]
    digests = DigestSet(tmp_path, most_recent=2)
    monkeypatch.setattr(digests, "_may_have", lambda digest: True)
    assert [digests.add(each) for each in (first, second, across, across, second)] == [False, False, False, True, True]
    digests.close()


def test_new_digests_are_seldom_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digests, looked_up = DigestSet(tmp_path, most_recent=1000), []
    find = digests._find
    monkeypatch.setattr(digests, "_find", lambda digest: looked_up.append(digest) or find(digest))
    assert not any(digests.add(digest_of(number)) for number in range(20_000))
    assert len(looked_up) < 200
    # 2 to 4 bytes of bits, and 4 x 257 of each of 20 runs.
    assert 2 * 20_000 <= digests.num_held_bytes - 20 * 4 * 257 <= 4 * 20_000
    assert all(digests.add(digest_of(number)) for number in range(0, 20_000, 100))
    # The file has no name: nothing is left by a job that is killed.
    assert list(tmp_path.iterdir()) == []
    digests.close()
    assert digests.num_held_bytes == 0


def test_control_filter_without_digests_loses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: bits that are not set answer no."""
    monkeypatch.setattr(DigestSet, "_set_bits", lambda self, data: None)
    digests = DigestSet(tmp_path, most_recent=2)
    assert [digests.add(digest_of(number)) for number in (0, 1, 2, 0)] == [False] * 4
    digests.close()
