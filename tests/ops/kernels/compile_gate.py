"""Compiles the product's Triton kernels for GPUs that are not there, and says what is wrong with what comes out.

    python tests/ops/kernels/compile_gate.py [90 ...]     prints {kernel: {capability: {...}}} and what is wrong
    ... --all [0/4] [90 ...]                              all that a chip launches, or every fourth kernel of it

`triton.compile` needs no driver, GPU or CUDA build of torch: the wheel brings LLVM, ptxas and cuobjdump. Registers and
stack are read with `cuobjdump -res-usage`, shared memory from Triton's metadata, instructions from the PTX.
A kernel fails the gate that does not compile, spills, wants more shared memory than the chip has, multiplies without
its matrix instruction, or keeps fewer stages of operands in shared memory than were asked for.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spmd_worker.model_config.layer_config import DeltaConfig, ExpertsConfig, MambaConfig
from spmd_worker.model_config.stored_format import MXFP4, StoredFormat
from spmd_worker.ops.kernels.recurrent import NormRule
from spmd_worker.ops.kernels.triton import (
    adapter_kernels,
    adapters,
    attention,
    attention_kernels,
    expert_kernels,
    experts,
    fp8,
    fp8_kernels,
    head_kernels,
    head_products,
    int8,
    int8_experts,
    int8_kernels,
    leaf_kernels,
    leaf_matmul,
    listed,
    listed_kernels,
    matmul,
    matmul_kernels,
    penalty_kernels,
    router_kernels,
    row_kernels,
    rows,
    sampling_kernels,
    scan_delta,
    scan_delta_kernels,
    scan_mamba,
    scan_mamba_kernels,
    short_conv,
    short_conv_kernels,
    sum_kernels,
    tile_table,
    tiles,
)
from spmd_worker.ops.kernels.triton.launching import power_of_two
from spmd_worker.ops.kernels.triton.tiles import Chip
from spmd_worker.ranks.leaves import leaf_bounds

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Variant:
    """One specialisation. `types` as Triton writes them; `aligned`: arguments that 16 divides, which the launcher finds
    out for itself. `pipelined_bytes`: shared memory that the asked stages of operands take, 0 where nothing is staged.
    `most_bytes`: what the worker asks of a chip's shared memory on its behalf, which mma.sync must not pass.
    `instruction`: what multiplies, if it is not MATRIX_INSTRUCTION. `stack_bytes`: what may lie on the stack. `chips`:
    those that launch it. `adds_parts`: on sm_90 products leave the matrix unit before they are added to a sum.
    `goes_on`: on sm_90 the unit has the next step's products to add while those of a step are waited for. `sums_as`: a
    variant whose first sum is spread over threads in the same way, and so has the same order. `decodes`: its products
    are those of weights of 16 bits, of which mma.sync has two inputs side by side in a thread.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    aligned: tuple[str, ...] = ()
    multiplies: bool = False
    pipelined_bytes: int = 0
    most_bytes: int = 0
    instruction: str = ""
    stack_bytes: int = 0
    chips: tuple[int, ...] = tuple(SHARED_BYTES)
    adds_parts: bool = False
    goes_on: bool = False
    sums_as: "Variant | None" = None
    decodes: bool = False


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack_bytes: int
    shared_bytes: int
    has_matrix_instruction: bool
    num_async_copies: int
    adds_parts: bool
    goes_on: bool
    sum_layout: str
    inputs_together: tuple[int, ...]


