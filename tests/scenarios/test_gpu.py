"""Tests that need a GPU (scripts/gpu_check.sh), and errors of a machine without one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from spmd_worker import LLM, SamplingParams

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
def test_gpu_cache_is_sized_by_memory_and_freed(tmp_path: Path):
    free_before, _ = torch.cuda.mem_get_info()
    with LLM(MODEL, device="cuda", gpu_memory_utilization=0.2) as llm:
        assert llm.llm_engine.scheduler.cache.num_blocks >= 16
        assert llm.generate("copy a b =", GREEDY, use_tqdm=False)[0].error is None
        free_meanwhile, _ = torch.cuda.mem_get_info()
    free_after, _ = torch.cuda.mem_get_info()
    assert free_meanwhile < free_after
    # CUDA's own context stays with the process.
    assert free_before - free_after < 2**30


@pytest.mark.gpu
def test_two_ranks_reduce_over_symmetric_memory():
    script = ranks.REPOSITORY / "tests" / "ops" / "kernels" / "peer_sums_on_gpu.py"
    environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    done = ranks.run_torchrun(script, 2, 240, environment, is_fresh=True)
    assert done.returncode == 0, done.output


@pytest.mark.gpu
def test_ours_is_near_transformers_on_the_gpu():
    done = ranks.run_command([sys.executable, COMPARE, "--device", "cuda"], timeout_s=240)
    assert done.returncode == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["results"][0]["num_same_tokens"] == result["results"][0]["num_tokens"], done.output


@pytest.mark.stress
def test_gpu_check_on_cpu_ends_in_json_line():
    done = ranks.run_script([COMPARE, "--device", "cpu", "--prompts", "3", "--tokens", "12"], timeout_s=240)
    assert done.returncode == 0, done.output
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
