"""One model on the ranks that torchrun started: tensor parallelism, and prompts of each rank's own.

    torchrun --nproc-per-node 2 examples/torchrun_two_ranks.py [MODEL]

`python examples/torchrun_two_ranks.py` runs the same program on one rank.
"""

import os
import sys

from spmd_worker import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
params = SamplingParams(temperature=0, max_tokens=16)

with LLM(model, tensor_parallel_size=num_ranks) as llm:
    # Every rank passes the same prompts and gets every output.
    outputs = llm.generate(["add 123 + 456 =", "sort 42 17 99 ="], params)
    if rank == 0:
        print("shared:", [output.outputs[0].text for output in outputs], flush=True)

    # With `gather` each rank passes its own prompts, any number of them, and gets their outputs.
    prompts = [f"add {100 + index} + {200 + rank} =" for index in range(1 + rank)]
    outputs = llm.generate(prompts, params, gather=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"rank {rank} of {num_ranks}: {prompt}{output.outputs[0].text}", flush=True)
