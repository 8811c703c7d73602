"""Compiles the product's Triton kernels for GPUs that are not there, and says what is wrong with what comes out.

    python tests/ops/kernels/compile_gate.py [90 ...]     prints {kernel: {capability: {...}}} and what is wrong

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
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spmd_worker.ops.kernels.triton import (
    attention,
    attention_kernels,
    matmul,
    matmul_kernels,
    row_kernels,
    rows,
    sampling_kernels,
    sum_kernels,
)
from spmd_worker.ops.kernels.triton.launching import power_of_two

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Variant:
    """One specialisation. `types` as Triton writes them; `aligned`: arguments that 16 divides, which the launcher finds
    out for itself. `pipelined_bytes`: shared memory that the asked stages of operands take, 0 where nothing is staged.
    `most_bytes`: what the worker asks of a chip's shared memory on its behalf, which mma.sync must not pass.
    `most_stack_bytes`: may be spilled, outside of the loops over keys.
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
    most_stack_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack_bytes: int
    shared_bytes: int
    has_matrix_instruction: bool
    num_async_copies: int


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
        num_async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
    )


def _instruction(variant: Variant, capability: int) -> str:
    """wgmma and tcgen05 have tiles of 64 rows or more."""
    return "mma.sync" if variant.constants.get("ROWS", 64) < 64 else MATRIX_INSTRUCTION[capability]


def examine(variant: Variant, capability: int) -> tuple[Compiled | None, list[str]]:
    """What came out for a chip of this capability, and what is wrong with it, in words."""
    try:
        found = compile_for(variant, capability)
    except Exception as error:
        return None, [f"{type(error).__name__}: {str(error).strip()[-300:]}"]
    wrong = []
    if found.stack_bytes > variant.most_stack_bytes:
        wrong.append(f"spills {found.stack_bytes} bytes")
    if found.shared_bytes > SHARED_BYTES[capability]:
        wrong.append(f"wants {found.shared_bytes} bytes of shared memory of {SHARED_BYTES[capability]}")
    if variant.multiplies and not found.has_matrix_instruction:
        wrong.append(f"multiplies without {_instruction(variant, capability)}")
    # mma.sync takes operands from registers: they have left the last stage by then.
    staged = int(variant.pipelined_bytes * (0.75 if MATRIX_INSTRUCTION[capability] == "mma.sync" else 1))
    if variant.pipelined_bytes and (not found.num_async_copies or found.shared_bytes < staged):
        wrong.append(f"is not pipelined: {found.shared_bytes} bytes of shared memory of {staged}")
    if variant.most_bytes and MATRIX_INSTRUCTION[capability] == "mma.sync" and found.shared_bytes > variant.most_bytes:
        wrong.append(f"wants {found.shared_bytes} bytes of shared memory, and the worker asks for {variant.most_bytes}")
    return found, wrong


MODELS = {"llama-8b": (32, 8, 128), "qwen-0.5b": (14, 2, 64), "llama-135m": (9, 3, 64)}
"""Query heads, key-value heads, head size."""
_POINTERS = dict.fromkeys(("items", "num_items", "starts", "lengths", "tables", "joins", "num_joins", "slots"), "*i32")
_FLOATS = dict.fromkeys(("partial_sums", "partial_tops", "partial_denoms", "sinks"), "*fp32")
_OF_ROWS = {
    **dict.fromkeys(("maxima", "factors", "min_logits", "values"), "*fp32"),
    **dict.fromkeys(("sums", "targets", "ids", "counts", "rows", "mask_rows", "top_k"), "*i64"),
    "top_p": "*fp64",
    "allowed": "*i32",
}
"""What belongs to rows of logits."""
_SCALARS = dict.fromkeys(("stride_query", "stride_page", "stride_table", "stride_key", "stride_value", "window"), "i32")
_PLANNED = dict.fromkeys(("S", "num_few", "max_partials", "later"), "i32")
_SIZES = dict.fromkeys(("M", "N", "K", "stride_x", "stride_weight", "stride_out", "H", "V", "stride"), "i32")
_COUNTS = {**dict.fromkeys(("num_pieces", "first_id", "num_words"), "i32"), "first": "i64", "parts": "*i64"}
_REAL = dict.fromkeys(("scale", "cap", "eps", "offset"), "fp32")


