"""Tests that need a GPU (scripts/gpu_check.sh), and errors of a machine without one."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker import LLM, SamplingParams
from spmd_worker.ops.kernels.triton.peer_sums import SymmetricMemory
from spmd_worker.worker.memory.device import measure_cuda, read_cuda

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
COMPARE = str(ranks.REPOSITORY / "scripts" / "gpu_compare.py")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def mixed_prompts(count: int) -> list[str]:
    """Short and long ones: what the model answers does not matter, only that it is the same everywhere."""
    return [f"copy {' '.join('abcdefghij'[: 1 + index % 10])} {index} =" for index in range(count)]


def token_ids(device: str, prompts: list[str], **settings: int | str) -> list[list[int]]:
    with LLM(MODEL, device=device, num_blocks=512, **settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.gpu
def test_demo_model_answers_equal_on_gpu_and_cpu():
    prompts = mixed_prompts(64)
    expected = token_ids("cpu", prompts)
    assert token_ids("cuda", prompts) == expected
    # Cut into small pieces and preempted for want of blocks, as on the CPU.
    assert token_ids("cuda", prompts, max_num_seqs=8, max_num_batched_tokens=16) == expected


@pytest.mark.gpu
def test_gpu_kernels_equal_cpu_chunked_and_unchunked():
    prompts = mixed_prompts(64)
    expected = token_ids("cpu", prompts)
    assert token_ids("cuda", prompts, device_backend="triton") == expected
    small: dict[str, int] = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    assert token_ids("cuda", prompts, device_backend="triton", **small) == expected


@pytest.mark.gpu
def test_cuda_graph_steps_equal_eager_steps():
    prompts = mixed_prompts(64)
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=1)
    settings = {"device": "cuda", "num_blocks": 512, "device_backend": "triton", "max_num_seqs": 24}

    def answers(llm: LLM) -> list[object]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with LLM(MODEL, enforce_eager=True, **settings) as llm:
        assert llm.collective_rpc(num_graphs) == [0]
        expected = answers(llm)
    with LLM(MODEL, enable_sleep_mode=True, **settings) as llm:
        # Of 8, 16 and 24 rows, layers and head, before the first step.
        assert llm.collective_rpc(num_graphs) == [6]
        assert answers(llm) == expected
        assert llm.collective_rpc(num_graphs)[0] > 6
        llm.sleep(level=1)
        assert llm.collective_rpc(num_graphs) == [0]
        llm.wake_up()
        assert answers(llm) == expected


def num_graphs(worker: Any) -> int:
    """Recorded by now."""
    graphs = worker.model_runner.graphs
    return 0 if graphs is None else graphs.num_recorded


@pytest.mark.gpu
def test_gpu_cache_is_sized_by_memory_and_freed():
    """By this process's own memory: others may use the GPU meanwhile."""
    held_before = torch.cuda.memory_reserved()
    with LLM(MODEL, device="cuda", gpu_memory_utilization=0.2, max_num_seqs=1024) as llm:
        cache_bytes = llm.llm_engine.scheduler.cache.num_blocks * llm.collective_rpc(block_bytes)[0]
        assert cache_bytes >= 2**28
        assert llm.generate("copy a b =", GREEDY, use_tqdm=False)[0].error is None
        assert torch.cuda.memory_reserved() - held_before >= cache_bytes
    # Workspaces of libraries stay with the process.
    assert torch.cuda.memory_reserved() - held_before < 2**27


def block_bytes(worker: Any) -> int:
    return worker.get_kv_cache_spec().block_bytes


CO_TENANT = """
import sys, torch
held = torch.empty(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    held = None
    torch.cuda.empty_cache()
    held = torch.empty(int(line), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("done", flush=True)
"""


@contextmanager
def co_tenant() -> Iterator[Callable[[int], None]]:
    """Another process, with a function that has it hold so many bytes of the GPU."""
    command = [sys.executable, "-c", CO_TENANT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def hold(num_bytes: int) -> None:
            print(num_bytes, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        yield hold
        process.stdin.close()


@pytest.mark.gpu
def test_co_tenants_memory_hides_none_of_ours():
    """Lower bounds only: other tests may allocate at the same time."""
    device, own_bytes, others_bytes = torch.device("cuda", torch.cuda.current_device()), 2**29, 2**32

    def measured(hold: Callable[[int], None], before: int, meanwhile: int) -> MemoryMeasurement:
        hold(before)
        readings = [read_cuda(device)]
        # Outside torch's allocator, as NCCL's buffers are.
        own = SymmetricMemory.allocate(own_bytes, device)
        readings.append(read_cuda(device))
        found = measure_cuda(device, 0, readings, nullcontext(lambda: hold(meanwhile)))
        del own
        return replace(found, total_bytes=found.total_bytes - readings[0].free)

    with co_tenant() as hold:
        given_back, taken = measured(hold, others_bytes, 1), measured(hold, 1, others_bytes)
        # Regression: the first was 0, because more came back than we had taken.
        assert given_back.non_torch_bytes >= own_bytes
        assert taken.non_torch_bytes >= others_bytes
        assert given_back.total_bytes == taken.total_bytes == 0


@pytest.mark.gpu
def test_start_beside_a_changing_co_tenant():
    prompts = mixed_prompts(8)
    expected = token_ids("cpu", prompts)
    with co_tenant() as hold:
        ended = threading.Event()

        def change() -> None:
            while not ended.is_set():
                hold(2**32)
                hold(1)

        changing = threading.Thread(target=change)
        changing.start()
        try:
            with LLM(MODEL, device="cuda", gpu_memory_utilization=0.5) as llm:
                # All that is of use.
                assert llm.llm_engine.scheduler.cache.num_blocks == 4096
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        finally:
            ended.set()
            changing.join()
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.gpu
def test_two_ranks_reduce_over_symmetric_memory():
    script = ranks.REPOSITORY / "tests" / "ops" / "kernels" / "peer_sums_on_gpu.py"
    environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    ranks.run_torchrun(script, 2, 240, environment, is_fresh=True).checked()


@pytest.mark.gpu
def test_ours_is_near_transformers_on_the_gpu():
    done = ranks.run_command([sys.executable, COMPARE, "--device", "cuda"], timeout_s=240).checked()
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["results"][0]["num_same_tokens"] == result["results"][0]["num_tokens"], done.output


@pytest.mark.stress
def test_gpu_check_on_cpu_ends_in_json_line():
    done = ranks.run_script([COMPARE, "--device", "cpu", "--prompts", "3", "--tokens", "12"], timeout_s=240).checked()
    result = json.loads(done.stdout.splitlines()[-1])
    assert [(each["dtype"], each["num_tokens"]) for each in result["results"]] == [("float32", 36), ("bfloat16", 36)]
    assert result["results"][0]["num_same_tokens"] == 36
    assert result["results"][0]["worst_logprob_difference"] > 0


def test_machine_without_gpu_is_reported_in_one_line():
    done = ranks.run_script([COMPARE, "--only-look"], timeout_s=240, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert done.output.count("torch finds no CUDA device here, so nothing was compared") == 1
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_requested_missing_gpu_is_one_error_line(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "add 1 2 ="}\n')
    command = [
        *(ranks.REPOSITORY / "launch.py", f"model.path={MODEL}", "device=cuda"),
        *("job.input=rows.jsonl", "job.output=out.jsonl"),
    ]
    done = ranks.run_script(command, timeout_s=240, env={"CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path)
    assert done.returncode == 1, done.output
    assert done.stderr == "error: device=cuda but torch finds no CUDA device here: use device=cpu\n"
