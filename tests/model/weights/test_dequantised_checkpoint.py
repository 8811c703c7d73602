"""Quantised weights equal the definitions of their formats, bit for bit in float32, for any rectangle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_files import BLOCK, FORMATS, GROUP, Format, gptq
from weight_files import save_single

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.weights import quantised_weight
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model.weights.identity import tensor_digests
from spmd_worker.model_config.quantization import read_quantization
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels import stored_weights

ROWS, COLUMNS = 72, 96
"""Rows are whole int32 of numbers, and no whole number of blocks; columns are groups."""
WHOLE = ((0, ROWS), (0, COLUMNS))


def matrix(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def opened(folder: Path, format_: Format, tensors: dict[str, torch.Tensor], **changes: Any) -> DequantisedCheckpoint:
    save_single(folder, {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()})
    config = {"quantization_config": {**format_.config, **changes}}
    quantization = read_quantization(config, folder / "config.json")
    assert quantization is not None
    return DequantisedCheckpoint.open(Checkpoint.open(folder), quantization)


def named(parts: dict[str, torch.Tensor], module: str = "model.layers.0.mlp.up_proj") -> dict[str, torch.Tensor]:
    return {module + ending: tensor for ending, tensor in parts.items()}


NAME = "model.layers.0.mlp.up_proj.weight"
ONE_OF_EACH_LAYOUT = ("fp8_block", "gptq_order", "awq", "int_row_zeros", "w4a16_zeros", "nf4_nested", "nvfp4")
EACH = [pytest.param(name, marks=() if name in ONE_OF_EACH_LAYOUT else pytest.mark.matrix) for name in FORMATS]
"""One of each layout in the default tier."""


class Made(dict[str, tuple[DequantisedCheckpoint, torch.Tensor]]):
    """A checkpoint of one weight and its values, by format."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> tuple[DequantisedCheckpoint, torch.Tensor]:
        parts, meant = FORMATS[name].pack(matrix())
        self[name] = opened(self._folder / name, FORMATS[name], named(parts)), meant
        return self[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


@pytest.mark.guarantee("Quantised files are dequantised exactly")
@pytest.mark.parametrize("name", FORMATS)
def test_weight_equals_its_format_bit_for_bit(made: Made, name: str):
    checkpoint, meant = made[name]
    assert (checkpoint.names(), checkpoint.shape(NAME)) == ([NAME], (ROWS, COLUMNS))
    assert checkpoint.dtype(NAME) == torch.float32
    assert torch.equal(checkpoint.read(NAME, WHOLE), meant)
    # Negative control: it is not the float matrix, and near it.
    assert 0 < (meant - matrix()).abs().max() < 1.0


def test_stored_numbers_mean_dequantised_values(made: Made, tmp_path: Path):
    """Whole, and shares that begin and end at groups, of rows in the middle of a word of AWQ."""
    borrowing = Format(
        {**FORMATS["gptq"].config, "sym": False},
        lambda weight: gptq(weight, bits=4, is_symmetric=False, has_order=False, is_second=False),
    )
    # Zero points of 0, which borrow, and of 15.
    parts, meant = borrowing.pack(torch.cat((matrix(ROWS // 2).abs(), -matrix(ROWS // 2).abs())))
    cases = {name: made[name] for name in ("gptq", "gptq_rows", "awq", "w4a16", "w4a16_zeros")}
    cases["borrowing"] = opened(tmp_path, borrowing, named(parts)), meant
    formats = {name: StoredFormat("int4", 1, 0 if name == "gptq_rows" else GROUP) for name in cases}
    cases |= {name: made[name] for name in ("fp8_block", "fp8_tensor", "float_row", "modelopt_fp8")}
    for name, (checkpoint, values) in cases.items():
        stored = formats.get(name, StoredFormat("e4m3", 1, BLOCK[1] if name == "fp8_block" else 0))
        checkpoint.check_stored(NAME, stored)
        for rows, columns in (WHOLE, ((3, 41), (GROUP, 5 * GROUP))):
            numbers, scales = checkpoint.read_stored(NAME, (rows, columns), stored)
            assert numbers.shape == (rows[1] - rows[0], (columns[1] - columns[0]) * stored.bits // 8)
            found = stored_weights.values(stored, numbers, scales)
            assert torch.equal(found, values[slice(*rows), slice(*columns)]), name
            assert stored_weights.are_surely_finite(stored, numbers, scales, torch.bfloat16)
            # Some of their multiples are not, and NaN is not.
            large = torch.full_like(scales, 3e37)
            assert not stored_weights.are_surely_finite(stored, numbers, large, torch.bfloat16)
            numbers = numbers.clone()
            numbers[-1, -1] = 0xFF
            is_finite = stored_weights.are_surely_finite(stored, numbers, scales, torch.bfloat16)
            assert is_finite == (stored.number == "int4")
        with pytest.raises(CheckpointError, match=r"not stored in 4-bit integers in groups of 32.*dequantize_weights"):
            checkpoint.check_stored(NAME, StoredFormat("int4", 1, 32))
    _, scales = cases["borrowing"][0].read_stored(NAME, WHOLE, StoredFormat("int4", 1, GROUP))
    assert {0.0, 15.0} <= set(scales[..., 1].unique().tolist())


@pytest.mark.parametrize("name", ["gptq_order", "w4a16_order", "gptq_v2_8bits"])
def test_files_in_other_orders_are_not_stored(made: Made, tmp_path: Path, name: str):
    """Also if config.json does not say that they are."""
    parts, _ = FORMATS[name].pack(matrix())
    for checkpoint in (made[name][0], opened(tmp_path, FORMATS[name], named(parts), desc_act=False)):
        with pytest.raises(CheckpointError, match="is not stored in 4-bit integers"):
            checkpoint.check_stored(NAME, StoredFormat("int4", 1, GROUP))


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_rectangle_equals_that_of_full_weight(made: Made, name: str, data: st.DataObject):
    checkpoint, meant = made[name]
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in (ROWS, COLUMNS)]
    region = tuple((start, stop) for start, stop in bounds)
    assert torch.equal(checkpoint.read(NAME, region), meant[tuple(slice(*each) for each in region)])


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("block_elements", [90, 1000])
def test_small_blocks_give_equal_values_within_limit(
    made: Made, name: str, block_elements: int, monkeypatch: pytest.MonkeyPatch
):
    checkpoint, meant = made[name]
    monkeypatch.setattr(quantised_weight, "_BLOCK_ELEMENTS", block_elements)
    weight = checkpoint.weights[NAME]
    sizes = []
    right = type(weight)._read_block

    def counted(self: Any, block: Any) -> torch.Tensor:
        values = right(self, block)
        sizes.append(values.numel())
        return values

    monkeypatch.setattr(type(weight), "_read_block", counted)
    assert torch.equal(checkpoint.read(NAME, WHOLE), meant)
    assert max(sizes) <= block_elements
    assert sum(sizes) == ROWS * COLUMNS


@pytest.mark.parametrize("name", EACH)
def test_rank_reads_only_its_share(made: Made, name: str, monkeypatch: pytest.MonkeyPatch):
    checkpoint, _ = made[name]
    monkeypatch.setattr("spmd_worker.model.weights.checkpoint._MAX_GAP_BYTES", 0)

    def bytes_of(*region: tuple[int, int]) -> int:
        before = checkpoint.num_bytes_read
        checkpoint.read(NAME, region)
        return checkpoint.num_bytes_read - before

    whole = bytes_of(*WHOLE)
    # Groups in an order of their own are spread over all scales.
    limit = 0.75 if "order" in name or "v2" in name else 0.6
    assert bytes_of((0, 40), (0, COLUMNS)) <= 0.7 * whole
    assert bytes_of((0, ROWS), (0, COLUMNS // 2)) <= max(limit, 0.6) * whole


def test_symmetric_gptq_zero_point_without_offset_is_read(tmp_path: Path):
    """https://github.com/vllm-project/vllm/pull/38966: a current writer calls it the first version."""
    parts, meant = gptq(matrix(), bits=4, is_symmetric=True, has_order=False, is_second=True)
    for kind in ("gptq", "gptq_v2"):
        checkpoint = opened(tmp_path / kind, FORMATS["gptq"], named(parts), checkpoint_format=kind)
        assert torch.equal(checkpoint.read(NAME, WHOLE), meant)
    # Negative control: an asymmetric one is shifted.
    checkpoint = opened(tmp_path / "shifted", FORMATS["gptq"], named(parts), sym=False)
    assert not torch.equal(checkpoint.read(NAME, WHOLE), meant)


@pytest.mark.control("Quantised files are dequantised exactly")
@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [
        ("awq", "AWQ_ORDER", tuple(range(8))),
        ("gptq_order", "full_words", lambda bounds, size: ((0, 1), slice(0, bounds[1] - bounds[0]))),
        ("w4a16_zeros", "_groups_of", lambda groups: (groups * 0, (0, 1))),
    ],
)
def test_comparison_detects_wrong_bit_order_and_groups(
    made: Made, name: str, key: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
):
    checkpoint, meant = made[name]
    region = ((8, 16), (8, 16))
    monkeypatch.setattr(quantised_weight, key, wrong)
    assert not torch.equal(checkpoint.read(NAME, region), meant[tuple(slice(*each) for each in region)])


@pytest.mark.control("Quantised files are dequantised exactly")
@pytest.mark.parametrize(
    ("name", "ending", "change"),
    [
        ("nvfp4", ".weight", lambda packed: packed >> 4 | packed << 4),
        ("nvfp4", ".weight_scale", lambda scales: scales.roll(1, dims=1)),
        ("nvfp4", ".weight_scale_2", lambda scale: scale * 1.01),
        ("nvfp4_packed", ".weight_packed", lambda packed: packed >> 4 | packed << 4),
        ("nvfp4_packed", ".weight_global_scale", lambda scale: 1 / scale),
    ],
)
def test_comparison_detects_changed_parts_of_nvfp4(tmp_path: Path, name: str, ending: str, change: Any):
    parts, meant = FORMATS[name].pack(matrix())
    checkpoint = opened(tmp_path, FORMATS[name], named({**parts, ending: change(parts[ending])}))
    assert (checkpoint.read(NAME, WHOLE) != meant).float().mean() > 0.6


@pytest.mark.parametrize("name", EACH)
def test_every_missing_part_is_named(tmp_path: Path, name: str):
    parts, _ = FORMATS[name].pack(matrix())
    first = next(iter(parts))
    needed = [
        ending for ending in parts if ending not in (first, ".input_scale", ".input_global_scale", ".weight_format")
    ]
    if not FORMATS[name].config.get("desc_act"):
        needed = [ending for ending in needed if ending != ".g_idx"]
    assert needed
    for index, ending in enumerate(needed):
        rest = {other: tensor for other, tensor in parts.items() if other != ending}
        with pytest.raises(CheckpointError) as caught:
            opened(tmp_path / str(index), FORMATS[name], named(rest))
        words = str(caught.value)
        assert f"model.layers.0.mlp.up_proj{first} has no " in words
        assert f"model.layers.0.mlp.up_proj{ending}" in words
        assert "\n" not in words


def test_ascending_order_is_optional(tmp_path: Path):
    parts, meant = FORMATS["gptq"].pack(matrix())
    del parts[".g_idx"]
    assert torch.equal(opened(tmp_path, FORMATS["gptq"], named(parts)).read(NAME, WHOLE), meant)


def test_plain_and_quantised_weight_are_rejected_together(tmp_path: Path):
    parts, _ = FORMATS["gptq"].pack(matrix())
    with pytest.raises(CheckpointError, match=r"up_proj\.qweight' and '.*up_proj\.weight' .*same weight"):
        opened(tmp_path, FORMATS["gptq"], {**named(parts), NAME: matrix()})


def test_part_without_its_weight_keeps_its_name(tmp_path: Path):
    parts, _ = FORMATS["awq"].pack(matrix())
    checkpoint = opened(tmp_path, FORMATS["awq"], {**named(parts), "model.layers.1.mlp.up_proj.scales": matrix()})
    assert checkpoint.names() == [NAME, "model.layers.1.mlp.up_proj.scales"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fp8_block", {"weight_block_size": [16, 16]}, ["weight_block_size", "FP8 in blocks of 16 x 16", "[5, 6]"]),
        ("fp8_block", {"weight_block_size": None}, ["weight_block_size", "one scale a tensor or a row"]),
        (
            "gptq",
            {"group_size": 36},
            ["bits and group_size", "96 inputs, which is not a multiple of the group size 36"],
        ),
        (
            "gptq",
            {"group_size": 32},
            ["group_size", "scales has the shape [6, 72], but the other tensors imply [3, 72]"],
        ),
        ("gptq", {"bits": 8}, ["bits and group_size", "8-bit integers in groups of 16", "imply [3, 72]"]),
        (
            "awq",
            {"group_size": -1},
            ["group_size", "scales has the shape [6, 72], but the other tensors imply [1, 72]"],
        ),
        ("w4a16", FORMATS["w8a16_rows"].config, ["config_groups", "weight_packed has the shape [72, 12]"]),
        (
            "w4a16",
            FORMATS["w4a16_zeros"].config,
            ["config_groups", "gate_proj.weight_packed has no model.layers.0.mlp.gate_proj.weight_zero_point"],
        ),
        ("int_row", FORMATS["float_row"].config, ["config_groups", "is int8, but must be float8_e4m3fn"]),
        ("nvfp4", FORMATS["modelopt_fp8"].config, ["quant_algo", "weight is uint8, but must be float8_e4m3fn"]),
        ("modelopt_fp8", FORMATS["nvfp4"].config, ["quant_algo", "weight_scale_2"]),
        ("fp8_block", FORMATS["awq"].config, []),
    ],
)
def test_mismatching_quantization_config_is_rejected_by_key(
    tmp_path: Path, name: str, changes: dict[str, Any], words: list[str]
):
    parts, _ = FORMATS[name].pack(matrix())
    if not words:
        # Another method altogether: no weight is found, and the check of names and dtypes says so.
        checkpoint = opened(tmp_path, FORMATS[name], named(parts), **changes)
        with pytest.raises(CheckpointError, match=r"has dtype F8_E4M3.*quantization_config"):
            checkpoint.dtype(NAME)
        return
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, FORMATS[name], {**named(parts), **named(parts, "model.layers.0.mlp.gate_proj")}, **changes)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: the files do not match quantization_config.")
    assert message.endswith("(and 1 similar)")
    for word in words:
        assert word in message, message


def test_invalid_groups_are_rejected_when_read(tmp_path: Path):
    parts, _ = FORMATS["gptq_order"].pack(matrix())
    parts[".g_idx"][5] = 6
    checkpoint = opened(tmp_path, FORMATS["gptq_order"], named(parts))
    checkpoint.read(NAME, ((0, ROWS), (6, COLUMNS)))
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx: .*groups outside 0 to 5$"):
        checkpoint.read(NAME, WHOLE)


def test_listed_modules_and_plain_weights_are_read_unchanged(tmp_path: Path):
    parts, meant = FORMATS["fp8_block"].pack(matrix())
    plain = {"lm_head.weight": matrix(seed=1), "model.visual.proj.weight": matrix(seed=2).bfloat16()}
    checkpoint = opened(
        tmp_path, FORMATS["fp8_block"], {**named(parts), **plain}, modules_to_not_convert=["model.visual"]
    )
    assert checkpoint.names() == ["lm_head.weight", NAME, "model.visual.proj.weight"]
    assert torch.equal(checkpoint.read("lm_head.weight", WHOLE), plain["lm_head.weight"])
    assert checkpoint.read("model.visual.proj.weight", WHOLE).dtype == torch.bfloat16
    assert torch.equal(checkpoint.read(NAME, WHOLE), meant)


@pytest.mark.parametrize("listed", ["up_proj", "model.layers.0", "model.*mlp", "model.layers.0.mlp.up_proj"])
def test_listed_module_is_not_dequantised(tmp_path: Path, listed: str):
    parts, _ = FORMATS["fp8_block"].pack(matrix())
    checkpoint = opened(tmp_path, FORMATS["fp8_block"], named(parts), modules_to_not_convert=[listed])
    assert checkpoint.names() == [NAME, NAME + "_scale_inv"]
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3"):
        checkpoint.read(NAME, WHOLE)


@pytest.mark.parametrize("listed", ["mlp.up", "layers", "model.layers.0.mlp.up_pro", "proj", "el.layers.0"])
def test_part_of_a_name_lists_no_module(tmp_path: Path, listed: str):
    parts, meant = FORMATS["fp8_block"].pack(matrix())
    checkpoint = opened(tmp_path, FORMATS["fp8_block"], named(parts), modules_to_not_convert=[listed])
    assert torch.equal(checkpoint.read(NAME, WHOLE), meant)


def test_groups_of_modules_have_own_formats(tmp_path: Path):
    """As llm-compressor writes mixed precision: names come before classes."""
    group = FORMATS["w4a16"].config["config_groups"]["group_0"]
    eight = FORMATS["w8a16_rows"].config["config_groups"]["group_0"]
    groups = {
        "group_0": {**group, "format": "pack-quantized"},
        "group_1": {**eight, "targets": [r"re:.*down_proj$"], "format": "pack-quantized"},
    }
    up, up_meant = FORMATS["w4a16"].pack(matrix())
    down, down_meant = FORMATS["w8a16_rows"].pack(matrix(seed=4))
    tensors = {**named(up), **named(down, "model.layers.0.mlp.down_proj")}
    checkpoint = opened(tmp_path, FORMATS["w4a16"], tensors, config_groups=groups, format="mixed-precision")
    assert torch.equal(checkpoint.read(NAME, WHOLE), up_meant)
    assert torch.equal(checkpoint.read("model.layers.0.mlp.down_proj.weight", WHOLE), down_meant)


def test_ignored_activation_scales_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    parts, _ = FORMATS["fp8_tensor"].pack(matrix())
    tensors = {**named(parts), "model.layers.0.self_attn.k_scale": torch.tensor(1.0)}
    with caplog.at_level("INFO"):
        assert opened(tmp_path, FORMATS["fp8_tensor"], tensors).names() == [NAME]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: ignored 2 scales of activations and caches, such as model.layers.0.mlp.up_proj.input_scale: both "
        f"are computed in the run's dtype"
    ]


def test_unused_bias_of_zeros_is_ignored(tmp_path: Path):
    parts, _ = FORMATS["gptq"].pack(matrix())
    biases = {".bias": torch.zeros(ROWS, dtype=torch.float16)}
    checkpoint = opened(tmp_path / "zeros", FORMATS["gptq"], named({**parts, **biases}))
    assert checkpoint.is_unused("model.layers.0.mlp.up_proj.bias")
    biases[".bias"][3] = 1
    checkpoint = opened(tmp_path / "one", FORMATS["gptq"], {**named({**parts, **biases}), "b.bias": torch.zeros(1)})
    assert not checkpoint.is_unused("model.layers.0.mlp.up_proj.bias")
    assert not checkpoint.is_unused("b.bias")


def test_scales_of_floating_point_dtypes_are_read(tmp_path: Path):
    parts, _ = FORMATS["fp8_block"].pack(matrix())
    powers = torch.exp2(torch.round(torch.log2(parts[".weight_scale_inv"])))
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        stored = {**parts, ".weight_scale_inv": powers.to(dtype)}
        checkpoint = opened(tmp_path / str(dtype), FORMATS["fp8_block"], named(stored))
        spread = powers.repeat_interleave(BLOCK[0], 0)[:ROWS].repeat_interleave(BLOCK[1], 1)[:, :COLUMNS]
        assert torch.equal(checkpoint.read(NAME, WHOLE), parts[".weight"].float() * spread)
    with pytest.raises(CheckpointError, match="weight_scale_inv is int32"):
        opened(tmp_path / "int", FORMATS["fp8_block"], named({**parts, ".weight_scale_inv": powers.int()}))


def test_block_scales_of_four_dimensions_are_read(tmp_path: Path):
    """ModelOpt's FP8_PB_WO."""
    parts, meant = FORMATS["fp8_block"].pack(matrix())
    rows, columns = parts[".weight_scale_inv"].shape
    stored = {".weight": parts[".weight"], ".weight_scale": parts[".weight_scale_inv"].view(rows, 1, columns, 1)}
    checkpoint = opened(tmp_path, FORMATS["fp8_block"], named(stored))
    for region in (WHOLE, ((30, 70), (17, 90))):
        assert torch.equal(checkpoint.read(NAME, region), meant[tuple(slice(*each) for each in region)])


@pytest.mark.parametrize("name", ["gptq", "nf4_nested", "bnb_int8"])
def test_matrices_of_gpt2_are_turned_round(tmp_path: Path, name: str):
    """Files of GPT-2 have them as inputs by outputs, but not when they are quantised."""
    parts, meant = FORMATS[name].pack(matrix())
    files = opened(tmp_path, FORMATS[name], named(parts)).files
    quantization = read_quantization({"quantization_config": FORMATS[name].config}, tmp_path)
    assert quantization is not None
    checkpoint = DequantisedCheckpoint.open(files, quantization, lambda name: name == NAME)
    assert checkpoint.shape(NAME) == (COLUMNS, ROWS)
    region = ((5, 80), (3, 60))
    wanted = meant.t()[5:80, 3:60]
    assert torch.equal(checkpoint.read(NAME, region), wanted)
    blocks = list(checkpoint.blocks(NAME, region, 4 * 500))
    assert len(blocks) > 1
    found = torch.empty_like(meant.t())
    for block in blocks:
        found[tuple(slice(*each) for each in block)] = checkpoint.read(NAME, block)
    assert torch.equal(found[5:80, 3:60], wanted)


def test_digests_cover_quantised_tensors(tmp_path: Path):
    parts, _ = FORMATS["gptq"].pack(matrix())
    digests = {}
    for index, name in enumerate(("a", "b", "c")):
        changed = {**parts, ".qweight": parts[".qweight"] + (index == 2)}
        save_single(tmp_path / name, named(changed))
        digests[name] = tensor_digests(tmp_path / name)
    assert digests["a"] == digests["b"] != digests["c"]


def test_formats_have_expected_group_size():
    assert COLUMNS % GROUP == 0
    assert ROWS % BLOCK[0], "a block that is cut off"
