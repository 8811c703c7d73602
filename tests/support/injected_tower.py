"""A model that takes images without a tower: a table of rows by picture, injected into a text model.

`injected()` makes every model of its block take images. A prompt is `{"prompt_token_ids": ids, "pictures": [...]}`,
whose ids are those of image tokens where a picture says. The table reads the number of a picture from its pixels, so
that pictures which arrive wrongly give other rows.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from spmd_worker import resolved
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.media.prepared import ImagePixels, PreparedImage
from spmd_worker.model.decoder import DecoderStack
from spmd_worker.model.layers.embedding import TokenRows
from spmd_worker.model.towers.tower import TowerRows
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.worker.runner.media_store import MediaStore
from spmd_worker.worker.worker import Worker

IMAGE = 7
HIDDEN_SIZE = 64


@dataclass(frozen=True)
class Picture:
    """Number and rows of a picture, whose tokens are those of `runs`."""

    number: int
    runs: tuple[tuple[int, int], ...]

    @property
    def item(self) -> MediaItem:
        num_rows = sum(count for _, count in self.runs)
        return MediaItem(bytes([self.number, num_rows]) * 8, self.runs, 4 * num_rows)

    @property
    def prepared(self) -> PreparedImage:
        item = self.item
        pixels = np.full((1, item.num_rows, 3), self.number, dtype=np.uint8)
        image = ImagePixels((pixels, pixels[:, :1]), (1, item.num_rows), (5, 6))
        return PreparedImage(item.media_id, image, "", item.num_rows, item.num_patches, (0, 0), b"")


def picture(number: int, start: int, num_rows: int) -> Picture:
    return Picture(number, ((start, num_rows),))


def prompt(*pictures: Picture, num_tokens: int) -> dict[str, Any]:
    """Image tokens where the pictures say, other ids elsewhere."""
    places = [place for each in pictures for start, count in each.runs for place in range(start, start + count)]
    ids = [IMAGE if place in places else 20 + place for place in range(num_tokens)]
    return {"prompt_token_ids": ids, "pictures": pictures}


def table_rows(number: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + num_rows)
    return torch.randn(num_rows, HIDDEN_SIZE, generator=generator) * 0.2


def table(pixels: ImagePixels) -> TowerRows:
    """In place of a tower."""
    first, second = pixels.crops
    assert (pixels.grid, pixels.size, second.shape) == ((1, first.shape[1]), (5, 6), (1, 1, 3))
    return TowerRows(table_rows(int(first[0, 0, 0]), first.shape[1]))


@contextmanager
def injected(**vision: Any) -> Iterator[None]:
    """Block in which models take images of the table; `vision` are further fields of their VisionConfig."""
    read, encode_one, make_store = resolved.read_model_files, PromptEncoder.encode_one, MediaStore.__init__
    forward = DecoderStack.forward

    def read_with_vision(folder: Any, **options: Any) -> Any:
        files = read(folder, **options)
        return replace(files, model_config=replace(files.model_config, vision=VisionConfig("table", IMAGE, **vision)))

    def encode_with_pictures(encoder: PromptEncoder, given: Any, is_truncated: bool, images: Any = None) -> Any:
        if not isinstance(given, dict) or "pictures" not in given:
            return encode_one(encoder, given, is_truncated, images)
        encoded = encode_one(encoder, {"prompt_token_ids": given["prompt_token_ids"]}, is_truncated)
        encoded.media = tuple(each.prepared for each in given["pictures"])
        encoded.media_items = tuple(each.item for each in given["pictures"])
        return encoded

    def store_with_table(store: MediaStore, make_rows: Any, *args: Any) -> None:
        make_store(store, make_rows or table, *args)

    def forward_with_given(
        stack: DecoderStack, *inputs: Any, media: Any = None, given: Any = None, **others: Any
    ) -> Any:
        """Until the model takes rows of images itself: as rows of embeddings, which the first rank adds."""
        if media is not None:
            given = TokenRows(media.places, media.rows if stack._group.rank == 0 else None)
        return forward(stack, *inputs, given=given, **others)

    with ExitStack() as stack:
        stack.enter_context(patch.object(resolved, "read_model_files", read_with_vision))
        stack.enter_context(patch.object(PromptEncoder, "encode_one", encode_with_pictures))
        stack.enter_context(patch.object(MediaStore, "__init__", store_with_table))
        if "media" not in inspect.signature(forward).parameters:
            stack.enter_context(patch.object(DecoderStack, "forward", forward_with_given))
        yield


class TableWorker(Worker):
    """A worker in another process, with the table."""

    def __init__(self, **options: Any) -> None:
        # Kept: the block would end with it.
        self.injection = injected()
        self.injection.__enter__()
        super().__init__(**options)
