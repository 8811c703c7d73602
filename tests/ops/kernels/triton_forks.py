"""Scripts of interpreted kernels, each in a fork of a process that has imported torch, triton and the package once.

    TRITON_INTERPRET=1 python tests/ops/kernels/triton_forks.py

Reads lines of JSON, `[SCRIPT, ARGUMENT, ...]`, and answers each with one: what the script wrote last, or its traceback.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback

import triton_cases  # noqa: F401  # what all of them import


def run(command: list[str], output: int) -> None:
    """Run the script as `__main__`, in this process."""
    os.dup2(output, 1)
    sys.argv[:] = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except BaseException:
        print(json.dumps(traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a process of {num_threads} threads cannot be forked safely"
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            pid = os.fork()
            if pid == 0:
                run(json.loads(line), output.fileno())
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            answer = [each for each in output.read().splitlines() if each][-1:]
        print(*(answer if exit_code == 0 and answer else [json.dumps(f"exit code {exit_code}")]), flush=True)


if __name__ == "__main__":
    main()
