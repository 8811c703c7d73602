import pytest

from spmd_worker.model.layers.weight_slice import (
    WeightSlice,
    empty_slice,
    extents,
    full_rectangle,
    replicated,
    shard,
    volume,
)


def test_replicated_slice_maps_every_element_to_itself():
    assert replicated("norm.weight", (4, 3), "n") == WeightSlice(
        "norm.weight", (4, 3), ((0, 4), (0, 3)), "n", ((0, 4), (0, 3))
    )


def test_shard_fills_parameter_with_its_share():
    piece = shard("down.weight", (4, 6), "d", dim=1, start=2, stop=4)
    assert piece.source == ((0, 4), (2, 4))
    assert piece.destination == ((0, 4), (0, 2))


def test_empty_slice_has_no_parameter():
    assert empty_slice("layers.9.weight", (4, 6)).is_empty
    assert not replicated("scale", (), "s").is_empty


def test_tensor_without_dimensions_has_one_element():
    assert (extents(()), volume(()), full_rectangle(())) == ((), 1, ())


def test_matrix_may_fill_part_of_a_stack():
    WeightSlice("experts.3.weight", (4, 6), ((0, 4), (0, 6)), "experts", ((3, 4), (0, 4), (0, 6)))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (((0, 5), (0, 6)), ((0, 5), (0, 6))),  # beyond the checkpoint tensor
        (((0, 4), (0, 6)), ((0, 4), (0, 5))),  # other extents
        (((0, 4),), ((0, 4),)),  # other dimensions than the checkpoint tensor
        (((3, 2), (0, 6)), ((3, 2), (0, 6))),  # backwards
        (((0, 4), (0, 6)), ((0, 2), (0, 4), (0, 6))),  # a leading dimension that is not 1
        (((0, 4), (0, 1)), ((0, 4),)),  # fewer dimensions
    ],
)
def test_inconsistent_slice_is_rejected(source, destination):
    with pytest.raises(AssertionError):
        WeightSlice("w", (4, 6), source, "p", destination)
