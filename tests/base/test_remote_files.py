"""Remote files against moto's S3 over HTTP, with faults in its answers, and other stores of fsspec."""

import contextlib
import logging
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import s3fs
from absent_package import remove_package

from spmd_worker.base import remote_files, remote_store, remote_upload
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_files import (
    create_remote,
    delete_remote,
    list_remote,
    open_remote,
    read_remote,
    replace_remote,
    state_of,
    states_below,
)
from spmd_worker.base.remote_names import RemotePath, file_path, shown_name, without_secrets
from spmd_worker.base.remote_store import RemoteChangedError, RemoteError, open_store
from spmd_worker.base.remote_upload import check_creatable, remove_leftovers, write_remote
from spmd_worker.frontends.batch.input.input_files import find_inputs

DATA = bytes(range(256)) * 3 * 4096
"""Three blocks."""
FAULTS = ("throttle", "reset", "lost")


@pytest.fixture(params=["s3", "memory", "file"])
def folder(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('s3').bucket}/folder"
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/folder"


def write(name, data):
    with write_remote(name) as file:
        for start in range(0, len(data), 1 << 18):
            file.write(data[start : start + (1 << 18)])


def small_parts(monkeypatch):
    """Parts as small as S3 allows."""
    monkeypatch.setattr(remote_upload, "_PART_BYTES", 5 << 20)


def test_files_are_created_listed_read_deleted(folder):
    assert create_remote(f"{folder}/a.jsonl", b"1") is True
    assert create_remote(f"{folder}/a.jsonl", b"2") is False
    write(f"{folder}/inner/b.jsonl", DATA)
    assert open_remote(f"{folder}/inner/b.jsonl").read() == DATA
    assert [name.removeprefix(folder) for name in list_remote(f"{folder}/*.jsonl")] == ["/a.jsonl"]
    assert [name.removeprefix(folder) for name in list_remote(f"{folder}/**/b.jsonl")] == ["/inner/b.jsonl"]
    assert list_remote(f"{folder}/a.jsonl") == [f"{folder}/a.jsonl"]
    assert list_remote(f"{folder}/none") == []
    assert {name: state.num_bytes for name, state in states_below(folder).items()} == {
        "a.jsonl": 1,
        "inner/b.jsonl": len(DATA),
    }
    assert state_of(f"{folder}/a.jsonl").time_s > 1e9
    delete_remote(f"{folder}/a.jsonl")
    delete_remote(f"{folder}/a.jsonl")
    assert read_remote(f"{folder}/a.jsonl") is None
    with pytest.raises(FileNotFoundError):
        state_of(f"{folder}/a.jsonl")


def test_ranges_are_those_of_the_file(folder):
    write(f"{folder}/b", DATA)
    file = open_remote(f"{folder}/b")
    for start, size in ((2 << 20, 10), ((1 << 20) - 5, 20), (0, 3), (len(DATA) - 4, 100), (len(DATA) + 7, 5)):
        file.seek(start)
        assert file.read(size) == DATA[start : start + size]


def test_reads_ahead_hold_few_blocks(s3, monkeypatch):
    write(f"{s3.bucket}/b", DATA)
    monkeypatch.setattr(remote_files, "_BLOCK_BYTES", 1 << 16)
    file = open_remote(f"{s3.bucket}/b")
    raw, most = file.raw, 0
    while file.read(10_000):
        most = max(most, len(raw._blocks))
    assert remote_files._AHEAD < most <= remote_files._MAX_BLOCKS
    ranges = [path for method, path in s3.requests if method == "GET"]
    assert len(ranges) == len(DATA) >> 16


@pytest.mark.guarantee("A remote file is read in one version or not at all")
def test_file_replaced_while_read_is_an_error(folder):
    write(f"{folder}/b", DATA)
    file = open_remote(f"{folder}/b")
    file.raw._block(0)
    file.raw._blocks.clear()
    write(f"{folder}/b", DATA[::-1])
    with pytest.raises(RemoteChangedError, match="changed while it was read"):
        file.read()


@pytest.mark.control("A remote file is read in one version or not at all")
def test_version_check_detects_reads_without_condition(s3, monkeypatch):
    write(f"{s3.bucket}/b", DATA)
    file = open_remote(f"{s3.bucket}/b")
    first = file.raw._block(0)
    file.raw._blocks.clear()
    write(f"{s3.bucket}/b", DATA[::-1])
    store = open_store(f"{s3.bucket}/b")
    monkeypatch.setattr(
        remote_files, "_read_s3", lambda store, state, start, stop: store.fs.cat_file(store.path, start=start, end=stop)
    )
    mixed = first + file.raw._block(1)
    assert mixed not in (DATA[: 2 << 20], DATA[::-1][: 2 << 20])
    assert store.is_s3


