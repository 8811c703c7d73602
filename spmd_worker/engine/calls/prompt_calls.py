"""Calls that answer prompts: from what a script passes to outputs in its order.

Prompts become token ids with their parameters, the ranks of the engine compare what each was given, prompts that can
never be answered are refused, and the rest is answered by this replica or by all of them. With `gather` and in turns
the prompts of a call are this rank's own, and so are its outputs. Scores and beams are such calls too.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, Literal, get_args

from tqdm import tqdm

from spmd_worker.base.config.plain_values import plain_bool, plain_int
from spmd_worker.base.errors import ChatTemplateError, ConfigError, PromptsRefusedError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.compat.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.chat import ChatOptions, answer_form, render, say_what_is_dropped
from spmd_worker.compat.prompts import Encoded, Prompt, TextPair, encode_prompt
from spmd_worker.engine.data_parallel.agreement import agree_on_call, agree_on_prompts
from spmd_worker.engine.data_parallel.own_prompts import OwnPrompt, Turns, answer_own
from spmd_worker.engine.data_parallel.prompts import RoundPrompt, answer_alone, answer_together
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import pooled_sampling
from spmd_worker.replica.sequence.request import as_token_ids
from spmd_worker.replica.sequence.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, for each, or those that the model's folder advises."""
UseTqdm = bool | Callable[..., Any]
OnError = Literal["raise", "row"]

logger = logging.getLogger(__name__)

_ON_ERROR: Final = get_args(OnError)
_NOTHING_BEFORE: Final = (
    "the prompt has no tokens: nothing comes before the first token of its completion, so that it has no score; "
    "give at least one, such as the model's bos token"
)
_Given = list[tuple[Encoded, SamplingParams]]
"""Prompts of one call with their parameters."""


