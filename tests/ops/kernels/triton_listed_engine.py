"""Models whose tokens see some keys alone through the whole engine with kernels of a GPU, interpreted, beside the CPU's
own kernels: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_listed_engine.py
                                                                       prints one JSON object

DeepSeek V4, whose tokens see a window and compressed entries, chosen and all, and V3.2, whose tokens choose. Rows
together, in chunks, alone and with a prefix that is found again have the same bits; so have steps that are replayed
(recorded_graphs.py), whose padding writes nothing.
"""

import json
import tempfile
from pathlib import Path
from unittest import mock

import compressed_checkpoints
import latent_checkpoints
from compressed_checkpoints import HEAVY, SLIDING, SPARSE
from recorded_graphs import RecordedGraph
from small_steps import use_small_steps
from state_rows import answers_of

from spmd_worker import LLM, SamplingParams
from spmd_worker.ops.kernels.triton import listed

SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 48,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 4,
    "num_blocks": 24,
    # The default of a device that is not named triton.
    "invariant_tensor_parallel": False,
    "block_size": 8,
}
HEAD = [5 + index * 7 % 80 for index in range(26)]
ROWS = [{"prompt_token_ids": [*HEAD, 7]}, {"prompt_token_ids": [11, 12]}, {"prompt_token_ids": [*HEAD, 9]}]
PARAMS = [
    SamplingParams(temperature=0.8 * (index != 1), seed=index, max_tokens=4, ignore_eos=True, logprobs=1)
    for index in range(len(ROWS))
]
EAGER, GRAPHS = "triton", "recorded_graphs.RecordedDevice"

V4 = {"layer_types": [SLIDING, SPARSE, HEAVY], "mlp_layer_types": ["hash_moe", "moe", "moe"], "num_hidden_layers": 3}
LATENTS = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "first_k_dense_replace": 2}


def write(folder: Path) -> dict[str, Path]:
    """Small checkpoints of both kinds."""
    compressed_checkpoints._write(folder / "v4", V4)
    family, keys = latent_checkpoints.CASES["glm_moe_dsa_shared"]
    latent_checkpoints.CASES["short"] = (family, keys | LATENTS)
    latent_checkpoints._write(folder / "glm", "short")
    return {"v4": folder / "v4", "glm": folder / "glm"}


def answers(llm: LLM, first: int = 0, end: int = len(ROWS)) -> list:
    return answers_of(llm.generate(ROWS[first:end], PARAMS[first:end], use_tqdm=False))


def ids(found: list) -> list:
    return [[sample[0] for sample in row] for row in found]


def check(name: str, folder: Path, found: dict[str, bool]) -> None:
    with LLM(folder, device_backend="cpu", **SETTINGS) as llm:
        expected = answers(llm)
    with LLM(folder, device_backend=EAGER, **SETTINGS) as llm:
        together = answers(llm)
        found[f"{name}: ids are the CPU's"] = ids(together) == ids(expected)
        found[f"{name}: control: other kernels have other bits"] = together != expected
        found[f"{name}: a prefix that is found"] = (
            answers(llm, 2, 3) == together[2:] and llm.llm_engine.counters.num_cached_prompt_tokens > 0
        )
    small = SETTINGS | {"max_num_batched_tokens": 7, "max_num_seqs": 3, "enable_prefix_caching": False}
    with LLM(folder, device_backend=GRAPHS, **small) as llm:
        before = RecordedGraph.num_replayed
        found[f"{name}: replayed, in chunks"] = answers(llm) == together and RecordedGraph.num_replayed > before
    with mock.patch.object(listed, "place_tokens", place_once()), LLM(folder, device_backend=GRAPHS, **small) as llm:
        found[f"{name}: control: tokens of another step"] = answers(llm, 0, 1) != together[:1]


def place_once() -> object:
    """`listed.place_tokens` that does nothing for a step in decode: its tokens are those of a chunk before."""
    place = listed.place_tokens

    def placed(starts: object, lengths: object, num_sequences: int, sequences: object, positions: object) -> None:
        if len(positions) > 3:
            place(starts, lengths, num_sequences, sequences, positions)

    return placed


def main() -> None:
    use_small_steps()
    listed.SCORE_TILE = 16
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, folder in write(Path(name)).items():
            check(kind, folder, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
