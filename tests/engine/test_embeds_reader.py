"""`EmbedsReader`: dtypes, rounding and names of rows of embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from open_links import open_links

from spmd_worker.engine.calls.prompt_tensors import rows_of_tensor
from spmd_worker.engine.embeds_reader import EmbedsReader
from spmd_worker.engine.request_error import RequestError


def test_rows_are_rounded_as_torch_does():
    numbers = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-32, 32)
    numbers[0, :2] = torch.tensor([-0.0, 1.00390625])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for wanted in ("float32", "bfloat16", "float16"):
            is_half = torch.float16 in (dtype, getattr(torch, wanted))
            given = (numbers.clamp(-6e4, 6e4) if is_half else numbers).to(dtype)
            rows = rows_of_tensor(given, EmbedsReader(64, wanted, 96))
            expected = given.to(getattr(torch, wanted)).view(torch.uint8).numpy()
            assert np.frombuffer(rows.data, np.uint8).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize(("dtype", "number"), [("float16", 7e4), ("bfloat16", 3.4e38), ("float32", torch.inf)])
def test_numbers_that_overflow_the_dtype_are_rejected(dtype: str, number: float):
    rows = torch.zeros(3, 8)
    rows[2, 5] = number
    with pytest.raises(RequestError, match=rf"\[2\]\[5\] is not finite in {dtype}"):
        rows_of_tensor(rows, EmbedsReader(8, dtype, 9))


def test_names_are_those_of_each_row():
    rows = torch.arange(32, dtype=torch.float32).view(4, 8)
    reader = EmbedsReader(8, "float32", 9)
    whole, part = rows_of_tensor(rows, reader), rows_of_tensor(rows[1:3].requires_grad_(), reader)
    assert part.content == whole.content[16:48]
    assert len(dict.fromkeys(whole.content[start : start + 16] for start in range(0, 64, 16))) == 4
    # The same bytes as other numbers.
    halves = rows_of_tensor(rows.view(torch.bfloat16), EmbedsReader(16, "bfloat16", 9))
    assert halves.data == whole.data
    assert halves.content[:16] != whole.content[:16]


def test_arrays_of_any_layout_are_read():
    numbers = np.arange(24, dtype=np.float32).reshape(3, 8) - 9
    reader = EmbedsReader(8, "float32", 9)
    expected = rows_of_tensor(torch.from_numpy(numbers), reader)
    read_only = numbers.copy()
    read_only.flags.writeable = False
    for given in (numbers[::-1].copy()[::-1], numbers.astype(">f4"), np.asfortranarray(numbers), read_only):
        assert rows_of_tensor(given, reader) == expected
    assert rows_of_tensor(torch._neg_view(-torch.from_numpy(numbers)), reader) == expected
    for unread in (numbers.astype(object), numbers.astype(str), torch.ones(3, 8, device="meta")):
        with pytest.raises(RequestError, match=r"prompt_embeds is (object|str|on the device meta)"):
            rows_of_tensor(unread, reader)


def test_rejected_folder_leaves_no_file_open(tmp_path: Path):
    reader = EmbedsReader(8, "float32", 9, tmp_path.parent)
    for _ in range(3):
        with pytest.raises(RequestError, match="directory"):
            reader.of_value({"path": tmp_path.name})
    # By name: files that earlier tests have left may be closed meanwhile.
    assert str(tmp_path) not in open_links()
