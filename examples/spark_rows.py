"""A Spark frame with a column of answers, by `mapInPandas`: an engine in each of Spark's Python workers.

    pip install pyspark
    python examples/spark_rows.py [MODEL]

Prints how many of 96 sums are right.
"""

import os
import sys

from pyspark.sql import SparkSession

from spmd_worker.integrations.pipeline_rows import PipelineRows

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
pairs = [(100 + 7 * index, 999 - 5 * index) for index in range(96)]
table = [(f"sum {index}", f"add {a} + {b} =", str(a + b)) for index, (a, b) in enumerate(pairs)]
# A row's key is its custom_id: its answer does not depend on partitions.
rows = PipelineRows(model, prompt="question", key="id", sampling={"temperature": 0, "max_tokens": 16})

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# Two workers, and three attempts of a task: Spark starts a worker that died, and its engine, again.
spark = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
frame = spark.createDataFrame(table, "id string, question string, sum string").repartition(4)
schema = ", ".join(["id string, question string, sum string", *(f"{name} string" for name in rows.names)])
answered = frame.mapInPandas(rows.answer_frames, schema).toPandas()
num_right = (answered["answer_text"].str.strip() == answered["sum"]).sum()
print(f"{num_right} of {len(answered)} answers are right")
spark.stop()
