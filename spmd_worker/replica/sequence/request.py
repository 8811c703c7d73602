"""One admitted request: all that a replica needs of a row, and nothing about the row's origin."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NewType

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.replica.sequence.encoder_input import EncoderInput
from spmd_worker.replica.sequence.input_rows import KEYS_VALUES, InputRows, check_rows, ids_without
from spmd_worker.replica.sequence.media_items import MediaItem, check_media
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.record_checks import Integer65, check_fields
from spmd_worker.replica.sequence.sampling_params import SamplingParams

RequestId = NewType("RequestId", int)
"""Number of a request in order of admission: the same on every rank, never reused within an engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """A row at admission. `stream` is the key of its random numbers, 64 bits (see `random_stream`).

    `rope_regime` is all that its rotary angles depend on besides positions (see `ModelConfig.rope_regime`): fixed here,
    so that its keys are always computed one way, and in the hashes of its blocks. With `pooling`, as `resolve_pooling`
    returns it, nothing is sampled, and `sampling` is that of `pooled_sampling`. `adapter` is the digest of its LoRA
    adapter's content, 0 for none: it is in the hashes of its blocks, and no other number names an adapter on the ranks.

    Positions of `rows` carry vectors, whose contents are in the hashes of its blocks; the ids there are placeholders.
    The first `num_virtual_tokens` positions are a prompt adapter's, or an encoder's (`EncoderInput`), not the caller's.
    Tokens of `media` take rows of a tower; their ids are those of image tokens, and the names of the images are in the
    hashes of its blocks.

    Requests of lower `priority` are served earlier, those of the same in order of admission; preemption begins with the
    highest number.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: Integer65
    rope_regime: int = 0
    pooling: PoolingParams | None = None
    adapter: int = 0
    rows: tuple[InputRows, ...] = ()
    num_virtual_tokens: int = 0
    media: tuple[MediaItem, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        """Check arguments: a wrong type would raise when a step's message is encoded, and end every rank."""
        object.__setattr__(self, "prompt_token_ids", as_token_ids(self.prompt_token_ids))
        check_sampling(self.sampling)
        object.__setattr__(self, "sampling", self.sampling.frozen())
        check_fields(self)
        if self.adapter < 0:
            raise ValueError(f"Request.adapter={self.adapter} must be 0, for none, or a digest above 0")
        check_rows(self.rows, len(self.prompt_token_ids))
        check_media(self.media, len(self.prompt_token_ids))
        if not 0 <= self.num_virtual_tokens <= len(self.prompt_token_ids):
            raise ValueError(f"Request.num_virtual_tokens={self.num_virtual_tokens} of {len(self.prompt_token_ids)}")
        if self.pooling is not None and not self.pooling.is_resolved:
            raise ValueError(f"Request.pooling={self.pooling} has unset fields: call resolve_pooling")

    @property
    def num_encoder_positions(self) -> int:
        """Positions of the encoder's input, before the decoder's: a prompt adapter's have rows."""
        return 0 if self.rows else self.num_virtual_tokens

    @property
    def encoder_input(self) -> EncoderInput | None:
        """The input of an encoder-decoder model's encoder."""
        if not self.num_encoder_positions:
            return None
        item = self.media[0]
        return EncoderInput(item.media_id, self.prompt_token_ids[: item.num_rows])

    @property
    def has_prompt_adapter(self) -> bool:
        return self.num_virtual_tokens > self.num_encoder_positions

    @property
    def own_token_ids(self) -> tuple[int, ...]:
        """The caller's prompt, as it is reported: without virtual tokens, with placeholders at positions of rows."""
        return self.prompt_token_ids[self.num_virtual_tokens :] if self.num_virtual_tokens else self.prompt_token_ids

    @property
    def num_given_tokens(self) -> int:
        """Leading positions whose keys and values are given, so that they are not computed."""
        return self.rows[0].num_rows if self.rows and self.rows[0].kind == KEYS_VALUES else 0

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """The ids of the prompt that are a token's: what penalties count and text is decoded after. An encoder's are
        not: they precede no output token.
        """
        return ids_without(self.rows, self.prompt_token_ids) if self.rows else self.own_token_ids


def whole_number(name: str, value: Any) -> int:
    """`value` as Python's own int: numpy's and torch's integers are accepted, True is not.

    Raises TypeError, and ValueError for what does not fit 64 bits.
    """
    number = plain_int(value)
    if number is None:
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}: give a whole number")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}={shown(number)} must fit 64 bits")
    return number


def as_token_ids(values: Any, name: str = "prompt_token_ids") -> tuple[int, ...]:
    """Token ids, from a sequence of integers. Raises TypeError or ValueError as `whole_number` does, with `name`."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise TypeError(f"{name} is a {type(values).__name__}: give a list of whole numbers")
    # Fast path: long prompts need no call per token.
    is_plain = list(map(type, values)).count(int) == len(values)
    if is_plain and (not values or -(2**63) <= min(values) <= max(values) < 2**63):
        return tuple(values)
    return tuple([whole_number(f"{name}[{index}]", value) for index, value in enumerate(values)])


def check_sampling(sampling: Any) -> None:
    """Raise TypeError for anything but SamplingParams."""
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is a {type(sampling).__name__}: give SamplingParams")


def random_stream(job_seed: int, sampling_seed: int | None, custom_id: str | None, index: int, call: int = 0) -> int:
    """Key of a row's random stream, an unsigned 64-bit integer: from its own seed if it has one, else from the job's
    seed with its custom id or index.

    `call` counts the calls with lists of rows: rows of the first have a job's random streams, those of a later one have
    streams of their own. The kinds of key never collide: the kind is hashed too.
    """
    if sampling_seed is not None:
        return _stream_of(f"seed:{sampling_seed}")
    if custom_id is not None:
        return _stream_of(f"id:{job_seed}:{custom_id}")
    return _stream_of(f"call:{job_seed}:{call}:{index}" if call else f"index:{job_seed}:{index}")


def unnamed_stream(job_seed: int, sampling_seed: int | None, number: int) -> int:
    """`random_stream` of a row that has neither custom id nor index: `number` counts such rows."""
    return _stream_of(f"seed:{sampling_seed}" if sampling_seed is not None else f"request:{job_seed}:{number}")


def _stream_of(name: str) -> int:
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, person=b"spmd-stream").digest()
    return int.from_bytes(digest, "little")
