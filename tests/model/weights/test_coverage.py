from pathlib import Path

import pytest

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import PaddingSlice, WeightSlice, empty_slice, replicated, shard
from spmd_worker.model.weights.coverage import checkpoint_problems, parameter_problems, raise_problems


def merged(name, rows, first):
    """A checkpoint tensor [rows, 4] that becomes rows of the parameter `qkv`."""
    return WeightSlice(name, (rows, 4), ((0, rows), (0, 4)), "qkv", ((first, first + rows), (0, 4)))


SLICES = [merged("q", 4, 0), merged("k", 2, 4), merged("v", 2, 6), shard("embed", (5, 4), "vocab", 0, 4, 5)]
PADDINGS = [PaddingSlice("vocab", ((1, 4), (0, 4)))]
PARAMETERS = {"qkv": (8, 4), "vocab": (4, 4)}
CHECKPOINT = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "embed": (5, 4)}


def check(slices=SLICES, paddings=PADDINGS, parameters=PARAMETERS, checkpoint=CHECKPOINT, ignorable=lambda name: False):
    expected = {piece.checkpoint_name: piece.checkpoint_shape for piece in slices}
    problems = checkpoint_problems(expected, checkpoint, ignorable=ignorable)
    raise_problems(Path("/model"), [*problems, *parameter_problems(slices, paddings, parameters)])


def test_merged_slices_and_padding_cover_their_parameters():
    check()


def test_one_tensor_may_be_read_into_two_parameters():
    check([*SLICES, replicated("q", (4, 4), "copy")], parameters={**PARAMETERS, "copy": (4, 4)})


def test_tensor_of_another_stage_needs_no_parameter():
    check([*SLICES, empty_slice("far", (9, 9))], checkpoint={**CHECKPOINT, "far": (9, 9)})


def test_stacked_experts_cover_their_parameter():
    slices = [
        WeightSlice(f"e{i}", (2, 3), ((0, 2), (0, 3)), "experts", ((i, i + 1), (0, 2), (0, 3))) for i in range(200)
    ]
    check(slices, [], {"experts": (200, 2, 3)}, {f"e{i}": (2, 3) for i in range(200)})


def test_adjacent_rectangles_do_not_overlap():
    quarters = [((r, r + 2), (c, c + 2)) for r in (0, 2) for c in (0, 2)]
    slices = [WeightSlice(f"w{i}", (2, 2), ((0, 2), (0, 2)), "w", quarter) for i, quarter in enumerate(quarters)]
    check(slices, [], {"w": (4, 4)}, {f"w{i}": (2, 2) for i in range(4)})
    moved = [*slices[:3], WeightSlice("w3", (2, 2), ((0, 2), (0, 2)), "w", ((2, 4), (1, 3)))]
    with pytest.raises(CheckpointError, match="overlap"):
        check(moved, [], {"w": (4, 4)}, {f"w{i}": (2, 2) for i in range(4)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": {"q": (4, 4), "k": (2, 4), "embed": (5, 4)}}, ["1 missing from the checkpoint", "  v"]),
        ({"checkpoint": {**CHECKPOINT, "gate": (1,)}}, ["1 in the checkpoint but not in the model", "  gate"]),
        (
            {"checkpoint": {**CHECKPOINT, "k": (2, 5)}},
            ["1 of another shape than the model's", "k: checkpoint [2, 5], model [2, 4]"],
        ),
        ({"checkpoint": {**CHECKPOINT, "k": (8,)}}, ["k: checkpoint [8], model [2, 4]"]),
        ({"paddings": []}, ["vocab [4, 4]: 12 elements are not covered"]),
        ({"slices": SLICES[1:], "checkpoint": {**CHECKPOINT}}, ["q", "qkv [8, 4]: 16 elements are not covered"]),
        ({"slices": [*SLICES, SLICES[0]]}, ["qkv", "overlap"]),
        ({"slices": [merged("q", 4, 1), *SLICES[1:]]}, ["[(1, 5), (0, 4)] and [(4, 6), (0, 4)] overlap"]),
        ({"paddings": [PaddingSlice("vocab", ((0, 4), (0, 4)))]}, ["vocab", "overlap"]),
        ({"paddings": [PaddingSlice("vocab", ((1, 5), (0, 4)))]}, ["[(1, 5), (0, 4)] lies outside of it"]),
        ({"paddings": [PaddingSlice("vocab", ((1, 4),))]}, ["[(1, 4)] lies outside of it"]),
        ({"parameters": {**PARAMETERS, "norm": (3,)}}, ["norm [3]: 3 elements are not covered"]),
        ({"parameters": {**PARAMETERS, "scale": ()}}, ["scale []: 1 elements are not covered"]),
        ({"parameters": {"qkv": (8, 4)}}, ["1 slices for a parameter that the model does not have", "  vocab"]),
    ],
)
def test_each_kind_of_mismatch_is_reported(changes, words):
    with pytest.raises(CheckpointError) as error_result:
        check(**changes)
    for word in words:
        assert word in str(error_result.value)


def test_scalar_parameter_is_covered_exactly_once():
    check([replicated("s", (), "s")], [], {"s": ()}, {"s": ()})
    with pytest.raises(CheckpointError, match="overlap"):
        check([replicated("s", (), "s"), replicated("t", (), "s")], [], {"s": ()}, {"s": (), "t": ()})


def test_shape_of_another_stages_tensor_is_checked():
    with pytest.raises(CheckpointError, match=r"far: checkpoint \[9, 8\], model \[9, 9\]"):
        check([*SLICES, empty_slice("far", (9, 9))], checkpoint={**CHECKPOINT, "far": (9, 8)})


def test_ignorable_names_are_optional():
    found = {**CHECKPOINT, "layers.0.rotary_emb.inv_freq": (8,)}
    check(checkpoint=found, ignorable=lambda name: name.endswith("rotary_emb.inv_freq"))
    with pytest.raises(CheckpointError, match="inv_freq"):
        check(checkpoint=found)


def test_one_error_lists_all_mismatches():
    with pytest.raises(CheckpointError) as error_result:
        check(paddings=[], checkpoint={"q": (3, 3), "k": (2, 4), "x": (1,), "embed": (5, 4)})
    assert str(error_result.value) == (
        "/model: checkpoint and model do not match\n"
        "1 missing from the checkpoint:\n  v\n"
        "1 in the checkpoint but not in the model:\n  x\n"
        "1 of another shape than the model's:\n  q: checkpoint [3, 3], model [4, 4]\n"
        "1 parameters not filled exactly once:\n  vocab [4, 4]: 12 elements are not covered"
    )


def test_long_lists_end_with_number_omitted():
    with pytest.raises(CheckpointError) as error_result:
        check(checkpoint={**CHECKPOINT, **{f"x{i:02d}": (1,) for i in range(33)}})
    message = str(error_result.value)
    assert "33 in the checkpoint but not in the model" in message
    assert "  x19\n  and 13 more" in message
    assert "x20" not in message
