"""The model as a tree that people read: one line a module, equal layers folded."""

from torch import nn

from spmd_worker.worker.inspection import describe_model


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(2, width, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList([Layer(3), Layer(3), Layer(3), Layer(4), Layer(3)])
        self.norm = nn.LayerNorm(2)


def test_equal_layers_in_a_row_share_their_lines():
    assert describe_model(Model()).splitlines() == [
        "Model",
        "  embed: Embedding weight [5, 2] float32",
        "  layers: ModuleList",
        "    0-2: Layer",
        "      up: Linear weight [3, 2] float32",
        "    3: Layer",
        "      up: Linear weight [4, 2] float32",
        "    4: Layer",
        "      up: Linear weight [3, 2] float32",
        "  norm: LayerNorm weight [2] float32 bias [2] float32",
    ]
