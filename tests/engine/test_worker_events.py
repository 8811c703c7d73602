"""A worker event: what an extension adds is prepared on all ranks, and then committed on all or undone on all.

pytest runs `main` in this process (one rank, worker processes) and this file on forked ranks, as under torchrun.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

from spmd_worker import LLM, SamplingParams, WorkerEventError

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
REFUSED = "worker event 'turn_norms' was undone on every rank: rank 1: ValueError: no room for 'turned'"


class Extension:
    """Worker event `turn_norms`: norms of the opposite sign, which give other answers."""

    def prepare_turn_norms(self, payload: dict[str, Any]) -> list[Any]:
        if self.environment.rank == payload["refuses"]:  # type: ignore[attr-defined]  # the worker's
            raise ValueError(f"no room for {payload['name']!r}")
        named = self.get_model().named_parameters()  # type: ignore[attr-defined]  # the worker's
        return [(weight, -weight.data) for name, weight in named if "norm" in name]

    def commit_turn_norms(self, staged: list[Any]) -> int:
        for weight, turned in staged:
            weight.data.copy_(turned)
        return self.environment.rank  # type: ignore[attr-defined]  # the worker's


def main(llm: LLM, refuses: int) -> dict[str, Any]:
    """What a rank sees: answers, a refused event among running requests, answers, a committed one, answers."""
    seen: dict[str, Any] = {"first": texts(llm)}
    for prompt in range(3):
        llm.llm_engine.add_request((7 + prompt, 8, 9), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    llm.llm_engine.step()
    try:
        seen["results"] = llm.worker_event("turn_norms", {"name": "turned", "refuses": refuses})
    except WorkerEventError as error:
        seen["refused"] = str(error)
    running = []
    while llm.llm_engine.has_unfinished_requests():
        running += [output.outputs[0].token_ids for output in llm.llm_engine.step()]
    seen |= {"running": running, "after refused": texts(llm)}
    seen["committed"] = llm.worker_event("turn_norms", {"name": "turned", "refuses": None})
    llm.reset_prefix_cache()
    return {**seen, "after committed": texts(llm)}


def texts(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=12)
    return [each.outputs[0].text for each in llm.generate(["copy a m v =", "sort 21 7 15 ="], params, use_tqdm=False)]


def new_llm(**options: Any) -> LLM:
    here = f"{Path(__file__).stem}.Extension"
    return LLM(MODEL, device="cpu", dtype="float32", num_blocks=64, timeout_s=30, worker_extension_cls=here, **options)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    with new_llm() as llm:
        return main(llm, refuses=-1)


def on_ranks(folder: Path, options: dict[str, int], *variant: str) -> list[dict[str, Any]]:
    done = ranks.run_forked([__file__, json.dumps(options), folder, *variant], nproc=2, timeout_s=60)
    assert done.returncode == 0, done.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check(seen: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """`alone` committed the first event and, by the second, turned the norms back."""
    assert alone["results"] == alone["committed"] == [0]
    assert alone["after committed"] == alone["first"] != alone["after refused"]
    for each in seen:
        assert each["refused"] == REFUSED
        assert each["after refused"] == each["first"] == alone["first"]
        assert each["after committed"] == alone["after refused"]
        assert [len(token_ids) for token_ids in each["running"]] == [9, 9, 9]
        assert each["running"] == seen[0]["running"]


@pytest.mark.parametrize("layout", [TP, PP], ids=["tp2", "pp2"])
def test_on_ranks_of_a_launcher_one_refusal_undoes_all_and_no_refusal_commits_all(layout, alone, tmp_path: Path):
    seen = on_ranks(tmp_path, layout)
    check(seen, alone)
    assert [each["committed"] for each in seen] == [[0], [1]]


@pytest.mark.parametrize("layout", [TP, PP], ids=["tp2", "pp2"])
def test_in_worker_processes_too(layout, alone):
    with new_llm(**layout, distributed_executor_backend="multiproc") as llm:
        seen = main(llm, refuses=1)
    check([seen], alone)
    assert seen["committed"] == [0, 1]


def test_a_rank_that_commits_before_the_others_are_ok_is_seen(alone, tmp_path: Path):
    """Negative control."""
    seen = on_ranks(tmp_path, TP, "hasty")
    with pytest.raises(AssertionError):
        check(seen, alone)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from spmd_worker.worker.worker_base import WorkerBase

    if "hasty" in sys.argv:
        prepare = WorkerBase.prepare_event

        def prepare_and_commit(self: WorkerBase, name: str, payload: Any) -> str:
            problem = prepare(self, name, payload)
            return problem or (WorkerBase.end_event(self, is_committed=True), prepare(self, name, payload))[1]

        WorkerBase.prepare_event = prepare_and_commit
    with new_llm(**json.loads(sys.argv[1])) as opened:
        report = main(opened, refuses=1)
        rank = opened.llm_engine.channel.rank
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(report))
