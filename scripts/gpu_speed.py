"""Speeds of whole models with dummy weights on a GPU, beside cuBLAS in place of our matmuls and beside floors.

    python scripts/gpu_speed.py {8b,135m,fp8,experts,adapters} [--device-backend triton] [--warm]
    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python scripts/gpu_speed.py 135m --dry

`8b`: one model, loaded once: 256 rows from prompt to end, decode and prefill steps, few rows, ways of sampling, and all
but sampling once more by cuBLAS. `135m`: shares of the time that the device is at work. `fp8`: 12 layers of the 8B
model beside the same in bfloat16. `experts`: sparse layers alone, in CUDA graphs, with experts in bfloat16 and as files
store them. `adapters`: 12 layers of the 8B model, rows with one LoRA adapter of rank 16, with eight, and with eight of
queries and values alone, beside rows without. --warm runs two layers for a few steps, for Triton's cache. A line a
figure, and one JSON object last.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from gpu_checkpoints import MODULES, make_adapter
from gpu_figures import CHIPS, Clock, Findings, NotOfferedError, Rates, rates
from torch import Tensor

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.model_config.stored_format import EXPERTS, MXFP4, StoredFormat
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ranks.communicator import single_group

BLOCK_SIZE, MAX_TOKENS, MAX_ROWS = 16, 2048, 256
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
"""Answers of random weights do not end by it."""
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p and top_k": {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    "logprobs=1": {"temperature": 0.0, "logprobs": 1},
    "three penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    "JSON schema": {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
}
MOST_OF_GREEDY, MOST_OF_LIBRARY = 1.1, 1.1
LEAST_FP8 = {"prefill": 1.4, "decode": 1.3}
LEAST_BUSY = {"decode": 90.0, "prefill": 80.0}
H200_MS = {"decode": 9.6, "prefill": 48.0, "one row": 5.5}
"""The most that a step of the 8B model may take on an H200 (decode at 350 keys; 10.2 at 400); on another chip in
proportion to its floor.
"""
H200_TOTAL_S = 2.8


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Llama, or with `num_experts` a Qwen3-MoE."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    def config(self, num_layers: int | None = None) -> dict[str, Any]:
        """Content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": num_layers or self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def shapes(self) -> list[tuple[int, int]]:
        """Outputs and inputs of a layer's matmuls."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        return [
            (qkv, self.hidden),
            (self.hidden, self.heads * self.head),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    def floor_ms(self, chip: Rates, num_tokens: int, num_rows: int, num_keys: float) -> float:
        """Milliseconds of a step of `num_tokens` that samples `num_rows` and reads `num_keys` keys in all: each matmul
        by bytes or operations, whichever takes longer, and the cache.
        """
        layer = sum(chip.floor_us(2 * n * k, 2.0 * num_tokens * n * k) for n, k in self.shapes())
        head = chip.floor_us(2 * self.vocabulary * self.hidden, 2.0 * num_rows * self.vocabulary * self.hidden)
        cache = chip.floor_us(num_keys * self.kv_heads * self.head * 4)
        return (self.layers * (layer + cache) + head) / 1e3


MODELS = {
    "8b": Sizes(4096, 14336, 32, 32, 8, 128, 128256),
    "135m": Sizes(576, 1536, 30, 9, 3, 64, 49152),
    "tiny": Sizes(64, 96, 2, 4, 2, 16, 320),
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "sliding_window": 128,
    "attention_bias": True,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
SPARSE = {"qwen3-30b-a3b": (QWEN3_MOE, 128, 8, 2048, 768), "gpt-oss-20b": (GPT_OSS, 32, 4, 2880, 2880)}
"""Config, experts, experts of a token, hidden size, intermediate size."""
STORED = {"qwen3-30b-a3b": ("FP8", StoredFormat("e4m3", 128, 128)), "gpt-oss-20b": ("MXFP4", MXFP4)}
"""Formats in which the files of these models have their experts."""
DRY_SPARSE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4}
DRY_SPARSE |= {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_local_experts": 8, "vocab_size": 320}
DRY_SPARSE |= {"num_experts_per_tok": 2}


@triton.jit
def _silu_mul(columns, out, WIDTH, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202  # Triton reads annotations
    """[T, 2 WIDTH] -> [T, WIDTH]: what follows a library's gated matmul, in one launch as other engines have it."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(columns + row * 2 * WIDTH + at, mask=at < WIDTH).to(tl.float32)
    up = tl.load(columns + row * 2 * WIDTH + WIDTH + at, mask=at < WIDTH).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=at < WIDTH)


