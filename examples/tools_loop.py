"""Loops over tool calls, of another length on each rank, over one tensor-parallel engine.

    torchrun --nproc-per-node 2 examples/tools_loop.py [MODEL]

`llm.turns()` lets each rank call as often as its own conversations need. The demo model was never trained on tools:
`tool_choice="required"` holds its calls to the schema, and the template below shows it the last message alone.
"""

import json
import os
import sys

from spmd_worker import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
number = {"type": "integer", "minimum": 100, "maximum": 999}
parameters = {
    "type": "object",
    "properties": {"a": number, "b": number},
    "required": ["a", "b"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "write_sum", "parameters": parameters}}]
template = (
    "{% if tools %}{% endif %}<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n<|im_start|>assistant{{ '\n' }}"
)


def write_sum(a: int, b: int) -> str:
    """The tool: what it returns is the model's next question."""
    return f"add {a} + {b} ="


with LLM(model, tensor_parallel_size=num_ranks, chat_template=template) as llm, llm.turns():
    encode = llm.get_tokenizer().encode
    spaces = {encode(space)[0]: -100.0 for space in " \n\t\r"}  # no spaces between the parts of a call's JSON
    for turn in range(1 + rank):
        messages = [{"role": "user", "content": "add 123 + 456 ="}]
        params = SamplingParams(temperature=1, seed=2 * turn + rank, max_tokens=128, logit_bias=spaces)
        (output,) = llm.chat(messages, params, tools=tools, tool_choice="required", tool_call_format="hermes")
        (message,) = llm.chat_messages(output, tools, tool_choice="required", tool_call_format="hermes")
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        result = write_sum(**arguments)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
        print(f"rank {rank}, turn {turn}: {result} {output.outputs[0].text}", flush=True)
