"""Packed products: close to plain ones, and the same bits for a row whatever the batch and the number of threads."""

import logging
import shutil
from pathlib import Path

import pytest
import ranks
import torch
import torch.nn.functional as F
from looped import looped
from native_builds import (
    EMULATED,
    HAS_AMX,
    LEAVE_OUT,
    NATIVE,
    ONEDNN,
    WITHOUT_AMX,
    compiled_with,
    emulated,
    library_for,
)
from native_libraries import ONEDNN_PACKS_BFLOAT16, needs_avx512
from torch_threads import threads

from spmd_worker.base.numerical_policy import HEAD
from spmd_worker.native import build
from spmd_worker.ops.kernels.cpu import linear
from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ops.kernels.cpu.panels import are_panels
from spmd_worker.ops.kernels.reference import ReferenceKernels

# (inputs, outputs); the last two have numbers of inputs and outputs that fit no tile.
SHAPES = [(576, 960), (576, 3072), (1536, 576), (896, 1152), (4864, 896), (64, 192), (128, 64), (4096, 1024)]
ODD_SHAPES = [(72, 48), (64, 50)]
LARGE_SHAPES = [(4096, 1024), (576, 3072)]
"""As others, and longer: stress tier."""
ROWS = [1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33]
NUM_ROWS = 64


def tiers(shapes: list[tuple[int, int]], *, stress: list[tuple[int, int]]) -> list:
    """Parameters, of which some are in the stress tier."""
    return [pytest.param(*each, marks=pytest.mark.stress if each in stress else []) for each in shapes]


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
each_shape = pytest.mark.parametrize(("num_inputs", "num_outputs"), [*tiers(SHAPES, stress=LARGE_SHAPES), *ODD_SHAPES])


def numbers(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


OTHERS = (ONEDNN, *((WITHOUT_AMX,) if HAS_AMX else ()))
# Beside the unit itself, to which `test_emulated_amx_has_the_bits_of_the_processor` compares it.
OF_EMULATED = pytest.mark.stress if HAS_AMX else pytest.mark.matrix
MATRIX = [
    pytest.param(EMULATED, marks=[needs_avx512, OF_EMULATED]),
    *(pytest.param(each, marks=pytest.mark.matrix) for each in OTHERS),
]


@pytest.fixture(params=[NATIVE, *MATRIX])
def kernels(request):
    """Built before oneDNN's first use, as a worker does. Emulated: the products for an AMX unit, on any machine."""
    made = CpuKernels(library_for(request.param))
    made.is_emulated = request.param == EMULATED
    return made


@pytest.mark.gate("*-896-1152-*", "*-576-960-*", "*-72-48-*", "*-64-*", "*-128-*")
@pytest.mark.skipif(not HAS_AMX, reason="the processor has no AMX to compare with")
@each_dtype
@each_shape
@pytest.mark.parametrize("is_gated", [False, True])
def test_emulated_amx_has_the_bits_of_the_processor(dtype, num_inputs, num_outputs, is_gated):
    num_outputs = num_outputs // 32 * 32 if is_gated else num_outputs
    weight, x = numbers(num_outputs, num_inputs, dtype=dtype), numbers(NUM_ROWS, num_inputs, dtype=dtype)
    results = []
    for name in (NATIVE, EMULATED):
        kernels = CpuKernels(library_for(name))
        pack, multiply = (kernels.pack_gated, kernels.gated_linear) if is_gated else (kernels.pack, kernels.linear)
        results.append(multiply(x, pack(weight), None))
    assert torch.equal(*results)


@needs_avx512
@pytest.mark.stress
@pytest.mark.parametrize("num_rows", [1, 20])
def test_mistake_in_emulated_amx_is_detected(num_rows, tmp_path, monkeypatch):
    """Negative control: with the second of each pair taken for the first, results are others."""
    weight, x = numbers(64, 96, dtype=torch.bfloat16), numbers(num_rows, 96, dtype=torch.bfloat16)
    expected = x.float() @ weight.float().T
    assert error_of(CpuKernels(library_for(EMULATED)), x, weight, expected) < 1e-2
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "cpu"))
    text = (sources / "amx.h").read_text()
    right = "_mm512_slli_epi32(lefts, 16)"
    assert text.count(right) == 1
    (sources / "amx.h").write_text(text.replace(right, "_mm512_and_si512(lefts, high)"))
    monkeypatch.setattr(build, "_SOURCE_FOLDER", sources)
    compiled_with.cache_clear()
    planted = emulated()
    compiled_with.cache_clear()
    assert error_of(CpuKernels(planted), x, weight, expected) > 0.1


