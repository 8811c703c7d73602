"""An engine whose rows have adapters of experts: loaded while others run, preempted, replaced by a trainer, removed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import expert_folder, open_experts
from peft_adapters import write_adapter
from run_folder import made_once
from stored_checkpoints import write_stored

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.source import read_config, read_tensors

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
PROMPTS = [{"prompt_token_ids": [7 * token % 61 + 3 for token in range(length)]} for length in (3, 17, 9, 12)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 60, "enable_lora": True, "max_lora_rank": 8}
ROOMY = {"num_blocks": 64, "max_loras": 3, "lora_experts": True}
SMALL = {"num_blocks": 40, "block_size": 2, "max_num_batched_tokens": 16, "max_loras": 2, "max_cpu_loras": 3}


def adapter(seed: int) -> Path:
    settings = (("target_modules", ("q_proj",)), ("target_parameters", PARAMETERS), ("lora_alpha", 16))
    base = expert_folder("qwen3_moe")
    return made_once(f"experts {seed}", lambda folder: write_adapter(open_experts(base), folder, settings, seed))


def request(seed: int) -> LoRARequest:
    return LoRARequest(f"a{seed}", seed, str(adapter(seed)))


def answers(llm: LLM, prompts: list[dict[str, Any]], requests: list[LoRARequest | None]) -> list[Any]:
    """Ids and logprobs of each row."""
    outputs = llm.generate(prompts, GREEDY, lora_request=requests, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return [
        (list(each.token_ids), [{key: one.logprob for key, one in of.items()} for of in each.logprobs or ()])
        for each in found
    ]


@pytest.mark.stress
def test_rows_keep_their_bits_in_an_engine():
    wanted: list[LoRARequest | None] = [request(1), None, request(2), request(1)]
    with LLM(str(expert_folder("qwen3_moe")), **SETTINGS, **ROOMY) as llm:
        plain = answers(llm, PROMPTS, [None] * 4)
        alone = [answers(llm, [prompt], [of])[0] for prompt, of in zip(PROMPTS, wanted, strict=True)]
        assert answers(llm, PROMPTS, wanted) == alone
        assert [one == other for one, other in zip(alone, plain, strict=True)] == [False, True, False, False]
        # A trainer pushes the first one's successor under its id, by tensors.
        tensors = {name: each * 2 for name, each in read_tensors(adapter(1)).items()}
        config = read_config(adapter(1))
        pushed = LoRARequest("a1", 1, lora_tensors=tensors, peft_config=config, load_inplace=True)
        newer = answers(llm, PROMPTS[:1], [pushed])
        assert newer != alone[:1]
        assert llm.remove_lora(1)
        assert answers(llm, PROMPTS, [None] * 4) == plain
        assert answers(llm, PROMPTS, wanted) == alone
    with LLM(str(expert_folder("qwen3_moe")), **SETTINGS, **SMALL, lora_experts=True) as llm:
        assert answers(llm, PROMPTS, wanted) == alone
        assert llm.llm_engine.counters.num_preemptions > 0


def test_adapter_of_experts_names_the_option():
    with LLM(str(expert_folder("qwen3_moe")), **SETTINGS, num_blocks=64) as llm:
        with pytest.raises(AdapterError, match=r"set lora_experts=True"):
            llm.add_lora(request(1))
        assert llm.list_loras() == set()


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["mxfp4", "gguf_experts", "fp8_shared"])
def test_experts_as_stored_answer_as_dequantised(tmp_path: Path, kind: str):
    folder = write_stored(tmp_path / kind, kind)
    found = []
    for dequantises in (False, True):
        options = SETTINGS | {"dtype": "bfloat16", "max_model_len": 64, "dequantize_weights": dequantises}
        with LLM(str(folder), **options, **ROOMY) as llm:
            model = llm.llm_engine.executor.driver_worker.model_runner.model
            adapted = LoRARequest("a", 1, lora_tensors=_tensors(model), peft_config=_CONFIG)
            plain, mixed = answers(llm, PROMPTS, [None] * 4), answers(llm, PROMPTS, [adapted, None] * 2)
            assert [one == other for one, other in zip(mixed, plain, strict=True)] == [False, True] * 2
            found.append(mixed)
    assert found[0] == found[1]


_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_parameters": PARAMETERS}


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Matrices of stacks of all experts, in every sparse layer."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for index, layer in enumerate(model.model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            continue
        first, name = experts["0"], f"base_model.model.model.layers.{index}.mlp.experts"
        hidden, size = first.down_proj.output_size, first.down_proj.input_size
        shapes = {f"{name}.base_layer": (hidden, 2 * size), name: (size, hidden)}
        for path, (inputs, outputs) in shapes.items():
            tensors[f"{path}.lora_A.weight"] = torch.randn(4 * len(experts), inputs, generator=generator) * inputs**-0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 4 * len(experts), generator=generator) * 0.2
    return tensors
