"""Similarity of two vectors, and of a query's and a document's vectors (MaxSim, https://arxiv.org/abs/2004.12832).

In double precision and in one order, so that a score depends on the pair alone, on any machine.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.model_config.pooling import PoolingConfig

_COLUMNS: Final = 512
"""Vectors of a document whose products are in the processor's cache together."""


def compared(config: PoolingConfig, first: Any, second: Any) -> float:
    """Score of a pair by what the model gives for its two texts: a vector, or a vector for each token."""
    if config.late is None:
        return similarity(config.similarity, first, second)
    return max_similarity(np.asarray(first), np.asarray(second), averages=config.late.averages)


def max_similarity(query: NDArray[np.float32], document: NDArray[np.float32], *, averages: bool = False) -> float:
    """Sum over the vectors of `query` [Q, D] of the highest product with a vector of `document` [T, D]; if it
    `averages`, divided by Q. 0 if either has none.
    """
    if not len(query) or not len(document):
        return 0.0
    # [D, Q, 1]: a product's terms are added one after another, which no library reorders.
    columns, highest = query.T.astype(np.float64)[:, :, None], np.full(len(query), -np.inf)
    for start in range(0, len(document), _COLUMNS):
        rows = document[start : start + _COLUMNS].T.astype(np.float64)
        products = np.zeros((len(query), rows.shape[1]))
        for column, row in zip(columns, rows, strict=True):
            products += column * row
        highest = np.maximum(highest, products.max(1))
    total = math.fsum(highest.tolist())
    return total / len(query) if averages else total


def similarity(name: str, x: Sequence[float], y: Sequence[float]) -> float:
    """Similarity of two vectors, by a `PoolingConfig.similarity`: larger is more similar, so distances are negated; the
    cosine is 0 if one is zero. Double precision, from exact sums: the same everywhere.
    """
    if name == "cosine":
        size = math.sqrt(_dot(x, x) * _dot(y, y))
        return _dot(x, y) / size if size else 0.0
    if name == "dot":
        return _dot(x, y)
    differences = [a - b for a, b in zip(x, y, strict=True)]
    if name == "manhattan":
        return -math.fsum(map(abs, differences))
    return -math.sqrt(_dot(differences, differences))


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(map(float.__mul__, x, y))