class PromptCalls:
    """The calls of one engine. `replicas` None: it has no other replica. Arguments are those of `LLM`'s methods, and so
    is what they raise.
    """

    def __init__(self, engine: Engine, replicas: Replicas | None, turns: Turns) -> None:
        self._engine, self._replicas, self._turns = engine, replicas, turns

    def encode(self, prompts: Prompt | Sequence[Prompt | TextPair], params: Any = None) -> list[Encoded]:
        """Of one prompt or a list of them. `params` are those of all or a list of each prompt's: they say whether it is
        cut. Raises TypeError for what is no prompt.
        """
        return [self._encoded(each, _is_cut(params, index)) for index, each in enumerate(_as_list(prompts))]

    def render(self, messages: Messages | Sequence[Messages], options: ChatOptions, params: Any) -> list[Encoded]:
        """Of one conversation or a list of them, otherwise as `encode`."""
        if self._engine.tokenizer is not None:
            say_what_is_dropped(options, self._engine.tokenizer)
        listed = enumerate(_as_conversations(messages))
        return [self._render(each, options, _is_cut(params, index)) for index, each in listed]

    def _encoded(self, prompt: Prompt | TextPair, is_cut: bool) -> Encoded:
        # Many prompts take a while, in which nothing is half done.
        deliver_signals()
        return encode_prompt(prompt, self._engine.need_tokenizer, None if is_cut else self._engine.limits.check_text)

    def run(
        self,
        call: str,
        encode: Callable[[], list[Encoded]],
        sampling_params: Params,
        on_error: OnError | None = None,
        gather: bool = False,
        use_tqdm: UseTqdm = False,
    ) -> list[RequestOutput]:
        """`call` is what the user called; where `on_error` is None it has no such argument, and raises. What `encode`
        raises is this rank's error, and the others hear of it.
        """
        with self._engine.calls.inside(call, is_alone=True):
            return self._run(call, encode, sampling_params, on_error, gather, use_tqdm)

    def _run(
        self,
        call: str,
        encode: Callable[[], list[Encoded]],
        sampling_params: Params,
        on_error: OnError | None,
        gather: bool,
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        engine, replicas = self._engine, self._replicas
        # Without asking the others: a rank that cannot go on has no channel, or was the cause of their errors already.
        engine.life.check_open()
        if replicas is not None:
            replicas.check_whole()

        def prepare() -> _Given:
            # Here, where the other ranks hear of it: even whether a value is true may raise, as of a tensor.
            _check_options(on_error, gather, use_tqdm)
            engine.requests.check_idle()
            engine.changes.complete_weights()
            encoded, pooling = encode(), engine.limits.pooling
            params = self._params(sampling_params, len(encoded))
            for index, each in enumerate(encoded):
                if each.pooling is not None and pooling is not None:
                    params[index] = pooled_sampling(each.pooling, pooling)
                elif each.form is not None and params[index].structured_outputs is not None:
                    each.error = "structured_outputs and tool_choice both say the answer's form: leave one out"
                elif each.form is not None:
                    params[index] = replace(params[index], structured_outputs=each.form).frozen()
                try:
                    params[index] = each.salted(params[index])
                except ValueError as error:
                    each.error = each.error or str(error)
            deliver_signals()
            return list(zip(encoded, params, strict=True))

        if plain_bool(gather) or self._turns.is_open:
            return self._answer_own(call, prepare, on_error)
        given = agree_on_prompts(engine, call, prepare, {"on_error": "raise" if on_error is None else on_error})
        number = engine.requests.num_calls
        outputs = self._refused(call, given, on_error)
        prompts = [
            RoundPrompt(number, index, each.text, each.token_ids, sampling, each.rope_regime, each.pooling)
            for index, (each, sampling) in enumerate(given)
            if index not in outputs
        ]
        engine.requests.num_calls += 1
        answer = partial(answer_alone, engine) if replicas is None else partial(answer_together, replicas)
        with contextlib.closing(_CallBar(use_tqdm, len(prompts), is_shown=engine.is_first_rank)) as bar:
            outputs |= answer(prompts, bar.update)
        return [outputs[index] for index in range(len(given))]

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        sampling_params: Params,
        gather: bool,
        use_tqdm: UseTqdm,
    ) -> list[list[float]]:
        """As `LLM.score_tokens`."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        lengths: list[int] = []

        def encode() -> list[Encoded]:
            listed = _as_list(prompts)
            if not isinstance(completions, Sequence) or isinstance(completions, str | bytes):
                kind = type(completions).__name__
                raise TypeError(f"completions is a {kind}: give a list of token ids for each prompt")
            if len(listed) != len(completions):
                raise ValueError(f"{len(completions)} completions for {len(listed)} prompts: give one for each prompt")
            given = [None] * len(listed) if sampling_params is None else self._params(sampling_params, len(listed))
            joined = []
            for prompt, completion, sampling in zip(listed, completions, given, strict=True):
                encoded, tokens = self._encoded(prompt, is_cut=False), as_token_ids(completion)
                if not tokens:
                    raise ValueError("a completion has no tokens: there is nothing to score")
                lengths.append(len(tokens))
                error = encoded.error if encoded.error or encoded.token_ids else _NOTHING_BEFORE
                both = Encoded(encoded.text, (*encoded.token_ids, *tokens), error)
                both.cache_salt = encoded.cache_salt
                both.rope_regime = self._scored_regime(len(encoded.token_ids), len(tokens), sampling)
                joined.append(both)
            return joined

        outputs = self.run("score_tokens", encode, params, gather=gather, use_tqdm=use_tqdm)
        return [_last_logprobs(_answered(output), length) for output, length in zip(outputs, lengths, strict=True)]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, lora_request: Any, use_tqdm: UseTqdm
    ) -> list[BeamSearchOutput]:
        """As `LLM.beam_search`."""
        with self._engine.calls.inside("beam_search", is_alone=True):
            return self._search(prompts, params, lora_request, use_tqdm)

    def _search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, lora_request: Any, use_tqdm: UseTqdm
    ) -> list[BeamSearchOutput]:
        engine = self._engine
        engine.life.check_open()

        def prepare() -> tuple[list[tuple[int, ...]], dict[str, Any]]:
            _check_options(None, False, use_tqdm)
            engine.requests.check_idle()
            if not isinstance(params, BeamSearchParams):
                raise TypeError(f"params is a {type(params).__name__}: give BeamSearchParams")
            encoded = self.encode(prompts)
            check_extras(len(encoded), lora_request, None)
            for each in encoded:
                if each.error is not None:
                    raise ValueError(each.error)
                if each.cache_salt is not None:
                    raise ValueError("cache_salt is not supported by beam_search: leave it out")
                engine.requests.check(each.token_ids, params.step_params)
            return [each.token_ids for each in encoded], asdict(params)

        # In turns each rank has beams of its own.
        token_ids, _ = prepare() if self._turns.is_open else agree_on_call(engine, "beam_search", prepare)
        eos_token_ids = engine.resolved.model_config.eos_token_ids
        searches = [BeamSearch(each, params, eos_token_ids) for each in token_ids]
        with contextlib.closing(_CallBar(use_tqdm, params.max_tokens, is_shown=engine.is_first_rank)) as bar:
            for _ in range(params.max_tokens):
                wanted = [search.prompts(engine.max_model_len) for search in searches]
                flat = [prompt for each in wanted for prompt in each]
                if not flat:
                    break
                outputs = iter(self.run("generate", partial(self.encode, flat), params.step_params))
                for search, prompts_of_it in zip(searches, wanted):
                    if prompts_of_it:
                        search.advance([_answered(next(outputs)) for _ in prompts_of_it])
                bar.update()
        is_plain = params.skip_special_tokens
        return [BeamSearchOutput([self._spelled(beam, is_plain) for beam in search.best()]) for search in searches]

    def _answer_own(self, call: str, prepare: Callable[[], _Given], on_error: OnError | None) -> list[RequestOutput]:
        """Of prompts that only this rank has."""
        given: _Given = []
        outputs: dict[int, RequestOutput] = {}
        accepted: list[int] = []

        def prepare_own() -> list[OwnPrompt]:
            given.extend(prepare())
            outputs.update(self._refused(call, given, on_error))
            accepted.extend(index for index in range(len(given)) if index not in outputs)
            return [
                OwnPrompt(each.token_ids, sampling, each.rope_regime, each.pooling)
                for each, sampling in map(given.__getitem__, accepted)
            ]

        if self._turns.is_open:
            # What this rank raises here is nobody else's business: it may ask again.
            answered = self._turns.ask(prepare_own())
        else:
            answered = answer_own(self._engine, self._replicas, f"{call}(gather=True)", prepare_own)
        for index, output in zip(accepted, answered, strict=True):
            output.request_id, output.prompt = str(index), given[index][0].text
            outputs[index] = output
        return [outputs[index] for index in range(len(given))]

    def _refused(self, call: str, given: _Given, on_error: OnError | None) -> dict[int, RequestOutput]:
        """Outputs with errors, by index, of the prompts that can never be answered. Raises PromptsRefusedError where
        `on_error` says so.
        """
        outputs = {}
        for index, (each, sampling) in enumerate(given):
            try:
                if each.error is not None:
                    raise ValueError(each.error)
                each.token_ids = tuple(self._engine.limits.truncate(each.token_ids, sampling))
                self._engine.requests.check(each.token_ids, sampling, each.pooling)
            except ValueError as error:
                outputs[index] = RequestOutput(
                    str(index), each.text, list(each.token_ids), finished=True, error=str(error)
                )
        if outputs and on_error != "row":
            reasons = {index: str(each.error) for index, each in outputs.items()}
            raise PromptsRefusedError(call, len(given), reasons, has_on_error=on_error is not None)
        return outputs

    def _render(self, messages: Messages, options: ChatOptions, is_cut: bool) -> Encoded:
        deliver_signals()
        try:
            tokenizer = self._engine.need_tokenizer()
            text = render(messages, options, tokenizer)
            if not is_cut:
                self._engine.limits.check_text(tokenizer, text)
            encoded = Encoded(text, tuple(tokenizer.encode(text, add_special_tokens=False)))
            encoded.form = answer_form(text, options, tokenizer)
            return encoded
        except (ConfigError, ChatTemplateError, ValueError) as error:
            return Encoded(None, (), str(error))

    def _params(self, given: Params, num_prompts: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [(given or self._engine.default_sampling).frozen()] * num_prompts
        if not isinstance(given, Sequence):
            raise TypeError(f"sampling_params is a {type(given).__name__}: give SamplingParams, or a list of them")
        if len(given) != num_prompts:
            raise ValueError(
                f"{len(given)} sampling params for {num_prompts} prompts: give one, or one for each prompt"
            )
        for index, each in enumerate(given):
            if not isinstance(each, SamplingParams):
                raise TypeError(f"sampling_params[{index}] is a {type(each).__name__}: give SamplingParams")
        return [each.frozen() for each in given]

    def _scored_regime(self, num_prompt_tokens: int, num_tokens: int, sampling: SamplingParams | None) -> int:
        """The rope regime in which a completion was sampled. Raises ValueError where that cannot be told."""
        if sampling is not None:
            return self._engine.requests.rope_regime(num_prompt_tokens, sampling)
        least, most = (
            self._engine.requests.rope_regime(num_prompt_tokens, SamplingParams(max_tokens=max_tokens))
            for max_tokens in (num_tokens, None)
        )
        if least != most:
            raise ValueError(
                "this model's LongRoPE depends on the max_tokens that a completion was sampled with: give score_tokens "
                "its sampling_params"
            )
        return least

    def _spelled(self, beam: BeamSearchSequence, skip_special_tokens: bool) -> BeamSearchSequence:
        tokenizer = self._engine.tokenizer
        return beam if tokenizer is None else replace(beam, text=tokenizer.decode(beam.tokens, skip_special_tokens))


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic in its stubs only
    """Without tqdm's thread, which would go on in the caller's process."""

    monitor_interval = 0


class _CallBar:
    """The bar of one call, which the first rank alone has. What a bar of the caller's making raises is logged, and the
    prompts are answered without it: the other ranks, which have none, are in the middle of the call.
    """

    def __init__(self, use_tqdm: UseTqdm, num_prompts: int, *, is_shown: bool) -> None:
        self._bar: Any = None
        if use_tqdm and is_shown:
            make = use_tqdm if callable(use_tqdm) else _Bar
            with self._lost_alone():
                self._bar = make(total=num_prompts, desc="prompts", disable=False)

    def update(self, count: int = 1) -> None:
        """`count` more are done."""
        if self._bar is not None:
            with self._lost_alone():
                self._bar.update(count)

    def close(self) -> None:
        """The call is over."""
        if self._bar is not None:
            with self._lost_alone():
                self._bar.close()

    @contextlib.contextmanager
    def _lost_alone(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # of code that is not ours, in a call that the other ranks are in
            self._bar = None
            logger.exception("use_tqdm: the bar raised, and the call goes on without it")


def _answered(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise ValueError(output.error)
    return output


def _last_logprobs(output: RequestOutput, count: int) -> list[float]:
    """Of the last tokens of a prompt."""
    assert output.prompt_logprobs is not None, "they were asked for"
    tokens, positions = output.prompt_token_ids[-count:], output.prompt_logprobs[-count:]
    found = [position[token].logprob for token, position in zip(tokens, positions, strict=True) if position is not None]
    assert len(found) == count, (len(found), count)
    return found


def _check_options(on_error: Any, gather: Any, use_tqdm: Any) -> None:
    """Raises TypeError or ValueError for what they cannot be."""
    if not isinstance(on_error, str | None):
        raise TypeError(f"on_error is a {type(on_error).__name__}: give one of {', '.join(map(repr, _ON_ERROR))}")
    if on_error not in (None, *_ON_ERROR):
        raise ValueError(f"on_error={str(on_error)[:80]!r} must be one of {', '.join(map(repr, _ON_ERROR))}")
    if plain_bool(gather) is None:
        raise TypeError(f"gather is a {type(gather).__name__}: give True or False")
    if plain_bool(use_tqdm) is None and not callable(use_tqdm):
        raise TypeError(f"use_tqdm is a {type(use_tqdm).__name__}: give True, False, or what makes the bar")


def _is_cut(params: Any, index: int) -> bool:
    """Whether the prompt at `index` is cut to what fits. What parameters cannot be is refused later."""
    if isinstance(params, Sequence):
        params = params[index] if index < len(params) else None
    return getattr(params, "truncate_prompt_tokens", None) is not None


def _as_list(prompts: Any) -> list[Any]:
    """A prompt alone becomes a list of one. Raises TypeError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise TypeError(f"prompts is a {type(prompts).__name__}: give a prompt or a list of prompts")
    listed = list(prompts)
    # A number as the first says that these are a prompt's ids; what is no id among them is that prompt's error.
    return [listed] if listed and (isinstance(listed[0], int) or plain_int(listed[0]) is not None) else listed


def _as_conversations(messages: Any) -> list[Any]:
    """A conversation alone becomes a list of one. Raises TypeError for what is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages is a {type(messages).__name__}: give a list of messages, or a list of such lists")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
