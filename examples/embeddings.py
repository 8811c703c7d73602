"""A vector for each text, and the nearest text by cosine similarity.

    python examples/embeddings.py [MODEL]

The demo model generates: `runner="pooling"` takes the last token's hidden state, normalised. A folder of
sentence-transformers needs no `runner`.
"""

import sys

import numpy as np

from spmd_worker import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
texts = ["sort 42 17 99 =", "copy x y z =", "add 500 + 400 ="]
queries = ["sort 42 17 98 =", "copy x y w =", "add 500 + 401 ="]

with LLM(model, runner="pooling") as llm:
    vectors = np.array([output.outputs.embedding for output in llm.embed(texts)])
    asked = np.array([output.outputs.embedding for output in llm.embed(queries)])

print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers, lengths {np.linalg.norm(vectors, axis=1).round(3)}")
similarities = asked @ vectors.T
for query, row in zip(queries, similarities, strict=True):
    print(f"{query} is nearest to {texts[row.argmax()]} ({row.max():.3f})")
