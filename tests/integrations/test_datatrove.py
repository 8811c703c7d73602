"""datatrove itself: a step with an engine in the task, and its runner with our server, while engines are killed.

`scripts/doors/check.sh` has the library.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from door_rows import MODEL, OPTIONS, SAMPLING, prompts, texts_of_job
from jobs_of_rows import openai_row
from process_tree import started

NUM_DOCUMENTS = 40
TASKS = 3
pytestmark = pytest.mark.stress


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("datatrove.pipeline.inference.run_inference")


def reader() -> Any:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep

    class Reader(PipelineStep):
        name = type = "documents"

        def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
            for number, prompt in list(enumerate(prompts(NUM_DOCUMENTS)))[rank::world_size]:
                yield Document(text=prompt, id=f"document {number}")

    return Reader()


def run(folder: Path, *steps: Any, tasks: int = 1, workers: int = 1) -> None:
    from datatrove.executor import LocalPipelineExecutor

    logs = str(folder / "logs")
    LocalPipelineExecutor([reader(), *steps], tasks=tasks, workers=workers, logging_dir=logs).run()


def writer(folder: Path) -> Any:
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    return JsonlWriter(str(folder / "out"), compression=None)


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """Metadata of the documents that were written, by id."""
    lines = [line for path in (folder / "out").iterdir() for line in path.read_text().splitlines()]
    documents = [json.loads(line) for line in lines]
    assert len(documents) == NUM_DOCUMENTS
    return {document["id"]: document["metadata"] for document in documents}


def expected_texts(folder: Path, url: str | None = None) -> dict[str, str]:
    """Texts of a job over the documents, as plain rows or rows of completions."""
    bodies = {f"document {number}": {"prompt": each, **SAMPLING} for number, each in enumerate(prompts(NUM_DOCUMENTS))}
    rows = [
        {"custom_id": name, **body} if url is None else openai_row(name, url, body) for name, body in bodies.items()
    ]
    return {name: texts[0] for name, texts in texts_of_job(folder, rows).items()}


@pytest.mark.guarantee("datatrove's answers equal a job's though ranks and servers are killed")
@pytest.mark.parametrize("workers", [1, 2])
def test_step_equals_a_job_in_any_tasks(workers: int, tmp_path: Path):
    from spmd_worker.integrations.datatrove_step import AnswerDocuments

    step = AnswerDocuments(MODEL, batch_documents=7, sampling=SAMPLING, **OPTIONS)
    run(tmp_path, step, writer(tmp_path), tasks=TASKS, workers=workers)
    found = {name: metadata["answer_text"] for name, metadata in written(tmp_path).items()}
    assert found == expected_texts(tmp_path)
    step.rows.close()


def test_killed_rank_of_a_step_is_replaced(tmp_path: Path):
    from datatrove.pipeline.base import PipelineStep

    from spmd_worker.integrations.datatrove_step import AnswerDocuments

    killed = []

    class Killer(PipelineStep):
        name = type = "killer"

        def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
            for document in data:
                if not killed:
                    killed.extend(step.rows.open().llm.llm_engine.executor.worker_pids)
                    os.kill(killed[1], signal.SIGKILL)
                yield document

    step = AnswerDocuments(MODEL, batch_documents=5, sampling=SAMPLING, tensor_parallel_size=2, **OPTIONS)
    run(tmp_path, step, Killer(), writer(tmp_path))
    found = {name: metadata["answer_text"] for name, metadata in written(tmp_path).items()}
    assert found == expected_texts(tmp_path)
    assert not set(killed) & set(step.rows.open().llm.llm_engine.executor.worker_pids)
    step.rows.close()


def runner(folder: Path, rollout: Any) -> Any:
    from datatrove.pipeline.inference.run_inference import InferenceConfig

    from spmd_worker.integrations.datatrove_server import SpmdInferenceRunner

    config = InferenceConfig(
        server_type="custom",
        model_name_or_path=MODEL,
        model_max_context=64,
        use_chat=False,
        max_concurrent_generations=4,
        server_ready_delay_sec=0.5,
        model_kwargs={"device": "cpu", "model.dtype": "float32", "cache.num_blocks": 64},
        server_log_folder=str(folder / "server"),
        default_generation_params=dict(SAMPLING),
    )
    return SpmdInferenceRunner(rollout, config, writer(folder))


def test_killed_server_of_a_runner_is_started_again(tmp_path: Path):
    killed = []

    async def rollout(document: Any, generate: Any) -> Any:
        answer = await generate({"prompt": document.text, "custom_id": document.id})
        if not killed:
            killed.extend(started("spmd_worker.serve"))
            os.kill(killed[0], signal.SIGKILL)
        return answer

    run(tmp_path, runner(tmp_path, rollout))
    found = {name: metadata["rollout_results"][0]["text"] for name, metadata in written(tmp_path).items()}
    assert found == expected_texts(tmp_path, "/v1/completions")
    assert not started("spmd_worker.serve")


@pytest.mark.control("datatrove's answers equal a job's though ranks and servers are killed")
def test_documents_without_their_ids_are_found(tmp_path: Path, control: Any):
    from spmd_worker.integrations.datatrove_step import AnswerDocuments

    step = AnswerDocuments(
        MODEL,
        row_of=lambda document: {"prompt": document.text, "custom_id": "one for all"},
        sampling=SAMPLING,
        **OPTIONS,
    )
    run(tmp_path, step, writer(tmp_path))
    found = {name: metadata["answer_text"] for name, metadata in written(tmp_path).items()}
    step.rows.close()
    with control():
        assert found == expected_texts(tmp_path)


def test_replicas_and_known_metadata_are_refused(tmp_path: Path):
    from datatrove.data import Document
    from datatrove.pipeline.inference.run_inference import InferenceConfig

    from spmd_worker.integrations.datatrove_server import SpmdServer
    from spmd_worker.integrations.datatrove_step import AnswerDocuments

    with pytest.raises(ValueError, match=r"^dp=2: a server has one replica here"):
        SpmdServer(InferenceConfig(server_type="custom", model_name_or_path=MODEL, dp=2), 0)
    document = Document(text="a", id="b", metadata={"answer": 1})
    with pytest.raises(ValueError, match=r"^document b has metadata 'answer' already"):
        AnswerDocuments(MODEL).keyed(document)