def error_of(kernels, x, weight, expected):
    """Largest, as a share of the largest value."""
    return float((kernels.linear(x, kernels.pack(weight), None).float() - expected).abs().max() / expected.abs().max())


@pytest.mark.gate(
    "native-*",
    "*oneDNN*-576-*",
    "*oneDNN*-64-*",
    "*AMX-64-*",
    "*AMX-72-*",
    "*AMX-128-*",
    "*AMX-576-*-bfloat16",
)
@each_dtype
@each_shape
def test_linear_row_bits_independent_of_the_batch(kernels, dtype, num_inputs, num_outputs):
    packed = kernels.pack(numbers(num_outputs, num_inputs, dtype=dtype))
    x, bias = numbers(NUM_ROWS, num_inputs, dtype=dtype), numbers(num_outputs, dtype=dtype)
    whole = kernels.linear(x, packed, bias)
    for num_rows in ROWS:
        assert torch.equal(kernels.linear(x[:num_rows], packed, bias), whole[:num_rows]), num_rows
        assert torch.equal(kernels.linear(x[-num_rows:], packed, bias), whole[-num_rows:]), num_rows


def many_rows_for(kernels, num_inputs):
    """Fewer where the unit is emulated, which takes a hundred times as long."""
    if not kernels.is_emulated:
        return MANY_ROWS
    return 70 if num_inputs > 1000 else 140


# Where products are cut in other ways: few rows and many, short and long ones, a last panel that is alone; rows that
# share sets of a cache.
CUTS = tiers(
    [(576, 960), (1536, 576), (4864, 544), (896, 2080), (64, 16400), (4096, 272)], stress=[(1536, 576), (896, 2080)]
)
MANY_ROWS = 520
# Gates are cut as plain products are: narrow ones show it, the others are in the stress tier.
GATED_CUTS = ((576, 960),)


def each_cut() -> list:
    """Inputs, outputs, whether it is gated."""
    gated = [
        (*each.values, True, each.marks or ([] if each.values in GATED_CUTS else pytest.mark.stress)) for each in CUTS
    ]
    plain = [(*each.values, False, each.marks) for each in CUTS]
    return [pytest.param(*values, marks=marks) for *values, marks in (*plain, *gated)]


@pytest.mark.gate(
    "native-64-16400-False-bfloat16",
    "native-4*",
    "native-576-*",
    "*-576-960-True-bfloat16",
    "native without AMX-576-960-True-float32",
    "*AMX-4864-544-False-bfloat16",
)
@pytest.mark.matrix
@each_dtype
@pytest.mark.parametrize(("num_inputs", "num_outputs", "is_gated"), each_cut())
def test_linear_row_bits_independent_of_tiling(kernels, dtype, num_inputs, num_outputs, is_gated):
    """By one thread and by two; rows in their place and in another."""
    num_outputs = num_outputs // 32 * 32 if is_gated else num_outputs
    weight = numbers(num_outputs, num_inputs, dtype=dtype)
    x, bias = numbers(many_rows_for(kernels, num_inputs), num_inputs, dtype=dtype), numbers(num_outputs, dtype=dtype)
    pack, multiply = (kernels.pack_gated, kernels.gated_linear) if is_gated else (kernels.pack, kernels.linear)
    packed, plain = pack(weight), ReferenceKernels().gated_linear if is_gated else ReferenceKernels().linear
    wholes = []
    for num_threads in (1, 2):
        with threads(num_threads):
            wholes.append(whole := multiply(x, packed, bias))
            for num_rows in [each for each in (1, 32, 128, 257) if each < len(x)]:
                assert torch.equal(multiply(x[:num_rows], packed, bias), whole[:num_rows]), (num_threads, num_rows)
            for num_rows in [each for each in (1, 33, 127, 129, 513) if each < len(x)]:
                assert torch.equal(multiply(x[-num_rows:], packed, bias), whole[-num_rows:]), (num_threads, num_rows)
    assert torch.equal(*wholes)
    expected = plain(x.double(), weight.double(), bias.double())
    largest_error = (whole.double() - expected).abs().max() / expected.abs().max()
    assert largest_error < (5e-6 if dtype == torch.float32 else 2e-2)