def compile_for(variant: Variant, capability: int) -> Compiled:
    kernel = variant.kernel
    signature = {name: variant.types.get(name, "constexpr") for name in kernel.arg_names}
    # None is a constant to the launcher.
    constants = {name: None for name in kernel.arg_names if name not in variant.types} | variant.constants
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if variant.types.get(name, "").startswith("*") or name in variant.aligned
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = compiled.asm["ptx"]
    return Compiled(
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        has_matrix_instruction=_instruction(variant, capability) in ptx,
        num_async_copies=len(re.findall(r"cp\.async\.(?:c[ag]|bulk\.tensor)", ptx)),
        adds_parts=re.search(r"= (arith\.addf|math\.fma) .*#mma", compiled.asm["ttgir"]) is not None,
        goes_on=re.search(r"warp_group_dot_wait .*pendings = [1-9]", compiled.asm["ttgir"]) is not None,
        sum_layout=_sum_layout(compiled.asm["ttgir"]),
        inputs_together=tuple(sorted(set(map(int, re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"]))))),
    )


def _sum_layout(ttgir: str) -> str:
    """Shape of the first sum's operand, and how it is spread over threads; "" without a sum."""
    found = re.search(r'"tt\.reduce".*?arith\.addf.*?: \(tensor<(\S+), (#\w+)>', ttgir, re.DOTALL)
    layout = found and re.search(rf"^{found[2]} = (.*)$", ttgir, re.MULTILINE)
    return f"{found[1]} {layout[1]}" if found and layout else ""


_SPILLED_BYTES: dict[int, dict[str, int]] = {
    80: {
        "attend 512 many": 40,
        "expert_linear fp8 rows 64x64x128 stages 4": 64,
        "expert_linear fp8 rows by slot 64x64x128 stages 4": 64,
    },
    100: {
        "gated_norm 8192": 8,
        "linear_of_leaf_pairs": 104,
        "choose_keys": 8,
    },
    120: {"attend deberta distances few": 8, "attend fp8 cache many": 80, "linear_of_leaves 2 of 1792": 144},
}
"""By capability and beginning of a variant's name: what Triton 3.7.1 spills on chips on which no tile was measured."""


def _instruction(variant: Variant, capability: int) -> str:
    """wgmma and tcgen05 have tiles of 64 rows or more."""
    of_chip = "mma.sync" if variant.constants.get("ROWS", 64) < 64 else MATRIX_INSTRUCTION[capability]
    return variant.instruction or of_chip


def examine(variant: Variant, capability: int) -> tuple[Compiled | None, list[str]]:
    """What came out for a chip of this capability, and what is wrong with it, in words."""
    try:
        found = compile_for(variant, capability)
    except Exception as error:
        return None, [f"{type(error).__name__}: {str(error).strip()[-300:]}"]
    wrong = []
    spilled = _SPILLED_BYTES.get(capability, {}).items()
    known = [size for name, size in spilled if variant.name.startswith(name)]
    if found.stack_bytes > max(variant.stack_bytes, *known, 0):
        wrong.append(f"spills {found.stack_bytes} bytes")
    if found.shared_bytes > SHARED_BYTES[capability]:
        wrong.append(f"wants {found.shared_bytes} bytes of shared memory of {SHARED_BYTES[capability]}")
    if variant.multiplies and not found.has_matrix_instruction:
        wrong.append(f"multiplies without {_instruction(variant, capability)}")
    if variant.adds_parts and capability == 90 and not found.adds_parts:
        wrong.append("adds in the matrix unit")
    if variant.goes_on and capability == 90 and not found.goes_on:
        wrong.append("waits for each step's products")
    if variant.sums_as is not None and found.sum_layout != compile_for(variant.sums_as, capability).sum_layout:
        wrong.append(f"adds in another order than {variant.sums_as.name}: {found.sum_layout}")
    if variant.decodes and found.inputs_together not in ((), (2,)):
        wrong.append(f"adds inputs in groups of {found.inputs_together}, and those of dequantised weights of 2")
    # mma.sync takes operands from registers: they have left the last stage by then.
    is_from_registers = _instruction(variant, capability) == "mma.sync"
    stages = variant.options.get("num_stages", 1)
    staged = variant.pipelined_bytes * (stages - is_from_registers) // stages
    if variant.pipelined_bytes and (not found.num_async_copies or found.shared_bytes < staged):
        wrong.append(f"is not pipelined: {found.shared_bytes} bytes of shared memory of {staged}")
    if variant.most_bytes and MATRIX_INSTRUCTION[capability] == "mma.sync" and found.shared_bytes > variant.most_bytes:
        wrong.append(f"wants {found.shared_bytes} bytes of shared memory, and the worker asks for {variant.most_bytes}")
    return found, wrong


MODELS = {"llama-8b": (32, 8, 128), "qwen-0.5b": (14, 2, 64), "llama-135m": (9, 3, 64)}
"""Query heads, key-value heads, head size."""
_POINTERS = dict.fromkeys(
    ("items", "num_items", "starts", "lengths", "tables", "joins", "num_joins", "slots", "last_visible"), "*i32"
)
_FLOATS = dict.fromkeys(("partial_sums", "partial_tops", "partial_denoms", "sinks", "biases"), "*fp32")
_OF_ROWS = {
    **dict.fromkeys(("maxima", "factors", "min_logits", "values"), "*fp32"),
    **dict.fromkeys(("sums", "targets", "ids", "counts", "rows", "mask_rows", "top_k"), "*i64"),
    **dict.fromkeys(("lists",), "*fp32"),
    "top_p": "*fp64",
    "allowed": "*i32",
}
"""What belongs to rows of logits."""
_SCALARS = dict.fromkeys(("stride_query", "stride_page", "stride_table", "stride_key", "stride_value", "window"), "i32")
_PLANNED = dict.fromkeys(("S", "num_few", "max_partials", "later", "most"), "i32")
_SIZES = dict.fromkeys(("M", "N", "K", "stride_x", "stride_weight", "stride_out", "H", "V", "stride"), "i32")
_COUNTS = {**dict.fromkeys(("num_pieces", "first_id", "num_words"), "i32"), "first": "i64", "parts": "*i64"}
_NUMBERS = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "i32": tl.int32}
_REAL = dict.fromkeys(("scale", "cap", "eps", "offset"), "fp32")


def variants(element: str = "bf16") -> Iterator[Variant]:
    """Every kernel that a step of a dense model launches, in the shapes of three models."""
    yield from attention_variants(element)
    yield from listed_variants(element)
    yield from (norm_variant(width, element) for width in (576, 896, 4096))
    types, constants = _typed(row_kernels.silu_and_mul, element), {"BN": 1024}
    yield Variant("silu_and_mul", row_kernels.silu_and_mul, types, constants, row_kernels.LAUNCH, ("N", "stride"))
    types = _typed(row_kernels.full_norm, element)
    constants = {"BH": 4096, "CENTRED": True, "BIAS": True}
    yield Variant("full_norm 4096", row_kernels.full_norm, types, constants, rows.row_options(4096), ("H",))
    yield from draw_variants(element)
    yield from choice_variants(element)
    yield from penalty_variants()
    yield from sum_variants(element)
    yield from fp8_variants(element)
    yield from int8_variants(element)


def norm_variant(width: int, element: str = "bf16") -> Variant:
    types, constants = _typed(row_kernels.add_rms_norm, element), {"BH": power_of_two(width), "ADDS": True}
    return Variant(f"add_rms_norm {width}", row_kernels.add_rms_norm, types, constants, rows.row_options(width), ("H",))


HEAD_SIZES = {"96": (8, 8, 96), "192": (8, 2, 192), "256": (8, 4, 256), "512": (16, 2, 512), "64 of one": (64, 1, 128)}
"""Further shapes of attention: query heads, key-value heads, head size."""
T5 = (12, 12, 64)
_COMPUTE = {80: (8, 0), 90: (9, 0), 100: (10, 0), 120: (12, 0)}
_STRIDES = ("stride_query", "stride_page")


def attention_variants(element: str = "bf16") -> Iterator[Variant]:
    """Attention in every way that it is launched, by the tiles of sm_90; `_on` takes those of other chips."""
    for name, (heads, kv_heads, size) in (MODELS | HEAD_SIZES).items():
        for way in ("few", "few joined", "many"):
            yield attend_variant(f"attend {name} {way}", heads, kv_heads, size, element)
    yield attend_variant("attend llama-8b many sinks", *MODELS["llama-8b"], element)
    capped = attend_variant("attend 256 many cap", *HEAD_SIZES["256"], element)
    yield replace(capped, stack_bytes=8)
    yield attend_variant("attend 256 many sight", *HEAD_SIZES["256"], element)
    for way in ("few", "many"):
        yield attend_variant(f"attend t5 bias {way}", *T5, element)
        variant = attend_variant(f"attend deberta distances {way}", *T5, element)
        # On sm_100.
        yield replace(variant, stack_bytes=16 if way == "many" else 0)
    for name, shape in LATENTS.items():
        for way in ("few", "few joined", "many"):
            variant = attend_variant(f"attend {name} {way}", *shape, element)
            # Sums of 512 numbers lie on the stack between segments.
            stack_bytes = 24 if "mistral-4" in name else 1152 if way == "many" else 0
            yield replace(variant, stack_bytes=stack_bytes)
    yield from fp8_cache_variants(element)
    types = _typed(row_kernels.write_rows, element)
    constants = {"KV_HEADS": 1, "D": 576, "DP": 1024, "BLOCK": 16, "VALUES": False}
    options, strides = row_kernels.LAUNCH | {"num_warps": 1}, ("stride_key", "stride_value", "stride_page")
    yield Variant("write_rows latent", row_kernels.write_rows, types, constants, options, strides)
    yield from head_variants(element)
    types = _typed(attention_kernels.make_items, element) | dict.fromkeys(("lengths", "items", "counts"), "*i32")
    constants = {"FEW": 4, "MANY": 32, "SEGMENT": attention_kernels.SEGMENT, "BATCH": 256, "EACH": 64}
    for name, has_sight in (("make_items", False), ("make_items sight", True)):
        chosen = constants | {"SIGHT": has_sight}
        yield Variant(name, attention_kernels.make_items, types, chosen, {"num_warps": 1})
    for name, (heads, _, size) in (MODELS | HEAD_SIZES).items():
        types = _typed(attention_kernels.join_partials, element)
        constants = attention.join_constants(heads, size)
        options = attention_kernels.LAUNCH
        yield Variant(f"join_partials {name}", attention_kernels.join_partials, types, constants, options)
    for model, (heads, kv_heads, size) in MODELS.items():
        types = _typed(row_kernels.rotate_and_write, element)
        constants, options = rows.rotate_constants(heads, kv_heads, size, 16), row_kernels.LAUNCH
        yield Variant(f"rotate_and_write {model}", row_kernels.rotate_and_write, types, constants, options, _STRIDES)
        options = row_kernels.LAUNCH | {"num_warps": 1}
        types = _typed(row_kernels.write_rows, element)
        constants = {"KV_HEADS": kv_heads, "D": size, "DP": power_of_two(size), "BLOCK": 16, "VALUES": True}
        strides = ("stride_key", "stride_value", "stride_page")
        yield Variant(f"write_rows {model}", row_kernels.write_rows, types, constants, options, strides)


def head_variants(element: str = "bf16") -> Iterator[Variant]:
    """Products of heads with their own weights, whose columns are contiguous, or their rows."""
    kernel = head_kernels.linear_of_heads
    sizes = dict.fromkeys(("T", "N", "K", "x_token", "x_head", "out_token", "out_head"), "i32")
    sizes |= dict.fromkeys(("weight_head", "weight_row", "weight_column"), "i32")
    for tile in (head_products.FEW, head_products.MANY):
        types = dict.fromkeys(("x", "weight", "out"), f"*{element}") | sizes
        aligned = ("N", "K", "x_token", "x_head", "weight_head", "weight_row", "out_token", "out_head")
        name = f"linear_of_heads {tile.rows}"
        # 16 rows are too few for wgmma.
        yield Variant(name, kernel, types, tile.constants(), tile.options(), aligned, tile.rows >= 64)


LISTS = {"latent lists deepseek-v3": (128, 576, 512), "latent lists sinks deepseek-v4": (64, 512, 512)}
"""Query heads, sizes of a key and of its value."""


def listed_variants(element: str = "bf16") -> Iterator[Variant]:
    """Kernels of layers that choose, list or compress keys, in the shapes of DeepSeek V3.2 and V4."""
    for name, (heads, size, _) in LISTS.items():
        for way in ("few", "few joined", "many"):
            variant = attend_variant(f"attend {name} {way}", heads, listed.num_groups((9, 0), heads), size, element)
            yield replace(variant, stack_bytes=_LIST_BYTES)
    scored = {"queries": f"*{element}", "cache": f"*{element}", "weights": "*fp32", "scores": "*fp32"}
    types = _of_lists(listed_kernels.score_keys) | scored
    for rate in (1, 4):
        constants, options = listed.score_constants(64, 128, 16, rate), listed.score_options()
        aligned = ("stride_page", "stride_row")
        yield Variant(f"score_keys {rate}", listed_kernels.score_keys, types, constants, options, aligned, True)
    options = listed.choice_options()
    constants, types = {"RATE": 1, "BATCH": options.pop("BATCH")}, _of_lists(listed_kernels.choose_keys)
    yield Variant("choose_keys", listed_kernels.choose_keys, types | {"scores": "*fp32"}, constants, options)
    for word, is_chosen in (("first", False), ("chosen", True)):
        constants = {"RATE": 4, "BLOCK": 16, "CHOSEN": is_chosen, "EACH": 1024}
        yield Variant(f"list_keys {word}", listed_kernels.list_keys, _of_lists(listed_kernels.list_keys), constants, {})
    constants = {"EACH": 64, "BATCH": 256}
    yield Variant("place_tokens", listed_kernels.place_tokens, _of_lists(listed_kernels.place_tokens), constants, {})
    types = _of_lists(listed_kernels.write_places) | dict.fromkeys(("values", "cache", "cleared"), f"*{element}")
    constants = listed.write_constants(2560, 16, 4, 2048)
    yield Variant("write_places", listed_kernels.write_places, types, constants, listed_kernels.LAUNCH)
    types = _of_lists(listed_kernels.compress) | {"rows": f"*{element}", "out": f"*{element}", "bias": "*fp32"}
    constants = listed.compress_constants(4, 512, 16, overlaps=True)
    yield Variant("compress", listed_kernels.compress, types, constants, listed_kernels.LAUNCH)


_LIST_BYTES = 1152
"""Sums of 512 numbers lie on the stack between segments."""


def _of_lists(kernel: Any) -> dict[str, str]:
    """Integers of 32 bits, and pointers to such."""
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    tensors = (
        "starts",
        "lengths",
        "sequences",
        "positions",
        "slots",
        "tables",
        "chosen",
        "numbers",
        "listed",
        "counts",
    )
    return {name: "*i32" if name in tensors else "i32" for name in names}


LATENTS = {"latent deepseek-v3": (128, 8, 576), "latent glm": (20, 2, 576), "latent mistral-4": (32, 2, 320)}
LATENTS |= {"latent sinks deepseek-v4": (64, 4, 512)}
"""Query heads, groups of them, size of a key."""


def attend_variant(name: str, heads: int, kv_heads: int, size: int, element: str, capability: int = 90) -> Variant:
    """`attend` as it is launched on a chip; the way is in the name."""
    itemsize = 4 if element == "fp32" else 2
    choose = attention.many_tile if "many" in name else attention.few_tile
    tile = choose(_COMPUTE[capability], size, heads // kv_heads, itemsize)
    capped, sinks = "cap" in name, "sinks" in name
    is_latent = "latent" in name
    value_size = size - 64 if is_latent and size != 512 else size
    kind = {"is_capped": capped, "has_sinks": sinks, "is_latent": is_latent, "has_sight": "sight" in name}
    kind |= {"is_biased": "bias" in name}
    kind |= dict.fromkeys(("has_query_scores", "has_key_scores"), "distances" in name)
    block_size = 1 if "lists" in name else 16
    constants = attention.attend_constants(tile, heads, kv_heads, size, value_size, block_size, **kind)
    constants |= {"ONE": "many" not in name, "LOOPS": not name.endswith("few")}
    # One tile of keys and one of values are in flight.
    staged = itemsize * attention_kernels.TILE * (size + (0 if is_latent else size // tile.parts))
    most = attention.shared_bytes(tile, size, itemsize, has_biases="bias" in name or "distances" in name)
    kernel, types = attention_kernels.attend, _typed(attention_kernels.attend, element) | {"values": f"*{element}"}
    if "fp8 cache" in name:
        types |= dict.fromkeys(("keys", "values"), "*u8")
    types |= {"columns": "*i32", "score_token": "i32", "score_head": "i32"}
    return Variant(name, kernel, types, constants, tile.options(), _STRIDES, element != "fp32", staged, most)


def fp8_cache_variants(element: str) -> Iterator[Variant]:
    """Kernels that read and write a cache in FP8."""
    shape = heads, kv_heads, size = MODELS["llama-8b"]
    for way in ("few", "few joined", "many"):
        variant = attend_variant(f"attend fp8 cache {way}", *shape, element)
        # What is in flight has a byte a number.
        yield replace(variant, pipelined_bytes=variant.pipelined_bytes // 2, stack_bytes=8 if way == "many" else 0)
    cache = {"cache": "*u8"}
    types, constants = _typed(row_kernels.rotate_and_write, element), rows.rotate_constants(heads, kv_heads, size, 16)
    kernel, options = row_kernels.rotate_and_write, row_kernels.LAUNCH
    yield Variant("rotate_and_write fp8 cache", kernel, types | cache, constants, options, _STRIDES)
    types, options = _typed(row_kernels.write_rows, element), row_kernels.LAUNCH | {"num_warps": 1}
    constants = {"KV_HEADS": kv_heads, "D": size, "DP": power_of_two(size), "BLOCK": 16, "VALUES": True}
    strides = ("stride_key", "stride_value", "stride_page")
    yield Variant("write_rows fp8 cache", row_kernels.write_rows, types | cache, constants, options, strides)


def draw_variants(element: str = "bf16") -> Iterator[Variant]:
    """Of a vocabulary of 128,256 ids; what filters leave is float32."""
    piece, block = {"PIECE": sampling_kernels.PIECE}, {"BLOCK": sampling_kernels.BLOCK}
    for kernel, constants in (
        (sampling_kernels.prob_sums, piece),
        (sampling_kernels.invert_cdf, piece | {"PIECES": 128}),
        (sampling_kernels.count_above, block),
        (sampling_kernels.forbid, block),
        (
            sampling_kernels.filter_logits,
            {"BLOCK": sampling_kernels.FILTER_BLOCK, "LISTED": sampling_kernels.LISTED},
        ),
    ):
        is_cut = kernel is sampling_kernels.filter_logits
        types = _typed(kernel, "fp32" if is_cut else element)
        options = sampling_kernels.FILTER_LAUNCH if is_cut else sampling_kernels.LAUNCH
        yield Variant(kernel.__name__, kernel, types, constants, options, ("V", "stride"))


def choice_variants(element: str = "bf16") -> Iterator[Variant]:
    """Maxima, draws, random numbers and top logits of a vocabulary of 128,256 ids."""
    piece, block = {"PIECE": sampling_kernels.PIECE, "PIECES": 128}, {"BLOCK": sampling_kernels.BLOCK}
    small, own = sampling_kernels.SMALL_LAUNCH, sampling_kernels.LAUNCH
    pointers = {"keys": "*i64", "columns": "*i64", "pairs": "*fp64", "bits": "*i64"}
    numbers = dict.fromkeys(("num_parts", "count", "num_blocks", "step", "otherwise", "num_rows"), "i32")
    for kernel, constants, options in (
        (sampling_kernels.part_maxima, block | {"PART": sampling_kernels.PART}, own),
        (sampling_kernels.join_maxima, {"PARTS": 8}, small),
        (sampling_kernels.top_logits, block | {"BLOCKS": 32}, own),
        (sampling_kernels.random_bits, {}, small),
        (sampling_kernels.draw, piece, own),
    ):
        types = _typed(kernel, element)
        types |= {name: kind for name, kind in (pointers | numbers).items() if name in types}
        yield Variant(kernel.__name__, kernel, types, constants, options, ("V", "stride"))


def penalty_variants() -> Iterator[Variant]:
    """Masks, bias and penalties, float32, of a vocabulary of 128,256 ids; bad words of up to 8 tokens."""
    block, width = {"BLOCK": penalty_kernels.BLOCK}, {"WIDTH": 8}
    floats = dict.fromkeys(("logits", "factors", "biases", "before"), "*fp32")
    numbers = dict.fromkeys(("V", "stride", "num_words"), "i32") | {"ids": "*i64"}
    for kernel, constants in (
        (penalty_kernels.clear, block),
        (penalty_kernels.start, block | width),
        (penalty_kernels.append, width),
        (penalty_kernels.decide, block | width | {"WORDS": penalty_kernels.WORDS}),
        (penalty_kernels.apply, block),
    ):
        names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        types = {name: (floats | numbers).get(name, "*i32") for name in names}
        options = penalty_kernels.APPEND_LAUNCH if kernel is penalty_kernels.append else penalty_kernels.LAUNCH
        yield Variant(f"penalties {kernel.__name__}", kernel, types, constants, options, ("V", "stride"))


def sum_variants(element: str = "bf16") -> Iterator[Variant]:
    """Of eight ranks, in their order, and by a tree of float32 parts, whose norm adds as that of one rank does."""
    for by_tree in (False, True):
        ranks, suffix = {"RANKS": 8, "BY_TREE": by_tree}, " by tree" * by_tree
        types = _typed(sum_kernels.add_parts, element) | {"N": "i32"}
        constants = ranks | {"BLOCK": sum_kernels.BLOCK}
        launch = sum_kernels.LAUNCH
        yield Variant(f"add_parts{suffix}", sum_kernels.add_parts, types, constants, launch, ("N", "first"))
        kernel = sum_kernels.add_parts_and_norm
        types = _typed(kernel, element)
        for width in (576, 4096):
            options, constants = launch | rows.row_options(width), ranks | {"BH": power_of_two(width)}
            sums_as = norm_variant(width, element) if by_tree else None
            name = f"add_parts_and_norm {width}{suffix}"
            yield Variant(name, kernel, types, constants, options, ("H", "first"), sums_as=sums_as)


CHIPS = {
    80: Chip("A100", (8, 0), 108, SHARED_BYTES[80]),
    90: Chip("H100", (9, 0), 132, SHARED_BYTES[90]),
    100: Chip("B200", (10, 0), 148, SHARED_BYTES[100]),
    120: Chip("RTX 5090", (12, 0), 170, SHARED_BYTES[120]),
}
_DEEPSEEK = ExpertsConfig(
    *(256, 8, 2048, "sigmoid", True, 2.5, 8, 4), has_choice_bias=True, has_router_bias=True, shared_size=2048
)
_PHIMOE = ExpertsConfig(16, 2, 6400, "sparsemixer", renormalises=False, jitter=0.01)
_OF_EXPERTS = {
    **dict.fromkeys(("slots", "counts", "own", "order", "tiles", "num_tiles", "is_own"), "*i32"),
    **dict.fromkeys(("ids", "totals"), "*i64"),
    **dict.fromkeys(("S", "N", "K", "H", "R"), "i32"),
    "weights": "*fp32",
    "limit": "fp32",
}


def expert_variants(element: str = "bf16", *, is_short: bool = False) -> Iterator[Variant]:
    """Of 128 experts, 8 chosen: all tiles of each chip, by TMA and by pointers. `is_short`: what the gate compiles."""
    light = expert_kernels.LAUNCH | {"num_warps": 4}
    sizes = {"CHOSEN": 8, "PADDED": True}
    for kernel, constants in (
        (expert_kernels.count_slots, sizes | {"BLOCK": expert_kernels.BLOCK}),
        (expert_kernels.place_slots, sizes | {"OWN": 128, "OWN_PADDED": 128, "BM": 64, "BLOCK": expert_kernels.BLOCK}),
        (expert_kernels.weighted_sum, sizes | {"ALL": False, "BH": 1024}),
        (expert_kernels.clamp_columns, {"BN": 1024}),
    ):
        yield Variant(kernel.__name__, kernel, _of_experts(kernel, element), constants, light, ("H",))
    options = ("num_warps", "num_stages", "enable_fp_fusion")
    for num_tokens, num_rows in ((256, 128),) if is_short else ((256, 128), (2048, 128), (256, 32)):
        tile = experts.router_tile(num_tokens, num_rows)
        constants = experts.router_constants(tile)
        launch = {key: constants.pop(key) for key in options}
        kernel = router_kernels.partial_logits
        types = _of_experts(kernel, element) | {"T": "i32", "weight": "*fp32", "partials": "*fp32"}
        yield Variant(f"partial_logits {tile.rows}x{tile.columns}", kernel, types, constants, launch, ("R", "H"))
    for config in (ExpertsConfig(128, 8, 768), *(() if is_short else (_DEEPSEEK, _PHIMOE))):
        constants = experts.choice_constants(config, config.num_experts, 8)
        launch = {key: constants.pop(key) for key in options if key in constants}
        kernel = router_kernels.choose
        types = (
            _of_experts(kernel, "fp32") | {"T": "i32"} | dict.fromkeys(("scaling", "added", "min_sum", "reach"), "fp32")
        )
        types = {name: kind for name, kind in types.items() if "bias" not in name or config.has_choice_bias}
        yield Variant(f"choose {config.num_experts}", kernel, types, constants, launch)
    for chip in (90,) if is_short else (80, 90, 100, 120):
        for num_slots in (256, 4096, 16384):
            pair = experts.tiles_for(num_slots, 128, torch.bfloat16, divmod(chip, 10), SHARED_BYTES[chip])
            if not is_short or pair[0].rows == 16:
                yield from _grouped_variants(pair, chip, element, is_short=is_short)
            yield from _stored_variants(num_slots, chip, element, is_short=is_short)


_OF_ADAPTERS = {
    **dict.fromkeys(("order", "tiles", "num_tiles", "ranks", "columns"), "*i32"),
    **dict.fromkeys(("T", "R", "N", "K", "num_n", "stride_x", "stride_out"), "i32"),
    **dict.fromkeys(("partials", "sums"), "*fp32"),
    "leaves": "*i32",
}


def adapter_variants(*, is_short: bool = False) -> Iterator[Variant]:
    """Merged q, k and v of rank 16, down of an 8B model of rank 64, with and without leaves, two parts of rank 256,
    gates of experts, 8 of a token, routers beside them, and rows placed by adapter. `is_short`: the first of few rows
    and that with leaves, and rows.
    """
    sizes = {"CHOSEN": 1, "PADDED": False, "BLOCK": expert_kernels.BLOCK}
    for kernel, constants, absent in (
        (expert_kernels.count_slots, sizes, "totals"),
        (expert_kernels.place_slots, sizes | {"OWN": 12, "OWN_PADDED": 16, "BM": 16}, "own"),
        (expert_kernels.place_slots, sizes | {"OWN": 1024, "OWN_PADDED": 1024, "BM": 64}, "own"),
    ):
        types = _of_experts(kernel, "bf16") | {"ids": "*i32"}
        types = {name: kind for name, kind in types.items() if name not in ("slots", absent)}
        word = " and experts" * (constants.get("OWN", 0) > 12)
        yield Variant(f"{kernel.__name__} of adapters{word}", kernel, types, constants, expert_kernels.LAUNCH)
    for word, tile, dtype in (
        ("few", adapters.FEW_ROWS, torch.bfloat16),
        ("many", adapters.MANY_ROWS, torch.bfloat16),
        ("float16", adapters.FLOAT16, torch.float16),
        ("float32", adapters.FLOAT32, torch.float32),
        ("float32 beside bfloat16", adapters.FLOAT32.with_rows(adapters.MANY_ROWS.rows), torch.float32),
    ):
        element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        ends = leaf_bounds(14336, 8)[1:]
        for rank, num_parts, num_inputs, leaf_ends, num_each in (
            *((16, 3, 4096, (), 1), (64, 1, 14336, (), 1), (64, 1, 14336, ends, 1), (256, 2, 4096, (), 1)),
            (16, 2, 2048, (), 8),
        ):
            if is_short and (word != "few" or not (rank == 16 or leaf_ends) or num_each > 1):
                continue
            pieces = adapters.pieces_of(num_inputs, leaf_ends)
            kernels = [
                (adapter_kernels.shrink, tile.shrink_constants(pieces, rank, num_parts, num_each)),
                (adapter_kernels.expand, tile.expand_constants(pieces, rank, num_parts, dtype)),
            ]
            kernels += [(adapter_kernels.join, tile.join_constants(pieces, rank))] if leaf_ends else []
            for kernel, constants in kernels:
                options = {key: constants.pop(key) for key in _OPTIONS if key in constants}
                names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
                names = [name for name in names if name != "leaves" or leaf_ends]
                types = {name: _OF_ADAPTERS.get(name, f"*{element}") for name in names}
                is_shrink = kernel is adapter_kernels.shrink
                staged = constants["BK"] * (tile.rows + constants["BR"]) * dtype.itemsize if is_shrink else 0
                yield Variant(
                    f"{kernel.__name__} {word} rank {rank} of {num_parts}{' in leaves' * bool(leaf_ends)}"
                    f"{' of experts' * (num_each > 1)}",
                    *(kernel, types, constants, options, ("R", "N", "K", "stride_x", "stride_out")),
                    multiplies=kernel is not adapter_kernels.join
                    and (dtype == torch.bfloat16 or (dtype == torch.float16 and is_shrink)),
                    pipelined_bytes=staged * tile.num_stages if tile.num_stages > 1 else 0,
                    instruction="mma.sync" if tile.rows < 64 else "",
                    stack_bytes=_OUTER_LOOP_BYTES,
                    chips=(80, 90, 120) if word == "few" else tuple(SHARED_BYTES),
                )


_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
STORED = {
    "mxfp4": MXFP4,
    "fp8 blocks": StoredFormat("e4m3", 128, 128),
    "fp8 rows": StoredFormat("e4m3", 1, 0),
}


def _stored_variants(num_slots: int, chip: int, element: str, *, is_short: bool) -> Iterator[Variant]:
    """Like `_grouped_variants`: gates of MXFP4 are clamped, those of FP8 plain; the gate compiles gates of few rows."""
    for word, stored in STORED.items():
        pair = experts.tiles_for(*(num_slots, 128, torch.bfloat16, divmod(chip, 10), SHARED_BYTES[chip]), stored)
        if is_short and (pair[0].rows != 16 or word == "fp8 rows"):
            continue
        for by_tma in (True,) if is_short else (True, False) if chip >= 90 else (False,):
            launches = [(expert_kernels.gate_up, False), (expert_kernels.expert_linear, False)]
            launches += [] if is_short else [(expert_kernels.expert_linear, True)]
            for kernel, gathers in launches:
                is_gated = kernel is expert_kernels.gate_up
                tile = pair[not is_gated]
                is_clamped = is_gated and stored.is_mxfp4
                if (is_short and is_gated != stored.is_mxfp4) or (
                    by_tma and not experts.gates_by_tma(is_clamped, divmod(chip, 10))
                ):
                    continue
                shape = f"{tile.rows}x{tile.columns}x{tile.inputs} stages {tile.num_stages}"
                types = _of_experts(kernel, element) | {"weight": "*u8"}
                types["scales"] = "*u8" if stored.is_mxfp4 else "*fp32"
                if by_tma:
                    num_bytes = tile.inputs // 2 if stored.is_mxfp4 else tile.inputs
                    types["weight"] = f"tensordesc<u8[{tile.columns}, {num_bytes}]>"
                    if not is_gated and not gathers:
                        types["x"] = f"tensordesc<{element}[{tile.rows}, {tile.inputs}]>"
                if not is_clamped:
                    del types["bias"]
                constants = experts.constants(8, tl.bfloat16, tile, stored) | {"BIAS": is_clamped, "BY_TMA": by_tma}
                constants |= {"CLAMPED": is_clamped} if is_gated else {"GATHERS": gathers, "BY_SLOT": True}
                options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "enable_fp_fusion")}
                yield Variant(
                    f"{kernel.__name__} {word} {'by slot ' * gathers}{shape}{' tma' if by_tma else ''}",
                    *(kernel, types, constants, options, ("N", "K"), True),
                    instruction="mma.sync" if tile.rows < 64 else "",
                    stack_bytes=_OUTER_LOOP_BYTES,
                    chips=(chip,),
                    decodes=True,
                )


def _grouped_variants(pair: experts.Tiles, chip: int, element: str, *, is_short: bool) -> Iterator[Variant]:
    for by_tma in (True,) if is_short else (True, False) if chip >= 90 else (False,):
        for tile, kernel in zip(pair, (expert_kernels.gate_up, expert_kernels.expert_linear), strict=True):
            is_gated = kernel is expert_kernels.gate_up
            words = ("", "clamped ") if is_gated else ("", "gathers ", "gathers by slot ")
            for word in words[is_gated : 1 + is_gated] if is_short else words:
                flag = word != ""
                if by_tma and is_gated and not experts.gates_by_tma(flag, divmod(chip, 10)):
                    continue
                shape = f"{tile.rows}x{tile.columns}x{tile.inputs} stages {tile.num_stages}"
                types = _of_experts(kernel, element)
                del types["scales"]
                if by_tma:
                    types["weight"] = f"tensordesc<{element}[{tile.columns}, {tile.inputs}]>"
                    if not is_gated and not flag:
                        types["x"] = f"tensordesc<{element}[{tile.rows}, {tile.inputs}]>"
                has_bias = is_gated and flag
                if not has_bias:
                    del types["bias"]
                constants = experts.constants(8, tl.bfloat16, tile) | {"BIAS": has_bias, "BY_TMA": by_tma}
                by_slot = word != "gathers "
                constants |= {"CLAMPED": flag} if is_gated else {"GATHERS": flag, "BY_SLOT": by_slot}
                options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "enable_fp_fusion")}
                yield Variant(
                    f"{kernel.__name__} {word}{shape}{' tma' if by_tma else ''}",
                    *(kernel, types, constants, options, ("N", "K"), True),
                    instruction="mma.sync" if tile.rows < 64 else "",
                    chips=(chip,),
                )


def _of_experts(kernel: Any, element: str) -> dict[str, str]:
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    return {name: _OF_EXPERTS.get(name, f"*{element}") for name in names}


_WIDE = tiles.Tile(128, 128, 64, 8, 4, rest_columns=64)


def matmul_variants(capability: int) -> Iterator[Variant]:
    """All tiles that a chip can get, each in the ways that it is launched in: as it says, with x by pointer where TMA
    would read past the end, and all by pointer for what TMA cannot move.
    """
    chip = CHIPS[capability]
    for is_gated in (False, True):
        shipped = [tile for key, entry in tile_table.shipped(chip).items() if key[0] == is_gated for tile in entry]
        safe = tiles.GATED_SAFE if is_gated else tiles.SAFE
        wide = (_WIDE,) if capability == 90 and not is_gated else ()
        for tile in dict.fromkeys((*shipped, *tiles.family(chip, is_gated=is_gated), *wide, safe)):
            if not tiles.fits(tile, chip, is_gated=is_gated):
                continue
            ways = {
                (tile.x_by_tma, tile.weight_by_tma, tile.out_by_tma),
                (False, tile.weight_by_tma, tile.out_by_tma),
                (False, False, False),
            }
            for way in sorted(ways, reverse=True):
                yield matmul_variant(tile, way, capability, is_gated=is_gated)
    yield matmul_variant(tiles.FLOAT32, (False, False, False), capability, is_gated=False, element="fp32")
    yield matmul_variant(tiles.FLOAT32, (False, False, False), capability, is_gated=True, element="fp32")


def matmul_variant(
    tile: tiles.Tile, way: tuple[bool, bool, bool], capability: int, *, is_gated: bool, element: str = "bf16"
) -> Variant:
    """Without a bias. `way`: whether x, weights and out go by TMA. N, K and strides are multiples of 16, as models'
    sizes are, and BK divides K.
    """
    kernel = matmul_kernels.gated_linear if is_gated else matmul_kernels.linear
    types = {name: kind for name, kind in _typed(kernel, element).items() if "bias" not in name}
    boxes = {"x": (tile.rows, tile.inputs), "out": (tile.rows, tile.columns)}
    boxes |= dict.fromkeys(("weight", "up_weight") if is_gated else ("weight",), (tile.columns, tile.inputs))
    if tile.rest_columns:
        boxes |= {"rest_weight": (tile.rest_columns, tile.inputs), "rest_out": (tile.rows, tile.rest_columns)}
    else:
        types = {name: kind for name, kind in types.items() if not name.startswith("rest_")}
    by_tma = {"x": way[0], "out": way[2], "rest_out": way[2]}
    by_tma |= dict.fromkeys(("weight", "up_weight", "rest_weight"), way[1])
    for name, box in boxes.items():
        if by_tma[name]:
            types[name] = f"tensordesc<{element}[{box[0]}, {box[1]}]>"
    dtype = torch.float32 if element == "fp32" else torch.bfloat16
    constants = dict(matmul.constants(tile, dtype, is_gated, False, True, *way))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", *matmul_kernels.LAUNCH)}
    itemsize = 4 if element == "fp32" else 2
    letters = "".join("t" if each else "p" for each in way)
    columns = f"{tile.columns}{f'+{tile.rest_columns}' if tile.rest_columns else ''}"
    name = f"{kernel.__name__} {tile.rows}x{columns}x{tile.inputs} {tile.num_warps} {tile.num_stages} {letters}"
    name += f"{' specialized' * tile.is_specialized}{' fp32' * (element == 'fp32')}"
    aligned = ("N", "K", "stride_x", "stride_weight", "stride_out")
    staged = itemsize * tile.inputs * tile.num_stages * (tile.rows + (1 + is_gated) * tile.width)
    has_few_rows = tile.rows < 64 and MATRIX_INSTRUCTION[capability] != "mma.sync"
    most = matmul.shared_bytes(itemsize) if tile in (tiles.SAFE, tiles.GATED_SAFE, tiles.FLOAT32) else 0
    # ptxas puts a few numbers of the outer loop on the stack, where most registers are free too.
    return Variant(
        name, kernel, types, constants, options, aligned, element != "fp32", staged, most,
        "mma.sync" if has_few_rows else "", _OUTER_LOOP_BYTES,
    )  # fmt: skip


_OUTER_LOOP_BYTES, _LEAF_LOOP_BYTES = 32, 48


def leaf_variants(capability: int, *, is_short: bool = False) -> Iterator[Variant]:
    """All tiles of a chip for the leaves of 14,336 inputs, of all and of half of them, as operands are launched; and
    unequal leaves, leaves that a step passes, and float32. `is_short`: what the gate compiles.
    """
    chip = CHIPS[capability]
    for (_, num_inputs, num_leaves), entry in tile_table.LEAVES.items() if capability == 90 and not is_short else ():
        cut = leaf_matmul.cut_of(leaf_bounds(num_inputs, num_leaves)[1:])
        for choice in dict.fromkeys(leaf_matmul.LeafTile(*pair) for pair in entry.values()):
            tile = choice.tile
            yield leaf_variant(choice, cut, (tile.x_by_tma, tile.weight_by_tma, tile.out_by_tma), capability)
    for ends in ((14336, 8),) if is_short else ((14336, 8), (7168, 4), (3584, 2), (2880, 8), (160, 8)):
        cut = leaf_matmul.cut_of(leaf_bounds(*ends)[1:])
        for choice in leaf_matmul.family(cut, chip):
            tile = choice.tile
            if is_short and (tile.rows, tile.columns, choice.in_registers) not in LEAF_TILES_OF_THE_GATE:
                continue
            is_even = cut.divisor >= tile.inputs
            ways = {(each and is_even and tile.x_by_tma, each and is_even and tile.weight_by_tma) for each in (0, 1)}
            for way in sorted(ways, reverse=True):
                yield leaf_variant(choice, cut, (*way, tile.out_by_tma), capability)
                if not is_short:
                    yield leaf_variant(choice, cut, (*way, False), capability, out="fp32")
        plain = leaf_matmul.tile_for(1, 64, ends[0], cut, torch.float32, torch.device("cpu"))
        yield leaf_variant(plain, cut, (False, False, False), capability, "fp32", "fp32")


LEAF_TILES_OF_THE_GATE = ((16, 32, True), (64, 64, True), (64, 128, True), (128, 128, False))


def leaf_variant(
    choice: leaf_matmul.LeafTile, cut: leaf_matmul.Cut, way: tuple[bool, bool, bool], capability: int,
    element: str = "bf16", out: str = "bf16",
) -> Variant:  # fmt: skip
    """With a bias. `way`: whether x, weights and out go by TMA."""
    tile = choice.tile
    kernel = leaf_kernels.linear_of_leaves if choice.in_registers else leaf_kernels.linear_of_leaf_pairs
    types = _typed(kernel, element) | {"out": f"*{out}", "base": "i32", "longer": "i32"}
    types |= {} if choice.in_registers else {"scratch": "*fp32"}
    boxes = {"x": (tile.rows, tile.inputs), "weight": (tile.columns, tile.inputs), "out": (tile.rows, tile.columns)}
    for by_tma, (name, box) in zip(way, boxes.items(), strict=True):
        if by_tma:
            types[name] = f"tensordesc<{element}[{box[0]}, {box[1]}]>"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[out]
    is_even = cut.divisor >= tile.inputs
    constants = dict(leaf_matmul.constants(choice, cut.num_levels, cut.unit, dtype, True, is_even, *way))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", *matmul_kernels.LAUNCH)}
    itemsize = 4 if element == "fp32" else 2
    letters = "".join("t" if each else "p" for each in way)
    name = f"{kernel.__name__} {1 << cut.num_levels} of {cut.unit * cut.base} {tile.rows}x{tile.columns}x{tile.inputs}"
    name += f" {tile.num_warps} {tile.num_stages} {letters}{' part' * (out != element)}{' fp32' * (element == 'fp32')}"
    aligned = ("N", "K", "stride_x", "stride_weight", "stride_out")
    staged = itemsize * tile.inputs * tile.num_stages * (tile.rows + tile.columns) * is_even
    has_few_rows = tile.rows < 64 and MATRIX_INSTRUCTION[capability] != "mma.sync"
    return Variant(
        name, kernel, types, constants, options, aligned, element != "fp32", staged,
        instruction="mma.sync" if has_few_rows else "", stack_bytes=_LEAF_LOOP_BYTES, adds_parts=element != "fp32",
    )  # fmt: skip


_QUANTISED = {"x_scales": "*fp32", "scales": "*fp32", "stride_scales": "i32", "maxima": "*fp32"}
SCALES = {
    "rows": fp8_kernels.OF_ROWS.value,
    "groups": fp8_kernels.OF_GROUPS.value,
    "blocks": fp8_kernels.OF_BLOCKS.value,
}
_ALIGNED = ("N", "K", "stride_x", "stride_weight", "stride_scales", "stride_out")
_SPILLED_SUM_BYTES = {(False, 128, 256): 104, (True, 128, 64): 88}
"""By is_gated, rows and columns: part of a sum leaves its registers between chains, and these tiles are fast so."""


def fp8_variants(element: str = "bf16") -> Iterator[Variant]:
    """Rows of 4,096 and 14,336 inputs; every tile by TMA, and one by pointers; scales of rows and of groups."""
    chips = tuple(each for each in SHARED_BYTES if each >= 89)
    for width in (4096, 14336):
        block = power_of_two(width)
        options = fp8_kernels.LAUNCH | {"num_warps": fp8.num_warps(block)}
        types = _typed(fp8_kernels.quantise_rows, element) | _QUANTISED | {"out": "*fp8e4nv"}
        types = {name: kind for name, kind in types.items() if name in fp8_kernels.quantise_rows.arg_names}
        constants = {"BLOCK": block, "IS_WHOLE": True}
        name = f"fp8 quantise {width}"
        yield Variant(name, fp8_kernels.quantise_rows, types, constants, options, ("K", "stride_x"), chips=chips)
    constants, options = {"BLOCK": 4096}, fp8_kernels.LAUNCH | {"num_warps": fp8.num_warps(4096)}
    yield Variant(
        "fp8 quantise groups", fp8_kernels.quantise_groups, types, constants, options, ("K", "stride_x"), chips=chips
    )
    made = {"numbers": "*fp8e4nv", "scales": "*fp32"}
    for is_grouped in (False, True):
        kernel, kind = fp8_kernels.add_rms_norm, "groups" if is_grouped else "rows"
        for width in (576, 4096):
            plain = norm_variant(width, element)
            constants = {"BH": power_of_two(width), "IS_GROUPED": is_grouped}
            sizes = (_typed(kernel, element) | made, constants, plain.options, ("H",))
            yield Variant(f"fp8 add_rms_norm {width} {kind}", kernel, *sizes, chips=chips, sums_as=plain)
        kernel, block = fp8_kernels.silu_and_mul, 4096 if is_grouped else 16384
        options = fp8_kernels.LAUNCH | {"num_warps": fp8.num_warps(block)}
        sizes = (_typed(kernel, element) | made, {"BN": block, "IS_GROUPED": is_grouped}, options, ("N", "stride"))
        yield Variant(f"fp8 silu_and_mul {kind} {block}", kernel, *sizes, chips=chips)
    others = tuple(each for each in chips if each != 90)
    for is_gated in (False, True):
        for kind in SCALES:
            tile = fp8.OTHER_CHIPS_GATED if is_gated else fp8.OTHER_CHIPS
            yield fp8_variant(tile, element, is_gated, kind, chips=others)
            found = [*(fp8.HOPPER_GATED_TILES if is_gated else fp8.HOPPER_TILES)]
            if kind == "rows":
                found += fp8.CHAINED_GATED_TILES if is_gated else fp8.CHAINED_TILES
                found += (each for key, of in fp8.MEASURED.items() if key[0] == is_gated for each in of.values())
            for tile in dict.fromkeys(found):
                yield fp8_variant(tile, element, is_gated, kind)
        for tile in fp8.HOPPER_GATED_TILES[:1] if is_gated else fp8.HOPPER_TILES[:1]:
            yield fp8_variant(tile, element, is_gated, "rows", x_by_tma=False)
    yield fp8_variant(fp8.HOPPER_TILES[-1], element, False, "rows", by_tma=False)


def fp8_variant(
    tile: fp8.Fp8Tile,
    element: str,
    is_gated: bool,
    kind: str,
    *,
    by_tma: bool = True,
    x_by_tma: bool = True,
    chips: tuple[int, ...] = (90,),
) -> Variant:
    """Without a bias."""
    types = _typed(fp8_kernels.linear, element) | _QUANTISED
    types = {name: kind for name, kind in types.items() if name in fp8_kernels.linear.arg_names and name != "bias"}
    if by_tma:
        box = tile.box(SCALES[kind])
        types |= {"x": f"tensordesc<fp8e4nv[{tile.rows}, {box}]>"}
        types |= {"weight": f"tensordesc<fp8e4nv[{tile.columns}, {box}]>"}
        types |= {"out": f"tensordesc<{element}[{tile.rows}, {tile.columns}]>"}
    if not by_tma:
        types |= dict.fromkeys(("x", "weight"), "*fp8e4nv")
    if not (by_tma and x_by_tma):
        types |= {"x": "*fp8e4nv", "out": f"*{element}"}
    constants = tile.constants(is_gated=is_gated, kind=SCALES[kind], has_bias=False)
    constants |= {"ELEMENT": _NUMBERS[element], "EVEN": True, "BY_TMA": by_tma}
    constants |= dict.fromkeys(("X_BY_TMA", "STORES_BY_TMA"), by_tma and x_by_tma)
    words = f"{' gated' if is_gated else ''} {kind}{'' if by_tma else ' pointers'}{'' if x_by_tma else ' few'}"
    name = f"fp8 linear{words} {tile.rows}x{tile.columns}x{tile.steps} {tile.num_stages} stages"
    options = tile.options()
    how: dict[str, Any] = {"chips": chips, "adds_parts": True, "goes_on": kind == "rows"}
    how["stack_bytes"] = _SPILLED_SUM_BYTES.get((is_gated, tile.rows, tile.columns), 0) if kind == "rows" else 0
    return Variant(name, fp8_kernels.linear, types, constants, options, _ALIGNED, True, **how)


def int8_variants(element: str = "bf16") -> Iterator[Variant]:
    """Rows of 14,336 inputs; every tile by TMA, one by pointers, and integer sums."""
    types = _typed(int8_kernels.quantise_rows, element) | _QUANTISED | {"out": "*i8"}
    types = {name: kind for name, kind in types.items() if name in int8_kernels.quantise_rows.arg_names}
    constants = {"BLOCK": 16384, "IS_WHOLE": True, "HAS_MAXIMA": False}
    options = int8_kernels.LAUNCH | {"num_warps": fp8.num_warps(16384)}
    yield Variant("int8 quantise 14336", int8_kernels.quantise_rows, types, constants, options, ("K", "stride_x"))
    others = tuple(each for each in SHARED_BYTES if each != 90)
    for is_gated in (False, True):
        yield int8_variant(int8.OTHER_CHIPS, element, is_gated, chips=others)
        for tile in int8.HOPPER_GATED_TILES if is_gated else int8.HOPPER_TILES:
            yield int8_variant(tile, element, is_gated)
    yield int8_variant(int8.HOPPER_TILES[2], element, False, by_tma=False)
    yield int8_variant(int8.HOPPER_TILES[-1], "i32", False)
    types = _of_experts(int8_kernels.expert_linear, "i8") | {"x_scales": "*fp32", "out": f"*{element}"}
    types |= dict.fromkeys(("weights", "biases"), "*i64") | {"row_bytes": "i32"}
    elsewhere = (int8_experts.FEW_ELSEWHERE, int8.OTHER_CHIPS)
    hopper = (int8_experts.FEW, int8_experts.SOME, int8_experts.MANY)
    for chips, of_chips in (((90,), hopper), (others, elsewhere)):
        for tile, gathers, by_slot in product(of_chips, (False, True), (False, True)):
            if not gathers and not by_slot:
                continue
            kind = {"CHOSEN": 8, "ELEMENT": _NUMBERS[element], "GATHERS": gathers, "BY_SLOT": by_slot, "BIAS": gathers}
            name = f"int8 experts{' gathers' * gathers}{' by slot' * by_slot} {tile.rows}x{tile.columns}"
            staged = tile.inputs * tile.num_stages * (tile.rows + tile.columns)
            yield Variant(
                *(name, int8_kernels.expert_linear, types, tile.constants() | kind, tile.options()),
                aligned=("N", "K", "row_bytes"),
                multiplies=tile.rows >= 64 and 90 in chips,
                pipelined_bytes=staged if 90 in chips else 0,
                instruction="mma.sync" if tile.rows < 64 else "",
                chips=chips,
            )


def int8_variant(
    tile: int8.Int8Tile, element: str, is_gated: bool, *, by_tma: bool = True, chips: tuple[int, ...] = (90,)
) -> Variant:
    """Without a bias."""
    by_tma = by_tma and 80 not in chips
    types = _typed(int8_kernels.linear, element) | _QUANTISED
    types = {name: kind for name, kind in types.items() if name in int8_kernels.linear.arg_names and name != "bias"}
    if by_tma:
        types |= {"x": f"tensordesc<i8[{tile.rows}, {tile.inputs}]>"}
        types |= {"weight": f"tensordesc<i8[{tile.columns}, {tile.inputs}]>"}
    else:
        types |= dict.fromkeys(("x", "weight"), "*i8")
    constants = tile.constants() | {"IS_GATED": is_gated, "BIAS": False, "BY_TMA": by_tma}
    constants |= {"ELEMENT": _NUMBERS[element], "SUMS": element == "i32"}
    kind = f"{' gated' if is_gated else ''}{'' if by_tma else ' pointers'}{' sums' if element == 'i32' else ''}"
    name = f"int8 linear{kind} {tile.rows}x{tile.columns}"
    # Triton multiplies int8 with neither wgmma of 16 rows nor tcgen05.
    options, multiplies = tile.options(), tile.rows >= 64 and 100 not in chips
    return Variant(name, int8_kernels.linear, types, constants, options, _ALIGNED, multiplies, chips=chips)


def _on(variant: Variant, capability: int) -> Variant:
    """With the tile that it is launched with on such a chip."""
    if variant.kernel is not attention_kernels.attend:
        return variant
    constants = variant.constants
    heads = [constants["KV_HEADS"] * constants["G"], constants["KV_HEADS"], constants["D"]]
    if "lists" in variant.name:
        heads[1] = listed.num_groups(_COMPUTE[capability], heads[0])
    chosen = attend_variant(variant.name, *heads, variant.types["out"][1:], capability)
    share = 2 if "fp8 cache" in variant.name else 1
    return replace(chosen, stack_bytes=variant.stack_bytes, pipelined_bytes=chosen.pipelined_bytes // share)


def _typed(kernel: Any, element: str) -> dict[str, str]:
    """All arguments that are not constexprs; pointers to elements are what is left."""
    known = _POINTERS | _FLOATS | _OF_ROWS | _SCALARS | _PLANNED | _SIZES | _COUNTS | _REAL
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    return {name: known.get(name, f"*{element}") for name in names}


_SEGMENTS = dict.fromkeys(("slots", "starts", "firsts"), "*i32")


def recurrent_variants(element: str = "bf16") -> Iterator[Variant]:
    """Every kernel of layers with states; those of segments as they are, and with tokens behind the kept ones."""
    yield from norms_of_states(element)
    for variant in (
        *conv_variants(element),
        *delta_variants(element),
        *mamba_variants(element),
        *mamba1_variants(element),
    ):
        yield variant
        types, constants = variant.types | {"kept": "*i32"}, variant.constants | {"HAS_KEPT": True}
        yield replace(variant, name=f"{variant.name} kept", types=types, constants=constants)


def conv_variants(element: str) -> Iterator[Variant]:
    """Convolutions of LFM2, LFM3, a gated delta net, and Qwen4's n-grams."""
    kernel = short_conv_kernels.short_conv
    for num_taps, has_silu in ((3, False), (7, False), (4, True), (10, True)):
        types = dict.fromkeys(("x", "weight", "bias", "tails", "out"), f"*{element}") | _SEGMENTS
        types |= {"C": "i32", "stride_x": "i32"}
        constants = short_conv.conv_constants(num_taps, has_bias=True, has_silu=has_silu)
        options = short_conv_kernels.LAUNCH
        yield Variant(f"short_conv {num_taps}", kernel, types, constants, options, ("C", "stride_x"))


def delta_variants(element: str) -> Iterator[Variant]:
    """Gated delta nets of Qwen3.5 and OLMo-Hybrid."""
    floats = dict.fromkeys(("a_log", "dt_bias", "states"), "*fp32") | dict.fromkeys(
        ("beta_scale", "query_scale", "decay_bound"), "fp32"
    )
    counts = ("HK", "HV", "stride_mixed", "stride_a", "stride_b")
    types = dict.fromkeys(("mixed", "a", "b", "out"), f"*{element}") | floats | dict.fromkeys(counts, "i32")
    types |= _SEGMENTS
    kernel = scan_delta_kernels.scan_delta
    for key_size, value_size, is_per_channel in ((128, 128, False), (96, 192, False), (128, 128, True)):
        config = DeltaConfig(16, 32, key_size, value_size, 1e-6, is_per_channel=is_per_channel)
        name = f"scan_delta {key_size} {value_size}{' channels' if is_per_channel else ''}"
        constants, scan = scan_delta.scan_constants(config), scan_delta_kernels.SCAN
        yield Variant(name, kernel, types, constants, scan, ("stride_mixed",))
    bounded = {**constants, "IS_BOUNDED": True}
    yield Variant("scan_delta 128 128 bounded", kernel, types, bounded, scan, ("stride_mixed",))


def norms_of_states(element: str) -> Iterator[Variant]:
    norm, options = scan_delta_kernels.gated_norm, scan_delta_kernels.LAUNCH
    numbers = dict.fromkeys(("SIZE", "stride_x", "stride_gate", "stride_weight"), "i32") | {"eps": "fp32"}
    types = dict.fromkeys(("x", "gate", "weight", "out"), f"*{element}") | numbers
    for size, gates_first, rounds_once in ((128, False, False), (8192, True, False), (1536, False, True)):
        constants = scan_delta.norm_constants(size, NormRule(1e-6, 1, "silu", gates_first, rounds_once))
        yield Variant(f"gated_norm {size}", norm, types, constants, options, ("SIZE", "stride_x", "stride_gate"))


def mamba_variants(element: str) -> Iterator[Variant]:
    """Mamba2 of Nemotron-H and Granite 4 H, and of Falcon-H1 with its larger states."""
    types = dict.fromkeys(("mixed", "dt", "out"), f"*{element}")
    types |= dict.fromkeys(("a_log", "dt_bias", "skip", "states"), "*fp32") | dict.fromkeys(("least", "most"), "fp32")
    types |= _SEGMENTS
    types |= dict.fromkeys(("H", "G", "stride_mixed", "stride_dt"), "i32")
    kernel, options = scan_mamba_kernels.scan_mamba, scan_mamba_kernels.LAUNCH
    for head_size, state_size in ((64, 128), (128, 256)):
        constants = scan_mamba.mamba_constants(MambaConfig(64, head_size, 8, state_size, 1e-5))
        yield Variant(f"scan_mamba {head_size} {state_size}", kernel, types, constants, options, ("stride_mixed",))


def mamba1_variants(element: str) -> Iterator[Variant]:
    """Mamba's states of 16, and larger ones."""
    types = dict.fromkeys(("inputs", "dt", "shared", "out"), f"*{element}")
    types |= dict.fromkeys(("a_log", "dt_bias", "skip", "states"), "*fp32")
    types |= _SEGMENTS
    types |= dict.fromkeys(("C", "stride_x", "stride_dt", "stride_shared"), "i32")
    kernel, options = scan_mamba_kernels.scan_mamba1, scan_mamba_kernels.LAUNCH
    for size in (16, 64):
        constants = scan_mamba.mamba1_constants(size)
        yield Variant(f"scan_mamba1 {size}", kernel, types, constants, options, ("stride_x",))


@triton.jit
def _bytes_linear(x, weight, out):
    """Bytes that are seen to be bytes by what chooses the order of inputs."""
    m, n, k = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 128)
    values = tl.load(weight + n[:, None] * 128 + k[None, :]).to(tl.bfloat16)
    tl.store(out + m[:, None] * 64 + n[None, :], tl.dot(tl.load(x + m[:, None] * 128 + k[None, :]), tl.trans(values)))


def planted() -> dict[str, Variant]:
    """Failures that the gate has to find on sm_90, by the word that it finds them with."""
    by_pointers, by_tma = (False, False, False), (True, True, True)
    base = matmul_variant(tiles.SAFE, by_pointers, 90, is_gated=False)
    large = matmul_variant(tiles.Tile(128, 256, 64, 8, 5), by_tma, 90, is_gated=False)
    plain = matmul_variant(tiles.FLOAT32, by_pointers, 90, is_gated=False, element="fp32")
    prompts = attend_variant("attend llama-8b many", *MODELS["llama-8b"], "bf16")
    normed = next(each for each in fp8_variants() if each.sums_as is not None)
    slow = replace(normed.sums_as or normed, options=normed.options | {"num_warps": 1})
    bytes_types = {"x": "*bf16", "weight": "*u8", "out": "*fp32"}
    return {
        "adds in another order": replace(normed, sums_as=slow),
        "spills": replace(prompts, options=prompts.options | {"maxnreg": 168}),
        "shared memory": large,
        "is not pipelined": replace(base, aligned=()),
        "adds in the matrix unit": replace(base, adds_parts=True),
        "waits for each step's": replace(fp8_variant(fp8.HOPPER_TILES[-1], "bf16", False, "blocks"), goes_on=True),
        "multiplies without": replace(plain, multiplies=True),
        "adds inputs in groups of": Variant("bytes", _bytes_linear, bytes_types, {}, {}, decodes=True),
    }


RECURRENT_OF_THE_GATE = (
    "short_conv 3",
    "scan_delta 128 128",
    "scan_delta 128 128 kept",
    "gated_norm 128",
    "scan_mamba 64 128",
    "scan_mamba1 16",
)
MATMULS_OF_THE_GATE = (
    "linear 16x64x256 4 4 ptt",
    "linear 64x64x128 4 6 ttt",
    "linear 128x256x64 8 4 ttp",
    "linear 128x128+64x64 8 4 ttt",
    "linear 64x64x64 4 3 ppp",
    "gated_linear 16x64x256 4 3 ptt",
    "gated_linear 128x128x64 8 4 ttp",
)


def variants_for(capability: int, *, is_short: bool) -> Iterator[Variant]:
    """All that a chip launches; `is_short`: what the gate compiles of it."""
    first = (
        "add_rms_norm 4096",
        "attend llama-8b few",
        "attend llama-8b many",
        "attend 256 many",
        "make_items",
        "join_partials llama-8b",
        "rotate_and_write llama-8b",
        "write_rows llama-8b",
        "attend fp8 cache few joined",
        "attend latent deepseek-v3 few",
        "attend latent lists sinks deepseek-v4 many",
        "score_keys 4",
        "choose_keys",
        "compress",
        "write_rows latent",
        "linear_of_heads 16",
        *(each.name for each in draw_variants()),
        *(each.name for each in choice_variants()),
        *(each.name for each in penalty_variants()),
        *(each.name for each in sum_variants()),
        *(
            "fp8 add_rms_norm 4096 rows",
            "fp8 quantise 14336",
            "fp8 linear rows 64x128x1",
            "fp8 linear gated rows 64x64x1",
            "int8 linear 128x256",
            "int8 experts gathers 64x128",
        ),
    )
    found = [each for each in variants() if not is_short or each.name.startswith(first)]
    matmuls = matmul_variants(capability)
    found += [each for each in matmuls if not is_short or each.name.startswith(MATMULS_OF_THE_GATE)]
    found += leaf_variants(capability, is_short=is_short)
    found += expert_variants(is_short=is_short)
    found += adapter_variants(is_short=is_short)
    found += (each for each in recurrent_variants() if not is_short or each.name in RECURRENT_OF_THE_GATE)
    launched = (_on(each, capability) for each in found if capability in each.chips)
    # The worker rejects models whose heads want more.
    yield from (each for each in launched if each.most_bytes <= SHARED_BYTES[capability])


def main(capabilities: list[int], part: str = "0/1") -> None:
    first, num_parts = map(int, part.split("/"))
    examined = {
        f"{each.name} sm_{of}": examine(each, of)
        for of in capabilities
        for each in islice(variants_for(of, is_short="--all" not in sys.argv), first, None, num_parts)
    }
    report = {
        "triton": triton.__version__,
        "resources": {name: found and asdict(found) for name, (found, _) in examined.items()},
        "wrong": {name: wrong for name, (_, wrong) in examined.items() if wrong},
    }
    if "--planted" in sys.argv:
        report["planted"] = {word: examine(variant, 90)[1] for word, variant in planted().items()}
    print(json.dumps(report))


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "interpreted kernels are not compiled"
    torch.set_num_threads(1)
    main(
        [int(word) for word in sys.argv[1:] if word.isdigit()] or [90],
        *[word for word in sys.argv[1:] if "/" in word],
    )
