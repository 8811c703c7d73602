"""Rows with adapters through the whole engine with kernels of a GPU, interpreted: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_adapters_engine.py
                                                                       prints one JSON object

One layer in float32; rows with two adapters and without one, beside the CPU's own kernels, in steps launched kernel by
kernel and replayed (recorded_graphs.py); adapters of other layers, replaced ones, and chunks of prompts.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from recorded_graphs import RecordedGraph
from small_steps import use_small_steps
from triton_engine import CONFIG
from triton_graphs import EAGER, GRAPHS, SETTINGS, SMALL, counted, rows

from spmd_worker import LLM, LoRARequest
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.ops.kernels.triton import adapters
from spmd_worker.worker.runner.step_graphs import StepGraphs

HIDDEN, KEYS, INNER = 32, 16, 48
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Inputs and outputs."""
RANK = 4
QUERIES = ("self_attn.q_proj",)
NUM_AT_START = 2
"""Steps with adapters before the first request."""


def adapter(
    int_id: int, seed: int, modules: Sequence[str] = tuple(MODULES), *, load_inplace: bool = False
) -> LoRARequest:
    """A random adapter, large enough that greedy answers change."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module in modules:
        num_inputs, num_outputs = MODULES[module]
        name = f"base_model.model.model.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, num_inputs, generator=generator) * num_inputs**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_outputs, RANK, generator=generator)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(modules), "bias": "none"}
    return LoRARequest(f"a{seed}", int_id, lora_tensors=tensors, peft_config=config, load_inplace=load_inplace)


FIRST, SECOND = adapter(1, 1), adapter(2, 2)
MIXED = (FIRST, None, SECOND, FIRST, None)


def open_llm(folder: Path, backend: str = "auto", *, has_adapters: bool = True, **settings: object) -> LLM:
    keys = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8} if has_adapters else {}
    settings = SETTINGS | keys | settings
    return LLM(folder, dtype="float32", device="cpu", load_format="dummy", device_backend=backend, **settings)


def answers(llm: LLM, requests: Sequence[LoRARequest | None], chosen: Sequence[int] = range(5)) -> list:
    """Ids and log-probabilities of the rows `chosen` of `triton_graphs.rows`, each with its adapter."""
    engine = llm.llm_engine
    has_adapters = any(requests)
    digests = engine.adapters.digests_of(requests) if has_adapters else (0,) * len(requests)
    prompts, params = rows()
    numbers = [
        engine.requests.add(
            PromptContent(tuple(prompts[row]["prompt_token_ids"]), adapter=digest), params[row], index=row
        )
        for row, digest in zip(chosen, digests, strict=True)
    ]
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            completion = output.outputs[0]
            entries = [{key: each.logprob for key, each in at.items()} for at in completion.logprobs or []]
            found[int(output.request_id)] = (list(completion.token_ids), entries)
    return [found[number] for number in numbers]


def ids_of(found: list) -> list:
    return [row[0] for row in found]


def alone(llm: LLM, requests: Sequence[LoRARequest | None] = MIXED) -> list:
    return [answers(llm, [request], [row])[0] for row, request in enumerate(requests)]


def check_eager(folder: Path, found: dict[str, bool]) -> list:
    """Answers of MIXED."""
    with open_llm(folder, EAGER, has_adapters=False) as llm:
        plain = answers(llm, [None] * 5)
    with open_llm(folder) as llm:
        expected = answers(llm, MIXED)
    with open_llm(folder, EAGER) as llm:
        mixed = answers(llm, MIXED)
        found["ids are the CPU's"] = ids_of(mixed) == ids_of(expected)
        found["rows without adapters have a plain run's bits"] = [mixed[1], mixed[4]] == [plain[1], plain[4]]
        found["control: adapters change answers"] = all(mixed[row] != plain[row] for row in (0, 2, 3))
        found["same bits alone"] = alone(llm) == mixed
        found["no row has one: a plain run's bits"] = answers(llm, [None] * 5) == plain
    with open_llm(folder, EAGER, max_num_batched_tokens=8, max_num_seqs=2) as llm:
        found["same bits in chunks"] = answers(llm, MIXED) == mixed
    return mixed


def check_graphs(folder: Path, mixed: list, found: dict[str, bool]) -> None:
    with open_llm(folder, GRAPHS) as llm:
        # Of 3 and of 4 rows, with adapters and without, and the head.
        found["recorded at the start"] = RecordedGraph.num_recorded == 6
        first, num_recorded, num_replayed = counted(lambda: answers(llm, MIXED))
        found["same bits replayed"] = first == mixed and num_replayed > 4
        found["chunks are recorded, and decode steps are not"] = num_recorded == 1
        found["same bits in another order"] = answers(llm, MIXED[::-1], range(5)[::-1])[::-1] == mixed
        # The two adapters change places, while no row has them.
        answers(llm, [adapter(1, 2, load_inplace=True), *[None] * 4])
        first = adapter(2, 1, load_inplace=True)
        moved = (first, None, adapter(1, 2), first, None)
        replaced, num_recorded, _ = counted(lambda: answers(llm, moved))
        found["replaced in place: same bits, nothing recorded"] = replaced == mixed and num_recorded == 0
        answers(llm, [None] * 5)
        # Queries alone, for which recorded steps launch too much, then all layers again.
        few, num_recorded, _ = counted(lambda: answers(llm, of_queries()))
        with open_llm(folder, EAGER) as eager:
            found["same bits of fewer layers"] = answers(eager, of_queries()) == few
        found["other layers: steps with adapters are recorded anew"] = num_recorded >= 2
        plain, num_recorded, _ = counted(lambda: answers(llm, [None] * 5))
        found["other layers: steps without are not"] = num_recorded == 0 and plain[1] == mixed[1]
        again = answers(llm, [adapter(1, 1, load_inplace=True)], [0])
        found["same bits of all layers again"] = again == mixed[:1]


def check_controls(folder: Path, mixed: list, found: dict[str, bool]) -> None:
    fill, filled = StepGraphs._fill_adapters, []

    def fill_once(graphs: StepGraphs, *step: object) -> None:
        filled.append(len(filled))
        if filled[-1] < NUM_AT_START:
            fill(graphs, *step)

    with mock.patch.object(StepGraphs, "_fill_adapters", fill_once), open_llm(folder, GRAPHS) as llm:
        found["control: adapters of the step before"] = answers(llm, MIXED) != mixed
    with mock.patch.object(LoadedAdapters, "_note_layers"), open_llm(folder, GRAPHS) as llm:
        answers(llm, of_queries())
        first, second = (adapter(number, number, load_inplace=True) for number in (1, 2))
        changed = (first, None, second, first, None)
        found["control: layers of the adapters before"] = answers(llm, changed) != mixed


def of_queries() -> tuple[LoRARequest | None, ...]:
    """MIXED with adapters of fewer layers, which take the place of others."""
    first, second = (adapter(number, number, QUERIES, load_inplace=True) for number in (1, 2))
    return (first, None, second, None, None)


def main() -> None:
    use_small_steps()
    adapters.MIN_PIECE = 128
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG | SMALL))
        mixed = check_eager(folder, found)
        check_graphs(folder, mixed, found)
        check_controls(folder, mixed, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
