"""Two LoRA adapters and the model without one, in one batch.

    python examples/adapters.py [MODEL]

An adapter is a folder that PEFT's `save_pretrained` wrote. Those here have random matrices, so that their answers are
noise.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spmd_worker import LLM, LoRARequest, SamplingParams


def write_adapter(folder: Path, config: Any, seed: int) -> Path:
    """Files as PEFT writes them, for the output projections of all layers."""
    generator = torch.Generator().manual_seed(seed)
    num_inputs, num_outputs = config.get_num_attention_heads() * config.get_head_size(), config.get_hidden_size()
    tensors = {}
    for layer in range(config.get_num_layers()):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, num_inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_outputs, 8, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


model = sys.argv[1] if len(sys.argv) > 1 else "scripts/demo/model"
greedy = SamplingParams(temperature=0, max_tokens=8)
prompt = "add 123 + 456 ="

with LLM(model, enable_lora=True, max_loras=2) as llm, tempfile.TemporaryDirectory() as folder:
    paths = [write_adapter(Path(folder) / name, llm.model_config, seed) for seed, name in enumerate(("one", "two"))]
    choices = [None, *(LoRARequest(path.name, number, path) for number, path in enumerate(paths, 1))]
    outputs = llm.generate([prompt] * 3, greedy, lora_request=choices)
    alone = [llm.generate(prompt, greedy, lora_request=choice)[0] for choice in choices]

for choice, output in zip(choices, outputs, strict=True):
    print(f"{choice.lora_name if choice else 'base'}: {prompt}{output.outputs[0].text!r}")
same = [one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in zip(outputs, alone, strict=True)]
print(f"each as alone: {same}")
