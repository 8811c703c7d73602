"""Daft itself: prompts and vectors equal a job's, while a rank is killed. `scripts/doors/check.sh` has the library."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from door_rows import MODEL, OPTIONS, SAMPLING, prompts, texts_of_job
from jobs_of_rows import answers_of_job, openai_row
from pooling_models import pooling_folder

from spmd_worker.frontends.serve.request_reader import content_name
from spmd_worker.integrations.pipeline_rows import PipelineRows

URL = "/v1/chat/completions"
NUM_ROWS = 40
pytestmark = pytest.mark.stress


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("daft.ai")


def answered(questions: list[str], options: dict[str, Any] = OPTIONS, **more: Any) -> dict[str, Any]:
    """Answers of Daft, by question."""
    import daft
    from daft.functions import prompt

    from spmd_worker.integrations.daft_provider import SpmdProvider

    answer = prompt(daft.col("question"), provider=SpmdProvider(**options), model=MODEL, **{**SAMPLING, **more})
    found = daft.from_pydict({"question": questions}).with_column("answer", answer).to_pydict()
    return dict(zip(found["question"], found["answer"], strict=True))


def expected_answers(folder: Path) -> dict[str, str]:
    bodies = [{"messages": [{"role": "user", "content": each}], **SAMPLING} for each in prompts(NUM_ROWS)]
    texts = texts_of_job(folder, [openai_row(content_name(URL, body), URL, body) for body in bodies])
    return {question: text for question, (text,) in zip(prompts(NUM_ROWS), texts.values(), strict=True)}


@pytest.mark.guarantee("Daft's answers equal a job's though a rank is killed")
def test_prompts_equal_a_job_in_any_order(tmp_path: Path):
    expected = expected_answers(tmp_path)
    assert answered(prompts(NUM_ROWS)) == expected
    assert answered(prompts(NUM_ROWS)[::-1]) == expected


def test_killed_rank_is_replaced(tmp_path: Path):
    options = {**OPTIONS, "tensor_parallel_size": 2}
    expected = expected_answers(tmp_path)
    assert answered(prompts(NUM_ROWS), options) == expected
    engine = PipelineRows(MODEL, **options).open()
    pids = engine.llm.llm_engine.executor.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    # The same engine, which Daft's process keeps.
    assert answered(prompts(NUM_ROWS), options) == expected
    assert not set(pids) & set(engine.llm.llm_engine.executor.worker_pids)
    PipelineRows(MODEL, **options).close()


@pytest.mark.control("Daft's answers equal a job's though a rank is killed")
def test_another_seed_is_found(tmp_path: Path, control: Any):
    with control():
        assert answered(prompts(NUM_ROWS), seed=3) == expected_answers(tmp_path)


def test_bad_prompt_is_null_and_no_other():
    question = prompts(1)[0]
    found = answered([question, "x" * 3000], on_error="ignore")
    assert found["x" * 3000] is None
    assert found[question] == answered([question])[question]
    with pytest.raises(ValueError, match="prompt_too_long"):
        answered([question, "x" * 3000])


def test_return_format_is_parsed():
    from pydantic import BaseModel

    class Digits(BaseModel):
        digits: list[int]

    more = {"return_format": Digits, "temperature": 0}
    (found,) = answered(["copy 1 2 3 ="], max_tokens=200, **more).values()
    assert found is not None
    assert [type(each) for each in found["digits"]] == [int] * len(found["digits"])
    assert answered(["copy 1 2 3 ="], max_tokens=2, on_error="log", **more) == {"copy 1 2 3 =": None}


def test_vectors_equal_a_jobs(tmp_path: Path):
    import daft
    from daft.functions import embed_text

    from spmd_worker.integrations.daft_provider import SpmdProvider

    folder, texts = pooling_folder("last"), [f"text {number}" for number in range(9)]
    vectors = embed_text(daft.col("text"), provider=SpmdProvider(dtype="float32", device="cpu"), model=str(folder))
    found = daft.from_pydict({"text": texts}).with_column("vector", vectors).to_pydict()["vector"]
    rows = [{"embed": text} for text in texts]
    expected = answers_of_job(tmp_path, folder, rows, options={"runner": "pooling"})
    assert [list(map(float, each)) for each in found] == [
        [float(number) for number in _float32(each["embedding"])] for each in expected
    ]


def _float32(values: list[float]) -> Any:
    import numpy as np

    return np.array(values, dtype=np.float32)