def rows_and_weight_with_ties(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype):
    """Small whole numbers, so that results are exact and many are equal; one row of NaN, one of infinities."""
    x = (numbers(num_rows, num_inputs, dtype=torch.float32) / 2).round()
    weight = (numbers(num_outputs, num_inputs, dtype=torch.float32) / 2).round()
    x[num_rows // 2 :, 4:] = 0.0
    x[0], x[-1] = 0.0, torch.nan
    if num_rows > 2:
        x[1] = torch.inf
    return x.to(dtype), weight.to(dtype)


@pytest.mark.gate("native-*", "*-64-50-*", "*-64-64-*", "native w* AMX-576-960-bfloat16")
@each_dtype
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 64), *CUTS, (64, 50)])
def test_linear_argmax_equals_argmax_of_linear(kernels, dtype, num_inputs, num_outputs):
    """By one thread and by two, which share the columns among them."""
    all_counts = (1, 15, num_outputs - 17, num_outputs)
    packed = None
    for num_rows in (1, 3, 33, min(140, many_rows_for(kernels, num_inputs))):
        x, weight = rows_and_weight_with_ties(num_rows, num_inputs, num_outputs, dtype)
        packed = kernels.pack(weight) if packed is None else packed
        product = kernels.linear(x, packed, None)
        for num_threads, counts in ((1, all_counts[-2:]), (2, all_counts)):
            with threads(num_threads):
                for count in counts:
                    values, places = kernels.linear_argmax(x, packed, count)
                    expected_values, expected_places = kernels.argmax(product[:, :count])
                    assert places.tolist() == expected_places.tolist(), (num_threads, num_rows, count)
                    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    values, places = kernels.linear_argmax(x[:0], packed, num_outputs)
    assert (values.shape, places.shape) == ((0,), (0,))


def test_linear_argmax_test_has_ties(kernels):
    """Negative control: whoever takes the last of equal numbers, or the wrong one of a row of NaN, is found out."""
    x, weight = rows_and_weight_with_ties(33, 576, 960, torch.bfloat16)
    product = kernels.linear(x, kernels.pack(weight), None).float()
    last = product.shape[1] - 1 - product.flip(1).argmax(dim=1)
    assert (last != product.argmax(dim=1)).sum() > 10
    assert product[-1].isnan().all()


def test_the_batch_test_can_fail():
    """Negative control: plain float32 products do not keep the promise."""
    plain, num_different = ReferenceKernels(), 0
    for num_inputs, num_outputs in SHAPES:
        weight = numbers(num_outputs, num_inputs, dtype=torch.float32)
        x = numbers(NUM_ROWS, num_inputs, dtype=torch.float32)
        whole = plain.linear(x, weight, None)
        num_different += any(not torch.equal(plain.linear(x[:n], weight, None), whole[:n]) for n in ROWS)
    assert num_different > 0


# Numbers of inputs that loops are about.
_LOOPS = {"gemm_avx512.h": "num_left = block.num_inputs;", "gemm_avx2.h": "input < end;"}


@pytest.mark.stress
@pytest.mark.parametrize("is_of_one_row", [True, False], ids=["a row alone", "any row"])
@each_dtype
def test_a_step_that_is_left_out_is_seen(dtype, is_of_one_row, tmp_path, monkeypatch):
    """Negative control for the products by vectors: one row alone has other bits, or all are too far away."""
    if not CpuKernels(library_for(WITHOUT_AMX)).has_gemm(dtype):
        pytest.skip("the library has no products of its own for this processor and dtype")
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "cpu"))
    left_out = "(kRows == 1 ? 2 : 0);" if is_of_one_row else "2;"
    for name, loop in _LOOPS.items():
        text = (sources / name).read_text()
        assert loop in text
        (sources / name).write_text(text.replace(loop, loop.replace(";", f" - {left_out}")))
    monkeypatch.setattr(build, "_SOURCE_FOLDER", sources)
    compiled_with.cache_clear()
    planted = CpuKernels(compiled_with(LEAVE_OUT))
    compiled_with.cache_clear()
    check = (
        test_linear_row_bits_independent_of_the_batch if is_of_one_row else test_products_are_close_to_double_precision
    )
    with pytest.raises(AssertionError):
        check(planted, dtype, 576, 960)


