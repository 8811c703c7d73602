"""EncoderPart: the encoder of an encoder-decoder model, from config.json.

An encoder reads one input a call and gives a row for each of its tokens or frames. The decoder's layers project these
rows to keys and values once, and attend to them from every token of the decoder (https://arxiv.org/abs/1706.03762).

Needs no torch.
"""

from dataclasses import dataclass
from typing import Any, Final

NUM_STRIDES: Final = 3
"""Convolutions over pictures of frames."""


@dataclass(frozen=True, slots=True)
class AudioInput:
    """An encoder that reads `num_frames` frames of `num_mel_bins` numbers: two convolutions, the second of stride 2,
    make half as many rows of them. With `num_channels` frames are pictures, of `chunk_frames` each at most: three
    convolutions of stride 2 in both directions with so many channels, and attention within `window_chunks` of them.

    With `window_frames` a recording is read in windows of so many, each by itself: rows of its last window's padding
    take part in attention if it `hears_padding`, and have tokens if it `counts_padding`. `joins`: the rows of a token
    stand side by side before the projector, else it reads their mean. `has_one_level`: features of all windows are
    relative to the loudest of the recording, else each window's are to its own. `has_exact_end`: the last window ends
    with the recording, else frames of silence follow; of pictures, one that is the recording's only one does, others
    are filled with zeros.
    """

    num_mel_bins: int
    num_frames: int
    num_channels: int = 0
    chunk_frames: int = 0
    window_chunks: int = 0
    window_frames: int = 0
    hears_padding: bool = False
    counts_padding: bool = False
    joins: bool = False
    has_one_level: bool = False
    has_exact_end: bool = False

    @property
    def num_rows(self) -> int:
        """Rows behind the two convolutions of what is read at once."""
        return (self.window_frames or self.num_frames) // 2

    @property
    def num_bands(self) -> int:
        """Bands that are left of the mel bins behind three convolutions."""
        bands = self.num_mel_bins
        for _ in range(NUM_STRIDES):
            bands = (bands + 1) // 2
        return bands

    @property
    def num_chunk_rows(self) -> int:
        """Rows of a complete chunk."""
        rows = self.chunk_frames
        for _ in range(NUM_STRIDES):
            rows = (rows + 1) // 2
        return rows


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """`stack`, a `ModelConfig`, has the encoder's layers, embeddings and norms; its architecture is a row of
    `ENCODER_PARTS`. Rows have its hidden size, which is the decoder's. `audio` None: the encoder reads token ids of the
    model's vocabulary.

    `max_rows` is the most rows of an input, 0 if the model sets no bound: its positions are relative.
    `start_token_id` begins the decoder's prompt. `shares_embedding`: its table of embeddings is the decoder's.
    """

    # A `ModelConfig` has this record, so its module is not imported here.
    stack: Any
    max_rows: int
    start_token_id: int
    shares_embedding: bool = False
    audio: AudioInput | None = None

    @property
    def kind(self) -> str:
        """Either "audio" or "text"."""
        return "text" if self.audio is None else "audio"
