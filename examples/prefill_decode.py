"""Two engines on one machine: one computes prompts, the other one answers them, with blocks in shared memory.

    python examples/prefill_decode.py [MODEL]

The first engine is a process of its own, which this program starts with the argument --prefill.
"""

import subprocess
import sys

from spmd_worker import LLM, SamplingParams

arguments = [argument for argument in sys.argv[1:] if argument != "--prefill"]
model = arguments[0] if arguments else "scripts/demo/model"
prompts = [f"sort 42 17 99 61 23 58 77 15 86 31 64 49 = 15 17 23 31 42 49 58 61 64 77 86 99; copy {x} =" for x in "abc"]

connector = "kv_cache.connectors.shared_memory:connect"
options = {"name": "example", "role": "producer" if "--prefill" in sys.argv else "consumer", "gib": 0.02}

if "--prefill" in sys.argv:
    with LLM(model, num_blocks=64, connector=connector, connector_options=options) as llm:
        # One token each: that computes the prompt, whose full blocks are handed over.
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        print("prefilled", flush=True)
        sys.stdin.read()
    sys.exit()

# The decoding engine starts second: it opens what the other one has made.
prefill = subprocess.Popen(
    [sys.executable, __file__, "--prefill", model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
with prefill:
    while line := prefill.stdout.readline():
        if line == "prefilled\n":
            break
    with LLM(model, num_blocks=64, connector=connector, connector_options=options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        for output in outputs:
            found = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were not computed here"
            print(f"{output.outputs[0].text!r}: {found}")
        print(f"{llm.llm_engine.counters.num_loaded_blocks} blocks came from the other engine")
