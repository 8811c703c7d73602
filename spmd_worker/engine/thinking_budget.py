"""`SamplingParams.thinking_token_budget` as rules of token ids, by the markers of the model's reasoning and the prompt.

Source: vLLM's `ThinkingBudgetState`. Tokens count from behind the last beginning, in the prompt too.
"""

from collections.abc import Sequence
from dataclasses import replace

from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.chat.chat_format import THINKING_MARKERS, chat_format_of
from spmd_worker.engine.request_error import RequestError
from spmd_worker.replica.grammar.rule_masks import behind_marker
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.token_rules import NO_RULES, ThinkingRules
from spmd_worker.tokenizer.tokenizer import Tokenizer


class ThinkingBudget:
    """Markers of one engine's reasoning, encoded when a request first needs them."""

    def __init__(self, options: ModelOptions, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._options, self._tokenizer, self._vocab_size = options, tokenizer, vocab_size
        self._markers: tuple[tuple[int, ...], ...] | None = None

    def markers(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the beginning and of the end. Raises RequestError where the model has none."""
        if self._markers is None:
            if self._tokenizer is None:
                message = "thinking_token_budget needs a tokenizer.json in the model folder: use max_tokens"
                raise RequestError("tokenizer_missing", message)
            template, options = self._tokenizer.chat_template_source, self._options
            name = chat_format_of(options.tool_call_format, options.reasoning_format, template).reasoning
            if name not in THINKING_MARKERS:
                raise RequestError(
                    "reasoning_unknown",
                    f"thinking_token_budget needs the markers of the model's reasoning, and the format is {name!r} by "
                    f"model.reasoning_format and the chat template: set model.reasoning_format to one of "
                    f"{', '.join(THINKING_MARKERS)}, or leave the budget out",
                )
            encoded = {text: self._tokenizer.encode(text, add_special_tokens=False) for text in THINKING_MARKERS[name]}
            for text, ids in encoded.items():
                if max(ids, default=self._vocab_size) >= self._vocab_size:
                    raise RequestError(
                        "token_out_of_vocabulary",
                        f"thinking_token_budget: the token ids of {text!r}, {ids}, are not in the model's vocabulary "
                        f"of {self._vocab_size} tokens: leave the budget out, or set model.reasoning_format",
                    )
            self._markers = tuple(map(tuple, encoded.values()))
        return self._markers

    def resolved(self, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """The parameters with the budget as a rule. Raises RequestError as `markers`."""
        if sampling.thinking_token_budget is None:
            return sampling
        begin, end = self.markers()
        opened, closed = _last_behind(begin, prompt_token_ids), _last_behind(end, prompt_token_ids)
        num_open = len(prompt_token_ids) - opened if opened > closed else None
        rules = replace(
            sampling.token_rules or NO_RULES,
            thinking=ThinkingRules(sampling.thinking_token_budget, begin, end, num_open),
        )
        return replace(sampling, token_rules=rules, thinking_token_budget=None).frozen()


def _last_behind(marker: tuple[int, ...], token_ids: Sequence[int]) -> int:
    """Position behind the last marker; 0 if there is none."""
    last = 0
    while (found := behind_marker(marker, token_ids, last)) is not None:
        last = found
    return last
