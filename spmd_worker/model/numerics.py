"""Region of the layers: the order in which they call kernels, and what they compute with torch's own operators."""

from pathlib import Path
from typing import Final

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ops.kernels.torch_version import torch_version

_PARTS: Final = (
    *("decoder.py", "decoder_layer.py", "layer_with_inputs.py", "scaled_layer.py", "shortcut_layer.py"),
    *("streams_layer.py", "predicted_streams_layer.py", "pooler.py", "layers", "towers"),
)


def layers_region() -> Region:
    """The region of all families: each is data that layers read."""
    folder = Path(__file__).parent
    sources = source_version(*[str(folder / each) for each in _PARTS])
    return Region("plain torch beside kernels", f"{torch_version()}, {sources}")
