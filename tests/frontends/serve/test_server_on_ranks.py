"""The server on two ranks, asked by OpenAI's client: what it streams is what a job writes, and ranks end together."""

import asyncio
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import ranks
from serving import KEY, MODEL, ServedRanks, joined, read_events, served_ranks, without_names
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.matrix

LAYOUTS = {"two shards": "parallel.tensor_parallel_size=2", "two stages": "parallel.pipeline_parallel_size=2"}
ENDING = {"two shards": signal.SIGTERM, "two stages": signal.SIGINT}
"""Signals that end the ranks."""
NUM_REQUESTS = 64
CUT, MALFORMED = 20, 40
HELD = ("vllm:kv_cache_usage_perc", "spmd_worker_serve_sequences")
"""Blocks and places."""
LONG = {"model": "m", "prompt": "copy a b c =", "max_tokens": 200, "extra_body": {"ignore_eos": True}}


def body_of(index: int) -> dict[str, Any]:
    """Greedy, seeded, and drawn by the request's name; some with several choices, log-probabilities or stop strings."""
    body: dict[str, Any] = {"model": "m", "prompt": f"add {index} 7 =", "max_tokens": 8 + index % 7}
    body |= ({"temperature": 0}, {"temperature": 1.5, "seed": index}, {"temperature": 1.5})[index % 3]
    if index % 5 == 0:
        body |= {"n": 2, "logprobs": 2}
    return body | ({"stop": ["7", "21"]} if index % 4 == 1 else {})


