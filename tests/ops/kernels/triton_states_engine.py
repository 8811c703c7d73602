"""Models with recurrent states through the whole engine with kernels of a GPU, interpreted, beside the CPU's own
kernels: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_states_engine.py
                                                                       prints one JSON object

Rows together, cut, from snapshots and alone have the same bits; the device keeps what steps have in common. So have
steps that are replayed (recorded_graphs.py), whose padding changes no state.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from recorded_graphs import RecordedGraph
from small_steps import use_small_steps
from state_rows import answers_of

from spmd_worker import LLM, SamplingParams
from spmd_worker.ops.attention.triton import TritonFixedAttention
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.ops.kernels.triton import scan_delta_kernels, short_conv_kernels

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
FAMILIES = {
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Qwen3_5ForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "load_format": "dummy",
    "max_model_len": 80,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "num_blocks": 40,
    "num_state_snapshots": 4,
}
HEAD = [5 + index * 7 % 80 for index in range(66)]
ROWS = [{"prompt_token_ids": [*HEAD, 7]}, {"prompt_token_ids": [*HEAD, 9]}, {"prompt_token_ids": [11, 12]}]
PARAMS = [
    SamplingParams(temperature=0.8, seed=index, max_tokens=3, ignore_eos=True, logprobs=1) for index in range(len(ROWS))
]

FILL_SEGMENTS = TritonFixedAttention._fill_segments


def answers(llm: LLM, first: int = 0, end: int = len(ROWS)) -> list:
    return answers_of(llm.generate(ROWS[first:end], PARAMS[first:end], use_tqdm=False))


def begin_anew(attention: TritonFixedAttention, segments: StateSegments) -> None:
    FILL_SEGMENTS(attention, replace(segments, firsts=torch.zeros_like(segments.firsts)))


def check_graphs(folder: Path, found: dict[str, bool]) -> None:
    """Of steps that hold few tokens, because recording computes them again."""
    settings = SETTINGS | {"max_num_batched_tokens": 8, "max_num_seqs": 3, "enable_prefix_caching": False}
    prompts = [{"prompt_token_ids": HEAD[:count]} for count in (4, 2)]

    def short(backend: str, num_rows: int = 2) -> list:
        with LLM(folder, device_backend=backend, **settings) as llm:
            return answers_of(llm.generate(prompts[:num_rows], PARAMS[:num_rows], use_tqdm=False))

    expected, replaying = short("triton"), "recorded_graphs.RecordedDevice"
    found["replayed: same bits"] = short(replaying) == expected and RecordedGraph.num_replayed > 0
    with mock.patch.object(TritonFixedAttention, "_fill_segments", begin_anew):
        found["replayed: control: rows that begin anew"] = short(replaying, 1) != expected[:1]


def main() -> None:
    use_small_steps()
    # Interpreted programs take their time one after another.
    scan_delta_kernels.BV, short_conv_kernels.BC = 16, 128
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, keys in FAMILIES.items():
            (folder / "config.json").write_text(json.dumps({"architectures": [family], **SIZES, **keys}))
            with LLM(folder, **SETTINGS) as llm:
                expected = answers(llm)
            with LLM(folder, device_backend="triton", **SETTINGS) as llm:
                together, again = answers(llm), answers(llm)
                found[f"{family}: from snapshots"] = llm.llm_engine.counters.num_snapshot_hits > 2 and again == together
                llm.reset_prefix_cache()
                found[f"{family}: alone"] = answers(llm, 1, 2) == together[1:2]
            ids = [[sample[0] for sample in row] for row in together]
            found[f"{family}: ids are the CPU's"] = ids == [[sample[0] for sample in row] for row in expected]
            found[f"{family}: control: other kernels have other bits"] = together != expected
        check_graphs(folder, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
