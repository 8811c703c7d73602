"""A local cache of the hub in huggingface_hub's layout, made by hand; and a hub on loopback that serves a folder."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_snapshot(
    cache: Path,
    name: str,
    source: Path,
    *,
    commit: str = COMMIT,
    refs: tuple[str, ...] = ("main",),
    leave_out: str = "",
    is_wanted: Callable[[str], bool] = bool,
) -> Path:
    """The snapshot of a model whose files are those of `source`, of which `is_wanted` says yes to the names: blobs,
    links to them, and refs.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True, exist_ok=True)
    blobs.mkdir(exist_ok=True)
    for name in files_of(source):
        if name != leave_out and is_wanted(name):
            content, link = (source / name).read_bytes(), snapshot / name
            blob = blobs / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("../" * (2 + name.count("/"))) / "blobs" / blob.name)
    for ref in refs:
        file = repository / "refs" / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    return snapshot


def files_of(source: Path) -> list[str]:
    """Names of the files in a folder and in those inside."""
    return [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]


class _Hub(BaseHTTPRequestHandler):
    """The few calls that a download of a snapshot makes (https://huggingface.co/docs/hub/api)."""

    source: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/"):
            names = [*files_of(self.source), "original/model.safetensors", "model.bin"]
            files = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
            siblings = [{"rfilename": name} for name in names]
            is_tree = "/tree/" in path
            body = json.dumps(files if is_tree else {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            if name not in files_of(self.source):
                self.send_error(404)
                return
            body = (self.source / name).read_bytes()
            if has_body:
                self.asked.append(name)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if has_body:
            self.wfile.write(body)


@contextmanager
def serve_hub(source: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has org/tiny, the files of `source`, and the names of files that were fetched."""
    asked: list[str] = []
    handler = type("Handler", (_Hub,), {"source": source, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
