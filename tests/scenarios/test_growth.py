"""A thousand repetitions leak nothing: calls, engines, jobs, steps and cycles of sleep and new weights, on one rank and
on two.

The stress tier prints the figures. The gate makes a few repetitions, and counts descriptors, threads, children and
files but not memory.
"""

import json
from typing import Any

import pytest
import ranks

LIMIT_S = 1200.0
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
MIB = 1 << 20

COMMON = f"""
    import os, sys, contextlib, io
    from pathlib import Path
    import torch
    from growth import Growth, report
    from spmd_worker import LLM, SamplingParams
    what, count, size, max_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    folder = Path(sys.argv[5])
    prompts = [f"add {{number}} 7 =" for number in range(6)]
    params = SamplingParams(max_tokens=6, temperature=1.0, logprobs=2)

    def new_llm():
        return LLM({str(MODEL)!r}, num_blocks=48, max_model_len=64, tensor_parallel_size=size, swap_space=0.01)

    def calls():
        llm = new_llm()
        return lambda: llm.generate(prompts, params, use_tqdm=False)

    def leaking_calls():
        call, kept = calls(), []
        return lambda: (call(), kept.append(bytearray(1 << 20)))

    def cycles():
        # As a trainer that sleeps while it computes; every other time the weights stay.
        from safetensors.torch import load_file
        llm, number = new_llm(), iter(range(10**9))
        load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
        def one():
            level = 1 + next(number) % 2
            llm.sleep(level)
            llm.wake_up(["weights"])
            if level == 2:
                load(load_file({str(MODEL / "model.safetensors")!r}).items())
            else:
                with llm.weight_update() as put:
                    for name, tensor in load_file({str(MODEL / "model.safetensors")!r}).items():
                        put(name, tensor)
            llm.reset_prefix_cache()
            llm.wake_up(["kv_cache"])
            llm.generate(prompts, params, use_tqdm=False)
        return one

    def leaking_threads():
        import growth, threading
        growth._LEAVE_S, call = 0.1, calls()
        return lambda: (call(), threading.Thread(target=threading.Event().wait, daemon=True).start())

    def engines():
        def one():
            with new_llm() as llm:
                llm.generate(prompts[:2], params, use_tqdm=False)
        return one

    def jobs():
        import launch
        rows = folder / "rows.jsonl"
        if os.environ.get("RANK", "0") == "0":
            rows.write_text("".join('{{"prompt": "%s", "max_tokens": 4}}\\n' % prompt for prompt in prompts))
        arguments = [
            "model.path={MODEL}", "model.dtype=float32", "device=cpu", "cache.num_blocks=48", "model.max_model_len=64",
            f"parallel.tensor_parallel_size={{size}}", f"job.input={{rows}}", f"job.output={{folder}}/out.jsonl",
            "job.resume=never",
        ]
        number = iter(range(10**9))
        def one():
            out = folder / f"run {{next(number) % 2}}"
            import shutil
            if os.environ.get("RANK", "0") == "0":
                shutil.rmtree(out, ignore_errors=True)
            assert launch.main([*arguments, f"job.run_dir={{out}}"]) == 0
        return one

    def steps():
        # One call of many steps is one repetition of 200.
        llm = new_llm()
        many = SamplingParams(max_tokens=50, ignore_eos=True, temperature=1.0)
        return lambda: llm.generate(prompts * 4, many, use_tqdm=False)

    growth = Growth(locals()[what](), [folder])
    growth.repeat(count)
    sys.exit(report(growth, max_bytes))
    """


def run(what: str, count: int, size: int, max_bytes: int, folder: Any) -> tuple[int, list[dict[str, Any]], str]:
    arguments = [what, str(count), str(size), str(max_bytes), folder]
    done = ranks.run_ranks(COMMON, size, LIMIT_S, arguments, has_agent_store=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print(f"\nGROWTH {what}, {size} ranks: {json.dumps(line)}", end="")
    return done.returncode, lines, done.output


@pytest.mark.gate("engines-2", "jobs-1")
@pytest.mark.guarantee("close() gives back what was taken")
@pytest.mark.matrix
@pytest.mark.parametrize(("what", "size"), [("calls", 2), ("cycles", 2), ("engines", 2), ("jobs", 1)])
def test_few_jobs_leave_no_resources_behind(what: str, size: int, tmp_path):
    returncode, lines, output = run(what, 4, size, 1 << 40, tmp_path)
    assert returncode == 0, output
    assert len(lines) == size


@pytest.mark.gate("leaking_threads-*")
@pytest.mark.control("close() gives back what was taken")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("what", "count", "grown"), [("leaking_calls", 40, "resident_bytes"), ("leaking_threads", 8, "threads")]
)
def test_growth_count_detects_leftovers(what: str, count: int, grown: str, tmp_path):
    """Negative control."""
    returncode, lines, output = run(what, count, 1, MIB, tmp_path)
    assert returncode != 0, output
    assert f"{grown} grew" in str(lines), output


MANY = [("jobs", 100, 1), ("cycles", 100, 1), ("cycles", 100, 2)]
MANY += [(what, count, size) for size in (1, 2) for what, count in (("calls", 1000), ("engines", 200))]
MANY += [("steps", 400, 1), ("steps", 100, 2)]


@pytest.mark.stress
@pytest.mark.parametrize(("what", "count", "size"), MANY)
def test_many_leave_nothing(what: str, count: int, size: int, tmp_path):
    returncode, lines, output = run(what, count, size, 8 * MIB, tmp_path)
    assert returncode == 0, output
    assert len(lines) == size, output
