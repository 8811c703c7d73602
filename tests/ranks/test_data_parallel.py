"""Replicas share the prompts and every rank gets one rank's answers, whoever computed them.

Each launch does many things, because starting ranks takes seconds. Float32, so that answers are equal to the last bit.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ranks
from plain_outputs import without_times
from reference_models import VOCAB_SIZE, checkpoint_folder, mixed_prompts, random_prompt

from spmd_worker import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = replace(GREEDY, temperature=0.9, prompt_logprobs=None)
KINDS = [
    GREEDY,
    DRAWN,
    replace(DRAWN, seed=7, logprobs=None),
    replace(DRAWN, n=3, top_k=20),
    replace(DRAWN, n=1, best_of=3),
    replace(DRAWN, max_tokens=20),
]
NUM_GOOD = 12
PROMPTS = [*mixed_prompts(NUM_GOOD, 60, seed=5), random_prompt(300, 0), [VOCAB_SIZE], []]
PARAMS = [*(KINDS[index % len(KINDS)] for index in range(NUM_GOOD)), GREEDY, GREEDY, GREEDY]
CALLS = {
    "many": range(len(PROMPTS)),
    "four": range(4),
    "one": range(1, 2),
    "none": range(0),
    "refused only": range(NUM_GOOD, len(PROMPTS)),
    "many again": range(len(PROMPTS)),
}
"""By name: which of the prompts, in the order of the calls."""
# Few at once, so that no replica has room for all.
SETTINGS = {
    "num_blocks": 100,
    "max_model_len": 190,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "dtype": "float32",
}

ANSWERS = """
import json, os, sys, time
from plain_outputs import without_times
from replica_parts import give_every_replica_a_part
from pathlib import Path
import torch.distributed as dist
from spmd_worker import LLM, SamplingParams
from spmd_worker.ranks.groups import shared_store
from spmd_worker.engine.data_parallel import round as round_module

job, out, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(os.environ["RANK"])
prompts, params = job["prompts"], [SamplingParams(**each) for each in job["params"]]
report = {"calls": {}, "own": {}, "errors": {}}

def generate(llm, places):
    return [without_times(each) for each in llm.generate([prompts[i] for i in places], [params[i] for i in places],
                                                  on_error="row", use_tqdm=False)]

def attempt(name, action):
    try:
        action()
        text = "none"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    report["errors"][name] = text

give_every_replica_a_part(job["sizes"]["data_parallel_size"])

def new_llm():
    return LLM(job["folder"], **job["sizes"], **job["settings"])