def expected_bodies(folder: Path, layout: str) -> list[Any]:
    """Answers of a job in the same layout."""
    rows = [
        {"custom_id": f"row {index}", "method": "POST", "url": "/v1/completions", "body": body_of(index)}
        for index in range(NUM_REQUESTS)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [
        *(ranks.REPOSITORY / "launch.py", f"model.path={MODEL}", "model.dtype=float32", "device=cpu"),
        *("cache.num_blocks=512", f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", layout),
    ]
    ranks.run_forked(command, 2, LIMIT_S).checked()
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return [without_names(answer["response"]["body"]) for answer in answers]


async def ask_all(server: ServedRanks) -> list[Any]:
    """All at once: streams put together; of the one that is cut off its first text, of the malformed one the error."""

    async def ask(index: int) -> Any:
        headers = {"X-Custom-Id": f"row {index}"}
        if index == MALFORMED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(**{**body_of(index), "temperature": -1}, stream=True)
            return refused.value
        if index == CUT:
            return await cut_off(client)
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.completions.create(**body_of(index), **more, extra_headers=headers)
        return without_names(joined([chunk.to_dict() async for chunk in stream]))

    async with client_of(server) as client:
        return await asyncio.gather(*map(ask, range(NUM_REQUESTS)))


def client_of(server: ServedRanks) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=LIMIT_S)


async def cut_off(client: openai.AsyncOpenAI) -> str:
    """A long answer's first text."""
    async with await client.completions.create(**LONG, n=8, logprobs=20, stream=True) as cut:
        return (await anext(aiter(cut))).choices[0].text


async def cut_one_off(server: ServedRanks) -> None:
    async with client_of(server) as client:
        await cut_off(client)


@pytest.mark.gate("two shards")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_concurrent_streams_equal_job_and_cut_frees_blocks(tmp_path: Path, layout: str):
    """64 streams at once, one of which is cut off."""
    expected = expected_bodies(tmp_path, LAYOUTS[layout])
    with served_ranks(tmp_path, 2, LAYOUTS[layout]) as server:
        found = asyncio.run(ask_all(server))
        client = server.client
        assert found[MALFORMED].body["code"] == "invalid_value"
        assert isinstance(found[CUT], str)
        for index in set(range(NUM_REQUESTS)) - {CUT, MALFORMED}:
            assert found[index] == expected[index], index
        num_cut = 1
        wait_until(lambda: all(client.metric(name) == 0 for name in HELD))
        while not client.metric("spmd_worker_serve_aborted_total"):
            # A client that gets its core back late cuts off what has left the server: 63 others are read beside it.
            asyncio.run(cut_one_off(server))
            num_cut += 1
            wait_until(lambda: all(client.metric(name) == 0 for name in HELD))
        ended = [client.metric(f"spmd_worker_serve_{how}_total") for how in ("answered", "aborted")]
        assert (sum(ended), ended[1]) == (NUM_REQUESTS - 2 + num_cut, 1)
        end_well(server, ENDING[layout])


def end_well(server: ServedRanks, number: int) -> None:
    """All ranks are asked, as torchrun asks them: what is there is answered, and all ranks end with 0."""
    body = {"prompt": "copy a b c =", "max_tokens": 200, "ignore_eos": True}
    num_tokens = server.client.metric("vllm:generation_tokens_total")
    connection = server.client.send("/v1/completions", body)
    # A request that the engine has not got yet may be refused.
    wait_until(lambda: server.client.metric("vllm:generation_tokens_total") > num_tokens)
    server.send(number, 0, 1)
    assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 200
    connection.close()
    assert server.wait() == (0, 0), server.log


@pytest.mark.stress
@pytest.mark.timed
def test_idle_server_outlives_the_timeout_of_its_ranks(tmp_path: Path):
    with served_ranks(tmp_path, 2, LAYOUTS["two shards"], "executor.timeout_s=3") as server:
        time.sleep(12)
        assert server.client.ask("/v1/completions", {"prompt": "add 1 2 =", "max_tokens": 2})[0] == 200
        assert "WARNING" not in server.log
        end_well(server, signal.SIGTERM)


@pytest.mark.stress
@pytest.mark.timed
@pytest.mark.parametrize("is_idle", [False, True])
def test_killed_rank_ends_all_within_ten_seconds(tmp_path: Path, is_idle: bool):
    assert kill_a_rank(tmp_path, is_idle=is_idle) < 10


@pytest.mark.gate("True")
@pytest.mark.guarantee("The server on ranks: a killed rank ends all, with its name")
@pytest.mark.parametrize("is_idle", [False, True])
def test_killed_rank_ends_all_with_its_name(tmp_path: Path, is_idle: bool):
    kill_a_rank(tmp_path, is_idle=is_idle)


SILENT = """
import sys
from spmd_worker.base.liveness.coordinated_shutdown import CoordinatedShutdown
from spmd_worker.frontends.serve.command import main
CoordinatedShutdown._write_report = lambda *_: None
sys.exit(main())
"""


@pytest.mark.stress
@pytest.mark.control("The server on ranks: a killed rank ends all, with its name")
def test_name_test_detects_ranks_that_end_silently(tmp_path: Path):
    """Negative control."""
    (tmp_path / "silent.py").write_text(SILENT)
    with pytest.raises(AssertionError, match=r"rank 1 is \(gone\|silent\)"):
        kill_a_rank(tmp_path, is_idle=True, script=tmp_path / "silent.py")


def kill_a_rank(tmp_path: Path, *, is_idle: bool, script: Path | None = None) -> float:
    """Seconds until all have ended."""
    with served_ranks(tmp_path, 2, LAYOUTS["two shards"], "executor.timeout_s=60", script=script) as server:
        body = {"prompt": "copy a b c =", "max_tokens": 240, "ignore_eos": True, "n": 8, "stream": True}
        responses = []
        if not is_idle:
            # More than can be answered before the end is noticed.
            responses = [server.client.send("/v1/completions", {**body, "seed": seed}) for seed in range(32)]
            wait_until(lambda: server.client.metric("vllm:generation_tokens_total") > 0)
        server.send(signal.SIGKILL, 1)
        killed_s = time.monotonic()
        codes = server.wait()
        took_s = time.monotonic() - killed_s
        assert codes[1] == -signal.SIGKILL
        assert codes[0] not in (0, -signal.SIGKILL), server.log
        assert re.search(r"(?m)^error: rank 1 is (gone|silent): ", server.log), server.log
        for each in responses:
            last = json.loads(read_events(each.getresponse())[-1])
            assert last["error"]["code"] == "server_failed"
            each.close()
    return took_s


@pytest.mark.stress
def test_busy_port_is_one_error_on_two_ranks():
    """The other rank, which was watched already, reported a silent rank 0 too."""
    source = """
        import sys, time
        from spmd_worker.frontends.serve import command
        bind = command.bind
        def bind_late(host, port):
            time.sleep(3)
            return bind(host, port)
        command.bind = bind_late
        sys.exit(command.main())
        """
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = f"serve.port={busy.getsockname()[1]}"
        arguments = [f"model.path={MODEL}", "device=cpu", "parallel.tensor_parallel_size=2", port]
        done = ranks.run_ranks(source, 2, LIMIT_S, arguments, under_torchrun=True)
    assert done.returncode == 1, done.output
    assert done.output.count("error: ") == 1, done.output
    assert f"error: serve.host=127.0.0.1 with {port} is unavailable (Address already in use)" in done.output