@pytest.mark.gate("lost")
@pytest.mark.guarantee("Faults of a remote store that pass change no byte")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_change_nothing(s3, monkeypatch, fault):
    small_parts(monkeypatch)
    s3.fault = lambda number, method, path: fault if number % 3 == 0 else None
    write(f"{s3.bucket}/b", DATA * 2)
    assert open_remote(f"{s3.bucket}/b").read() == DATA * 2
    for number in range(4):
        assert create_remote(f"{s3.bucket}/c{number}", b"%d" % number) is True
        assert create_remote(f"{s3.bucket}/c{number}", b"other") is False
    assert read_remote(f"{s3.bucket}/c3") == b"3"
    assert any(number % 3 == 0 for number in range(len(s3.requests)))


@pytest.mark.control("Faults of a remote store that pass change no byte")
def test_fault_check_detects_a_lost_create(s3, monkeypatch):
    s3.fault = lambda number, method, path: "lost" if method == "PUT" and number < 3 else None
    monkeypatch.setattr(remote_files, "read_remote", lambda name: None)
    # Nobody looks whether the first try succeeded: a name without a creator.
    assert create_remote(f"{s3.bucket}/c", b"own") is False


def test_fault_that_stays_is_an_error(s3):
    s3.fault = lambda number, method, path: "throttle"
    with pytest.raises(RemoteError, match="after 10 tries") as caught:
        state_of(f"{s3.bucket}/b")
    assert caught.value.is_transient


@pytest.mark.guarantee("A remote output appears whole or not at all")
def test_unfinished_upload_leaves_no_file(s3, monkeypatch):
    small_parts(monkeypatch)
    name = f"{s3.bucket}/b"
    with contextlib.suppress(ZeroDivisionError), write_remote(name) as file:
        file.write(DATA * 2)
        assert list_remote(name) == []
        raise ZeroDivisionError
    assert list_remote(name) == []
    assert remove_leftovers(name) == 0
    # A killed writer aborts nothing; the next start does.
    write_remote(name).write(DATA * 2)
    write_remote(f"{name}-other").write(DATA * 2)
    assert remove_leftovers(name) == 1
    assert remove_leftovers(f"{s3.bucket}/b-*") == 1
    check_creatable(name)
    assert list_remote(name) == []
    assert remove_leftovers(name) == 0


@pytest.mark.control("A remote output appears whole or not at all")
def test_upload_check_detects_a_file_before_its_end(s3, monkeypatch):
    name = f"{s3.bucket}/b"
    writer = remote_upload._S3Writer
    monkeypatch.setattr(writer, "write", lambda self, data: replace_remote(name, bytes(data)))
    with write_remote(name) as file:
        file.write(DATA)
        assert list_remote(name) == [name]


def test_parts_grow_so_that_any_file_fits(s3):
    writer = remote_upload._S3Writer(open_store(f"{s3.bucket}/b"))
    sizes = []
    for number in range(10_000):
        if number % 1000 == 0:
            sizes.append(writer._part_bytes)
        writer._parts.append({})
    assert sizes[:2] == [8 << 20, 16 << 20]
    assert sum(1000 * size for size in sizes) > 5 << 40


class Pages(BaseHTTPRequestHandler):
    """Serves DATA with ranges and a condition; a path of /flat... has neither."""

    etag = '"1"'

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.send_header("ETag", self.etag)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self):
        if self.headers.get("If-Match") not in (None, self.etag):
            self.send_error(412)
            return
        start, stop = 0, len(DATA)
        if "Range" in self.headers and not self.path.startswith("/flat"):
            start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            stop = min(stop, last + 1)
        self.send_response(206 if stop - start < len(DATA) else 200)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(DATA[start:stop])

    def log_message(self, *_):
        return


@pytest.fixture
def pages():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_http_file_is_read_by_ranges(pages, monkeypatch):
    monkeypatch.setattr(Pages, "etag", '"1"')
    assert open_remote(f"{pages}/rows.jsonl").read() == DATA
    file = open_remote(f"{pages}/rows.jsonl")
    monkeypatch.setattr(Pages, "etag", '"2"')
    with pytest.raises(RemoteChangedError):
        file.read()
    with pytest.raises(RemoteError, match="ignores ranges"):
        open_remote(f"{pages}/flat").read()


