"""Rows of images, or of an encoder's inputs, on a rank of the first stage, and on the leader's what they are made of:
pixels or features of audio. Texts that an encoder reads are ids of the request.

The plan decides what is made, by which rank, and what is dropped (`replica/scheduler/media_rows.py`): every rank of the
tensor group keeps the same rows. A tower sees one image or input a call, on one rank, so rows do not depend on the
layout.

E: tokens of a step that take rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_worker.media.prepared import EncoderIds
from spmd_worker.media.sent_audio import SentMedia, content_from
from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.model.towers.tower import MakeRows, TowerInput, TowerRows, TwoTowers
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.encoder_input import is_text
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.step import StepPlan

_MANY_PATCHES: Final = 1024
"""Patches of one rank in a step, within which no rank waits for minutes: 8,160 took 15 on a busy core."""


def _nothing() -> None:
    pass


class _Encode(NamedTuple):
    plan: EncodeMedia
    request: Request

    @property
    def item(self) -> MediaItem:
        return self.request.media[self.plan.index]


class MediaStore:
    """`make_rows` is the tower, None where there is none: then it must be set before the first plan with images. Rows
    are [1 + num_added, rows of the image, hidden_size] of `dtype`; audio adds zeros. `kind` is the medium or media,
    in errors.

    Any thread may call `hold` while another one steps.
    """

    def __init__(
        self,
        make_rows: MakeRows | None,
        group: GroupHandle,
        hidden_size: int,
        num_added: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str = "image",
    ) -> None:
        self.make_rows, self._kind = make_rows, kind
        self._group, self._dtype, self._device = group, dtype, device
        self._hidden_size, self._num_added = hidden_size, num_added
        self._rows: dict[bytes, Tensor] = {}
        self._held: dict[RequestId, dict[int, SentMedia]] = {}
        self.on_layer: Callable[[], None] = _nothing
        """Called behind each layer of a tower, of this rank's or of another's, in steps whose images take long."""
        self._num_layers = 0
        """Layers since the begin of a plan's images."""
        self.encode_s = 0.0
        """Seconds in which this rank has made rows, or waited for those of other ranks."""

    def hold(self, request_id: int, index: int, media: SentMedia) -> None:
        """Hold image or audio `index` of a request, until `forget`; only tensor rank 0 has use for it."""
        if self._group.rank == 0:
            self._held.setdefault(RequestId(request_id), {})[index] = media

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Release what is held of finished requests."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def clear(self) -> None:
        """Release all rows before the plan that drops them, which comes before any that reads them."""
        self._rows.clear()

    @property
    def names(self) -> list[bytes]:
        """Names of the images whose rows are here."""
        return list(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(each.nbytes for each in self._rows.values())

    @property
    def num_held_bytes(self) -> int:
        """Host memory of all pixels and features held."""
        return sum(len(each.data) for media in self._held.values() for each in media.values())

    @torch.inference_mode()
    def apply(self, plan: StepPlan, request_of: Callable[[RequestId], Request]) -> None:
        """Drop and make rows as the plan says. Every rank of the first stage calls this, before its forward pass.
        `request_of` are the requests of the worker's mirror.
        """
        for media_id in plan.drop_rows:
            self._rows.pop(media_id, None)
        if not plan.encode:
            return
        started = perf_counter()
        encodes = [_Encode(each, request_of(RequestId(each.request_id))) for each in plan.encode]
        # All contents first: then every owner makes its rows while the others make theirs.
        contents = [self._content_at_owner(each) for each in encodes]
        made = self._all_made(encodes, contents)
        for each, rows in zip(encodes, made, strict=True):
            self._rows[each.item.media_id] = self._group.broadcast(rows, each.plan.owner)
        self.encode_s += perf_counter() - started

    def _all_made(self, encodes: Sequence[_Encode], contents: Sequence[TowerInput | None]) -> list[Tensor]:
        """The rows that this rank makes. Where images take long the ranks meet behind each layer: those that wait for
        rows hear of the others' progress, so a layer, and not an image, has the time that ranks wait for each other.
        """
        trunks, num_images = _trunks(self.make_rows), Counter([each.plan.owner for each in encodes])
        if not trunks or not self._takes_long(encodes):
            return [self._made(*each) for each in zip(encodes, contents, strict=True)]
        self._num_layers = 0
        for trunk in trunks:
            trunk.on_layer = self._end_layer
        try:
            made = [self._made(*each) for each in zip(encodes, contents, strict=True)]
        finally:
            # Not a cycle: a model without references is freed at once.
            for trunk in trunks:
                trunk.on_layer = _nothing
        # Ranks need not know which tower an owner runs.
        while self._num_layers < max(num_images.values()) * max(len(trunk.layers) for trunk in trunks):
            self._end_layer()
        return made

    def _takes_long(self, encodes: Sequence[_Encode]) -> bool:
        """Whether ranks may wait for rows for minutes. Layers are only queued on a GPU, where no image takes that."""
        if self._group.size == 1 or self._device.type != "cpu":
            return False
        num_patches: Counter[int] = Counter()
        for each in encodes:
            num_patches[each.plan.owner] += each.item.num_patches
        return max(num_patches.values()) > _MANY_PATCHES

    def _end_layer(self) -> None:
        self._num_layers += 1
        self._group.all_gather(torch.zeros(1))
        self.on_layer()

    def of_step(self, scheduled: Sequence[ScheduledSequence]) -> StepMedia | None:
        """The rows of a step, and their places among its tokens; None if it computes no image tokens."""
        return self._rows_of(scheduled, 0)

    def behind_step(self, scheduled: Sequence[ScheduledSequence]) -> StepMedia | None:
        """The rows of the tokens that follow those of a step in their sequences, in the places of the latter. Rows that
        are not made yet are left out: those of an image that begins behind the step, of whose first row a head then has
        the placeholder. That costs acceptance at one position, and no answer. To make them a step earlier, plans of
        every replica, their step log and its replay would have to know which runs have such a head.
        """
        return self._rows_of(scheduled, 1)

    def _rows_of(self, scheduled: Sequence[ScheduledSequence], distance: int) -> StepMedia | None:
        if not self._rows:
            return None
        places: list[range] = []
        parts: list[Tensor] = []
        start = 0
        for sequence, count, _ in scheduled:
            first, media = sequence.num_computed_tokens + distance, sequence.request.media
            for item in media if media and first < media[-1].end else ():
                for token, row, num_rows in item.rows_between(first, first + count):
                    rows = self._rows.get(item.media_id) if distance else self._rows[item.media_id]
                    if rows is not None:
                        places.append(range(start + token - first, start + token - first + num_rows))
                        parts.append(rows[:, row : row + num_rows])
            start += count
        if not places:
            return None
        indices = to_device(torch.from_numpy(np.concatenate(places).astype(np.int64)), self._device)
        rows, *added = torch.cat(parts, dim=1).unbind()
        return StepMedia(indices, rows, tuple(added))

    def _content_at_owner(self, encode: _Encode) -> TowerInput | None:
        """The content that rows of an image or an input are made of, on the rank that makes them, sent there by rank 0.
        Every rank knows the text that an encoder reads.
        """
        owner, rank = encode.plan.owner, self._group.rank
        given = encode.request.encoder_input
        if given is not None and is_text(given):
            return EncoderIds(given.token_ids) if rank == owner else None
        held = self._held_of(encode) if rank == 0 else None
        if owner == 0:
            return None if held is None else held.content
        counts = [0, 0] if held is None else [len(held.sizes), len(held.data)]
        num_sizes, num_bytes = self._sent(torch.tensor(counts)).tolist()
        sizes = self._sent(torch.tensor([0] * num_sizes if held is None else held.sizes)).tolist()
        data = bytearray(num_bytes) if held is None else bytearray(held.data)
        content = self._sent(torch.frombuffer(data, dtype=torch.uint8))
        if rank != owner:
            return None
        return content_from(sizes, content.numpy().tobytes())

    def _held_of(self, encode: _Encode) -> SentMedia:
        number, index, media_id = encode.plan.request_id, encode.plan.index, encode.item.media_id
        held = self._held.get(RequestId(number), {}).get(index)
        if held is None or held.media_id != media_id:
            raise RuntimeError(
                f"request {number}: this rank does not hold the content of {self._kind} {index} ({media_id.hex()}): it "
                f"is given to the engine of the rank that admits the request"
            )
        return held

    def _sent(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor of the host, on every rank."""
        return self._group.broadcast(to_device(tensor, self._device)).cpu()

    def _made(self, encode: _Encode, content: TowerInput | None) -> Tensor:
        """The rows of an image or input on the rank that makes them, memory for them on others."""
        shape = (1 + self._num_added, encode.item.num_rows, self._hidden_size)
        if encode.plan.owner != self._group.rank:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        if self.make_rows is None or content is None:
            raise RuntimeError("this model has no tower, so it makes no rows of images or inputs: load it with one")
        made = self._with_added(self.make_rows(content))
        rows = torch.stack([made.rows, *made.added]).to(self._device, self._dtype)
        if getattr(self.make_rows, "has_rows_behind", False):
            rows = rows[:, : encode.item.num_rows].contiguous()
        if rows.shape != shape:
            raise RuntimeError(
                f"the tower made rows of shape {tuple(rows.shape)} of {encode.item.media_id.hex()}, and the "
                f"prompt has tokens for {shape}"
            )
        return rows

    def _with_added(self, made: TowerRows) -> TowerRows:
        """The rows, of which a recording beside images adds none to later layers."""
        if made.added or not isinstance(self.make_rows, TwoTowers):
            return made
        return TowerRows(made.rows, (torch.zeros_like(made.rows),) * self._num_added)


def _trunks(make_rows: MakeRows | None) -> list[Any]:
    """The layers of each tower that has some."""
    towers = (make_rows.images, make_rows.audio) if isinstance(make_rows, TwoTowers) else (make_rows,)
    return [trunk for each in towers if (trunk := getattr(each, "trunk", None)) is not None]
