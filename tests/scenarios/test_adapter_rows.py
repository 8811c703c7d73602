"""Rows with LoRA adapters depend on the row and its adapter alone, bit for bit; and old blocks are never found.

64 rows with five adapters and none, mixed: in one batch and alone, in chunks, preempted, with prefix hits, with few
adapters a step, in stages and replicas of ranks, and in a job that was killed.
"""

import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
from adapter_folders import write_adapter
from cut_jobs import Ended, end_after
from jobs_of_rows import answers_of_job
from run_folder import made_once

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import AdapterError

Answer = tuple[list[int], list[float]]

NUM_ROWS, NUM_ADAPTERS, NUM_BLOCKS = 64, 5, 300
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = (ALL_LINEAR, ("q_proj", "v_proj"), ("down_proj",), ("k_proj", "gate_proj", "up_proj"), ALL_LINEAR)
RANKS = (4, 8, 16, 3, 20)
SMALL = {"block_size": 2, "num_blocks": 60, "max_num_batched_tokens": 96, "max_num_seqs": 14, "max_model_len": 96}
CASES: dict[str, dict[str, Any]] = {
    "batch": {},
    "swapped in chunks of 17, one adapter a step": {
        **SMALL,
        "max_num_batched_tokens": 17,
        "preemption_mode": "swap",
        "max_loras": 1,
    },
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "recomputed": {**SMALL, "preemption_mode": "recompute"},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "two adapters a step": {"max_loras": 2},
    "chunks of 50": {"max_num_batched_tokens": 50, "max_num_seqs": 50},
    "whole prompts": {"enable_chunked_prefill": False},
    "a step ahead": {"async_scheduling": True},
    "a step ahead, swapped": {**SMALL, "preemption_mode": "swap", "async_scheduling": True},
    "without a prefix cache": {"enable_prefix_caching": False},
    "small blocks": {"block_size": 4, "num_blocks": 1200},
}


@cache
def folders() -> tuple[Path, list[Path]]:
    """A model, and five adapters for it."""
    from reference_models import checkpoint_folder  # slow to import, so not on ranks

    model = checkpoint_folder("llama3")
    root = made_once("adapters of rows", lambda folder: write_adapters(folder, model))
    return model, [root / str(number) for number in range(NUM_ADAPTERS)]


def write_adapters(folder: Path, model: Path) -> None:
    for number, (targets, rank) in enumerate(zip(TARGETS, RANKS, strict=True)):
        write_adapter(folder / str(number), model, 1 + number, targets, rank, scale=0.3)


