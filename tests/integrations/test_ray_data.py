"""Ray Data itself: answers equal a job's while actors and ranks are killed.

`scripts/doors/check.sh` has the library.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from door_rows import MODEL, OPTIONS, lines_of_job, numbered, plain_rows
from process_tree import started

NUM_ROWS = 120
ACTOR = "ray::MapWorker"
pytestmark = pytest.mark.stress


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    library = pytest.importorskip("ray")
    library.init(num_cpus=2, include_dashboard=False)
    yield library
    library.shutdown()


def given_rows() -> list[dict[str, Any]]:
    rows = plain_rows(NUM_ROWS)
    rows[7]["max_tokens"] = -1
    return rows


def dataset_of(library: Any, num_blocks: int) -> Any:
    rows = numbered(given_rows())
    # No order of blocks is the job's.
    return library.data.from_items(rows[::2] + rows[1::2], override_num_blocks=num_blocks)


def lines_of(rows: Iterator[dict[str, Any]]) -> list[str]:
    return [row["answer"] for row in sorted(rows, key=lambda row: row["index"])]


@pytest.mark.guarantee("Ray Data's answers equal a job's though an actor and a rank are killed")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_engine_changes_no_answer(num_ranks: int, ray: Any, tmp_path: Path):
    from spmd_worker.integrations.ray_data import answer_rows

    options = {**OPTIONS, "tensor_parallel_size": num_ranks}
    # Batches wait for one another, so that many are left after the first answer.
    answered = answer_rows(dataset_of(ray, 20), MODEL, batch_size=6, num_engines=3 - num_ranks, **options)
    found = iter(answered.iter_rows())
    first = next(found)
    (victim, *_) = started(ACTOR)
    if num_ranks == 2:
        (victim, *_) = started("spmd_worker", victim)
    os.kill(victim, signal.SIGKILL)
    assert lines_of([first, *found]) == lines_of_job(tmp_path, given_rows())


@pytest.mark.control("Ray Data's answers equal a job's though an actor and a rank are killed")
def test_actor_without_keys_is_found(ray: Any, tmp_path: Path, control: Any):
    from spmd_worker.integrations.pipeline_rows import PipelineRows

    class ByPosition:
        def __init__(self) -> None:
            self.rows = PipelineRows(MODEL, output="other", **OPTIONS)

        def __call__(self, batch: Any) -> Any:
            rows = [{**row, "index": place} for place, row in enumerate(batch.to_pylist())]
            return batch.append_column("answer", [self.rows.answer(rows)["other"]])

    found = dataset_of(ray, 5).map_batches(
        ByPosition, batch_format="pyarrow", batch_size=6, compute=ray.data.ActorPoolStrategy(size=1)
    )
    expected = lines_of_job(tmp_path, given_rows())
    with control():
        assert lines_of(found.iter_rows()) == expected


def test_batch_format_is_checked(ray: Any):
    from spmd_worker.integrations.ray_data import RayRows, resource_of

    rows = RayRows(MODEL, **OPTIONS)
    with pytest.raises(ValueError, match=r"^a batch is a dict: give map_batches batch_format='pyarrow'"):
        rows({"prompt": ["a"]})
    rows._rows.close()
    assert (resource_of(None), resource_of("cpu"), resource_of("cuda")) == ("num_cpus", "num_cpus", "num_gpus")


@pytest.mark.parametrize(("num_engines", "is_full"), [(1, False), (2, True)])
def test_engines_on_all_cpus_are_warned_of(num_engines: int, is_full: bool, ray: Any, caplog: pytest.LogCaptureFixture):
    """Regression: nothing was said, and tasks that read files waited forever."""
    from spmd_worker.integrations.ray_data import answer_rows

    answer_rows(dataset_of(ray, 1), MODEL, num_engines=num_engines, **OPTIONS)
    found = [each for each in caplog.messages if "of the cluster's 2 CPUs" in each]
    assert [each.split(" of ")[0] for each in found] == ["num_engines=2 engines reserve 2"] * is_full
