"""A pool's store in S3: names are created once, whatever happens to the answers."""

import threading

import pytest

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.pool.object_store import open_objects, open_pool_store
from spmd_worker.frontends.batch.pool.posix_store import PosixStore


@pytest.fixture(params=["s3", "memory"])
def root(request, tmp_path):
    return f"{request.getfixturevalue('s3').bucket}/pool" if request.param == "s3" else f"memory://{tmp_path.name}/pool"


def test_store_keeps_the_interface(root):
    store = open_pool_store(root)
    assert store.create("ranges/00000001", b"a") is True
    assert store.create("ranges/00000001", b"b") is False
    # Repeated after a lost answer.
    assert store.create("ranges/00000001", b"a") is True
    store.touch("ranges/00000002.0001", b"bc")
    store.touch("ranges/inner/x", b"")
    store.touch("job.json", b"{}")
    assert [(each.name, each.num_bytes) for each in store.list("ranges/")] == [
        ("ranges/00000001", 1),
        ("ranges/00000002.0001", 2),
    ]
    assert [each.name for each in store.list("ranges/00000002")] == ["ranges/00000002.0001"]
    assert [each.name for each in store.list("")] == ["job.json"]
    assert store.list("workers/") == []
    assert store.read("ranges/00000001") == b"a"
    assert store.read("ranges/9") is None
    # Of a second's precision on S3.
    now_s = store.now_s("workers/a.beat")
    assert all(abs(now_s - each.time_s) < 60 for each in store.list("ranges/"))
    store.delete("ranges/00000001")
    store.delete("ranges/00000001")
    assert store.read("ranges/00000001") is None


def test_folder_is_a_posix_store(tmp_path):
    assert isinstance(open_pool_store(str(tmp_path / "pool")), PosixStore)


def winners(store, num_names: int, num_writers: int) -> list[int]:
    """Number of writers that created each name, all at once."""
    counts, lock = [0] * num_names, threading.Lock()

    def create(writer: int) -> None:
        for name in range(num_names):
            is_created = store.create(f"ranges/{name}", b"%d" % writer)
            with lock:
                counts[name] += is_created

    threads = [threading.Thread(target=create, args=(number,)) for number in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


@pytest.mark.guarantee("In a pool on S3 a name has one creator")
@pytest.mark.parametrize("fault", [None, "lost"])
def test_name_has_one_creator(s3, fault):
    store = open_objects(f"{s3.bucket}/pool")
    s3.fault = lambda number, method, path: fault if number % 4 == 0 else None
    assert winners(store, 4, 3) == [1] * 4


@pytest.mark.control("In a pool on S3 a name has one creator")
def test_creator_check_detects_writes_without_condition(s3):
    store = open_objects(f"{s3.bucket}/pool")
    s3.has_conditions = False
    assert winners(store, 1, 2) == [2]
    # A start finds it.
    with pytest.raises(ConfigError, match="lets a name be created twice"):
        open_objects(f"{s3.bucket}/pool")


@pytest.mark.parametrize(
    ("name", "words"),
    [("https://host/pool", "is only read"), ("s3://no-such-bucket-here/pool", "cannot be written")],
)
def test_unusable_pools_are_rejected(s3, name, words):
    with pytest.raises(ConfigError, match=words):
        open_objects(name)
