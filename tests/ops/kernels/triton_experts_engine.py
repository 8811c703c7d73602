"""Models with experts through the whole engine with kernels of a GPU, interpreted, beside the CPU's own kernels: a
process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_experts_engine.py
                                                                       prints one JSON object

One layer in float32 of four families; steps launched kernel by kernel and replayed (recorded_graphs.py), whose padding
no expert may count; updates in place, sleep, and weights that code has moved.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from recorded_graphs import RecordedGraph
from small_steps import use_small_steps
from triton_graphs import GRAPHS, SETTINGS, answers, counted, move_weights, scale_weights

from spmd_worker import LLM, SamplingParams
from spmd_worker.worker.worker import Worker

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FAMILIES = {
    "Qwen3MoeForCausalLM": {"num_experts": 6, "intermediate_size": 48, "norm_topk_prob": True},
    "MixtralForCausalLM": {"num_local_experts": 6, "intermediate_size": 24},
    "GptOssForCausalLM": {"num_local_experts": 6, "intermediate_size": 24, "sliding_window": 32},
    "Qwen2MoeForCausalLM": {"num_experts": 6, "intermediate_size": 48, "shared_expert_intermediate_size": 24},
}


def open_llm(folder: Path, backend: str | None = None, **settings: object) -> LLM:
    settings = SETTINGS | settings
    if backend is not None:
        settings["device_backend"] = backend
    return LLM(folder, dtype="float32", device="cpu", load_format="dummy", **settings)


def ids_of(found: list) -> list:
    return [row[0] for row in found]


def loads(worker: Worker) -> dict[int, list[int]]:
    return worker.get_report().expert_loads


def are_views(worker: Worker) -> bool:
    """Whether experts' parameters share storages."""
    experts = worker.get_model().model.layers[0].mlp.experts
    storages = {each.down_proj.weight.untyped_storage().data_ptr() for each in experts.values()}
    return len(experts) > 1 and len(storages) == 1


def loads_of(llm: LLM, compute: Callable[[], list]) -> tuple[list, dict[int, list[int]]]:
    """And the tokens of each expert meanwhile."""
    (before,) = llm.collective_rpc(loads)
    found = compute()
    (after,) = llm.collective_rpc(loads)
    return found, {layer: [b - a for a, b in zip(before[layer], after[layer], strict=True)] for layer in after}


def routes(llm: LLM) -> list:
    """Experts of each token of a row."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, return_routed_experts=True)
    (output,) = llm.generate([[5, 9, 30]], params, use_tqdm=False)
    return [output.prompt_routed_experts.tolist(), output.outputs[0].routed_experts.tolist()]


def check_graphs(folder: Path, found: dict[str, bool]) -> None:
    with open_llm(folder, "triton") as llm:
        eager = answers(llm)
        # The second time, prefixes are cached.
        _, expected = loads_of(llm, lambda: answers(llm))
        llm.apply_model(scale_weights)
        scaled = answers(llm)
    with open_llm(folder, GRAPHS, enable_sleep_mode=True) as llm:
        first, _, num_replayed = counted(lambda: answers(llm))
        found["same bits replayed"] = first == eager and num_replayed > 4
        # Steps with cached prompts are recorded now: recording computes here, and counts, as it does not on a device.
        answers(llm)
        again, num_tokens = loads_of(llm, lambda: answers(llm))
        found["replayed steps count tokens without padding"] = again == eager and num_tokens == expected
        found["control: tokens were counted"] = sum(expected[0]) > 0
        llm.apply_model(scale_weights)
        updated, num_recorded, _ = counted(lambda: answers(llm))
        found["same bits after an update in place"] = updated == scaled and num_recorded == 0
        found["control: the update changed answers"] = scaled != eager
        llm.sleep(level=1)
        llm.wake_up()
        found["same bits after sleep"] = answers(llm) == scaled
        found["experts lie side by side after sleep"] = llm.collective_rpc(are_views) == [True]
    with open_llm(folder, GRAPHS) as llm:
        llm.collective_rpc(move_weights)
        moved, num_recorded, _ = counted(lambda: answers(llm))
        found["same bits where weights have moved"] = moved == scaled and num_recorded > 0
    with open_llm(folder, "triton") as llm:
        llm.collective_rpc(move_weights)
        found["same bits where weights have moved, without graphs"] = answers(llm) == scaled


def copy_weights(worker: Worker) -> None:
    """The same weights elsewhere."""
    for parameter in worker.get_model().parameters():
        parameter.data = parameter.data.clone()


def check_int8(folder: Path, expected: list, found: dict[str, bool]) -> None:
    """Experts in int8 beside the CPU's: sums are exact, and the rest of a layer is another kernel's."""
    int8 = {"quantization": "int8", "invariant_tensor_parallel": False}
    with open_llm(folder, "triton", **int8) as llm:
        eager = answers(llm)
    with open_llm(folder, **int8) as llm:
        found["int8: ids are the CPU's"] = ids_of(eager) == ids_of(answers(llm))
    found["int8: control: eight bits are seen"] = eager != expected
    with open_llm(folder, GRAPHS, **int8) as llm:
        first, _, num_replayed = counted(lambda: answers(llm))
        found["int8: same bits replayed"] = first == eager and num_replayed > 4
        llm.collective_rpc(copy_weights)
        moved, num_recorded, _ = counted(lambda: answers(llm))
        found["int8: same bits where weights have moved"] = moved == eager and num_recorded > 0


def main() -> None:
    use_small_steps()
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, keys in FAMILIES.items():
            config = {"architectures": [family], **SIZES, **keys}
            (folder / "config.json").write_text(json.dumps(config))
            with open_llm(folder) as llm:
                expected, experts = answers(llm), routes(llm)
            with open_llm(folder, "triton") as llm:
                ours = answers(llm)
                found[f"{family}: routed experts are the CPU's"] = routes(llm) == experts
            found[f"{family}: ids are the CPU's"] = ids_of(ours) == ids_of(expected)
            found[f"{family}: control: other kernels have other bits"] = ours != expected
            if family == "Qwen3MoeForCausalLM":
                check_graphs(folder, found)
                (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 32}))
                with open_llm(folder, "triton") as llm:
                    check_int8(folder, answers(llm), found)
    found["control: graphs were recorded"] = RecordedGraph.num_recorded > 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
