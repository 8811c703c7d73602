"""Training and sampling in turns: a torch model takes gradient steps, and its weights go into the LLM.

    python examples/trainer_weight_updates.py [MODEL]
    torchrun --nproc-per-node 2 examples/trainer_weight_updates.py [MODEL]

Needs transformers for the trainer's model. On two ranks both train on the same batch, as DDP would leave them with
the same weights, and the LLM is tensor-parallel: each rank takes its slices of the tensors.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from spmd_worker import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
prompt, target = "add 123 + 456 =", " 42"
params = SamplingParams(temperature=0, max_tokens=8)

with LLM(model, tensor_parallel_size=num_ranks) as llm:
    trained = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    tokenizer = llm.get_tokenizer()
    prompt_ids, target_ids = tokenizer.encode(prompt), [*tokenizer.encode(target), tokenizer.eos_token_id]
    inputs = torch.tensor([prompt_ids + target_ids])
    labels = torch.tensor([[-100] * len(prompt_ids) + target_ids])  # the loss is of the answer alone

    for step in range(4):
        text = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
        loss = trained(inputs, labels=labels).loss
        if rank == 0:
            print(f"step {step}: {prompt}{text}, loss {loss.item():.3f}", flush=True)
        for _ in range(3):
            optimizer.zero_grad()
            trained(inputs, labels=labels).loss.backward()
            optimizer.step()
        with llm.weight_update() as load:
            for name, parameter in trained.named_parameters():
                load(name, parameter.detach())
