"""Spark and dask themselves: frames with answers of a job. `scripts/doors/check.sh` has the libraries."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from door_rows import MODEL, OPTIONS, SAMPLING, lines_of_job, plain_rows, prompts
from ranks import REPOSITORY, run_script

from spmd_worker.integrations.pipeline_rows import PipelineRows

NUM_ROWS = 40
pytestmark = pytest.mark.stress


def rows_of_questions() -> PipelineRows:
    return PipelineRows(MODEL, prompt="question", sampling=SAMPLING, **OPTIONS)


def frame_of_questions() -> pandas.DataFrame:
    return pandas.DataFrame({"index": range(NUM_ROWS), "question": prompts(NUM_ROWS)}).sample(frac=1, random_state=1)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = sql.SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


@pytest.mark.guarantee("Spark's answers equal a job's though a Python worker is killed")
@pytest.mark.parametrize("is_killed", [False, True])
def test_map_in_pandas_equals_a_job(is_killed: bool, spark: Any, tmp_path: Path):
    rows, mark = rows_of_questions(), str(tmp_path / "killed")

    def answered(frames: Iterator[Any]) -> Iterator[Any]:
        for number, frame in enumerate(rows.answer_frames(frames)):
            if is_killed and not number and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield frame

    schema = "index long, question string, answer string, answer_text string, answer_error string"
    frame = spark.createDataFrame(frame_of_questions()).repartition(4)
    found = frame.mapInPandas(answered, schema).toPandas().sort_values("index")
    assert found["answer"].tolist() == lines_of_job(tmp_path, plain_rows(NUM_ROWS))
    assert os.path.exists(mark) is is_killed


@pytest.mark.control("Spark's answers equal a job's though a Python worker is killed")
def test_partitions_without_keys_are_found(spark: Any, tmp_path: Path, control: Any):
    rows = rows_of_questions()

    def answered(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            own = rows.answer_frame(frame.drop(columns="index").assign(index=range(len(frame))))
            yield own.assign(index=frame["index"])[["index", "answer"]]

    frame = spark.createDataFrame(frame_of_questions()).repartition(4)
    found = frame.mapInPandas(answered, "index long, answer string").toPandas().sort_values("index")
    with control():
        assert found["answer"].tolist() == lines_of_job(tmp_path, plain_rows(NUM_ROWS))


@pytest.mark.parametrize("name", ["dask_rows.py", "spark_rows.py"])
def test_example_prints_right_answers(name: str):
    pytest.importorskip({"dask_rows.py": "dask.dataframe", "spark_rows.py": "pyspark"}[name])
    done = run_script([REPOSITORY / "examples" / name], 240).checked()
    assert re.search(r"9[4-6] of 96 answers are right", done.stdout), done.output


def test_dask_partitions_equal_a_job(tmp_path: Path):
    dask = pytest.importorskip("dask.dataframe")
    rows = rows_of_questions()
    frame = dask.from_pandas(frame_of_questions().reset_index(drop=True), npartitions=4)
    meta = frame._meta.assign(**dict.fromkeys(rows.names, pandas.Series(dtype="str")))
    found = frame.map_partitions(rows.answer_frame, meta=meta).compute(scheduler="threads").sort_values("index")
    rows.close()
    assert found["answer"].tolist() == lines_of_job(tmp_path, plain_rows(NUM_ROWS))
