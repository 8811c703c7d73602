"""Answers that keep to a form: a choice, a regular expression, a JSON schema.

    pip install 'spmd-worker[structured]'
    python examples/structured_outputs.py [MODEL]

The demo model was never trained on JSON: its numbers mean nothing, but they are valid.
"""

import json
import sys

from spmd_worker import LLM, SamplingParams, StructuredOutputsParams

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
digit = {"type": "integer", "minimum": 0, "maximum": 9}
schema = {
    "type": "object",
    "properties": {"digits": {"type": "array", "items": digit, "minItems": 3, "maxItems": 3}},
    "required": ["digits"],
    "additionalProperties": False,
}
constraints = {
    "choice": StructuredOutputsParams(choice=[" 479", " 579", " 589"]),
    "regex": StructuredOutputsParams(regex=r"( [0-9]{2})+"),
    "json": StructuredOutputsParams(json=schema, disable_any_whitespace=True),
}
prompts = ["add 123 + 456 =", "sort 42 17 99 =", "copy 1 2 3 ="]

with LLM(model) as llm:
    # A list of parameters has one entry for each prompt.
    params = [SamplingParams(temperature=0, max_tokens=32, structured_outputs=each) for each in constraints.values()]
    outputs = llm.generate(prompts, params)

for kind, prompt, output in zip(constraints, prompts, outputs, strict=True):
    print(f"{kind}: {prompt}{output.outputs[0].text}")
print("parsed:", json.loads(outputs[-1].outputs[0].text))
