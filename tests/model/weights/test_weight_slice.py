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


def test_a_whole_slice_maps_every_element_to_the_same_place():
    assert replicated("norm.weight", (4, 3), "n") == WeightSlice(
        "norm.weight", (4, 3), ((0, 4), (0, 3)), "n", ((0, 4), (0, 3))
    )


def test_a_shard_takes_its_share_of_one_dimension_and_fills_a_parameter_of_that_size():
    piece = shard("down.weight", (4, 6), "d", dim=1, start=2, stop=4)
    assert piece.source == ((0, 4), (2, 4))
    assert piece.destination == ((0, 4), (0, 2))


def test_a_tensor_of_another_stage_is_an_empty_slice_without_a_parameter():
    assert empty_slice("layers.9.weight", (4, 6)).is_empty
    assert not replicated("scale", (), "s").is_empty


def test_the_one_element_of_a_tensor_without_dimensions_counts():
    assert (extents(()), volume(()), full_rectangle(())) == ((), 1, ())


def test_one_matrix_may_land_in_a_stack_of_matrices():
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
def test_a_slice_that_contradicts_itself_cannot_be_made(source, destination):
    with pytest.raises(AssertionError):
        WeightSlice("w", (4, 6), source, "p", destination)
