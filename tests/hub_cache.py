"""A local cache of the hub in huggingface_hub's layout, made by hand; and a hub on loopback that serves a folder."""

import hashlib
import json
from collections.abc import Iterator
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
) -> Path:
    """The snapshot of a model whose files are those of `source`: blobs, links to them, and refs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True, exist_ok=True)
    blobs.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != leave_out:
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            blob.write_bytes(path.read_bytes())
            (snapshot / path.name).unlink(missing_ok=True)
            (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    for ref in refs:
        file = repository / "refs" / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    return snapshot


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
            names = [*(file.name for file in sorted(self.source.iterdir())), "original/model.safetensors", "model.bin"]
            files = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
            siblings = [{"rfilename": name} for name in names]
            is_tree = "/tree/" in path
            body = json.dumps(files if is_tree else {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            file = self.source / path.rpartition("/")[2]
            if not path.startswith(f"/org/tiny/resolve/{COMMIT}/") or not file.is_file():
                self.send_error(404)
                return
            body = file.read_bytes()
            if has_body:
                self.asked.append(file.name)
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
