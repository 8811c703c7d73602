"""Ranks under torchrun: every rank gets the same ids and log-probabilities, equal to those of a single rank.

The matrix of SURFACE.md, "External launcher", rows 1 to 5 and 7, for tensor-parallel sizes 2 and 4.
`test_embedding_manners.py` has more of row 1. In row 5 the ranks make two engines of half the size, each with its own
prompts. pytest starts this file under torchrun; the ranks record their results.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.worker import start

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
PROMPTS = ["copy a m v s j l =", "reverse h x a f w =", "sort 21 87 57 15 =", "copy q ="]
PARAMS = {
    "of the row": SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=16, logprobs=2, ignore_eos=True),
    "of the job": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, logprobs=2, ignore_eos=True),
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True),
}
"""By where the seed is from."""
CALLS_OF_ENGINES = ([PROMPTS[:3], [], PROMPTS[3:]], [[], PROMPTS[1:2]])
"""By engine, in row 5: the prompts of each call of `generate`."""
BUDGETS = (0.9, 0.5, 0.7, 0.6)
"""By rank: `gpu_memory_utilization`."""
MEMORY_BYTES = 16 << 20
"""What each rank is told its machine has, so that budgets and not need decide on the number of blocks."""
LOGPROB_TOLERANCE = 1e-4
LIMIT_S = 240.0

Report = dict[str, Any]


# In pytest.

WORLDS = [pytest.param(2, id="tp2"), pytest.param(4, id="tp4", marks=pytest.mark.stress)]


@pytest.fixture(scope="module", params=WORLDS)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Each rank's report. The ranks have exited with 0 in time and no process is left: row 7."""
    folder = tmp_path_factory.mktemp("launcher")
    done = ranks.run_torchrun([__file__, folder], request.param, LIMIT_S, is_fresh=request.param == 4)
    check_ended_well(done)
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)]
    return [{**report, "values": load_file(folder / f"rank{rank}.safetensors")} for rank, report in enumerate(reports)]


def check_ended_well(done: ranks.CompletedRanks) -> None:
    assert done.returncode == 0, done.output


@pytest.fixture(scope="module")
def alone() -> Iterator[Report]:
    """The report of one rank, in this process."""
    with LLM(MODEL, dtype="float32", device="cpu", num_blocks=64, seed=0) as llm:
        yield {"outputs": outputs_of(llm), "parameters": parameters_of(llm), "values": values_of(llm)}


@pytest.mark.parametrize("params", PARAMS)
def test_outputs_are_bit_identical_on_all_ranks(reports: list[Report], params: str):
    for report in reports[1:]:
        assert report["outputs"][params] == reports[0]["outputs"][params]


@pytest.mark.parametrize("params", PARAMS)
def test_second_generate_repeats_only_with_seeds(reports: list[Report], params: str):
    for report in reports:
        assert report["outputs again"] == reports[0]["outputs again"]
        is_same = report["outputs again"][params] == report["outputs"][params]
        assert is_same == (params != "of the job")


@pytest.mark.parametrize("params", PARAMS)
def test_ids_equal_one_rank_and_logprobs_nearly(reports: list[Report], alone: Report, params: str):
    for mine, theirs in zip(reports[0]["outputs"][params], alone["outputs"][params], strict=True):
        assert (mine["prompt"], mine["text"], mine["ids"]) == (theirs["prompt"], theirs["text"], theirs["ids"])
        for ours, other in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            assert ours.keys() == other.keys()
            for token, value in ours.items():
                assert float.fromhex(value) == pytest.approx(float.fromhex(other[token]), abs=LOGPROB_TOLERANCE)


def test_sampling_is_sampling_and_the_comparison_compares_something(reports: list[Report]):
    """Negative control: other seeds and greedy decoding give other tokens."""
    ids = {name: [row["ids"] for row in rows] for name, rows in reports[0]["outputs"].items()}
    assert ids["of the row"] != ids["of the job"] != ids["greedy"] != ids["of the row"]
    assert all(len(row) == 16 for rows in ids.values() for row in rows)
    assert all(len(entry) >= 2 for rows in reports[0]["outputs"].values() for row in rows for entry in row["logprobs"])


def test_ranks_agree_on_the_minimum_number_of_blocks(reports: list[Report]):
    measured = [report["own blocks"] for report in reports]
    assert len({tuple(each) for each in measured}) == len(measured), measured
    smallest = [min(device for device, _ in measured), min(host for _, host in measured)]
    for report in reports:
        assert report["agreed blocks"] == smallest
        assert report["scheduler's blocks"] == smallest[0]


def test_caller_can_access_local_shard_parameters(reports: list[Report], alone: Report):
    whole = alone["parameters"]
    for report in reports:
        assert report["parameters"].keys() == whole.keys()
    num_cut = 0
    for name, shape in whole.items():
        parts = [report["parameters"][name] for report in reports]
        cut = [dim for dim, size in enumerate(shape) if any(part[dim] != size for part in parts)]
        assert not cut or sum(part[cut[0]] for part in parts) == shape[cut[0]], (name, parts)
        num_cut += len(cut)
    assert num_cut == 7 * 4 + 1, "each matrix of each layer, and the embedding"


def test_local_parameters_equal_the_ranks_checkpoint_shard(reports: list[Report], alone: Report):
    whole = load_file(MODEL / "model.safetensors")
    assert alone["values"].keys() == whole.keys()
    for name, expected in whole.items():
        parts = [report["values"][name] for report in reports]
        if parts[0].shape == expected.shape:
            assert all(torch.equal(part, expected.float()) for part in parts), name
        else:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat(parts, dim), expected.float()), name
            # Negative control: another rank's part is another.
            assert not torch.equal(torch.cat(parts[::-1], dim), expected.float()), name


