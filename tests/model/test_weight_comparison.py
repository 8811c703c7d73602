"""Sums of a tensor's elements, which slices divide, and digests of them that ranks agree on."""

import pytest
import torch

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.weights.weight_comparison import Sums, combined_digests, digest_of_all, element_sums

SHAPE = (12, 7)
DTYPES = (torch.float32, torch.bfloat16)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype)


def rank_of(values: torch.Tensor, *rows: tuple[int, int]) -> Sums:
    """A rank that holds ranges of the rows."""
    dtype = str(values.dtype).removeprefix("torch.")
    regions = [(each, (0, SHAPE[1])) for each in rows]
    return {"w": [(region, dtype, element_sums(values[slice(*region[0])], region, SHAPE)) for region in regions]}


@pytest.mark.guarantee("Digests of weights are the same on any layout")
@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_does_not_depend_on_slices(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values, shapes = numbers(dtype), {"w": SHAPE}
    layouts = [[[(0, 12)]], [[(0, 6)], [(6, 12)]], [[(0, 3)], [(3, 6)], [(6, 9), (9, 12)]], [[(0, 12)], [(0, 12)]]]
    found = [combined_digests(shapes, [rank_of(values, *rows) for rows in layout]) for layout in layouts]
    monkeypatch.setattr("spmd_worker.model.weights.weight_comparison._BLOCK_ELEMENTS", 10)
    found.append(combined_digests(shapes, [rank_of(values, (0, 12))]))
    assert len({digest_of_all(each) for each in found}) == 1


@pytest.mark.control("Digests of weights are the same on any layout")
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_elements_have_another_digest(dtype: torch.dtype) -> None:
    """One bit, two elements in each other's place, and the same numbers in another shape."""
    values = numbers(dtype)
    bit, swapped = values.clone(), values.clone()
    bit.view(torch.int16)[5, 3] ^= 1
    swapped[2, 1], swapped[8, 6] = values[8, 6], values[2, 1]
    assert swapped[2, 1] != values[2, 1]
    found = [element_sums(each, ((0, 12), (0, 7)), SHAPE) for each in (values, bit, swapped)]
    found.append(element_sums(values.reshape(7, 12), ((0, 7), (0, 12)), (7, 12)))
    assert len({first for first, _ in found[:3]}) == len({second for _, second in found[:3]}) == 3
    digests = [combined_digests({"w": SHAPE}, [rank_of(each, (0, 12))])["w"] for each in (values, bit, swapped)]
    digests.append(combined_digests({"w": SHAPE}, [rank_of(values.double(), (0, 12))])["w"])
    assert len(set(digests)) == 4


def test_ranks_that_hold_different_elements_are_named() -> None:
    values = numbers(torch.float32)
    other = values.clone()
    other[7, 2] += 1
    with pytest.raises(CheckpointError, match=r"^w \(rows 6 to 12 of 12\) is not the same on ranks 0 and 2"):
        combined_digests({"w": SHAPE}, [rank_of(values, (6, 12)), rank_of(values, (0, 6)), rank_of(other, (6, 12))])
    with pytest.raises(CheckpointError, match=r"^w: the "):
        combined_digests({"w": SHAPE}, [rank_of(values, (0, 6))])
