"""Beam search by single steps: of each beam the likeliest next tokens, of all of these the likeliest beams.

Knows no engine: it says which prompts to compute and takes what came of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd_worker.base.config.plain_values import asks, plain_bool, plain_float, plain_int, shown
from spmd_worker.base.names import explain_keywords
from spmd_worker.replica.sequence.outputs import RequestOutput, TokenLogprobs
from spmd_worker.replica.sequence.sampling_params import MAX_LOGPROBS, REFUSED, SamplingParams

_NO_FORM: Final = "beams are not held to a form: generate with structured_outputs, or leave it out"


@explain_keywords()
@dataclass(frozen=True)
class BeamSearchParams:
    """`beam_width` beams of at most `max_tokens` tokens. A beam's score is its log-probability divided by its length,
    prompt included and an end-of-sequence token not, to the power of `length_penalty`.

    `skip_special_tokens` is of the beams' text. `include_stop_str_in_output` is vLLM's and without effect: beams have
    all their tokens. `temperature` is 0; `structured_outputs` and `watermarking` may ask for nothing.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    watermarking: Any = None

    def __post_init__(self) -> None:
        """Raises ValueError naming key, value and rule."""
        most = MAX_LOGPROBS // 2
        for name in ("beam_width", "max_tokens"):
            value = plain_int(getattr(self, name))
            if value is None or not 1 <= value < 2**63:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be a whole number, 1 or more")
            object.__setattr__(self, name, value)
        for name in ("temperature", "length_penalty"):
            number = plain_float(getattr(self, name))
            if number is None or not math.isfinite(number):
                raise ValueError(f"{name}={shown(getattr(self, name))} must be a finite number")
            object.__setattr__(self, name, number)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            flag = plain_bool(getattr(self, name))
            if flag is None:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be true or false")
            object.__setattr__(self, name, flag)
        if self.beam_width > most:
            raise ValueError(f"beam_width={self.beam_width} must be at most {most}")
        if self.temperature:
            raise ValueError(f"temperature={self.temperature} must be 0: beams are the likeliest, not sampled")
        for name, reason in (("structured_outputs", _NO_FORM), ("watermarking", REFUSED["watermarking"])):
            value = getattr(self, name)
            if asks(value):
                raise ValueError(f"{name}={shown(value)} is refused: {reason}")
            object.__setattr__(self, name, None)

    @property
    def step_params(self) -> SamplingParams:
        """What each beam is asked for: one token's log-probabilities. Of each beam as many as all beams may need when
        that many of them end.
        """
        return SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * self.beam_width, ignore_eos=True, detokenize=False
        )


@dataclass
class BeamSearchSequence:
    """A beam: `tokens` of prompt and output, `logprobs` of the output's; `text` is that of all tokens, "" without a
    tokenizer.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | None = None
    lora_request: None = None


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The beams of one prompt."""

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Sequence[int]) -> None:
        self._params = params
        self._eos_token_ids = () if params.ignore_eos else tuple(eos_token_ids)
        self._beams = [BeamSearchSequence(list(prompt_token_ids))]
        self._ended: list[BeamSearchSequence] = []

    def prompts(self, max_model_len: int) -> list[dict[str, Any]]:
        """What is to be computed next: nothing where every beam has ended, or is as long as can be."""
        return [{"prompt_token_ids": beam.tokens} for beam in self._beams if len(beam.tokens) < max_model_len]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """`outputs` of `prompts`, in their order."""
        extended: list[BeamSearchSequence] = []
        for beam, output in zip(self._beams, outputs, strict=True):
            (completion,) = output.outputs
            (position,) = completion.logprobs or [{}]
            for token_id, entry in position.items():
                longer = replace(
                    beam,
                    tokens=[*beam.tokens, token_id],
                    logprobs=[*beam.logprobs, position],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                )
                if token_id in self._eos_token_ids:
                    self._ended.append(replace(longer, finish_reason="stop", stop_reason=token_id))
                else:
                    extended.append(longer)
        self._beams = self._best(extended)

    def best(self) -> list[BeamSearchSequence]:
        """Of those that ended and those that are cut off now."""
        return self._best([*self._ended, *[replace(beam, finish_reason="length") for beam in self._beams]])

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        # Sorting is stable: equal ones stay in the order of beams and of token ids.
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return float(beam.cum_logprob / length**self._params.length_penalty)