def test_callers_process_group_gives_equal_outputs(reports: list[Report]):
    for report in reports:
        assert report["outputs in the caller's world"] == report["outputs"]["of the row"]
        assert report["caller's sum"] == sum(range(len(reports)))


@pytest.mark.guarantee("Engines in one world know nothing of each other")
def test_surplus_ranks_form_independent_engines(reports: list[Report], alone: Report):
    """Uneven numbers of prompts, none included, other seeds and other parameters: nobody waits for the other engine."""
    expected = {row["prompt"]: row for row in alone["outputs"]["of the row"]}
    for rank, report in enumerate(reports):
        engine = rank * 2 // len(reports)
        calls = report["outputs of an engine of half the size"]
        assert [[row["prompt"] for row in rows] for rows in calls] == CALLS_OF_ENGINES[engine]
        for row in (row for rows in calls for row in rows):
            assert row["ids"] == expected[row["prompt"]]["ids"]
            assert row["text"] == expected[row["prompt"]]["text"]


ACQUAINTED = """
    import os
    import torch.distributed as dist
    import test_external_launcher as launcher
    from spmd_worker.ranks.communicator import GroupHandle
    from spmd_worker.ranks.transport.channel import ControlChannel

    def new_llm(*given, right=launcher.new_llm, **named):
        llm = right(*given, **named)
        llm.llm_engine.engine_channel = ControlChannel(GroupHandle((0, 1), rank, dist.group.WORLD))
        return llm

    rank, launcher.new_llm = int(os.environ["RANK"]), new_llm
    dist.init_process_group("gloo")
    launcher.outputs_of_half_the_ranks(rank, 2)
"""
"""The ranks of two engines compare the calls that they make."""


@pytest.mark.control("Engines in one world know nothing of each other")
def test_engines_that_know_of_each_other_are_seen(control):
    """Negative control."""
    done = ranks.run_ranks(ACQUAINTED, 2, LIMIT_S)
    with control("number of prompts is 3 on rank 0, 0 on rank 1"):
        check_ended_well(done)


def test_incomplete_engine_of_ranks_is_an_error(reports: list[Report]):
    size = len(reports)
    for report in reports:
        assert report["error for too few ranks"] == (
            f"tensor_parallel_size={size * 2} x pipeline_parallel_size=1 x "
            f"data_parallel_size=1 is {size * 2} ranks per engine, but {size} were started: start a multiple "
            f"of {size * 2} (torchrun --nproc-per-node)"
        )


# On the ranks.


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start.measure_host = lambda weights, activations, local_world_size: MemoryMeasurement(MEMORY_BYTES, weights, 0, 0)
    start.profile_host = lambda measurement, max_step: measurement
    report: Report = {}
    with new_llm(size, gpu_memory_utilization=BUDGETS[rank]) as llm:
        report["outputs"] = outputs_of(llm)
        report["outputs again"] = outputs_of(llm)
        report["parameters"] = parameters_of(llm)
        save_file(values_of(llm), folder / f"rank{rank}.safetensors")
        report["own blocks"], report["agreed blocks"] = blocks_of(llm)
        report["scheduler's blocks"] = llm.llm_engine.scheduler.cache.num_blocks
    try:
        new_llm(size * 2, num_blocks=64)
    except ConfigError as error:
        report["error for too few ranks"] = str(error)
    report["outputs of an engine of half the size"] = outputs_of_half_the_ranks(rank, size)
    dist.init_process_group("gloo")
    with new_llm(size, num_blocks=64) as llm:
        report["outputs in the caller's world"] = rows_of(llm, PARAMS["of the row"])
    total = torch.tensor([rank])
    dist.all_reduce(total)
    report["caller's sum"] = total.item()
    dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


def new_llm(size: int, **options: object) -> LLM:
    fixed = {"dtype": "float32", "device": "cpu", "seed": 0, "timeout_s": LIMIT_S}
    return LLM(MODEL, tensor_parallel_size=size, **fixed, **options)


def outputs_of_half_the_ranks(rank: int, size: int) -> list[list[Report]]:
    """Outputs of this rank's engine, one of two."""
    engine = rank * 2 // size
    with new_llm(size // 2, num_blocks=64 + engine) as llm:
        return [rows_of(llm, PARAMS["of the row"], each) for each in CALLS_OF_ENGINES[engine]]


def outputs_of(llm: LLM) -> dict[str, list[Report]]:
    return {name: rows_of(llm, params) for name, params in PARAMS.items()}


def rows_of(llm: LLM, params: SamplingParams, prompts: list[str] = PROMPTS) -> list[Report]:
    rows = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (completion,) = output.outputs
        logprobs = [{str(token): entry.logprob.hex() for token, entry in each.items()} for each in completion.logprobs]
        rows.append(
            {"prompt": output.prompt, "text": completion.text, "ids": completion.token_ids, "logprobs": logprobs}
        )
    return rows


def parameters_of(llm: LLM) -> dict[str, list[int]]:
    (shapes,) = llm.apply_model(lambda model: {name: list(each.shape) for name, each in model.named_parameters()})
    return shapes


def values_of(llm: LLM) -> dict[str, torch.Tensor]:
    (values,) = llm.apply_model(lambda model: {name: each.clone() for name, each in model.named_parameters()})
    return values


def blocks_of(llm: LLM) -> tuple[list[int], list[int]]:
    """Device and host blocks: what this rank had room for, and what it has."""
    (local,) = llm.collective_rpc(lambda local: local)
    cache = local.running.caches.engine
    room = [local.sizing.num_device_blocks, local.sizing.num_host_blocks]
    return room, [cache.num_device_blocks, cache.num_host_blocks]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