def rows() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Greedy and sampled rows of 1 to 60 tokens; six neighbours have one prompt, each with another adapter."""
    ids = [3 + (7 * each + each * each) % 190 for each in range(60)]
    prompts = [{"prompt_token_ids": ids[: length_of(row)]} for row in RANGE]
    greedy = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 1}
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.9, "top_k": 40}]
    return prompts, [SamplingParams(**{**greedy, **kinds[i // 6 % 3], "seed": i}) for i in RANGE]


RANGE = range(NUM_ROWS)


def length_of(row: int) -> int:
    return (1, 16, 33, 60, 7, 48)[row // 6 % 6]


def request_of(row: int, adapters: list[Path]) -> LoRARequest | None:
    number = row % (NUM_ADAPTERS + 1)
    return LoRARequest(f"a{number}", number, str(adapters[number - 1])) if number else None


def answers(llm: LLM, adapters: list[Path], order: list[int], *, are_alone: bool = False) -> list[Answer]:
    """Tokens and log-probabilities of the rows, each with its adapter."""
    prompts, params = rows()
    found: dict[int, Answer] = {}
    for group in [[row] for row in order] if are_alone else [order]:
        requests = [request_of(row, adapters) for row in group]
        outputs = llm.generate(
            [prompts[row] for row in group], [params[row] for row in group], use_tqdm=False, lora_request=requests
        )
        for row, output in zip(group, outputs, strict=True):
            (completion,) = output.outputs
            logprobs = [entry.logprob for step in completion.logprobs or [] for entry in step.values()]
            found[row] = (list(completion.token_ids), logprobs)
    return [found[row] for row in sorted(order)]


def open_llm(model: Path, **arguments: Any) -> LLM:
    settings = {"num_blocks": NUM_BLOCKS, "max_loras": NUM_ADAPTERS, "max_cpu_loras": NUM_ADAPTERS, **arguments}
    return LLM(model, enable_lora=True, **settings)


@cache
def expected(dtype: str) -> list[Answer]:
    """Answers of each row alone."""
    model, adapters = folders()
    with open_llm(model, dtype=dtype) as llm:
        return answers(llm, adapters, list(RANGE), are_alone=True)


STRESSED = [("bfloat16", case) for case in CASES]
STRESSED += [(dtype, case) for dtype in ("float32", "bfloat16") for case in MORE_CASES]


def check_case(dtype: str, case: str) -> None:
    model, adapters = folders()
    settings = {**CASES, **MORE_CASES}[case]
    with open_llm(model, dtype=dtype, **settings) as llm:
        assert answers(llm, adapters, list(RANGE)) == expected(dtype)
        assert answers(llm, adapters, list(reversed(RANGE))) == expected(dtype), "with prefix hits"
        counters = llm.llm_engine.counters
        assert (counters.num_preemptions > 0) == ("preemption_mode" in settings)


@pytest.mark.guarantee("A row with an adapter depends on the row and the adapter alone")
@pytest.mark.parametrize("case", CASES)
def test_rows_with_adapters_are_as_alone(case: str):
    check_case("float32", case)


@pytest.mark.stress
@pytest.mark.parametrize(("dtype", "case"), STRESSED)
def test_more_rows_with_adapters_are_as_alone(dtype: str, case: str):
    check_case(dtype, case)


@pytest.mark.control("A row with an adapter depends on the row and the adapter alone")
def test_comparison_detects_rows_with_other_adapters(control):
    model, adapters = folders()
    with open_llm(model) as llm:
        found = answers(llm, [*adapters[1:], adapters[0]], list(RANGE))
    same = [one == other for one, other in zip(found, expected("float32"), strict=True)]
    assert same == [row % (NUM_ADAPTERS + 1) == 0 for row in RANGE]
    with control():
        assert found == expected("float32")


def test_old_blocks_are_never_found(tmp_path: Path):
    """An id that is used again, a name that is loaded again, and contents that come back."""
    model, adapters = folders()
    prompts, params = [{"prompt_token_ids": list(range(3, 63))}] * 2, SamplingParams(temperature=0, max_tokens=4)

    def ask(llm: LLM, request: LoRARequest | None) -> tuple[list[int], int]:
        outputs = llm.generate(prompts[:1], params, use_tqdm=False, lora_request=request)
        return list(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens or 0

    alone = {}
    for number, folder in enumerate(adapters[:3]):
        with open_llm(model) as llm:
            alone[number], _ = ask(llm, LoRARequest("alone", 1, str(folder)))
    assert len({tuple(each) for each in alone.values()}) == 3
    with open_llm(model) as llm:
        first, second = (LoRARequest("policy", 1, str(each)) for each in adapters[:2])
        assert ask(llm, first) == (alone[0], 0)
        assert ask(llm, first) == (alone[0], 48)
        assert llm.llm_engine.remove_lora(1)
        assert ask(llm, second) == (alone[1], 0), "its id was another's"
        with pytest.raises(AdapterError, match="lora_int_id=1 is loaded as 'policy'"):
            ask(llm, LoRARequest("policy", 1, str(adapters[2])))
        shutil.copytree(adapters[2], tmp_path / "policy")
        assert ask(llm, LoRARequest("policy", 1, str(tmp_path / "policy"), load_inplace=True)) == (alone[2], 0)
        shutil.copytree(adapters[0], tmp_path / "policy", dirs_exist_ok=True)
        assert ask(llm, LoRARequest("policy", 1, str(tmp_path / "policy"), load_inplace=True)) == (alone[0], 48)
        assert ask(llm, LoRARequest("same content", 7, str(adapters[0]))) == (alone[0], 48)


def test_hundred_runs_of_one_row_agree():
    """Rows of other adapters run beside it, each time others."""
    model, adapters = folders()
    wanted, prompt = 7, rows()[0][7]
    with open_llm(model, enable_prefix_caching=False) as llm:
        requests = [request_of(wanted if index % 2 else index, adapters) for index in range(200)]
        outputs = llm.generate([prompt] * 200, rows()[1][wanted], use_tqdm=False, lora_request=requests)
    found = [output.outputs[0].token_ids for output in outputs[1::2]]
    assert found == [expected("float32")[wanted][0]] * 100


def test_killed_job_with_adapters_resumes_with_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, adapters = folders()
    named = {f"a{number}": str(folder) for number, folder in enumerate(adapters)}
    prompts, _ = rows()
    given = [{**prompts[row], "max_tokens": 4, "temperature": 0.9} for row in range(24)]
    given = [{**each, "adapter": f"a{row % 6}"} if row % 6 < NUM_ADAPTERS else each for row, each in enumerate(given)]

    def run(folder: Path) -> bytes:
        folder.mkdir(exist_ok=True)
        answers_of_job(folder, model, given, options={"adapters": named})
        return (folder / "out.jsonl").read_bytes()

    unbroken = run(tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        end_after(patch, 9)
        with pytest.raises(Ended):
            run(tmp_path / "killed")
    assert run(tmp_path / "killed") == unbroken
    assert b'"error": {' not in unbroken


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"data_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}


def on_rank(model: Path, adapters: list[Path], cut: Path, alone: list[Answer]) -> None:
    """All layouts, one after the other; on rank 1 the files of an adapter are cut short."""
    rank = os.environ["RANK"]
    for name, layout in LAYOUTS.items():
        with open_llm(model, max_num_batched_tokens=64, max_num_seqs=24, **layout) as llm:
            found = answers(llm, adapters, list(RANGE))
            check_layout(name, found, alone)
            broken = LoRARequest("cut", 99, str(cut if rank == "1" else adapters[0]), load_inplace=True)
            loaded = llm.llm_engine.list_loras()
            try:
                llm.llm_engine.add_lora(broken)
            except AdapterError as error:
                # One write: print's two may mix with the other rank's.
                os.write(1, (f"rank {rank}, {name}: {error}".replace("\n", " ") + "\n").encode())
            assert llm.llm_engine.list_loras() == loaded
            assert answers(llm, adapters, list(range(6))) == found[:6]


def check_layout(name: str, found: list[Answer], alone: list[Answer]) -> None:
    if name != "tensor":
        assert found == alone, name
        return
    for (ids, logprobs), (expected_ids, others) in zip(found, alone, strict=True):
        assert ids == expected_ids
        assert max(abs(ours - theirs) for ours, theirs in zip(logprobs, others, strict=True)) < 1e-4


@pytest.mark.guarantee("Rows with adapters have equal answers in all layouts")
def test_layouts_agree_and_survive_a_cut_file(tmp_path: Path):
    model, adapters = folders()
    cut = tmp_path / "cut"
    shutil.copytree(adapters[0], cut)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    (tmp_path / "alone.json").write_text(json.dumps(expected("float32")))
    arguments = [model, json.dumps([*map(str, adapters)]), cut, tmp_path / "alone.json"]
    done = ranks.run_forked([__file__, *arguments], 2, timeout_s=120).checked()
    for rank in (0, 1):
        for layout in ("replicas", "stages", "tensor"):
            line = next(each for each in done.stdout.splitlines() if each.startswith(f"rank {rank}, {layout}: "))
            assert f"rank 1: {cut}" in line
            assert "truncated" in line


@pytest.mark.control("Rows with adapters have equal answers in all layouts")
def test_layout_comparison_detects_another_answer(control):
    alone = expected("float32")
    for layout in LAYOUTS:
        with control():
            check_layout(layout, [*alone[6:12], *alone[6:]], alone)


if __name__ == "__main__":
    answers_alone = [(ids, logprobs) for ids, logprobs in json.loads(Path(sys.argv[4]).read_text())]
    on_rank(Path(sys.argv[1]), [Path(each) for each in json.loads(sys.argv[2])], Path(sys.argv[3]), answers_alone)
