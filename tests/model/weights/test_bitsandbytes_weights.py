"""Weights of bitsandbytes: blocks across rows, several nested scales, bytes of other dtypes, and damaged parts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import FORMATS, Format, bitsandbytes_4
from test_dequantised_checkpoint import NAME, matrix, named, opened

from spmd_worker.base.errors import CheckpointError

NESTED = FORMATS["nf4_nested"]
STATE = ".weight.quant_state.bitsandbytes__nf4"
ROWS, COLUMNS = 300, 96
"""450 blocks of 64, of which 256 have the first nested scale; every second row begins inside a block."""
WHOLE = ((0, ROWS), (0, COLUMNS))


@pytest.fixture(scope="module")
def packed() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return NESTED.pack(matrix(ROWS, COLUMNS))


@pytest.mark.parametrize(
    ("rows", "columns", "size"), [(ROWS, COLUMNS, 64), (150, 128, 32), (301, 65, 64), (7, 33, 128), (40, 130, 32)]
)
def test_blocks_run_along_the_whole_weight(tmp_path: Path, rows: int, columns: int, size: int):
    """Rows may begin inside bytes, and the last block may be cut off."""
    format_ = Format(
        NESTED.config,
        lambda weight: bitsandbytes_4(weight, kind="nf4", size=size, is_nested=True, storage=torch.uint8),
    )
    parts, meant = format_.pack(matrix(rows, columns))
    checkpoint = opened(tmp_path, format_, named(parts))
    assert (checkpoint.names(), checkpoint.shape(NAME)) == ([NAME], (rows, columns))
    middle = rows // 2, columns // 2
    for region in (((0, rows), (0, columns)), ((0, rows), (middle[1], columns)), ((3, middle[0]), (5, middle[1] + 2))):
        assert torch.equal(checkpoint.read(NAME, region), meant[tuple(slice(*each) for each in region)])


def _swapped(packed: torch.Tensor) -> torch.Tensor:
    return packed >> 4 | packed << 4


def _one_more(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[300 % len(tensor)] += 1
    return changed


def _state(change: Callable[[dict[str, Any]], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(stored: torch.Tensor) -> torch.Tensor:
        state = json.loads(bytes(stored.tolist()))
        change(state)
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return changed


@pytest.mark.control("Quantised files are dequantised exactly")
@pytest.mark.parametrize(
    ("ending", "change", "num_changed"),
    [
        (".weight", _swapped, None),
        (".weight.absmax", _one_more, 64),
        (".weight.nested_absmax", _one_more, 256 * 64),
        (STATE, _state(lambda state: state.update(nested_offset=state["nested_offset"] * 1.01)), None),
    ],
)
def test_comparison_detects_one_changed_part(
    tmp_path: Path,
    packed: tuple[dict[str, torch.Tensor], torch.Tensor],
    ending: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    num_changed: int | None,
):
    parts, meant = packed
    checkpoint = opened(tmp_path, NESTED, named({**parts, ending: change(parts[ending])}))
    differing = int((checkpoint.read(NAME, WHOLE) != meant).sum())
    # Numbers that mean 0 stay.
    assert 0 < differing <= (num_changed or meant.numel())
    assert differing > (num_changed or meant.numel()) * 0.7


def _set(**values: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return _state(lambda state: state.update(values))


@pytest.mark.parametrize(
    ("ending", "change", "words"),
    [
        (STATE, _set(shape=[ROWS, COLUMNS + 1]), ["weight has 14400 bytes", "says [300, 97]"]),
        (STATE, _set(shape=[10**30, 10**30]), ["weight has 14400 bytes"]),
        (STATE, _set(shape=[ROWS * COLUMNS]), ["shape=[28800], but it must be the two sizes of a matrix"]),
        (STATE, _set(shape=[-ROWS, -COLUMNS]), ["shape=[-300, -96]"]),
        (STATE, _set(blocksize=0), ["blocksize=0, but it must be one of 32, 64"]),
        (STATE, _set(blocksize=128), ["absmax has the shape [450], but the other tensors imply [225]"]),
        (STATE, _set(nested_blocksize=True), ["nested_blocksize=True, but it must be one of"]),
        (STATE, _set(nested_offset=None), ["nested_offset=None, but it must be a finite number"]),
        (STATE, _set(nested_dtype="float16"), ["nested_dtype='float16', but it must be float32"]),
        (STATE, lambda stored: stored[:-1], [f"{STATE} is not JSON"]),
        (STATE, lambda stored: stored.repeat(40), ["must be at most 4096 bytes of JSON"]),
        (STATE, lambda stored: stored.float(), [f"{STATE} is float32, but must be uint8"]),
        (".weight.quant_map", lambda table: table[:15], ["quant_map has the shape [15]", "imply [16]"]),
        (".weight.quant_map", lambda table: table * torch.inf, ["quant_map has values that are not finite"]),
        (".weight.nested_quant_map", lambda table: table / 0, ["nested_quant_map has values that are not finite"]),
        (".weight.nested_absmax", lambda scales: scales[:1], ["nested_absmax has the shape [1]", "imply [2]"]),
        (".weight.absmax", lambda scales: scales.half(), ["absmax is float16, but must be float32 or uint8"]),
    ],
)
def test_damaged_parts_are_rejected_when_opened(
    tmp_path: Path,
    packed: tuple[dict[str, torch.Tensor], torch.Tensor],
    ending: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: list[str],
):
    parts, _ = packed
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, NESTED, named({**parts, ending: change(parts[ending])}))
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path}: the files do not match quantization_config.load_in_4bit of config.json, NF4"
    )
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_weights_say_themselves_that_they_are_quantised(tmp_path: Path):
    """Releases of transformers read llm_int8_skip_modules in several ways."""
    parts, meant = FORMATS["fp4"].pack(matrix())
    assert parts[".weight"].dtype == torch.bfloat16
    plain = {"model.layers.0.mlp.gate_proj.weight": matrix(seed=1).bfloat16()}
    checkpoint = opened(tmp_path, FORMATS["fp4"], {**named(parts), **plain}, llm_int8_skip_modules=["mlp", "up_proj"])
    assert torch.equal(checkpoint.read(NAME, ((0, 72), (0, 96))), meant)
    assert checkpoint.dtype("model.layers.0.mlp.gate_proj.weight") == torch.bfloat16


def test_int8_numbers_in_other_orders_are_rejected(tmp_path: Path):
    parts, meant = FORMATS["bnb_int8"].pack(matrix())
    rest = {ending: part for ending, part in parts.items() if ending != ".weight_format"}
    assert torch.equal(opened(tmp_path / "0", FORMATS["bnb_int8"], named(rest)).read(NAME, ((0, 72), (0, 96))), meant)
    parts[".weight_format"] += 2
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_format is 2, but must be 0, numbers by rows"):
        opened(tmp_path / "2", FORMATS["bnb_int8"], named(parts))
