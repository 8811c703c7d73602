"""A data pipeline with the `datasets` library: a column of answers, made batch by batch.

    pip install datasets
    python examples/datasets_pipeline.py [MODEL]

Prints how many of 96 sums are right.
"""

import sys

from datasets import Dataset

from spmd_worker import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
pairs = [(100 + 7 * index, 999 - 5 * index) for index in range(96)]
data = Dataset.from_dict(
    {"prompt": [f"add {a} + {b} =" for a, b in pairs], "expected": [str(a + b) for a, b in pairs]},
)
params = SamplingParams(temperature=0, max_tokens=16)

with LLM(model) as llm:

    def answer(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        """One call of the engine for each batch."""
        outputs = llm.generate(batch["prompt"], params, use_tqdm=False)
        return {"answer": [output.outputs[0].text.strip() for output in outputs]}

    # A fingerprint of your own: `datasets` would try to hash the engine to make one.
    data = data.map(answer, batched=True, batch_size=32, new_fingerprint="answers")

num_right = len(data.filter(lambda row: row["answer"] == row["expected"]))
print(data.column_names)
print(f"{num_right} of {len(data)} answers are right, such as {data[0]['prompt']} {data[0]['answer']}")
