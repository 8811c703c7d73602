"""A job over S3 that is killed at each of its requests, one after another, and started again: always the same bytes."""

import json
import os
import signal
from hashlib import sha256

import pytest
from fork_server import fork_server
from ranks import REPOSITORY

from spmd_worker.base.remote_files import delete_remote, list_remote, read_remote, replace_remote
from spmd_worker.base.remote_upload import remove_leftovers

LAUNCH = REPOSITORY / "launch.py"
MODEL = REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 12
LIMIT_S = 120.0
EARLIER, EARLIER_MANIFEST = b"of an earlier job", b'{"parts": []}'
OUTPUTS = {"parts": "out/part-*.jsonl.gz", "one object": "out/answers.jsonl.gz"}


def start(s3, folder, output):
    command = [
        *(str(LAUNCH), f"model.path={MODEL}", "device=cpu", "cache.num_blocks=64", "sampling.max_tokens=4"),
        *(f"job.input={s3.bucket}/rows.jsonl", f"job.output={s3.bucket}/{output}", "job.part_rows=5"),
        "job.commit_rows=2",
    ]
    with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
        return fork_server().fork(command, dict(os.environ) | s3.environment(), folder, stdout, stderr)


def run_to_end(s3, folder, output):
    s3.fault = None
    code = start(s3, folder, output).wait(LIMIT_S)
    assert code == 0, (folder / "stderr").read_text()[-2000:]


def objects(s3) -> dict[str, bytes | None]:
    return {name.rpartition("/")[2]: read_remote(name) for name in list_remote(f"{s3.bucket}/out/*")}


def check_whole(found, whole) -> None:
    """What is visible at any moment is whole: objects are as in the end, and the manifest describes what is there."""
    for name, data in found.items():
        if name != "manifest.json":
            assert data == whole[name], name
    for part in json.loads(found.get("manifest.json") or '{"parts": []}')["parts"]:
        assert sha256(found[part["part"]]).hexdigest() == part["sha256"]


@pytest.mark.stress
@pytest.mark.guarantee("A job over S3 killed at any request ends with the same bytes", is_control_inside=True)
@pytest.mark.parametrize("is_done", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_job_killed_at_every_request(s3, tmp_path, kind, is_done):
    lines = [f'{{"prompt": "add {index} 7 =", "temperature": 0.9}}\n'.encode() for index in range(NUM_ROWS)]
    replace_remote(f"{s3.bucket}/rows.jsonl", b"".join(lines))
    (tmp_path / "first").mkdir()
    run_to_end(s3, tmp_path / "first", OUTPUTS[kind])
    whole = objects(s3)
    assert len(whole) == (4 if kind == "parts" else 1)
    number = num_killed = 0
    while num_killed == number:
        number += 1
        for name in list_remote(f"{s3.bucket}/out/*"):
            data = EARLIER_MANIFEST if name.endswith("/manifest.json") else EARLIER
            replace_remote(name, data) if number % 2 else delete_remote(name)
        num_killed += killed_at(s3, tmp_path / str(number), OUTPUTS[kind], number, is_done)
        check_whole({name: data for name, data in objects(s3).items() if data != EARLIER}, whole)
        run_to_end(s3, tmp_path / str(number), OUTPUTS[kind])
        assert objects(s3) == whole, number
        assert remove_leftovers(f"{s3.bucket}/{OUTPUTS[kind]}") == 0, number
    with pytest.raises(AssertionError):
        # A part that appears before it is whole.
        check_whole(dict.fromkeys(whole, b"of another job") | {"manifest.json": b'{"parts": []}'}, whole)
    print(f"\n{kind}: killed at each of {num_killed} requests")
    assert num_killed > 10


def killed_at(s3, folder, output, number, is_done) -> bool:
    """Whether the job was killed at its request of this number, which was carried out if `is_done`."""
    folder.mkdir()
    s3.requests.clear()
    pids: list[int] = []

    def kill(count, method, path):
        if count != number:
            return None if count < number else "throttle"
        while not pids:
            continue
        os.kill(pids[0], signal.SIGKILL)
        return "lost" if is_done else "throttle"

    s3.fault = kill
    process = start(s3, folder, output)
    pids.append(process.pid)
    code = process.wait(LIMIT_S)
    s3.fault = None
    return code == -signal.SIGKILL
