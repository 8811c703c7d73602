"""Prompts of encoder-decoder models in plain ids, before any tokenizer: `given(encoder ids, decoder ids)`, and
`heard(number, num_rows, decoder ids)`, audio whose rows are of a table: so a model whose encoder reads text takes it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from rows_of_encoders import encoder_rows

from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model.towers.tower import TowerRows
from spmd_worker.replica.sequence.encoder_input import encoder_audio, encoder_text
from spmd_worker.worker.runner.media_store import MediaStore
from spmd_worker.worker.worker import Worker


def given(encoder: Sequence[int], decoder: Sequence[int]) -> dict[str, Any]:
    """Text for the encoder."""
    return {"encoder": encoder_text(encoder), "ids": [*decoder], "media": ()}


def heard(number: int, num_rows: int, decoder: Sequence[int]) -> dict[str, Any]:
    """Audio, whose features are its number."""
    features = AudioFeatures(np.full((2, 2 * num_rows), number, dtype=np.float32))
    name = bytes([number, num_rows]) * 8
    audio = PreparedAudio(name, features, num_rows, num_rows, 0.0, 1.0, 1.0, b"source")
    return {"encoder": encoder_audio(name, num_rows), "ids": [*decoder], "media": (audio,)}


@contextmanager
def encoder_prompts() -> Iterator[None]:
    """Block in which prompts may be those of `given` and `heard`."""
    encode_one, make_store = PromptEncoder.encode_one, MediaStore.__init__

    def encode(encoder: PromptEncoder, prompt: Any, is_truncated: bool, *others: Any) -> Any:
        if not isinstance(prompt, dict) or "encoder" not in prompt:
            return encode_one(encoder, prompt, is_truncated, *others)
        return Encoded(tuple(prompt["ids"]), is_ids=True, encoder=prompt["encoder"], media=prompt["media"])

    def store_with_table(store: MediaStore, make_rows: Any, *args: Any) -> None:
        def make(content: Any) -> TowerRows:
            if not isinstance(content, AudioFeatures):
                return make_rows(content)
            num_rows = content.features.shape[1] // 2
            return TowerRows(encoder_rows(num_rows) * content.features[0, 0])

        make_store(store, make, *args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(PromptEncoder, "encode_one", encode))
        stack.enter_context(patch.object(MediaStore, "__init__", store_with_table))
        yield


class HearingWorker(Worker):
    """A worker in another process, with the table."""

    def __init__(self, **options: Any) -> None:
        # Kept: the block would end with it.
        self.injection = encoder_prompts()
        self.injection.__enter__()
        super().__init__(**options)
