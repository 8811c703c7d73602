"""Rows of input embeddings that requests compute with, held in host memory by the content's name.

Only the rank that adds them to its embeddings holds any: the first tensor rank of the first stage, to which the front
end's rank gives them before the request is admitted. A chunk's rows are copied to the device in the step that computes
them, so neither preemption nor a prefix hit needs a word of the scheduler: what is computed is looked up.

E: tokens of a step whose rows are given.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_worker.model.layers.embedding import TokenRows
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.input_rows import EMBEDDINGS
from spmd_worker.replica.sequence.request import RequestId


class RowStore:
    """Rows of `width` numbers of the model's dtype. `is_holder`: this rank holds them; others only know their places.

    Any thread may call `hold` while another one steps.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, *, is_holder: bool) -> None:
        self._width, self._dtype, self._device, self._is_holder = width, dtype, device, is_holder
        self._rows: dict[bytes, Tensor] = {}
        self._of_requests: dict[RequestId, tuple[bytes, Tensor]] = {}

    def hold(self, request_id: int, content: bytes, data: bytes) -> None:
        """Hold a request's rows, little-endian numbers of the model's dtype, until `forget`."""
        if self._is_holder:
            self._of_requests[RequestId(request_id)] = (content, self._tensor(data))

    def keep(self, content: bytes, rows: Tensor) -> None:
        """Hold rows that several requests name, until `drop`."""
        if self._is_holder:
            self._rows[content] = rows

    def drop(self, content: bytes) -> None:
        self._rows.pop(content, None)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Release the rows of finished requests."""
        for request_id in request_ids:
            self._of_requests.pop(request_id, None)

    @property
    def num_bytes(self) -> int:
        """Host memory of all rows held."""
        return sum(each.nbytes for each in (*self._rows.values(), *[rows for _, rows in self._of_requests.values()]))

    def of_step(self, scheduled: Sequence[ScheduledSequence]) -> TokenRows | None:
        """The rows of a step, and their places among its tokens; None if it computes none."""
        places: list[range] = []
        parts: list[Tensor] = []
        start = 0
        for sequence, count, _ in scheduled:
            first = sequence.num_computed_tokens
            for each in sequence.request.rows:
                begin, end = max(each.start, first), min(each.end, first + count)
                if begin < end and each.kind == EMBEDDINGS:
                    places.append(range(start + begin - first, start + end - first))
                    if self._is_holder:
                        rows = self._held(sequence.request.request_id, each.content)
                        parts.append(rows[begin - each.start : end - each.start])
            start += count
        if not places:
            return None
        indices = to_device(torch.from_numpy(np.concatenate(places).astype(np.int64)), self._device)
        return TokenRows(indices, to_device(torch.cat(parts), self._device) if self._is_holder else None)

    def _held(self, request_id: RequestId, content: bytes) -> Tensor:
        if content in self._rows:
            return self._rows[content]
        name, rows = self._of_requests.get(request_id, (b"", torch.empty(0)))
        if name != content:
            raise RuntimeError(
                f"request {request_id}: this rank does not hold the rows {content[:16].hex()} that it computes with: "
                f"they are given to the engine of the rank that admits the request"
            )
        return rows

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=self._dtype).view(-1, self._width)