@pytest.mark.gate("native-*", "*-576-960-*", "*-64-*", "*-72-*", "*-128-*")
@each_dtype
@each_shape
def test_threads_change_no_bit(kernels, dtype, num_inputs, num_outputs):
    packed = kernels.pack(numbers(num_outputs, num_inputs, dtype=dtype))
    x = numbers(NUM_ROWS, num_inputs, dtype=dtype)
    results = []
    for num_threads in (1, 2):
        with threads(num_threads):
            results.append(kernels.linear(x, packed, None))
    assert torch.equal(*results)


@pytest.mark.gate("native-*", "*-576-960-*", "*-1536-576-*", "*-64-*", "*-72-*", "*-128-*")
@each_dtype
@each_shape
def test_products_are_close_to_double_precision(kernels, dtype, num_inputs, num_outputs):
    weight = numbers(num_outputs, num_inputs, dtype=dtype)
    x, bias = numbers(33, num_inputs, dtype=dtype), numbers(num_outputs, dtype=dtype)
    for chosen in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if chosen is None else chosen.double())
        result = kernels.linear(x, kernels.pack(weight), chosen)
        assert result.dtype == dtype
        largest_error = (result.double() - expected).abs().max() / expected.abs().max()
        assert largest_error < (2e-6 if dtype == torch.float32 else 4e-3)


def float32_error(kernels: PackedKernels, num_inputs: int, num_outputs: int) -> float:
    """Root mean square, relative to the sums of magnitudes; small, large and one-sided rows are among them."""
    weight, x = numbers(num_outputs, num_inputs, dtype=torch.float32), numbers(64, num_inputs, dtype=torch.float32)
    x[:16] *= 1e-20
    x[16:32] *= 1e15
    x[32:48] = x[32:48].abs()
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    errors = (kernels.linear(x, kernels.pack(weight), None).double() - exact) / size
    return float(errors.pow(2).mean().sqrt())


@pytest.mark.gate("*-576-960", "*-1536-576", "*-64-*", "*-128-*")
@pytest.mark.parametrize(("num_inputs", "num_outputs"), tiers(SHAPES, stress=LARGE_SHAPES))
def test_amx_float32_is_as_exact_as_float32_instructions(kernels, num_inputs, num_outputs):
    """A chain of steps as long as the inputs, against one that oneDNN cuts as it likes: within twice of each other."""
    ours, onednns = (float32_error(each, num_inputs, num_outputs) for each in (kernels, PackedKernels()))
    assert ours < 2 * onednns
    assert ours < 5e-8


@pytest.mark.stress
@needs_avx512
def test_missing_float32_piece_is_detected(tmp_path, monkeypatch):
    """Negative control: without the products of first and third pieces, errors are those of 16 bits."""
    sources = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "cpu"))
    text = (sources / "gemm_amx.h").read_text()
    piece = "      take_weight(2);\n      multiply_pieces();\n"
    assert text.count(piece) == 1
    (sources / "gemm_amx.h").write_text(text.replace(piece, ""))
    monkeypatch.setattr(build, "_SOURCE_FOLDER", sources)
    compiled_with.cache_clear()
    planted = emulated()
    compiled_with.cache_clear()
    assert float32_error(CpuKernels(planted), 576, 960) > 1e-7


@pytest.mark.gate("native-*", "*AMX-bfloat16")
@each_dtype
def test_results_past_caches_have_same_bits(kernels, dtype):
    """Results that AMX products do not keep in a cache equal few of them at a time; plain, and in leaves."""
    weight, x, bias = (numbers(*shape, dtype=dtype) for shape in ((2048, 64), (544, 64), (2048,)))
    packed, ends = kernels.pack(weight), (32, 64)
    ways = [lambda rows: kernels.linear(rows, packed, bias)]
    if are_panels(packed):
        ways += [
            lambda rows: kernels.linear_of_leaves(rows, packed, bias, ends, dtype),
            lambda rows: kernels.linear_of_leaves(rows, packed, bias, ends, torch.float32),
        ]
    for multiply in ways:
        for num_threads in (1, 2):
            with threads(num_threads):
                whole, parts = multiply(x), [multiply(rows) for rows in x.split(60)]
                assert torch.equal(whole, torch.cat(parts)), num_threads


@each_dtype
def test_outputs_of_a_shard_equal_the_complete_weight(kernels, dtype):
    weight, x = numbers(960, 576, dtype=dtype), numbers(7, 576, dtype=dtype)
    whole = kernels.linear(x, kernels.pack(weight), None)
    for start in (0, 320, 640):
        part = kernels.linear(x, kernels.pack(weight[start : start + 320]), None)
        assert torch.equal(part, whole[:, start : start + 320])