def variants(element: str = "bf16") -> Iterator[Variant]:
    """Every kernel that a step of a dense model launches, in the shapes of three models."""
    yield from attention_variants(element)
    for width in (576, 896, 4096):
        types = _typed(row_kernels.add_rms_norm, element)
        constants = {"BH": power_of_two(width), "ADDS": True}
        options = rows.row_options(width)
        yield Variant(f"add_rms_norm {width}", row_kernels.add_rms_norm, types, constants, options, ("H",))
    types = _typed(row_kernels.full_norm, element)
    constants = {"BH": 4096, "CENTRED": True, "BIAS": True}
    yield Variant("full_norm 4096", row_kernels.full_norm, types, constants, rows.row_options(4096), ("H",))
    yield from matmul_variants(element)
    yield from draw_variants(element)
    yield from sum_variants(element)


HEAD_SIZES = {"96": (8, 8, 96), "192": (8, 2, 192), "256": (8, 4, 256), "64 of one": (64, 1, 128)}
"""Further shapes of attention: query heads, key-value heads, head size."""
_COMPUTE = {80: (8, 0), 90: (9, 0), 100: (10, 0), 120: (12, 0)}
_STRIDES = ("stride_query", "stride_page")


def attention_variants(element: str = "bf16") -> Iterator[Variant]:
    """Attention in every way that it is launched, by the tiles of sm_90; `_on` takes those of other chips."""
    for name, (heads, kv_heads, size) in (MODELS | HEAD_SIZES).items():
        for way in ("few", "few joined", "many"):
            yield attend_variant(f"attend {name} {way}", heads, kv_heads, size, element)
    yield attend_variant("attend llama-8b many sinks", *MODELS["llama-8b"], element)
    capped = attend_variant("attend 256 many cap", *HEAD_SIZES["256"], element)
    yield replace(capped, most_stack_bytes=8)
    types = _typed(attention_kernels.make_items, element) | dict.fromkeys(("lengths", "items", "counts"), "*i32")
    constants = {"FEW": 4, "MANY": 32, "SEGMENT": attention_kernels.SEGMENT, "BATCH": 256, "EACH": 64}
    yield Variant("make_items", attention_kernels.make_items, types, constants, {"num_warps": 1})
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
        constants = {"KV_HEADS": kv_heads, "D": size, "DP": power_of_two(size), "BLOCK": 16}
        strides = ("stride_key", "stride_value", "stride_page")
        yield Variant(f"write_rows {model}", row_kernels.write_rows, types, constants, options, strides)


