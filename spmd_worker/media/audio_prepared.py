"""PreparedAudio: a window of audio as an encoder takes it."""

from dataclasses import dataclass

from spmd_worker.media.prepared import AudioFeatures


@dataclass(frozen=True, slots=True)
class PreparedAudio:
    """Seconds `start_s` to `end_s` of audio that is `duration_s` long: all of it, or one of its windows, which come in
    their order and without gaps.

    `media_id` names the features; `source_digest` is the SHA-256 of the bytes given, for all windows the same. `text`
    stands in a prompt of text and audio in place of a placeholder; empty for an encoder's input, which has none.
    """

    media_id: bytes
    features: AudioFeatures
    num_rows: int
    num_patches: int
    start_s: float
    end_s: float
    duration_s: float
    source_digest: bytes
    text: str = ""

    @property
    def content(self) -> AudioFeatures:
        return self.features

    @property
    def token_grid(self) -> tuple[int, int]:
        """Positions of its rows follow no grid."""
        return 0, 0
