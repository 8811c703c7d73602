"""A worker event of an extension, while a request runs: refused by one rank, undone on all; else committed on all."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import WorkerEventError

TP, PP, DP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}
SCRIPT, MULTIPROC = __file__, {"distributed_executor_backend": "multiproc"}
REFUSED = "worker event 'turn_norms' was undone on every rank: rank 1: ValueError: no room"


class Extension:
    def prepare_turn_norms(self, refusing_rank: int | None) -> list[Any]:
        if self.environment.rank == refusing_rank:
            raise ValueError("no room")
        return [(weight, -weight.data) for name, weight in self.get_model().named_parameters() if "norm" in name]

    def commit_turn_norms(self, staged: list[Any]) -> int:
        return len([weight.data.copy_(turned) for weight, turned in staged])


def main(folder: Path, **options: Any) -> None:
    """What a rank sees, in a file: text, ids of a request, the refusal meanwhile, text, whether all had norms, text."""
    model, params = ranks.REPOSITORY / "scripts/demo/model", SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, worker_extension_cls="test_worker_events.Extension", device="cpu", num_blocks=64, **options) as llm:
        seen = [llm.generate("sort 21 7 =", params)[0].outputs[0].text]
        llm.llm_engine.add_request((7, 8, 9), params)
        with pytest.raises(WorkerEventError) as refused:
            llm.worker_event("turn_norms", 1)
        while llm.llm_engine.has_unfinished_requests():
            seen += [each.outputs[0].token_ids for each in llm.llm_engine.step()]
        seen += [str(refused.value), llm.generate("sort 21 7 =", params)[0].outputs[0].text]
        seen += [min(llm.worker_event("turn_norms", reset_prefix_cache=True)) > 0]
        seen += [llm.generate("sort 21 7 =", params)[0].outputs[0].text]
        (folder / str(llm.llm_engine.engine_channel.rank)).write_text(json.dumps(seen))


@pytest.mark.gate(
    "{'tensor_parallel_size': 2}", "{'pipeline_parallel_size': 2, 'distributed_executor_backend': 'multiproc'}"
)
@pytest.mark.guarantee("Worker events change all workers or none")
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    "layout",
    [
        TP,
        {**PP, **MULTIPROC},
        *(pytest.param(each, marks=pytest.mark.matrix) for each in (PP, DP, {**TP, **MULTIPROC})),
    ],
    ids=str,
)
def test_a_worker_event(layout: dict[str, Any], tmp_path: Path):
    if "distributed_executor_backend" in layout:
        main(tmp_path, **layout)
    else:
        ranks.run_forked([SCRIPT, json.dumps(layout), tmp_path], nproc=2, timeout_s=240).checked()
    seen = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    for first, running, refused, after_refused, have_norms, after_committed in seen:
        assert (refused, after_refused, running, have_norms) == (REFUSED, first, seen[0][1], True)
        assert after_committed == seen[0][-1] != first


if __name__ == "__main__":
    main(Path(sys.argv[2]), **json.loads(sys.argv[1]))