def attend_variant(name: str, heads: int, kv_heads: int, size: int, element: str, capability: int = 90) -> Variant:
    """`attend` as it is launched on a chip; the way is in the name."""
    itemsize = 4 if element == "fp32" else 2
    choose = attention.many_tile if "many" in name else attention.few_tile
    tile = choose(_COMPUTE[capability], size, heads // kv_heads, itemsize)
    capped, sinks = "cap" in name, "sinks" in name
    constants = attention.attend_constants(tile, heads, kv_heads, size, size, 16, is_capped=capped, has_sinks=sinks)
    constants |= {"ONE": "many" not in name, "LOOPS": not name.endswith("few")}
    # One tile of keys and one of values are in flight.
    staged = itemsize * attention_kernels.TILE * (size + size // tile.parts)
    most = attention.shared_bytes(tile, size, itemsize)
    kernel, types = attention_kernels.attend, _typed(attention_kernels.attend, element) | {"values": f"*{element}"}
    return Variant(name, kernel, types, constants, tile.options(), _STRIDES, element != "fp32", staged, most)


def draw_variants(element: str = "bf16") -> Iterator[Variant]:
    """Of a vocabulary of 128,256 ids; what filters leave is float32."""
    piece, block = {"PIECE": sampling_kernels.PIECE}, {"BLOCK": sampling_kernels.BLOCK}
    for kernel, constants in (
        (sampling_kernels.prob_sums, piece),
        (sampling_kernels.invert_cdf, piece | {"PIECES": 128}),
        (sampling_kernels.count_above, block),
        (sampling_kernels.forbid, block),
        (sampling_kernels.filter_logits, block),
    ):
        is_cut = kernel is sampling_kernels.filter_logits
        types = _typed(kernel, "fp32" if is_cut else element)
        options = sampling_kernels.FILTER_LAUNCH if is_cut else sampling_kernels.LAUNCH
        yield Variant(kernel.__name__, kernel, types, constants, options, ("V", "stride"))


def sum_variants(element: str = "bf16") -> Iterator[Variant]:
    """Of eight ranks."""
    ranks = {"RANKS": 8}
    types = _typed(sum_kernels.add_parts, element) | {"N": "i32"}
    constants = ranks | {"BLOCK": sum_kernels.BLOCK}
    yield Variant("add_parts", sum_kernels.add_parts, types, constants, sum_kernels.LAUNCH, ("N", "first"))
    types = _typed(sum_kernels.add_parts_and_norm, element)
    options = sum_kernels.LAUNCH | rows.row_options(4096)
    constants = ranks | {"BH": 4096}
    yield Variant("add_parts_and_norm 4096", sum_kernels.add_parts_and_norm, types, constants, options, ("H", "first"))


def matmul_variants(element: str = "bf16") -> Iterator[Variant]:
    gated = (matmul.GATED_FEW_ROWS, matmul.GATED_MANY_ROWS)
    for tile in (matmul.FEW_ROWS, matmul.MANY_ROWS, *gated):
        kernel = matmul_kernels.gated_linear if tile in gated else matmul_kernels.linear
        yield matmul_variant(kernel, tile, element)


def matmul_variant(kernel: Any, tile: matmul.Tile, element: str = "bf16") -> Variant:
    """Without a bias. N, K and strides are multiples of 16, as models' sizes are."""
    types = {name: kind for name, kind in _typed(kernel, element).items() if "bias" not in name}
    columns = tile.columns * (2 if kernel is matmul_kernels.gated_linear else 1)
    staged = 2 * tile.inputs * (tile.rows + columns) * tile.num_stages
    name = f"{kernel.__name__} {tile.rows}x{tile.columns}x{tile.inputs}"
    aligned = ("N", "K", "stride_x", "stride_weight", "stride_out")
    most = matmul.shared_bytes(4 if element == "fp32" else 2)
    return Variant(name, kernel, types, tile.constants(False), tile.options(), aligned, element != "fp32", staged, most)


def _on(variant: Variant, capability: int) -> Variant:
    """With the tile that it is launched with on such a chip."""
    if variant.kernel is not attention_kernels.attend:
        return variant
    constants = variant.constants
    heads = (constants["KV_HEADS"] * constants["G"], constants["KV_HEADS"], constants["D"])
    chosen = attend_variant(variant.name, *heads, variant.types["out"][1:], capability)
    return replace(chosen, most_stack_bytes=variant.most_stack_bytes)


def _typed(kernel: Any, element: str) -> dict[str, str]:
    """All arguments that are not constexprs; pointers to elements are what is left."""
    known = _POINTERS | _FLOATS | _OF_ROWS | _SCALARS | _PLANNED | _SIZES | _COUNTS | _REAL
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    return {name: known.get(name, f"*{element}") for name in names}


def planted() -> dict[str, Variant]:
    """Failures that the gate has to find on sm_90, by the word that it finds them with."""
    base = matmul_variant(matmul_kernels.linear, matmul.MANY_ROWS)
    prompts = attend_variant("attend llama-8b many", *MODELS["llama-8b"], "bf16")
    return {
        "spills": replace(prompts, options=prompts.options | {"maxnreg": 168}),
        "shared memory": matmul_variant(matmul_kernels.linear, matmul.Tile(128, 256, 64, 8, 5)),
        "is not pipelined": replace(base, aligned=()),
        "multiplies without": replace(matmul_variant(matmul_kernels.linear, matmul.FLOAT32, "fp32"), multiplies=True),
    }


def main(capabilities: list[int]) -> None:
    everything = list(variants())
    first = (
        "linear",
        "gated_linear",
        "add_rms_norm 4096",
        "attend llama-8b few",
        "attend llama-8b many",
        "attend 256 many",
        "make_items",
        "join_partials llama-8b",
        "rotate_and_write llama-8b",
        "write_rows llama-8b",
        *(each.name for each in draw_variants()),
        *(each.name for each in sum_variants()),
    )
    short = [each for each in everything if each.name.startswith(first)]
    chosen = everything if "--all" in sys.argv else short
    examined = {f"{each.name} sm_{of}": examine(_on(each, of), of) for each in chosen for of in capabilities}
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
    main([int(word) for word in sys.argv[1:] if word.isdigit()] or [90])
