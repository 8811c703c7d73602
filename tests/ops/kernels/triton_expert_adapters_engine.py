"""Rows with adapters of experts and routers through the whole engine with kernels of a GPU, interpreted: a process of
its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_expert_adapters_engine.py
                                                                       prints one JSON object

One layer in float32 of two families; rows with two adapters and without one, beside the CPU's own kernels, in steps
launched kernel by kernel and replayed (recorded_graphs.py); replaced adapters, adapters of experts alone, and sleep.
"""

import json
import tempfile
from pathlib import Path

import torch
from recorded_graphs import RecordedGraph
from small_steps import use_small_steps
from triton_adapters_engine import alone, answers, ids_of, open_llm
from triton_experts_engine import FAMILIES, SIZES
from triton_graphs import EAGER, GRAPHS, counted

from spmd_worker import LLM, LoRARequest
from spmd_worker.ops.kernels.triton import adapters

HIDDEN, INNER, NUM_EXPERTS, RANK = SIZES["hidden_size"], SIZES["moe_intermediate_size"], 6, 4
INT8_INNER = 32
ROUTERS = {"Qwen3MoeForCausalLM": "mlp.gate", "GptOssForCausalLM": "mlp.router"}
REPLAYED = "Qwen3MoeForCausalLM"
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapter(
    family: str, int_id: int, seed: int, *, of_all: bool = True, load_inplace: bool = False, inner: int = INNER
) -> LoRARequest:
    """A random adapter of all experts, and of the router and queries unless it is not `of_all`."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    stacks = {"mlp.experts.base_layer": (HIDDEN, 2 * inner), "mlp.experts": (inner, HIDDEN)}
    sizes = {name: (inputs, outputs, NUM_EXPERTS * RANK) for name, (inputs, outputs) in stacks.items()}
    if of_all:
        sizes |= {ROUTERS[family]: (HIDDEN, NUM_EXPERTS, RANK), "self_attn.q_proj": (HIDDEN, HIDDEN, RANK)}
    for name, (inputs, outputs, rank) in sizes.items():
        path = f"base_model.model.model.layers.0.{name}"
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_parameters": PARAMETERS}
    return LoRARequest(f"a{seed}", int_id, lora_tensors=tensors, peft_config=config, load_inplace=load_inplace)


def opened(folder: Path, backend: str = "auto", **settings: object) -> LLM:
    return open_llm(folder, backend, **({"lora_experts": True} | settings))


def check(folder: Path, family: str, found: dict[str, bool]) -> None:
    first, second = (adapter(family, number, number) for number in (1, 2))
    mixed = (first, None, second, first, None)
    with open_llm(folder, EAGER, has_adapters=False) as llm:
        plain = answers(llm, [None] * 5)
    with opened(folder) as llm:
        expected = answers(llm, mixed)
    with opened(folder, EAGER) as llm:
        eager = answers(llm, mixed)
        found[f"{family}: ids are the CPU's"] = ids_of(eager) == ids_of(expected)
        found[f"{family}: rows without adapters have a plain run's bits"] = [eager[1], eager[4]] == [plain[1], plain[4]]
        found[f"{family}: control: adapters change answers"] = all(eager[row] != plain[row] for row in (0, 2, 3))
        found[f"{family}: same bits alone"] = alone(llm, mixed) == eager
    if family != REPLAYED:
        return
    with opened(folder, EAGER, max_num_batched_tokens=8, max_num_seqs=2) as llm:
        found[f"{family}: same bits in chunks"] = answers(llm, mixed) == eager
    with opened(folder, GRAPHS, enable_sleep_mode=True) as llm:
        at_start = RecordedGraph.num_recorded
        replayed, _, num_replayed = counted(lambda: answers(llm, mixed))
        found[f"{family}: same bits replayed"] = replayed == eager and num_replayed > 4 and at_start > 0
        experts = adapter(family, 1, 3, of_all=False, load_inplace=True)
        of_experts, num_recorded, _ = counted(lambda: answers(llm, [experts, None, None, experts, None]))
        found[f"{family}: experts alone change answers"] = of_experts[0] != eager[0] and of_experts[1] == eager[1]
        llm.sleep(level=1)
        llm.wake_up()
        newer = adapter(family, 1, 1, load_inplace=True)
        changed = (newer, None, second, newer, None)
        found[f"{family}: same bits after a change and sleep"] = answers(llm, changed) == eager
        # Prefixes are cached now, and chunks of other sizes are recorded once.
        answers(llm, mixed)
        again, num_recorded, _ = counted(lambda: answers(llm, mixed))
        found[f"{family}: and replayed"] = again == eager and num_recorded == 0


def check_int8(folder: Path, found: dict[str, bool]) -> None:
    """Experts in int8, whose rows are of 32 numbers at least, joined into one call."""
    first, second = (adapter(REPLAYED, number, number, inner=INT8_INNER) for number in (1, 2))
    mixed = (first, None, second, first, None)
    int8 = {"quantization": "int8", "invariant_tensor_parallel": False}
    with open_llm(folder, EAGER, has_adapters=False, **int8) as llm:
        plain = answers(llm, [None] * 5)
    with opened(folder, **int8) as llm:
        expected = answers(llm, mixed)
    with opened(folder, EAGER, **int8) as llm:
        eager = answers(llm, mixed)
        found["int8: ids are the CPU's"] = ids_of(eager) == ids_of(expected)
        found["int8: rows without adapters have a plain run's bits"] = [eager[1], eager[4]] == [plain[1], plain[4]]
        found["int8: same bits alone"] = alone(llm, mixed) == eager
    with opened(folder, GRAPHS, **int8) as llm:
        replayed, _, num_replayed = counted(lambda: answers(llm, mixed))
        found["int8: same bits replayed"] = replayed == eager and num_replayed > 4


def main() -> None:
    use_small_steps()
    adapters.MIN_PIECE = 128
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in ROUTERS:
            (folder / "config.json").write_text(json.dumps({"architectures": [family], **SIZES, **FAMILIES[family]}))
            check(folder, family, found)
        sizes = SIZES | FAMILIES[REPLAYED] | {"moe_intermediate_size": INT8_INNER}
        (folder / "config.json").write_text(json.dumps({"architectures": [REPLAYED], **sizes}))
        check_int8(folder, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