@each_dtype
def test_input_rows_may_be_strided_or_empty(kernels, dtype):
    weight, merged = numbers(64, 96, dtype=dtype), numbers(9, 200, dtype=dtype)
    packed, x = kernels.pack(weight), merged[:, 50:146]
    assert torch.equal(kernels.linear(x, packed, None), kernels.linear(x.contiguous(), packed, None))
    assert kernels.linear(x[:0], packed, None).shape == (0, 64)


def test_library_without_gemms_uses_onednn(kernels):
    packed = CpuKernels(library_for(ONEDNN)).pack(numbers(64, 64, dtype=torch.bfloat16))
    assert packed.is_mkldnn == ONEDNN_PACKS_BFLOAT16
    assert PackedKernels().pack(numbers(64, 64, dtype=torch.float32)).is_mkldnn


@pytest.fixture
def packs_only(monkeypatch):
    """A function: from now on, in this test, oneDNN packs these dtypes and no other."""

    def forget() -> None:
        for each in ("rows_are_invariant", "warn_unless_invariant", "log_unpacked"):
            getattr(linear, each).cache_clear()
        linear.converts_to_float32.cache_clear()

    def packs_only(*dtypes: torch.dtype) -> None:
        monkeypatch.setattr(linear, "can_pack", lambda dtype: dtype in dtypes)
        forget()

    yield packs_only
    forget()


@each_dtype
def test_unpackable_weight_is_multiplied_unpacked(kernels, packs_only, dtype, caplog):
    """Said once, as is what rows are then like."""
    half = numbers(64, 64, dtype=torch.float16)
    assert kernels.pack(half) is half
    packs_only()
    weight, x = numbers(50, 64, dtype=dtype), numbers(3, 64, dtype=dtype)
    with caplog.at_level(logging.WARNING):
        assert kernels.pack(weight) is weight
        assert kernels.pack(weight) is weight
    assert torch.equal(kernels.linear(x, weight, None), F.linear(x, weight))
    messages = [record.getMessage() for record in caplog.records]
    assert len([each for each in messages if "torch's own GEMMs multiply them" in each]) == 1
    is_told = len([each for each in messages if "other bits in another batch" in each]) == 1
    assert is_told != linear.rows_are_invariant(dtype)


# One block and several, of a number of outputs that ends in a block of its own; then one that fits no tile.
CONVERTED = [(576, 960), (4864, 272), (4096, 530), SMALL_BLOCKS := (256, 530), (64, 50), (33, 40)]
"""Blocks of `SMALL_BLOCKS` are as many as of the one before, of a sixteenth of the elements."""
LONG = [(4864, 272), (4096, 530)]
"""Of these, in the stress tier."""


@pytest.fixture
def converting(packs_only) -> PackedKernels:
    """The kernels of a CPU without a compiler on which oneDNN cannot pack bfloat16, on any CPU."""
    packs_only(torch.float32)
    return PackedKernels()


@pytest.mark.gate("64-*", "33-*")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "has_bias"),
    [
        *(pytest.param(*each, False, marks=pytest.mark.stress if each in LONG else []) for each in CONVERTED),
        (64, 50, True),
    ],
)
def test_converted_weights_multiply_rows_independently(converting, num_inputs, num_outputs, has_bias, monkeypatch):
    """In any batch, at any place in it, by one thread and by two; past the rows that share a block; to the last bit."""
    if (num_inputs, num_outputs) == SMALL_BLOCKS:
        monkeypatch.setattr(linear, "_BLOCK_ELEMENTS", 1 << 16)
    weight = converting.pack(numbers(num_outputs, num_inputs, dtype=torch.bfloat16))
    bias = numbers(num_outputs, dtype=torch.bfloat16) if has_bias else None
    x = numbers(linear._BLOCK_ROWS + NUM_ROWS, num_inputs, dtype=torch.bfloat16)
    wholes = []
    for num_threads in (1, 2):
        with threads(num_threads):
            wholes.append(whole := converting.linear(x, weight, bias))
            for num_rows in (*ROWS, linear._BLOCK_ROWS, linear._BLOCK_ROWS + 1):
                for rows in (slice(num_rows), slice(-num_rows, None), slice(9, 9 + num_rows)):
                    assert torch.equal(converting.linear(x[rows], weight, bias), whole[rows]), (num_threads, rows)
    assert torch.equal(*wholes)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Rounded once: within a little more than half a unit in the last of eight places.
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8 * 1.01, atol=1e-4)
    assert converting.linear(x[:0], weight, bias).shape == (0, num_outputs)


