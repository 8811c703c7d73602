"""Tokens per second through the server, against `LLM.generate` on the same rows and ranks.

    python scripts/bench_serve.py MODEL [--rows 256] [--prompt-tokens 64] [--tokens 128] [--concurrency 256]
                                  [--turns 3] [--rounds 1] [--tp 2] [--pp 1] [--dtype auto] [--num-blocks N]
                                  [--streamed]

Rows are random token ids, greedy, and run to their last token. Both sides run under torchrun with `tp * pp` ranks, one
at a time and in turns: `LLM.generate` with all rows in a call, and the server, asked by `--concurrency` connections of
this process, which shares the machine with it; fewer of them than rows run fewer rows at once than generate does. In
each turn a side is started anew and has a round before the measured ones, of which the median counts. The last line is
one JSON object; `ratio` is the median over the turns of the server's tokens per second over generate's, to be at least
0.95.
"""

import argparse
import http.client
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEY_VARIABLE = "SPMD_WORKER_API_KEY"
FIGURES = "figures: "


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.generate:
        generate(options)
        return 0
    words = sys.argv[1:] if arguments is None else arguments
    num_tokens = options.rows * options.tokens
    rates: dict[str, list[float]] = {"generate": [], "serve": []}
    for number in range(options.turns):
        # Which is first changes, because the machine warms up, or something else starts on it.
        for side in ("serve", "generate") if number % 2 else ("generate", "serve"):
            seconds = serve(options) if side == "serve" else start_generate(options, words)
            rates[side].append(num_tokens / statistics.median(seconds))
        generated, served = rates["generate"][-1], rates["serve"][-1]
        print(f"output tokens/s   generate {generated:10,.1f}   serve {served:10,.1f}   ratio {served / generated:.4f}")
    ratio = statistics.median(own / other for own, other in zip(rates["serve"], rates["generate"], strict=True))
    figures = {"rows": options.rows, "output_tokens": num_tokens, "concurrency": options.concurrency}
    print(json.dumps({**figures, "is_streamed": options.streamed, "tokens_per_second": rates, "ratio": ratio}))
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in (("rows", 256), ("prompt-tokens", 64), ("tokens", 128), ("concurrency", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def torchrun(options: argparse.Namespace) -> list[str]:
    ranks = str(options.tp * options.pp)
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]


def prompts_of(options: argparse.Namespace, round_number: int) -> list[list[int]]:
    """Others in each round, so that nothing is found in the prefix cache."""
    config = json.loads((options.model / "config.json").read_text())
    chance = random.Random(round_number)
    vocabulary = range(config.get("text_config", config)["vocab_size"])
    return [chance.choices(vocabulary, k=options.prompt_tokens) for _ in range(options.rows)]


def start_generate(options: argparse.Namespace, words: list[str]) -> list[float]:
    """Seconds of the measured rounds."""
    own = [str(Path(__file__).resolve()), *words, "--generate"]
    done = subprocess.run([*torchrun(options), *own], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(FIGURES)]
    return list(json.loads(line.removeprefix(FIGURES)))


def generate(options: argparse.Namespace) -> None:
    """On one rank; rank 0 prints the seconds of the measured rounds."""
    sys.path.insert(0, str(ROOT))
    from spmd_worker import LLM, SamplingParams

    layout = {"tensor_parallel_size": options.tp, "pipeline_parallel_size": options.pp}
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    seconds = []
    with LLM(options.model, dtype=options.dtype, num_blocks=options.num_blocks, **layout) as llm:
        for number in range(1 + options.rounds):
            prompts = [{"prompt_token_ids": ids} for ids in prompts_of(options, number)]
            began_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began_s)
    if int(os.environ["RANK"]) == 0:
        print(f"{FIGURES}{json.dumps(seconds[1:])}", flush=True)


def serve(options: argparse.Namespace) -> list[float]:
    """Seconds of the measured rounds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = secrets.token_hex(16)
    blocks = "null" if options.num_blocks is None else options.num_blocks
    keys = [
        *(f"model.path={options.model}", f"model.dtype={options.dtype}", f"cache.num_blocks={blocks}"),
        *(f"parallel.tensor_parallel_size={options.tp}", f"parallel.pipeline_parallel_size={options.pp}"),
        *(f"serve.port={port}", f"serve.max_queued={options.rows}"),
    ]
    command = [*torchrun(options), "-m", "spmd_worker.serve", *keys]
    server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, KEY_VARIABLE: key})
    try:
        wait_until_ready(port, server)
        return [ask_all(options, port, key, number) for number in range(1 + options.rounds)][1:]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def wait_until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start: its own words are above")


def ask_all(options: argparse.Namespace, port: int, key: str, number: int) -> float:
    """Seconds until all rows of a round have their answers."""
    bodies = [
        {"prompt": ids, "max_tokens": options.tokens, "temperature": 0, "ignore_eos": True, "stream": options.streamed}
        for ids in prompts_of(options, number)
    ]
    coded = [json.dumps(body).encode() for body in bodies]
    share = [coded[index :: options.concurrency] for index in range(options.concurrency)]

    def ask_some(mine: list[bytes]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for body in mine:
            connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            check_answer(options, content)
        connection.close()

    began_s = time.perf_counter()
    with ThreadPoolExecutor(options.concurrency) as pool:
        list(pool.map(ask_some, share))
    return time.perf_counter() - began_s


def check_answer(options: argparse.Namespace, content: bytes) -> None:
    if options.streamed:
        assert content.endswith(b"data: [DONE]\n\n"), content[-200:]
        return
    body: Any = json.loads(content)
    assert body["usage"]["completion_tokens"] == options.tokens, body


if __name__ == "__main__":
    sys.exit(main())