class _Library:
    """Matmuls by `F.linear` for `TritonKernels`, and how often they were asked."""

    num_calls = 0

    @classmethod
    def linear(cls, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        del out
        cls.num_calls += 1
        return F.linear(x, weight, bias)

    @classmethod
    def gated_linear(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = cls.linear(x, weight, bias)
        width = len(weight) // 2
        out = columns.new_empty((len(columns), width))
        _silu_mul[(len(columns), triton.cdiv(width, 1024))](columns, out, width, 1024)
        return out


@contextmanager
def library_matmuls() -> Iterator[type[_Library]]:
    """`TritonKernels` multiplies by the library meanwhile."""
    ours = {name: TritonKernels.__dict__.get(name) for name in ("linear", "gated_linear")}
    _Library.num_calls = 0
    for name in ours:
        setattr(TritonKernels, name, staticmethod(getattr(_Library, name)))
    try:
        yield _Library
    finally:
        for name, method in ours.items():
            delattr(TritonKernels, name) if method is None else setattr(TritonKernels, name, method)


@dataclass
class Steps:
    """Milliseconds of each step of some rows, and seconds in all."""

    ms: list[float] = field(default_factory=list)
    total_s: float = 0.0
    num_prefill: int = 0
    num_tokens: int = 0
    """Asked of each row."""
    num_output_tokens: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def prefill_ms(self) -> float:
        """Median of steps full of prompts."""
        return statistics.median(self.ms[1 : max(2, self.num_prefill - 1)])

    @property
    def decode_ms(self) -> float:
        """Median of steps in which all rows decode: from the last prompt on, until the row that began first ends."""
        together = self.ms[self.num_prefill + 1 : self.num_tokens - 1] or self.ms[-1:]
        return statistics.median(together)


class Model:
    """An `LLM` of dummy weights, stepped by hand."""

    def __init__(self, folder: Path, backend: str, *, is_dry: bool, **settings: Any) -> None:
        self.is_dry = is_dry
        self.vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "device": "cpu" if is_dry else "cuda",
            "device_backend": backend,
            "dtype": "float32" if is_dry else "bfloat16",
            "max_model_len": 64 if is_dry else 4096,
            "num_blocks": 64 if is_dry else 8192,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8 if is_dry else MAX_ROWS,
            "max_num_batched_tokens": 32 if is_dry else MAX_TOKENS,
        }
        began = time.perf_counter()
        try:
            self.llm = LLM(folder, **{**defaults, **settings})
        except ConfigError as error:
            raise NotOfferedError(str(error)) from None
        self.ready_s = time.perf_counter() - began
        self._budget = int(defaults["max_num_batched_tokens"])

    def close(self) -> None:
        self.llm.close()
        del self.llm
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def prompts(self, count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        return [tuple(row) for row in torch.randint(3, self.vocabulary, (count, length), generator=generator).tolist()]

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_tokens: int,
        at_step: Callable[[int], None] | None = None,
        *,
        adapters: Sequence[LoRARequest | None] = (None,),
        **how: Any,
    ) -> Steps:
        """All rows from their first step to their last, with `adapters` in turns. `at_step` is called before each step
        with its number.
        """
        engine, steps = self.llm.llm_engine, Steps(num_tokens=num_tokens)
        params = SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, **how})
        digests = engine.adapters.digests_of(adapters)
        for row, prompt in enumerate(prompts):
            engine.requests.add(PromptContent(prompt, adapter=digests[row % len(digests)]), params)
        steps.num_prefill = -(-sum(map(len, prompts)) // self._budget)
        self.wait()
        began = before = time.perf_counter()
        while engine.has_unfinished_requests():
            if at_step is not None:
                at_step(len(steps.ms))
            for output in engine.step():
                steps.num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
                if output.error is not None:
                    steps.errors.append(str(output.error))
            now = time.perf_counter()
            steps.ms.append((now - before) * 1e3)
            before = now
        self.wait()
        steps.total_s = time.perf_counter() - began
        return steps

    def wait(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def drop_graphs(self) -> None:
        """Later steps are recorded anew."""
        self.llm.collective_rpc(_forget_graphs)

    def busy_ms(self, prompts: Sequence[tuple[int, ...]], num_tokens: int, first: int, last: int) -> float:
        """Milliseconds a step in which the device is at work, of steps `first` to `last`, from a profile."""
        profiles: list[Any] = []

        def at_step(number: int) -> None:
            if number == first:
                self.wait()
                kind = torch.profiler.ProfilerActivity.CPU if self.is_dry else torch.profiler.ProfilerActivity.CUDA
                profiles.append(torch.profiler.profile(activities=[kind]))
                profiles[0].__enter__()
            if number == last and profiles:
                self.wait()
                profiles[0].__exit__(None, None, None)

        self.run(prompts, num_tokens, at_step)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiles[0].events()
            if self.is_dry or str(event.device_type).endswith("CUDA")
        )
        return covered(spans) / 1e3 / (last - first)


def _forget_graphs(worker: Any) -> None:
    if (graphs := worker.model_runner.graphs) is not None:
        graphs.forget()


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals, which are sorted by their start."""
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def write_model(folder: Path, config: dict[str, Any], *, has_tokenizer: bool = False) -> Path:
    """A model's folder without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if has_tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Byte-level BPE with as many ids as the model: pairs of characters, and what one more makes of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    tokens = ["<pad>", "<s>", "</s>", *sorted(letters)]
    plain = [chr(code) for code in range(33, 127)]
    merges: list[tuple[str, str]] = []
    last = plain
    while len(tokens) < vocab_size:
        more = [(one, two) for one in last for two in plain][: vocab_size - len(tokens)]
        merges += more
        last = [one + two for one, two in more]
        tokens += last
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


class Speeds:
    """Each method is one part."""

    def __init__(self, findings: Findings, folder: Path, backend: str, *, is_dry: bool, is_warming: bool) -> None:
        self.findings, self.folder, self.backend = findings, folder, backend
        self.is_dry, self.is_warming, self.chip = is_dry, is_warming, rates()
        self.is_small = is_dry or is_warming

    def open(self, name: str, config: dict[str, Any], **settings: Any) -> Model:
        folder = write_model(self.folder / name, config, has_tokenizer=settings.pop("has_tokenizer", False))
        model = Model(folder, self.backend, is_dry=self.is_dry, **settings)
        self.findings.figure(f"{name}: start to ready", model.ready_s, "s")
        return model

    def counts(self) -> tuple[int, int, int]:
        """Rows, prompt tokens and output tokens of the main workload."""
        return (2, 8, 3) if self.is_dry else (16, 300, 6) if self.is_warming else (256, 300, 100)

    def checked(self, name: str, steps: Steps, num_tokens: int) -> Steps:
        """Rows that end as errors would be fast."""
        if steps.errors or steps.num_output_tokens != num_tokens:
            self.findings.must(f"{name}: output tokens", steps.num_output_tokens, num_tokens)
            self.findings.must(f"{name}: errors", steps.errors[:2], [])
        return steps

    def main_workload(self, model: Model, sizes: Sizes, name: str) -> dict[str, float]:
        """256 x 300 + 100, and few rows: milliseconds of steps, and seconds."""
        rows, prompt, output = self.counts()
        # Graphs of both sizes are recorded, as they are where a job has run for a while.
        model.run(model.prompts(rows, min(prompt, 24), 1), 3)
        # Prompts that an earlier workload computed are in the cache.
        model.llm.reset_prefix_cache()
        steps = self.checked(name, model.run(model.prompts(rows, prompt, 2), output), rows * output)
        found = {"total": steps.total_s, "decode": steps.decode_ms, "prefill": steps.prefill_ms}
        few = (1, 2) if self.is_dry else (1, 16, 64)
        for count in few:
            num_tokens = 3 if self.is_dry else 16
            steps = model.run(model.prompts(count, prompt, 3 + count), num_tokens)
            self.checked(name, steps, count * num_tokens)
            found["one row" if count == 1 else f"{count} rows"] = steps.decode_ms
        return found

    def floors(self, sizes: Sizes, chip: Rates) -> dict[str, float]:
        """Floors of `main_workload`'s figures: while all 256 rows decode, they have about 350 keys."""
        rows, prompt, output = self.counts()
        keys = prompt + output // 2
        found = {
            "decode": sizes.floor_ms(chip, rows, rows, rows * keys),
            "prefill": sizes.floor_ms(chip, MAX_TOKENS, MAX_TOKENS // prompt, 0),
            "one row": sizes.floor_ms(chip, 1, 1, prompt),
        }
        found |= {f"{count} rows": sizes.floor_ms(chip, count, count, count * prompt) for count in (2, 16, 64)}
        decoding = sizes.floor_ms(chip, rows, rows, rows * (prompt + output // 2))
        found["total"] = (rows * prompt / MAX_TOKENS * found["prefill"] + output * decoding) / 1e3
        return found

    def large(self) -> None:
        sizes = MODELS["tiny" if self.is_dry else "8b"]
        config = sizes.config(2 if self.is_warming else None)
        model = self.open("8b", config, has_tokenizer=True, enable_prefix_caching=True)
        ours = self.main_workload(model, sizes, "8b")
        if not self.is_warming:
            self.sampling(model)
        with library_matmuls() as library:
            model.drop_graphs()
            theirs = self.main_workload(model, sizes, "8b by cuBLAS")
            self.findings.must("8b by cuBLAS: matmuls were the library's", library.num_calls > 0, True)
        model.drop_graphs()
        model.close()
        floors, reference = self.floors(sizes, self.chip), self.floors(sizes, Rates(*CHIPS["H200"]))
        for name, value in ours.items():
            most = {**H200_MS, "total": H200_TOTAL_S}.get(name)
            most = None if most is None or self.is_small else most * floors[name] / reference[name]
            unit = "s" if name == "total" else "ms"
            label = "256 rows x 300 + 100" if name == "total" else f"{name} step"
            beside = {"library": theirs[name], "floor": floors[name], "most": most}
            self.findings.figure(f"8b: {label}", value, unit, **beside)
        for name, value in ours.items():
            most = None if self.is_small else MOST_OF_LIBRARY
            self.findings.figure(f"8b: {name}, ours to cuBLAS", value / theirs[name], "x", most=most)

    def sampling(self, model: Model) -> None:
        """Milliseconds of a decode step of the same 256 rows, whose prompts are in the cache."""
        rows, prompt, _ = self.counts()
        prompts, num_tokens = model.prompts(rows, prompt, 2), 3 if self.is_dry else 24
        greedy_ms = None
        for name, how in SAMPLED.items():
            if "structured_outputs" in how and find_spec("llguidance") is None:
                self.findings.not_offered["sampling by a JSON schema"] = "llguidance is not installed"
                continue
            model.run(prompts[:2], 3, **how)
            # A grammar may force several tokens in a step.
            steps = model.run(prompts, num_tokens, **how)
            if "structured_outputs" not in how:
                self.checked(name, steps, rows * num_tokens)
            ms = statistics.median(steps.ms[len(steps.ms) // 2 : -1])
            greedy_ms = ms if greedy_ms is None else greedy_ms
            most = None if self.is_dry else MOST_OF_GREEDY * greedy_ms
            self.findings.figure(f"8b: decode step, {name}", ms, "ms", most=most)
            self.findings.say(f"8b: {name} to greedy", round(ms / greedy_ms, 2))

    def small(self) -> None:
        sizes = MODELS["tiny" if self.is_dry else "135m"]
        # Nothing is found in the cache, so that each run computes the same.
        model = self.open("135m", sizes.config(2 if self.is_warming else None), enable_prefix_caching=False)
        rows, prompt, _ = self.counts()
        num_tokens = 4 if self.is_dry else 64
        prompts = model.prompts(rows, prompt, 2)
        model.run(prompts, num_tokens)
        if self.is_warming:
            model.close()
            return
        steps = self.checked("135m", model.run(prompts, num_tokens), rows * num_tokens)
        after = steps.num_prefill
        spans = {"decode": (after + 10, after + 25), "prefill": (2, after - 1)}
        if self.is_dry:
            spans = {"decode": (after, after + 2), "prefill": (0, 1)}
        floors = self.floors(sizes, self.chip)
        for name, ms in {"decode": steps.decode_ms, "prefill": steps.prefill_ms}.items():
            busy = model.busy_ms(prompts, num_tokens, *spans[name])
            self.findings.figure(f"135m: {name} step", ms, "ms", floor=floors[name])
            self.findings.figure(f"135m: {name} step, device at work", busy, "ms", floor=floors[name])
            least = None if self.is_dry else LEAST_BUSY[name]
            self.findings.figure(f"135m: {name}, share of the device", busy / ms * 100, "%", least=least)
        self.findings.figure("135m: output tokens a second", steps.num_output_tokens / steps.total_s, "/s")
        model.close()

    def fp8(self) -> None:
        sizes = MODELS["tiny" if self.is_dry else "8b"]
        num_layers = 2 if self.is_small else 12
        found = {}
        for name in ("bf16", "fp8"):
            quantised = {"quantization": "fp8"} if name == "fp8" else {}
            model = self.open(f"8b of {num_layers} layers in {name}", sizes.config(num_layers), **quantised)
            rows, prompt, _ = self.counts()
            # All rows decode together for a while after the last prompt.
            num_tokens = 4 if self.is_small else 64
            model.run(model.prompts(rows, min(prompt, 24), 1), 3)
            steps = self.checked(name, model.run(model.prompts(rows, prompt, 2), num_tokens), rows * num_tokens)
            found[name] = {"prefill": steps.prefill_ms, "decode": steps.decode_ms}
            model.close()
        for name, least in LEAST_FP8.items():
            for kind in ("bf16", "fp8"):
                self.findings.figure(f"8b of {num_layers} layers, {name} step in {kind}", found[kind][name], "ms")
            ratio = found["bf16"][name] / found["fp8"][name]
            self.findings.figure(f"fp8: {name}, times bf16", ratio, "x", least=None if self.is_small else least)

    def adapters(self) -> None:
        sizes = MODELS["tiny" if self.is_dry else "8b"]
        num_layers = 2 if self.is_small else 12
        config, count, rank = sizes.config(num_layers), 2 if self.is_dry else 8, 16
        keys = {"enable_lora": True, "max_loras": count, "max_cpu_loras": 2 * count, "max_lora_rank": rank}
        model = self.open(f"8b of {num_layers} layers with adapters", config, **keys)
        whole, few = (
            [self._adapter(config, first + number, rank, modules) for number in range(count)]
            for first, modules in ((1, tuple(MODULES)), (1 + count, ("self_attn.q_proj", "self_attn.v_proj")))
        )
        kinds: dict[str, Sequence[LoRARequest | None]] = {
            "no adapter": (None,),
            "one adapter": whole[:1],
            f"{count} adapters": whole,
            f"{count} adapters of q and v": few,
        }
        rows, prompt, _ = self.counts()
        num_tokens, found = 4 if self.is_small else 64, {}
        for seed, (name, adapters) in enumerate(kinds.items()):
            if adapters is few:
                # Layers that no loaded adapter changes are skipped.
                for each in whole:
                    model.llm.remove_lora(each.lora_int_id)
            model.run(model.prompts(rows, min(prompt, 24), 2 * seed), 3, adapters=adapters)
            steps = model.run(model.prompts(rows, prompt, 2 * seed + 1), num_tokens, adapters=adapters)
            self.checked(name, steps, rows * num_tokens)
            found[name] = {"prefill": steps.prefill_ms, "decode": steps.decode_ms}
            for kind, ms in found[name].items():
                self.findings.figure(f"8b of {num_layers} layers, {kind} step, {name}", ms, "ms")
                self.findings.figure(f"{name}: {kind}, times none", ms / found["no adapter"][kind], "x")
        model.close()

    @staticmethod
    def _adapter(config: dict[str, Any], number: int, rank: int, modules: Sequence[str]) -> LoRARequest:
        tensors, settings = make_adapter(config, number, rank, modules)
        return LoRARequest(f"a{number}", number, lora_tensors=tensors, peft_config=settings)

    def experts(self) -> None:
        for name, (config, num_experts, chosen, hidden, size) in SPARSE.items():
            with self.findings.part(name):
                self._experts(
                    name, {**config, **(DRY_SPARSE if self.is_dry else {})}, num_experts, chosen, hidden, size
                )

    def _experts(
        self, name: str, config: dict[str, Any], num_experts: int, chosen: int, hidden: int, size: int
    ) -> None:
        model = self.open(name, config, num_blocks=64 if self.is_dry else 1024)
        # Through the worker: the layer that steps call, with its router.
        layer = model.llm.collective_rpc(_sparse_layers)[0][0]
        word, stored = STORED[name]
        layers = {
            "bf16": (layer, 2.0),
            word: (_stored_layer(config, stored, layer), stored.num_bytes(1024, 1024) / 2**20),
        }
        for rows, (kind, (each, size_of_weight)) in product(
            (3,) if self.is_dry else (1, 16, 256, 2048), layers.items()
        ):
            share = 1 - (1 - chosen / num_experts) ** rows
            num_bytes = size_of_weight * share * num_experts * 3 * hidden * size
            flop = 6.0 * rows * chosen * hidden * size
            floor = self.chip.floor_us(num_bytes, flop) / 1e3
            is_limited = name == "qwen3-30b-a3b" and kind == "bf16"
            most = {256: floor / 0.31, 2048: 3 * floor}.get(rows) if is_limited else None
            with torch.inference_mode():
                ms, how = self._layer_ms(name, each, rows, config["hidden_size"])
            words = f"{rows} rows" if kind == "bf16" else f"{rows} rows in {kind}"
            self.findings.figure(f"experts {name}, {words}, {how}", ms, "ms", floor=floor, most=most)
        model.close()

    def _layer_ms(self, name: str, layer: torch.nn.Module, rows: int, hidden: int) -> tuple[float, str]:
        """Milliseconds of a call, and how it was launched."""
        x = torch.randn(rows, hidden, device=layer.gate.weight.device)
        call = partial(layer, x.to(torch.float32 if self.is_dry else torch.bfloat16))
        try:
            return Clock(is_timing=not self.is_small).us([call]) / 1e3, "in a graph"
        except RuntimeError as error:
            # A recording that failed leaves its own stream behind.
            torch.cuda.set_stream(torch.cuda.default_stream())
            self.findings.say(f"{name}: a layer cannot be recorded", str(error)[:200])
            return _seconds(call) * 1e3, "launched one by one"


@torch.no_grad()
def _stored_layer(config: dict[str, Any], stored: StoredFormat, plain: Any) -> SparseFeedForward:
    """A layer with the experts of a file in this format, and the router of `plain`."""
    model_config, device = model_config_of(config, Path("config.json")), plain.gate.weight.device
    dtype = plain.experts["0"].down_proj.weight.dtype
    formats = {0: {EXPERTS: stored}}
    context = LayerContext(*(single_group(), TritonKernels(), SdpaBackend(), dtype, device), stored=formats)
    layer = SparseFeedForward(context, model_config.layers[0], model_config.hidden_size)
    for (name, parameter), given in zip(layer.named_parameters(), plain.parameters(), strict=True):
        if parameter.dtype == torch.uint8:
            # Not the largest numbers of FP8, for sums to be finite.
            parameter.random_(0, 112)
        else:
            assert parameter.shape == given.shape, name
            parameter.copy_(given)
    for buffer in layer.buffers():
        buffer.copy_(buffer.random_(116, 121) if stored.is_mxfp4 else buffer.uniform_(1e-4, 1e-3))
    return layer


def _sparse_layers(worker: Any) -> list[Any]:
    modules = worker.get_model().modules()
    return [each for each in modules if type(each).__name__ == "SparseFeedForward"]


def _seconds(call: Callable[[], object]) -> float:
    """Median of a few calls."""
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


class _Starts(logging.Handler):
    """Seconds of a start by part, where the runtime says them."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.INFO)
        self._findings, self._count = findings, 0

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith("worker ready in"):
            self._count += 1
            self._findings.say(f"start {self._count}", message)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("8b", "135m", "fp8", "experts", "adapters"))
    parser.add_argument("--device-backend", default="triton", metavar="NAME")
    parser.add_argument("--warm", action="store_true", help="two layers, a few steps, so that kernels are compiled")
    parser.add_argument("--dry", action="store_true", help="float32 on the CPU, interpreted, tiny, nothing timed")
    arguments = parser.parse_args()
    findings = Findings()
    runtime = logging.getLogger("spmd_worker")
    runtime.setLevel(logging.INFO)
    runtime.addHandler(_Starts(findings))
    with tempfile.TemporaryDirectory(prefix="gpu-speed-") as folder:
        backend = arguments.device_backend
        speeds = Speeds(findings, Path(folder), backend, is_dry=arguments.dry, is_warming=arguments.warm)
        asked = {
            "8b": speeds.large,
            "135m": speeds.small,
            "fp8": speeds.fp8,
            "experts": speeds.experts,
            "adapters": speeds.adapters,
        }
        for part in arguments.parts:
            with findings.part(part):
                asked[part]()
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
