"""The forms that the triton backend compiles before the first request, counted: kernels that compute nothing note in
which form Triton would compile them for sm_90, by Triton's own rules.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_folders import CONFIG, lora_tensors
from encoder_models import encoder_folder
from expert_checkpoints import expert_folder
from pooling_models import pooling_folder
from ranks import REPOSITORY
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from spmd_worker import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.triton import (
    adapter_kernels,
    attention_kernels,
    expert_kernels,
    experts,
    head_kernels,
    leaf_kernels,
    matmul,
    matmul_kernels,
    penalty_kernels,
    router_kernels,
    row_kernels,
    sampling_kernels,
)
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.worker.backends import triton as triton_backend
from spmd_worker.worker.backends.backend import Operations
from spmd_worker.worker.backends.triton import TritonDevice
from spmd_worker.worker.runner import dummy_steps

pytestmark = pytest.mark.matrix
MODEL = REPOSITORY / "scripts" / "demo" / "model"
OUTPUTS = {"out": 0, "sums": 1, "counts": 0, "totals": 1, "ids": 0, "columns": 0, "values": 0, "pairs": 0}
"""And what a kernel that computes nothing leaves there: `sums` are masses, of which a row has some, and `totals` tokens
of experts.
"""


class Counted:
    """In a kernel's place: notes the form of a launch, and answers with what OUTPUTS says."""

    def __init__(self, kernel: JITFunction, forms: set[tuple]) -> None:
        self._kernel, self._forms = kernel, forms
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid: tuple[int, ...]) -> "Counted":
        assert all(size > 0 for size in grid), grid
        return self

    def __call__(self, *arguments: object, **keywords: object) -> None:
        bound, form, options = self._bind(*arguments, **keywords)
        self._forms.add((self._kernel.__name__, *map(str, form), str(sorted(options.items()))))
        for name, value in OUTPUTS.items():
            if bound.get(name) is not None:
                # A descriptor has the tensor.
                getattr(bound[name], "base", bound[name]).fill_(value)
        if "slots" in bound and "cache" in bound:
            # A slot past the cache is somebody's memory.
            assert bound["slots"].max() < len(bound["cache"]) * bound["BLOCK"], bound["slots"]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    """Of every launch so far."""
    found: set[tuple] = set()
    for module in (
        adapter_kernels,
        attention_kernels,
        expert_kernels,
        head_kernels,
        router_kernels,
        sampling_kernels,
        penalty_kernels,
        matmul_kernels,
        leaf_kernels,
        row_kernels,
    ):
        for name, kernel in inspect.getmembers(module, lambda each: isinstance(each, JITFunction)):
            if not name.startswith("_"):
                monkeypatch.setattr(module, name, Counted(kernel, found))
    # On the CPU it wants the interpreter.
    monkeypatch.setattr(TritonDevice, "operations", lambda self: Operations(TritonKernels(), TritonBackend()))
    # Of which the model's rows pass several.
    monkeypatch.setattr(attention_kernels, "SEGMENT", 64)
    return found


def mixed_steps(llm: LLM) -> None:
    """Rows of one token and of many, greedy, drawn, filtered, penalised, reported and with forms, in every company."""
    ways = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 5, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": 1},
        {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-z]+")},
        {"temperature": 0.0, "logprobs": 1, "structured_outputs": StructuredOutputsParams(regex="[0-9]+")},
    ]
    params = [SamplingParams(max_tokens=3, ignore_eos="structured_outputs" not in way, **way) for way in ways]
    for way in params:
        llm.generate([[5]], way, use_tqdm=False)
    for lengths in ((1, 2, 3), (130, 1), (7, 100, 64, 65)):
        prompts = [[5] * length for length in lengths for _ in params]
        llm.generate(prompts, params * len(lengths), use_tqdm=False)
    llm.generate([[5]] * 80, params[0], use_tqdm=False)


def new_forms(forms: set[tuple], dtype: str, **settings: int) -> set[tuple]:
    """What the mixed steps compile beside what was there before the first request."""
    with LLM(MODEL, device="cpu", dtype=dtype, num_blocks=512, device_backend="triton", **settings) as llm:
        before = set(forms)
        mixed_steps(llm)
        return forms - before


@pytest.mark.gate("bfloat16-settings0", "float32-settings1")
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8, "invariant_tensor_parallel": True}]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_step_compiles_after_warm_up(forms: set[tuple], dtype: str, settings: dict[str, int]):
    assert new_forms(forms, dtype, **settings) == set()
    names = {form[0] for form in forms}
    assert names >= {"attend", "join_partials", "linear", "forbid", "filter_logits", "draw"}
    assert ("linear_of_leaves" in names) == ("invariant_tensor_parallel" in settings)


def test_without_the_warm_up_the_first_steps_compile(forms: set[tuple], monkeypatch: pytest.MonkeyPatch):
    """Control, and how it was."""
    monkeypatch.setattr(TritonDevice, "warm_up", lambda self, *arguments: None)
    compiled = {form[0] for form in new_forms(forms, "bfloat16")}
    assert compiled >= {
        "attend",
        "join_partials",
        "linear",
        "gated_linear",
        "prob_sums",
        "forbid",
        "filter_logits",
        "draw",
    }