def test_server_out_of_reach_is_no_missing_file(pages, monkeypatch):
    """Before, fsspec's FileNotFoundError of a refused connection was one."""
    monkeypatch.setattr(remote_store, "_FIRST_PAUSE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        name = f"http://127.0.0.1:{closed.getsockname()[1]}/rows.jsonl"
    with pytest.raises(RemoteError, match="after 10 tries") as caught:
        list_remote(name)
    assert caught.value.is_transient


def test_code_in_a_name_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "_FIRST_PAUSE_S", 0.0)
    for folder in (f"memory://{tmp_path.name}", f"file://{tmp_path}"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            state_of(f"{folder}/Throttling-study/none.jsonl")
        assert read_remote(f"{folder}/Throttling-study/none.jsonl") is None
    (tmp_path / "SlowDown").mkdir()
    with pytest.raises(RemoteError, match="IsADirectoryError: ") as caught:
        read_remote(f"file://{tmp_path}/SlowDown")
    assert not caught.value.is_transient


def test_wrong_bucket_and_missing_credentials_are_named(s3, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        replace_remote("s3://no-such-bucket/rows.jsonl", b"")
    with pytest.raises(FileNotFoundError, match="no such file"):
        state_of(f"{s3.bucket}/none")
    assert list_remote(f"{s3.bucket.replace('s3', 'S3')}/none") == []
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"rows.jsonl cannot be read: no credentials are found .*: set those of the"):
        find_inputs(f"{s3.bucket}/rows.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()


def test_names_that_are_only_read_are_rejected_for_writing():
    with pytest.raises(ConfigError, match="https:// is only read"):
        write_remote("https://host/rows.jsonl")
    with pytest.raises(ConfigError, match="ftp:// is not supported"):
        open_store("ftp://host/rows.jsonl")


@pytest.mark.parametrize(
    ("package", "name", "command"),
    [
        ("adlfs", "az://b/x", "pip install adlfs$"),
        ("gcsfs", "gs://b/x", "pip install gcsfs$"),
        ("fsspec", "s3://b/x", r"pip install 'spmd-worker\[remote\]'$"),
    ],
)
def test_missing_package_is_named(monkeypatch, package, name, command):
    remove_package(monkeypatch, package)
    with pytest.raises(ConfigError, match=rf"needs {package}, which is not installed: {command}"):
        open_store(name)


def test_broken_package_is_not_called_missing(monkeypatch, tmp_path):
    """fsspec's words hide the error of gcsfs's import."""
    (tmp_path / "gcsfs.py").write_text("raise ImportError('libm9.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gcsfs", raising=False)
    words = r"is installed but cannot be imported \(ImportError: libm9\.so: cannot open shared object file\)"
    with pytest.raises(ConfigError, match=rf"needs gcsfs, which {words}: pip install gcsfs installs what it lacks"):
        open_store("gs://b/x")


def test_remote_path_stands_for_a_local_one():
    path = file_path("https://me:pass@host/a/rows.jsonl.gz?X-Amz-Signature=abc")
    assert isinstance(path, RemotePath)
    assert (path.name, path.suffix) == ("rows.jsonl.gz", ".gz")
    assert str(path) == "https://host/a/rows.jsonl.gz?..."
    assert "abc" not in repr(path)
    assert str(file_path("s3://b/part-*.jsonl").with_name("x")) == "s3://b/x"
    assert shown_name("a?b@c") == "a?b@c"
    assert shown_name("HTTPS://me:pass@host/rows.jsonl?sig=abc") == "HTTPS://host/rows.jsonl?..."


@pytest.mark.guarantee("Credentials of remote stores are never shown")
def test_errors_have_no_secrets(s3, monkeypatch, caplog):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "plantedsessiontoken")
    monkeypatch.setattr("spmd_worker.base.remote_store._MAX_TRIES", 2)
    caplog.set_level(logging.DEBUG)
    s3.fault = lambda number, method, path: "reset"
    texts = []
    for name in (f"{s3.bucket}/b", "http://me:plantedpass@127.0.0.1:9/x?X-Amz-Signature=plantedsignature"):
        with pytest.raises(OSError) as caught:
            state_of(name)
        texts += [str(caught.value), repr(caught.value), caught.value.strerror]
    texts.append(without_secrets("token plantedsessiontoken at https://me:plantedpass@host/x?sig=plantedsignature"))
    texts.append(without_secrets("key plantedkey", {"client_kwargs": {"aws_secret_access_key": "plantedkey"}}))
    assert "planted" not in "\n".join([*texts, caplog.text])


@pytest.mark.control("Credentials of remote stores are never shown")
def test_secret_check_detects_a_name_as_it_is(monkeypatch):
    monkeypatch.setattr("spmd_worker.base.remote_store.shown_name", str)
    monkeypatch.setattr("spmd_worker.base.remote_store._MAX_TRIES", 1)
    with pytest.raises(OSError, match="planted"):
        state_of("http://me:planted@127.0.0.1:9/x")


@pytest.mark.stress
def test_memory_is_flat_while_a_large_object_is_read(s3):
    name, num_bytes = f"{s3.bucket}/large", 200 << 20
    s3.requests.clear()
    code = (
        "import sys; from spmd_worker.base.remote_files import open_remote\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "file, num_read, most = open_remote(sys.argv[1]), 0, 0\n"
        "file.read(1 << 20); before = resident(); file.seek(0)\n"
        "while block := file.read(1 << 18):\n"
        "    num_read += len(block); most = max(most, resident())\n"
        "print(num_read, most - before)"
    )
    import subprocess

    with write_remote(name) as file:
        for _ in range(num_bytes >> 20):
            file.write(os.urandom(1 << 20))
    found = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    num_read, growth = map(int, found.stdout.split())
    print(f"\n200 MB object: {growth / 1e6:.1f} MB more than after its first block")
    assert num_read == num_bytes
    assert growth < 64 << 20
