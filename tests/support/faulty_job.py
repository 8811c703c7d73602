"""A small job, again and again in one process, each time with one fault of a file below it. See faulty_io.c.

    LD_PRELOAD=faulty_io.so python tests/support/faulty_job.py FOLDER EVERY

For each kind of call on a file of the job (`CALLS`) and each error, the first, then the EVERY-th such call and so on
fails. The job then answers with the right bytes, or ends with one error in words and no output under its name; and the
same command, without a fault, ends with the right bytes. Prints one line of JSON.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

from composed_once import compose_once

import launch

MODEL = Path(__file__).resolve().parents[2] / "scripts" / "demo" / "model"
SHORT_WRITE = 0
CALLS = {
    "write": (errno.ENOSPC, errno.EIO, SHORT_WRITE),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC),
    "open": (errno.EMFILE, errno.EACCES),
    "truncate": (errno.EIO,),
    "unlink": (errno.EIO,),
    "lock": (errno.ENOLCK,),
}
"""By call the errors that it is given; a short write is none, and half of the bytes."""

ROWS = [{"prompt": f"add {index} 7 =", "max_tokens": 2 + index % 5, "temperature": 0.8} for index in range(6)]
LIBRARY = ctypes.CDLL(None)


def arm(word: str, call: str, number: int, error: int) -> None:
    """The `number`-th call from now on; 0 counts only."""
    LIBRARY.faulty_io_set(word.encode(), call.encode(), ctypes.c_long(number), error)


def num_calls() -> int:
    """Calls of the armed kind since then."""
    return int(LIBRARY.faulty_io_count())


def run(folder: Path) -> tuple[int | None, str]:
    """The exit code, None for an exception that was not caught, and what was said on stderr."""
    arguments = [
        *(f"model.path={MODEL}", "model.dtype=float32", "device=cpu", "cache.num_blocks=32", "model.max_model_len=64"),
        *("job.commit_rows=1", f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}"),
    ]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            return launch.main(arguments), said.getvalue()
        except Exception as error:
            return None, f"{said.getvalue()}{type(error).__name__}: {error}"


def fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def troubles_of(folder: Path, call: str, number: int, error: int, expected: bytes) -> tuple[str, list[str]]:
    """How the job with the fault ended, and what is wrong with that."""
    fresh(folder)
    output = folder / "out.jsonl"
    arm(f"{folder}/", call, number, error)
    code, said = run(folder)
    has_struck = num_calls() >= number
    arm("", "", 0, 0)
    found = []
    if not has_struck:
        return "not struck", []
    if code == 0:
        if not output.exists() or output.read_bytes() != expected:
            found.append("exit code 0 and other bytes")
    else:
        if code is None or len(re.findall(r"^error: \S", said, re.MULTILINE)) != 1 or "Traceback" in said:
            found.append(f"exit code {code}, and not one error in words: {said[-600:]}")
        if output.exists() and output.read_bytes() != expected:
            found.append("an output that is not whole has the output's name")
    code_after, said_after = run(folder)
    if code_after != 0:
        found.append(f"the same command ends with {code_after} afterwards: {said_after[-600:]}")
    elif output.read_bytes() != expected:
        found.append("other bytes afterwards")
    return ("answered" if code == 0 else "failed"), found


def main() -> int:
    folder, every = Path(sys.argv[1]) / "job", int(sys.argv[2])
    compose_once()
    fresh(folder)
    code, said = run(folder)
    assert code == 0, said
    expected = (folder / "out.jsonl").read_bytes()
    endings, troubles = Counter[str](), []
    for call, errors in CALLS.items():
        fresh(folder)
        arm(f"{folder}/", call, 0, 0)
        run(folder)
        count = num_calls()
        arm("", "", 0, 0)
        endings[f"calls of {call}"] = count
        for error in errors:
            name = errno.errorcode.get(error, "half")
            for number in range(1, count + 1, every):
                ending, found = troubles_of(folder, call, number, error, expected)
                endings[ending] += 1
                troubles += [f"{call} {number} of {count}, {name}: {each}" for each in found]
    os.write(1, f"{json.dumps({**endings, 'troubles': troubles})}\n".encode())
    return int(bool(troubles))


if __name__ == "__main__":
    sys.exit(main())