with new_llm() as llm:
    engine = llm.llm_engine
    for name, places in job["calls"].items():
        before = engine.counters.num_finished
        report["calls"][name] = generate(llm, places)
        report["own"][name] = engine.counters.num_finished - before
    attempt("other prompts", lambda: llm.generate([[20 + rank], [21]], params[0], use_tqdm=False))
    attempt("other number", lambda: llm.generate([[20]] * (1 + rank // 2 + rank % 2), params[0], use_tqdm=False))
    report["calls"]["after errors"] = generate(llm, range(4))
    prefix = llm._replicas.prefix
    names = ("taken", "counted", "finished", "over", "heartbeat/0", "heartbeat/1")
    report["keys"] = [name for name in names if shared_store().check([f"{prefix}/round 1/{name}"])]
    # The control: a stream named by the order in which its replica took the prompts.
    admit = engine.requests.admit
    engine.requests.admit = lambda *given, index, **named: admit(*given, index=None, **named)
    report["control"] = generate(llm, job["calls"]["many"])

with new_llm() as first, new_llm() as second:
    report["calls"]["second engine"] = generate(second, range(8))
    report["calls"]["first engine"] = generate(first, range(4))
    if rank == job["culprit"]:
        execute = second.llm_engine.executor.execute_model
        def fail(plan, *others, **named):
            if plan.num_tokens > 0:
                raise ValueError("no more")
            return execute(plan, *others, **named)
        second.llm_engine.executor.execute_model = fail
    attempt("failure", lambda: generate(second, job["calls"]["many"]))
    attempt("after failure", lambda: generate(second, range(2)))
report["groups"] = dist.is_initialized()
(out / f"{rank}.json").write_text(json.dumps(report))
"""


def reports_of(size: int, tmp_path: Path, *, culprit: int, **sizes: int) -> list[dict[str, Any]]:
    """What every rank saw, in rank order."""
    job = {
        "folder": str(checkpoint_folder("llama3")),
        "prompts": PROMPTS,
        "params": [asdict(each) for each in PARAMS],
        "calls": {name: list(places) for name, places in CALLS.items()},
        "settings": SETTINGS,
        "sizes": sizes,
        "culprit": culprit,
    }
    return ranks.reports_of_job(ANSWERS, size, tmp_path, job)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[dict[str, Any]]]:
    """What one rank answers, as the ranks write it."""
    answers = {}
    # By engine: what a row draws depends on the number of the call.
    for calls in ({**CALLS, "after errors": range(4)}, {"second engine": range(8)}, {"first engine": range(4)}):
        with LLM(checkpoint_folder("llama3"), **SETTINGS) as llm:
            for name, places in calls.items():
                prompts, params = [PROMPTS[i] for i in places], [PARAMS[i] for i in places]
                outputs = llm.generate(prompts, params, on_error="row", use_tqdm=False)
                answers[name] = [without_times(output) for output in outputs]
    return json.loads(json.dumps(answers))


def check(reports: list[dict[str, Any]], alone: dict[str, Any], num_replicas: int, tolerance: float) -> None:
    for report in reports[1:]:
        assert report["calls"] == reports[0]["calls"], "every rank has every output, equal to the last bit"
    for report in reports:
        assert report["calls"].keys() == alone.keys()
        for name, outputs in report["calls"].items():
            assert_same(outputs, alone[name], tolerance)
        assert report["keys"] == []
        assert not report["groups"], "closing leaves no group behind"
        assert "prompts[0]" in report["errors"]["other prompts"], report["errors"]
        assert "number of prompts" in report["errors"]["other number"], report["errors"]
    own = [report["own"] for report in reports[:: len(reports) // num_replicas]]
    assert sum(each["many"] for each in own) == NUM_GOOD
    assert min(each["many"] for each in own) > 0, "every replica had its part"
    assert sorted(each["one"] for each in own) == [0] * (num_replicas - 1) + [1]
    assert all(each["none"] == each["refused only"] == 0 for each in own)
    with pytest.raises(AssertionError):
        assert_same(reports[0]["control"], alone["many"], tolerance)


def assert_same(outputs: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """All but where prefixes were found: replicas have caches of their own."""
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        for key in ("request_id", "prompt_token_ids", "error", "finished"):
            assert ours[key] == theirs[key]
        for key in ("index", "token_ids", "text", "finish_reason", "stop_reason"):
            assert [each[key] for each in ours["outputs"]] == [each[key] for each in theirs["outputs"]]
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=tolerance)


def logprobs_of(output: dict[str, Any]) -> list[float]:
    """Of chosen and prompt tokens: which are the likeliest may be decided by rounding."""
    entries = [entry for entry in output["prompt_logprobs"] or [] if entry is not None]
    entries += [entry for each in output["outputs"] for entry in each["logprobs"] or []]
    return [next(iter(entry.values()))[0] for entry in entries]


def check_failure(reports: list[dict[str, Any]], words: tuple[str, ...], culprits: range) -> None:
    """All ranks hear of it in seconds, and none goes on."""
    for rank, report in enumerate(reports):
        text = report["errors"]["failure"]
        assert "no more" in text, (rank, text)
        if rank not in culprits:
            assert text.startswith("RankFailedError: "), (rank, text)
            assert all(word in text for word in words), (rank, text)
        text = report["errors"]["after failure"]
        assert text.startswith("RuntimeError: "), (rank, text)


@pytest.mark.guarantee("Replicas: one rank's bits, in calls and jobs", is_control_inside=True)
def test_two_replicas_match_one_rank(tmp_path: Path, alone: dict[str, Any]):
    reports = reports_of(2, tmp_path, culprit=1, data_parallel_size=2)
    check(reports, alone, 2, tolerance=0.0)
    check_failure(reports, ("rank 1 (replica 1) raised ValueError: no more",), range(1, 2))


@pytest.mark.stress
def test_three_replicas_match_one_rank(tmp_path: Path, alone: dict[str, Any]):
    """A call of four rows is answered too."""
    reports = reports_of(3, tmp_path, culprit=0, data_parallel_size=3)
    check(reports, alone, 3, tolerance=0.0)
    check_failure(reports, ("rank 0 (replica 0) raised ValueError: no more",), range(1))


@pytest.mark.stress
def test_two_replicas_of_two_ranks_match_one_rank(tmp_path: Path, alone: dict[str, Any]):
    """The rank that fails is not the one that speaks for its replica."""
    reports = reports_of(4, tmp_path, culprit=3, data_parallel_size=2, tensor_parallel_size=2)
    check(reports, alone, 2, tolerance=1e-4)
    check_failure(reports, ("replica 1, ranks 2 to 3", "rank 1 raised ValueError"), range(2, 4))


@pytest.mark.stress
def test_two_replicas_of_two_stages_match_one_rank(tmp_path: Path, alone: dict[str, Any]):
    reports = reports_of(4, tmp_path, culprit=1, data_parallel_size=2, pipeline_parallel_size=2)
    check(reports, alone, 2, tolerance=0.0)
    check_failure(reports, ("replica 0, ranks 0 to 1", "rank 1 raised ValueError"), range(2))


SEVERAL = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, SamplingParams

folder, settings, out, rank = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]), int(os.environ["RANK"])
with LLM(folder, data_parallel_size=2, **settings) as llm:
    params = SamplingParams(temperature=0.9, max_tokens=5, ignore_eos=True)
    calls = [[[20 + i, 30] for i in range(9)], [], [[50]]] if rank < 2 else [[], [[60]] * 4]
    answers = [[each.outputs[0].token_ids for each in llm.generate(call, params, use_tqdm=False)] for call in calls]
(out / f"{rank}.json").write_text(json.dumps(answers))
"""


@pytest.mark.matrix
def test_larger_world_holds_two_engines_with_own_prompts(tmp_path: Path):
    folder = checkpoint_folder("llama3")
    answers = ranks.reports(SEVERAL, 4, tmp_path, [folder, json.dumps(SETTINGS)])
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    params = SamplingParams(temperature=0.9, max_tokens=5, ignore_eos=True)
    for calls, found in (
        ([[[20 + i, 30] for i in range(9)], [], [[50]]], answers[0]),
        ([[], [[60]] * 4], answers[2]),
    ):
        with LLM(folder, **SETTINGS) as llm:
            expected = [[each.outputs[0].token_ids for each in llm.generate(c, params, use_tqdm=False)] for c in calls]
        assert found == expected


SILENT = """
import json, os, sys, time
from replica_parts import give_every_replica_a_part
from spmd_worker import LLM, SamplingParams

# The rows must not all be answered before rank 1 comes.
give_every_replica_a_part(2)
folder, settings, rank = sys.argv[1], json.loads(sys.argv[2]), int(os.environ["RANK"])
llm = LLM(folder, data_parallel_size=2, timeout_s=10, **settings)
params = SamplingParams(temperature=0, max_tokens=5)
llm.generate([[20]] * 8, params, use_tqdm=False)
if rank == 1:
    step = llm.llm_engine.executor.execute_model
    llm.llm_engine.executor.execute_model = lambda *given, **named: (time.sleep(60), step(*given, **named))[1]
try:
    llm.generate([[20]] * 50, params, use_tqdm=False)
except Exception as error:
    os.write(1, f"rank {rank}: {type(error).__name__}: {error}\\n".encode())
    os._exit(3)
"""


@pytest.mark.stress
def test_hanging_replica_is_named_after_the_timeout(tmp_path: Path):
    done = ranks.run_ranks(SILENT, 2, timeout_s=240, arguments=[checkpoint_folder("llama3"), json.dumps(SETTINGS)])
    assert done.returncode != 0
    assert "rank 0: RankFailedError: replica 1 is silent: no sign of life in 10 s" in done.stdout, done.output
