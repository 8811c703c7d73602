"""Every family: tokens and log-probabilities have the same bits on 1, 2, 4 and 8 ranks."""

from pathlib import Path

import pytest
from leaf_models import CASES, leaf_folder
from leaf_runs import on_ranks

from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.leaves import num_leaves

DTYPES = ("float32", "bfloat16")


@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_family_has_same_bits_on_ranks(name: str, tmp_path: Path):
    folder = leaf_folder(name)
    count = num_leaves(read_model_files(folder).model_config, 8)
    runs = {dtype: {"dtype": dtype} for dtype in DTYPES}
    whole = on_ranks(folder, tmp_path / "1", 1, runs)
    found = []
    for size in (2, 4, 8):
        if size > count:
            continue
        sized = {dtype: {**each, "tensor_parallel_size": size} for dtype, each in runs.items()}
        parts = on_ranks(folder, tmp_path / str(size), size, sized)
        found += [f"{size} {dtype}: {whole[dtype].difference(parts[dtype])}" for dtype in runs if whole[dtype] != parts[dtype]]
    print("LEAVES", name, count, sum(each.logprobs.size for each in whole.values()))
    assert not found, found
