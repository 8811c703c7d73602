"""PromptContent: all that a request gives the model to read, from the encoding of its prompt to its admission."""

from dataclasses import KW_ONLY, dataclass, field

from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.sequence.encoder_input import EncoderInput
from spmd_worker.replica.sequence.input_rows import PromptRows
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.prompt_adapter_request import VirtualTokens
from spmd_worker.replica.sequence.record_checks import NOT_SENT


@dataclass(slots=True)
class PromptContent:
    """A prompt as ids; its output repeats `text` and `encoder_text`, on the rank that has them. The first of the ids
    are placeholders of `rows`, which are computed in their place; the `virtual` tokens of a loaded prompt adapter come
    before all. `media_items` say which tokens take the rows of each of its images, `media`. `adapter` is the digest of
    the contents of a loaded LoRA adapter, 0 without one. `rope_regime` None is derived from its length and parameters.
    `pooling` is normalised (`resolve_pooling`), None for a prompt to generate from.

    `encoder` is the input of an encoder-decoder model's encoder: text, and then `encoder_text` is that text if it was
    given as one, or the only one of `media`, audio. The ids are then the decoder's prompt.
    """

    token_ids: tuple[int, ...]
    text: str | None = field(default=None, metadata=NOT_SENT)
    _: KW_ONLY
    rope_regime: int | None = None
    pooling: PoolingParams | None = None
    adapter: int = 0
    rows: PromptRows | None = None
    virtual: VirtualTokens | None = None
    media_items: tuple[MediaItem, ...] = ()
    encoder: EncoderInput | None = None
    priority: int = 0
    encoder_text: str | None = field(default=None, metadata=NOT_SENT)
    media: tuple[PreparedMedia, ...] = field(default=(), compare=False, metadata=NOT_SENT)

    @property
    def num_virtual_tokens(self) -> int:
        """Tokens of the prompt adapter."""
        return 0 if self.virtual is None else self.virtual.num_tokens
