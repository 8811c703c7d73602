"""Two kinds of scores: how similar texts are, and how probable given answers are.

    python examples/scores.py [MODEL]

The right answer is the most probable one.
"""

import sys

from spmd_worker import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"

# Similarity of a query and documents. A cross-encoder's folder scores pairs by its own head, with the same call.
query, documents = "sort 42 17 99 =", ["add 500 + 400 =", "sort 42 17 98 =", "copy x y z ="]
with LLM(model, runner="pooling") as llm:
    scores = [output.outputs.score for output in llm.score(query, documents)]
for score, document in sorted(zip(scores, documents, strict=True), reverse=True):
    print(f"{query} and {document} {score:.3f}")

# Log-probability of each answer: the sum over its tokens.
prompt, answers = "add 123 + 456 =", [" 479", " 579", " 580"]
with LLM(model) as llm:
    tokenizer = llm.get_tokenizer()
    tokens = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    logprobs = [sum(each) for each in llm.score_tokens([prompt] * len(answers), tokens)]
for logprob, answer in sorted(zip(logprobs, answers, strict=True), reverse=True):
    print(f"{prompt}{answer} has log-probability {logprob:.2f}")