def test_other_gemm_of_a_single_row_is_detected(converting, monkeypatch):
    """Negative control: what looks at the rows of products says so, and does not raise, where bfloat16 is converted."""
    assert linear.rows_are_invariant(torch.bfloat16)
    linear.rows_are_invariant.cache_clear()
    monkeypatch.setattr(linear, "_gemm", lambda x, weight, bias: F.linear(x, weight, bias) * (1 + 0.01 * (len(x) == 2)))
    assert not linear.rows_are_invariant(torch.bfloat16)


def test_weight_conversion_is_logged_once_without_second_copy(converting, caplog):
    weight = numbers(50, 64, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert converting.pack(weight) is weight
        assert converting.pack(weight) is weight
        assert converting.pack(weight.float()).is_mkldnn
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("oneDNN cannot pack bfloat16 weights on this CPU")
    assert "float32, a block at a time" in message


def test_float16_gets_plain_operations_and_a_reason():
    kernels, reason = cpu_kernels(torch.float16)
    assert type(kernels) is PackedKernels
    assert "not in float16" in str(reason)


def test_batch_dependent_gemms_are_logged_once(packs_only, monkeypatch, caplog):
    """A product that adds the number of rows stands for oneDNN on a processor where its rows differ."""
    packs_only(torch.float32)
    monkeypatch.setattr(linear, "_gemm", lambda x, packed, bias: x.new_full((len(x), 1), len(x)))
    with caplog.at_level(logging.WARNING):
        linear.warn_unless_invariant(torch.float32)
        linear.warn_unless_invariant(torch.float32)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "ONEDNN_MAX_CPU_ISA" in messages[0]


@pytest.mark.parametrize("dtype", linear.PACKED_DTYPES, ids=str)
def test_numerics_ask_onednn_where_it_multiplies(dtype, monkeypatch):
    """A host program's own products would lose AMX at that question."""
    monkeypatch.setattr(linear, "can_pack", lambda of: pytest.fail("asked"))
    assert "native" in CpuKernels(library_for(NATIVE)).numerics(dtype)[HEAD].implementation
    with pytest.raises(pytest.fail.Exception, match="asked"):
        CpuKernels(library_for(ONEDNN)).numerics(dtype)


@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_onednns_rows_are_invariant_here_without_a_compiler(first, tmp_path, monkeypatch):
    """A process of its own: what oneDNN may use is settled at its first product, of a model of either dtype."""
    script = tmp_path / "invariant.py"
    script.write_text(
        "import os, torch\n"
        "from spmd_worker.ops.kernels.cpu.linear import PackedKernels, rows_are_invariant\n"
        "before = dict(os.environ)\n"
        f"PackedKernels().numerics(torch.{first})\n"
        f"PackedKernels().pack(torch.ones(16, 16, dtype=torch.{first}))\n"
        "assert dict(os.environ) == before\n"
        "print(rows_are_invariant(torch.bfloat16), rows_are_invariant(torch.float32))\n"
    )
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    done = ranks.run_script([script], timeout_s=120)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.output


@pytest.mark.gate("bfloat16")
@pytest.mark.matrix
@each_dtype
@looped("has_bias", [False, True])
@looped(("num_inputs", "size"), [(32, 16), (576, 1536), (896, 48), (64, 4864), (40, 24)])
@looped("num_rows", [0, 1, 2, 15, 33, 100, 700])
def test_gated_epilogue_equals_activation_after_the_gemm(dtype, num_rows, num_inputs, size, has_bias):
    kernels, reason = cpu_kernels(dtype)
    assert reason is None
    generator = torch.Generator().manual_seed(size)
    x = (2 * torch.randn(num_rows, num_inputs, generator=generator)).to(dtype)
    weight = (torch.randn(2 * size, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    bias = torch.randn(2 * size, generator=generator).to(dtype) if has_bias else None
    gated = kernels.gated_linear(x, kernels.pack_gated(weight), bias)
    assert gated.shape == (num_rows, size)
    assert torch.equal(gated, kernels.silu_and_mul(kernels.linear(x, kernels.pack(weight), bias)))
    torch.testing.assert_close(gated, ReferenceKernels().gated_linear(x, weight, bias), rtol=3e-2, atol=3e-2)
