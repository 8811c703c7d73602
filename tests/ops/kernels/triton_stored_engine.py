"""Models with experts in MXFP4 and FP8 through the whole engine with kernels of a GPU, interpreted, beside the same
with experts dequantised: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_stored_engine.py
                                                                       prints one JSON object

Checkpoints in the formats of GPT-OSS and Qwen3-MoE-FP8, in float32; steps launched kernel by kernel and replayed
(recorded_graphs.py); updates, sleep, and files that replace them.
"""

import json
import tempfile
from pathlib import Path

import torch
from recorded_graphs import RecordedGraph
from small_steps import use_small_steps
from stored_checkpoints import write_stored
from triton_graphs import GRAPHS, SETTINGS, answers, counted

from spmd_worker import LLM
from spmd_worker.worker.worker import Worker

MATRIX = "model.layers.0.mlp.experts.down_proj"


def double_experts(model: torch.nn.Module) -> None:
    model.get_parameter(MATRIX).data.mul_(2)


def open_llm(folder: Path, backend: str | None = "triton", **settings: object) -> LLM:
    settings = SETTINGS | settings
    if backend is not None:
        settings["device_backend"] = backend
    return LLM(folder, dtype="float32", device="cpu", **settings)


def expert_bytes(worker: Worker) -> int:
    """Bytes of matrices of experts, scales included."""
    experts = [layer.mlp.experts.modules() for layer in worker.get_model().model.layers]
    modules = [each for of_layer in experts for each in of_layer if hasattr(each, "weight")]
    return sum(each.weight.nbytes + getattr(each, "weight_scales", each.weight[:0]).nbytes for each in modules)


def says(llm: LLM, call: str, *words: str) -> bool:
    """Whether the call is refused in these words."""
    try:
        if call == "update":
            llm.update_weights([(MATRIX, torch.zeros(4, 64, 96))])
        else:
            llm.apply_model(double_experts)
    except Exception as error:
        return all(word in str(error) for word in words)
    return False


def check_changes(folder: Path, other: Path, found: dict[str, bool]) -> None:
    """MXFP4: updates, sleep and other files."""
    with open_llm(other, dequantize_weights=True) as llm:
        of_other = answers(llm)
    with open_llm(folder, GRAPHS, enable_sleep_mode=True) as llm:
        expected, _, num_replayed = counted(lambda: answers(llm))
        found["replayed"] = num_replayed > 4
        found["an update is refused"] = says(llm, "update", "MXFP4", "dequantize_weights")
        found["a change is refused"] = says(llm, "change", "MXFP4", "dequantize_weights")
        llm.collective_rpc("reload_weights")
        found["same bits after a reload"] = answers(llm) == expected
        llm.sleep(level=1)
        llm.wake_up()
        found["same bits after sleep"] = answers(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights", args=(str(other),))
        found["bits of another file after deep sleep"] = answers(llm) == of_other
        found["control: it has other bits"] = of_other != expected
    with open_llm(folder, dequantize_weights=True) as llm:
        dequantised = answers(llm)
        llm.apply_model(double_experts)
        found["replayed steps have the bits of dequantised experts"] = expected == dequantised
        found["dequantised experts can be changed"] = answers(llm) != dequantised


def main() -> None:
    use_small_steps()
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind in ("mxfp4", "fp8_block", "fp8_row"):
            keys = {"num_hidden_layers": 1}
            folder = write_stored(Path(name, kind), kind, **keys)
            with open_llm(folder) as llm:
                stored, (num_bytes,) = answers(llm), llm.collective_rpc(expert_bytes)
            with open_llm(folder, dequantize_weights=True) as llm:
                dequantised, (num_plain,) = answers(llm), llm.collective_rpc(expert_bytes)
            found[f"{kind}: tokens and log-probabilities are those of dequantised experts"] = stored == dequantised
            share = num_bytes / num_plain
            # Of float32: 4.25 bits with scales of 128 inputs at least, or 8 bits.
            found[f"{kind}: experts take the bytes of their file"] = share < (0.15 if kind == "mxfp4" else 0.26)
            with open_llm(folder, None) as llm:
                ids = [row[0] for row in answers(llm)]
            found[f"{kind}: ids are the CPU's"] = [row[0] for row in stored] == ids
            if kind == "mxfp4":
                other = write_stored(Path(name, "other"), kind, seed=1, **keys)
                check_changes(folder, other, found)
                found["graphs were recorded"] = RecordedGraph.num_recorded > 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
