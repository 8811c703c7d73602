"""Dense layers after a pooled vector, as sentence-transformers writes them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.weights.dense_files import read_denses
from spmd_worker.model_config.pooling import DenseConfig


def test_nonfinite_dense_weights_are_rejected_unless_allowed(tmp_path: Path):
    weight = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    (tmp_path / "2_Dense").mkdir()
    save_file({"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors")
    dense = DenseConfig("2_Dense", num_inputs=2, num_outputs=2, has_bias=False, activation="none")
    words = r"2_Dense/model.safetensors: tensor 'linear.weight' has nan at \[0, 1\].*allow_nonfinite=true"
    with pytest.raises(CheckpointError, match=words):
        read_denses(tmp_path, [dense])
    (read,) = read_denses(tmp_path, [dense], allows_nonfinite=True)
    assert [*read] == ["linear.weight"]
    assert torch.equal(read["linear.weight"].nan_to_num(7.0), weight.nan_to_num(7.0))
