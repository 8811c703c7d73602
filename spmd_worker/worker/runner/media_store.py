"""Rows of images on a rank of the first stage, and on the leader's the pixels that they are made from.

The plan decides what is made, by which rank, and what is dropped (`replica/scheduler/media_rows.py`): every rank of the
tensor group keeps the same rows. A tower sees one image a call, on one rank, so rows do not depend on the layout.

E: tokens of a step that take rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_worker.media.prepared import NUM_CHANNELS, ImagePixels, pixels_from
from spmd_worker.media.sent_image import SentImage
from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.model.towers.tower import MakeRows
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.step import StepPlan

_NUM_SIZES: Final = 5
"""Integers that a broadcast of pixels begins with: the number of crops, then grid and size."""


def _nothing() -> None:
    pass


class _Encode(NamedTuple):
    plan: EncodeMedia
    item: MediaItem


class MediaStore:
    """`make_rows` is the tower, None where there is none: then it must be set before the first plan with images. Rows
    are [1 + num_added, rows of the image, hidden_size] of `dtype`.

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
    ) -> None:
        self.make_rows = make_rows
        self._group, self._dtype, self._device = group, dtype, device
        self._hidden_size, self._num_added = hidden_size, num_added
        self._rows: dict[bytes, Tensor] = {}
        self._pixels: dict[RequestId, dict[int, SentImage]] = {}
        self.on_layer: Callable[[], None] = _nothing
        """Called behind each layer of a tower, of this rank's or of another's."""
        self._num_layers = 0
        """Layers since the begin of a plan's images."""
        self.encode_s = 0.0
        """Seconds in which this rank has made rows, or waited for those of other ranks."""

    def hold(self, request_id: int, index: int, image: SentImage) -> None:
        """Hold the pixels of image `index` of a request, until `forget`; only tensor rank 0 has use for them."""
        if self._group.rank == 0:
            self._pixels.setdefault(RequestId(request_id), {})[index] = image

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Release the pixels of finished requests."""
        for request_id in request_ids:
            self._pixels.pop(request_id, None)

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
    def num_pixel_bytes(self) -> int:
        """Host memory of all pixels held."""
        return sum(len(image.data) for images in self._pixels.values() for image in images.values())

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
        encodes = [_Encode(each, request_of(RequestId(each.request_id)).media[each.index]) for each in plan.encode]
        # All pixels first: then every owner makes its rows while the others make theirs.
        pixels = [self._pixels_at_owner(each) for each in encodes]
        made = self._all_made(encodes, pixels)
        for each, rows in zip(encodes, made, strict=True):
            self._rows[each.item.media_id] = self._group.broadcast(rows, each.plan.owner)
        self.encode_s += perf_counter() - started

    def _all_made(self, encodes: Sequence[_Encode], pixels: Sequence[ImagePixels | None]) -> list[Tensor]:
        """The rows of the images that this rank makes. The ranks meet behind each layer: those that wait for rows hear
        of the others' progress, so a layer, and not an image, has the time that ranks wait for each other.
        """
        trunk, self._num_layers = getattr(self.make_rows, "trunk", None), 0
        if trunk is None:
            return [self._made(*each) for each in zip(encodes, pixels, strict=True)]
        trunk.on_layer = self._end_layer
        try:
            made = [self._made(*each) for each in zip(encodes, pixels, strict=True)]
        finally:
            # Not a cycle: a model without references is freed at once.
            trunk.on_layer = _nothing
        num_images = Counter([each.plan.owner for each in encodes])
        while self._num_layers < max(num_images.values()) * len(trunk.layers):
            self._end_layer()
        return made

    def _end_layer(self) -> None:
        self._num_layers += 1
        # Layers are only queued on a GPU, where an image takes no minutes.
        if self._device.type == "cpu" and self._group.size > 1:
            self._group.all_gather(torch.zeros(1))
        self.on_layer()

    def of_step(self, scheduled: Sequence[ScheduledSequence]) -> StepMedia | None:
        """The rows of a step, and their places among its tokens; None if it computes no image tokens."""
        if not self._rows:
            return None
        places: list[range] = []
        parts: list[Tensor] = []
        start = 0
        for sequence, count, _ in scheduled:
            first, media = sequence.num_computed_tokens, sequence.request.media
            for item in media if media and first < media[-1].end else ():
                for token, row, num_rows in item.rows_between(first, first + count):
                    places.append(range(start + token - first, start + token - first + num_rows))
                    parts.append(self._rows[item.media_id][:, row : row + num_rows])
            start += count
        if not places:
            return None
        indices = to_device(torch.from_numpy(np.concatenate(places).astype(np.int64)), self._device)
        rows, *added = torch.cat(parts, dim=1).unbind()
        return StepMedia(indices, rows, tuple(added))

    def _pixels_at_owner(self, encode: _Encode) -> ImagePixels | None:
        """The pixels of an image, on the rank that makes its rows, sent there by rank 0."""
        owner, rank, image = encode.plan.owner, self._group.rank, None
        if rank == 0:
            image = self._pixels.get(RequestId(encode.plan.request_id), {}).get(encode.plan.index)
            if image is None or image.media_id != encode.item.media_id:
                raise RuntimeError(
                    f"request {encode.plan.request_id}: this rank does not hold the pixels of image "
                    f"{encode.plan.index} ({encode.item.media_id.hex()}): they are given to the engine of the rank "
                    f"that admits the request"
                )
        if owner == 0:
            return None if image is None else image.pixels
        sizes = [0] * _NUM_SIZES if image is None else [len(image.shapes), *image.grid, *image.size]
        num_crops, *others = self._sent(torch.tensor(sizes)).tolist()
        flat = [0] * 2 * num_crops if image is None else [side for shape in image.shapes for side in shape]
        shapes = [(height, width) for height, width in self._sent(torch.tensor(flat)).view(-1, 2).tolist()]
        num_bytes = sum(height * width for height, width in shapes) * NUM_CHANNELS
        data = bytearray(num_bytes) if image is None else bytearray(image.data)
        sent = self._sent(torch.frombuffer(data, dtype=torch.uint8))
        if rank != owner:
            return None
        grid, size = (others[0], others[1]), (others[2], others[3])
        return pixels_from(sent.numpy().tobytes(), tuple(shapes), grid, size)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor of the host, on every rank."""
        return self._group.broadcast(to_device(tensor, self._device)).cpu()

    def _made(self, encode: _Encode, pixels: ImagePixels | None) -> Tensor:
        """The rows of an image on the rank that makes them, memory for them on others."""
        shape = (1 + self._num_added, encode.item.num_rows, self._hidden_size)
        if encode.plan.owner != self._group.rank:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        if self.make_rows is None or pixels is None:
            raise RuntimeError("this model has no tower, so it makes no rows of images: load it with one")
        made = self.make_rows(pixels)
        rows = torch.stack([made.rows, *made.added]).to(self._device, self._dtype)
        if rows.shape != shape:
            raise RuntimeError(
                f"the tower made rows of shape {tuple(rows.shape)} of image {encode.item.media_id.hex()}, and the "
                f"prompt has tokens for {shape}"
            )
        return rows
