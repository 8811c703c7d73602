"""Beam search by single steps: each beam is extended by its top-k next tokens, and the best extensions are kept.

Independent of the engine: it returns the prompts to compute and is given their outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd_worker.base.config.plain_values import asks, plain_bool, plain_float, plain_int, shown
from spmd_worker.base.config.schema import MAX_LOGPROBS
from spmd_worker.base.names import with_keyword_hints
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import RequestOutput, TokenLogprobs
from spmd_worker.replica.sequence.sampling_params import REJECTED, SamplingParams
from spmd_worker.replica.sequence.token_rules import TokenRules, as_token_rules

_NO_GRAMMAR: Final = "beams are not constrained: use generate with structured_outputs, or leave it out"

_OF_BEAMS: Final = TokenRules(num_beam_tokens=0)
"""No rules, for log-probabilities of allowed tokens alone."""


def _positive(value: Any) -> int | None:
    number = plain_int(value)
    return None if number is None or not 1 <= number < 2**63 else number


def _finite(value: Any) -> float | None:
    number = plain_float(value)
    return None if number is None or not math.isfinite(number) else number


@with_keyword_hints()
@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`: `beam_width` beams of at most `max_tokens` tokens. The score of a beam is its
    log-probability divided by its length, with the prompt and without an end-of-sequence token, to the power of
    `length_penalty`.

    `skip_special_tokens` applies to the beams' text. `include_stop_str_in_output` is accepted for vLLM and has no
    effect: beams have all their tokens. `temperature` is 0; `structured_outputs` and `watermarking` are not supported.
    `allowed_token_ids` and `token_rules` are as in `SamplingParams`: a beam has allowed tokens alone, and its
    log-probability is the model's own. Encoder-decoder models set their own rules.
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
    allowed_token_ids: tuple[int, ...] | None = None
    token_rules: TokenRules | None = None

    def __post_init__(self) -> None:
        kinds: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
            (_positive, "a whole number, 1 or more", ("beam_width", "max_tokens")),
            (_finite, "a finite number", ("temperature", "length_penalty")),
            (plain_bool, "true or false", ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")),
        )
        for plain, rule, names in kinds:
            for name in names:
                value = plain(getattr(self, name))
                if value is None:
                    raise ValueError(f"{name}={shown(getattr(self, name))} must be {rule}")
                object.__setattr__(self, name, value)
        object.__setattr__(self, "token_rules", as_token_rules(self.token_rules))
        most = MAX_LOGPROBS // 2
        if self.beam_width > most:
            raise ValueError(f"beam_width={self.beam_width} must be at most {most}")
        if self.temperature:
            raise ValueError(f"temperature={self.temperature} must be 0: beams are not sampled")
        for name, reason in (("structured_outputs", _NO_GRAMMAR), ("watermarking", REJECTED["watermarking"])):
            value = getattr(self, name)
            if asks(value):
                raise ValueError(f"{name}={shown(value)} is rejected: {reason}")
            object.__setattr__(self, name, None)
        object.__setattr__(self, "allowed_token_ids", self.step_params.allowed_token_ids)

    @property
    def step_params(self) -> SamplingParams:
        """Parameters of a step: enough top log-probabilities to refill all beams if `beam_width` of them end."""
        rules = None if self.allowed_token_ids is None else _OF_BEAMS
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=2 * self.beam_width,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=self.allowed_token_ids,
            token_rules=rules,
        )


@dataclass
class BeamSearchSequence:
    """A beam: `tokens` of prompt and output, `logprobs` of the output; `text` of all tokens, "" without a tokenizer."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | None = None
    lora_request: LoRARequest | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The beams of one prompt."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        lora_request: LoRARequest | None = None,
        rules: TokenRules | None = None,
    ) -> None:
        self._params, self._rules, self._num_prompt = params, rules, len(prompt_token_ids)
        self._eos_token_ids = () if params.ignore_eos else tuple(eos_token_ids)
        self._beams = [BeamSearchSequence(list(prompt_token_ids), lora_request=lora_request)]
        self._ended: list[BeamSearchSequence] = []

    def prompts(self, max_model_len: int) -> list[dict[str, Any]]:
        """The prompts to compute next; none if every beam has ended or has the maximum length."""
        return [{"prompt_token_ids": beam.tokens} for beam in self._beams if len(beam.tokens) < max_model_len]

    def next_params(self, plain: SamplingParams) -> SamplingParams:
        """Parameters of the next call for each of `prompts`: `plain`, with rules if there are any."""
        if self._rules is None or not self._beams:
            return plain
        # All beams have the same length.
        num_tokens = len(self._beams[0].tokens) - self._num_prompt
        return replace(plain, token_rules=replace(self._rules, num_beam_tokens=num_tokens)).frozen()

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend the beams by the outputs of `prompts`, in their order."""
        extended: list[BeamSearchSequence] = []
        for beam, output in zip(self._beams, outputs, strict=True):
            (completion,) = output.outputs
            (position,) = completion.logprobs or [{}]
            for token_id, entry in position.items():
                if entry.logprob == -math.inf:
                    # Forbidden: fewer tokens are allowed than asked for.
                    continue
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
        """The best of the beams that ended and of those that end now, by length."""
        return self._best([*self._ended, *[replace(beam, finish_reason="length") for beam in self._beams]])

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        # Sorting is stable: equal beams keep the order of their parents and token ids.
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return float(beam.cum_logprob / length**self._params.length_penalty)
