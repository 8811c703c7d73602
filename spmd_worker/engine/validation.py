"""Which requests an engine can answer at all: checked once, before anything is queued, so that one costs the others
nothing.

Knows prompts, sampling parameters and limits. Knows nothing about ranks or steps. Imports no torch, for the reader of
rows.
"""

from dataclasses import dataclass

from spmd_worker.sequence.sampling_params import SamplingParams


class RequestError(ValueError):
    """A request that could never be answered: the message names what to change, `code` is an error row's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one engine can answer; `max_model_len` counts prompt and output tokens."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    has_tokenizer: bool

    def check(self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        """Raise RequestError for what is wrong first."""
        self._check_prompt(prompt_token_ids)
        self._check_sampling(sampling)

    def _check_prompt(self, prompt_token_ids: tuple[int, ...]) -> None:
        if not prompt_token_ids:
            raise RequestError("empty_prompt", "the prompt has no tokens: give at least one")
        least, most = min(prompt_token_ids), max(prompt_token_ids)
        if least < 0 or most >= self.vocab_size:
            outside = least if least < 0 else most
            word = outside if abs(outside) < 2**64 else "of more than 64 bits"
            raise RequestError(
                "token_out_of_vocabulary", f"token id {word} is outside the vocabulary of {self.vocab_size} tokens"
            )
        if len(prompt_token_ids) + 1 > self.max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt_token_ids)} tokens but model.max_model_len is {self.max_model_len}, which "
                f"must hold the prompt and at least one output token: shorten the prompt or raise model.max_model_len",
            )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.num_sequences > self.max_num_seqs:
            key = "n" if sampling.best_of is None else "best_of"
            raise RequestError(
                "request_refused",
                f"{key}={sampling.num_sequences} is more than scheduler.max_num_seqs="
                f"{self.max_num_seqs}: lower {key} or raise scheduler.max_num_seqs",
            )
        if sampling.stop and not self.has_tokenizer:
            message = "stop strings need a tokenizer.json in the model folder: use stop_token_ids"
            raise RequestError("tokenizer_missing", message)
        try:
            sampling.check_vocabulary(self.vocab_size)
        except ValueError as error:
            raise RequestError("token_out_of_vocabulary", str(error)) from None
