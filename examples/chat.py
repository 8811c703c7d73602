"""Conversations in one call: each is rendered with the model's chat template and answered.

    python examples/chat.py [MODEL]

Prints each question with its answer, and three samples of one.
"""

import sys

from spmd_worker import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
questions = ["add 123 + 456 =", "sort 42 17 99 =", "copy a b c ="]
conversations = [[{"role": "user", "content": question}] for question in questions]

with LLM(model) as llm:
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=16))
    for question, output in zip(questions, outputs, strict=True):
        answer = output.outputs[0]
        print(f"{question} {answer.text} ({len(answer.token_ids)} tokens, {answer.finish_reason})")

    # Several samples of one conversation. The same program draws the same samples when it runs again.
    (output,) = llm.chat(conversations[0], SamplingParams(n=3, temperature=0.7, max_tokens=16, seed=7))
    print("three samples:", [sample.text for sample in output.outputs])
