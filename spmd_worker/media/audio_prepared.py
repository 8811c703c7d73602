"""PreparedAudio: a window of audio as an encoder takes it."""

from dataclasses import dataclass

from spmd_worker.media.prepared import AudioFeatures


@dataclass(frozen=True, slots=True)
class PreparedAudio:
    """Seconds `start_s` to `end_s` of audio that is `duration_s` long: all of it, or one of its windows, which come in
    their order and without gaps.

    `media_id` names the features; `source_digest` is the SHA-256 of the bytes given, for all windows the same.
    """

    media_id: bytes
    features: AudioFeatures
    num_rows: int
    num_patches: int
    start_s: float
    end_s: float
    duration_s: float
    source_digest: bytes

    @property
    def content(self) -> AudioFeatures:
        return self.features

    @property
    def text(self) -> str:
        """Audio has no place in a prompt's text."""
        return ""

    @property
    def token_grid(self) -> tuple[int, int]:
        """Positions of its rows follow no grid."""
        return 0, 0