def test_compile_check_detects_incomplete_warm_up(forms: set[tuple], monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.warm_up_steps
    monkeypatch.setattr(triton_backend, "warm_up_steps", lambda tokens, *sizes: right(65, *sizes)[:1])
    monkeypatch.setattr(matmul, "warm_up_rows", lambda count: (count,))
    assert {form[0] for form in new_forms(forms, "bfloat16")} >= {"gated_linear", "attend"}


@pytest.mark.parametrize("name", ["mean", "last"])
def test_a_model_that_pools_is_warmed_up_too(forms: set[tuple], name: str):
    with LLM(pooling_folder(name), device="cpu", dtype="float32", num_blocks=64, device_backend="triton") as llm:
        before = set(forms)
        assert "linear" in {form[0] for form in before}
        llm.embed([[5] * 20, [7], [9] * 30], use_tqdm=False)
        assert forms == before


@pytest.mark.parametrize("name", ["bert", "modern", "mpnet", "deberta"])
def test_encoders_warm_up_within_their_cache(forms: set[tuple], name: str):
    """Of a step's blocks: with more rows than a step may have it was written past its end."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": 64}
    with LLM(encoder_folder(name), device="cpu", dtype="float32", device_backend="triton", **settings) as llm:
        before = set(forms)
        assert {"attend", "write_rows", "make_items"} <= {form[0] for form in before}
        llm.encode([{"prompt_token_ids": [5] * length} for length in (20, 1, 2, 40)], use_tqdm=False)
        assert forms == before


@pytest.mark.parametrize("case", ["bfloat16", "float32", "control: no steps for experts"])
def test_warm_up_covers_experts_without_counting_tokens(
    forms: set[tuple], monkeypatch: pytest.MonkeyPatch, case: str
):  # fmt: skip
    is_control = case.startswith("control")
    if is_control:
        monkeypatch.setattr(TritonDevice, "_expert_token_counts", lambda self: ())
        monkeypatch.setattr(matmul, "warm_up_rows", lambda count: (1,))
    dtype = "bfloat16" if is_control else case
    folder = expert_folder("qwen3_moe")
    with LLM(folder, device="cpu", dtype=dtype, load_format="dummy", num_blocks=128, device_backend="triton") as llm:
        before = set(forms)
        assert {form[0] for form in before} >= {"choose", "place_slots", "gate_up", "expert_linear"}
        loads = llm.llm_engine.executor.reports()[0].expert_loads
        assert {sum(counts) for counts in loads.values()} == {0}
        llm.generate([[5, 6, 7], [8] * 3], SamplingParams(max_tokens=2), use_tqdm=False)
        # Control: they are, once a row has come.
        loads = llm.llm_engine.executor.reports()[0].expert_loads
        assert min(sum(counts) for counts in loads.values()) > 0
        # All tiles of experts: steps of few tokens, of some, of many.
        for count in (1, 4, 12, 24):
            llm.generate([[8] * 30] * count, SamplingParams(max_tokens=2), use_tqdm=False)
        compiled = {form[0] for form in forms - before}
        if is_control:
            compiled.discard("linear")
        assert compiled == ({"place_slots", "gate_up", "expert_linear"} if is_control else set())


def test_warm_up_counts_identity_experts_too():
    """LongCat-Flash: steps take the tiles of few, of some and of many rows by all experts that a token chooses from."""
    config = model_config_of({"architectures": ["LongcatFlashForCausalLM"]}, Path("config.json"))
    scheduler = SimpleNamespace(max_num_batched_tokens=8192)
    resolved = SimpleNamespace(model_config=config, config=SimpleNamespace(scheduler=scheduler))
    device: Any = SimpleNamespace(resolved=resolved)
    counts = TritonDevice._expert_token_counts(device)
    tiles = {experts.tiles_for(count * 12, 512 + 256, torch.bfloat16, (9, 0), 1 << 20) for count in (1, *counts)}
    assert tiles == {experts.FEW_ROWS, experts.SOME_ROWS, experts.MANY_ROWS}


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.stress)], ids=["", "control"])
def test_warm_up_covers_steps_with_adapters(forms: set[tuple], monkeypatch: pytest.MonkeyPatch, is_control: bool):
    """Control: rows of warm-up have none."""
    if is_control:
        for module in (triton_backend, dummy_steps):
            monkeypatch.setattr(module, "with_adapter", lambda scheduled, adapter: scheduled)
    keys = {"enable_lora": True, "max_lora_rank": 16, "num_blocks": 512, "device_backend": "triton"}
    with LLM(MODEL, device="cpu", dtype="bfloat16", **keys) as llm:
        before = set(forms)
        engine, adapter = llm.llm_engine, LoRARequest("a", 1, lora_tensors=lora_tensors(1), peft_config=CONFIG)
        digest = engine.adapters.digest_of(adapter)
        for counts in ((1,), (1, 70), (250,) * 5):
            for count in counts:
                engine.requests.add(PromptContent((5,) * count, adapter=digest), SamplingParams(max_tokens=2))
            while engine.has_unfinished_requests():
                engine.step()
        compiled = {form[0] for form in forms - before}
    assert compiled == ({"count_slots", "place_slots", "shrink", "expand"} if is_control else set())
