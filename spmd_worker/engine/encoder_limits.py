"""Limits of the input that the encoder of an encoder-decoder model reads. Imports no torch, for row readers."""

from dataclasses import dataclass

from spmd_worker.engine.request_error import RequestError
from spmd_worker.replica.sequence.encoder_input import EncoderInput
from spmd_worker.resolved import ResolvedRun


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """`kind` of input, "text" or "audio", with at most `max_len` rows. `may_raise`: the model allows more."""

    kind: str
    max_len: int
    may_raise: bool

    def check(self, given: EncoderInput, vocab_size: int) -> None:
        """Raise RequestError for an input that is empty, too long, or outside the vocabulary."""
        if not given.num_rows:
            raise RequestError("empty_prompt", f"the encoder's {self.kind} is empty: give at least one token")
        if given.num_rows > self.max_len:
            raise self.too_long(str(given.num_rows))
        least, most = min(given.token_ids), max(given.token_ids)
        if least < 0 or most >= vocab_size:
            raise RequestError(
                "token_out_of_vocabulary",
                f"token id {least if least < 0 else most} of the encoder's text is outside the vocabulary of "
                f"{vocab_size} tokens",
            )

    def too_long(self, count: str) -> RequestError:
        """The error of an input of `count` rows."""
        way_out = " or raise scheduler.max_encoder_len" if self.may_raise else ""
        return RequestError(
            "prompt_too_long",
            f"the encoder's {self.kind} has {count} {'tokens' if self.kind == 'text' else 'rows'} but "
            f"scheduler.max_encoder_len is {self.max_len}: shorten it{way_out}",
        )


def encoder_limits(resolved: ResolvedRun) -> EncoderLimits | None:
    """Limits of a run; None for a model without an encoder, and where it reads the rows that are classified."""
    part, max_len = resolved.model_config.encoder_part, resolved.max_encoder_len
    if part is None or resolved.model_config.pooling is not None:
        return None
    may_raise = not part.max_rows or max_len < part.max_rows
    return EncoderLimits(part.kind, max_len, may_raise)


def check_encoder_input(limits: EncoderLimits | None, vocab_size: int, given: EncoderInput | None) -> None:
    """Raise RequestError for a missing input, one that the model does not read, or one beyond the limits."""
    if limits is None:
        if given is not None:
            message = "this model has no encoder: give a prompt, and no encoder_prompt"
            raise RequestError("encoder_unsupported", message)
    elif given is None:
        way = "its text under encoder_prompt" if limits.kind == "text" else "audio"
        raise RequestError("encoder_input_missing", f"this model's encoder reads {limits.kind}: give {way}")
    else:
        limits.check(given, vocab_size)
