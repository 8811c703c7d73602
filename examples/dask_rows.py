"""A dask frame with a column of answers: an engine in each of dask's processes.

    pip install 'dask[dataframe]'
    python examples/dask_rows.py [MODEL]

Prints how many of 96 sums are right.
"""

import sys

import dask.dataframe
import pandas

from spmd_worker.integrations.pipeline_rows import PipelineRows

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
pairs = [(100 + 7 * index, 999 - 5 * index) for index in range(96)]
frame = pandas.DataFrame({"question": [f"add {a} + {b} =" for a, b in pairs], "sum": [str(a + b) for a, b in pairs]})
# A row's key is its custom_id: its answer does not depend on partitions.
frame["id"] = [f"sum {index}" for index in frame.index]
rows = PipelineRows(model, prompt="question", key="id", sampling={"temperature": 0, "max_tokens": 16})

if __name__ == "__main__":
    partitions = dask.dataframe.from_pandas(frame, npartitions=4)
    # Types of the result, without which dask would call the engine with a row of its own.
    meta = partitions._meta.assign(**dict.fromkeys(rows.names, pandas.Series(dtype="str")))
    answered = partitions.map_partitions(rows.answer_frame, meta=meta).compute(scheduler="threads")
    num_right = (answered["answer_text"].str.strip() == answered["sum"]).sum()
    print(f"{num_right} of {len(answered)} answers are right")
