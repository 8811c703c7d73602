"""Calls that pool prompts: `LLM.embed`, `encode`, `classify`, `reward` and `score`, each a call of `PromptCalls`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.prompts import Encoded, Prompt, TextPair, take_pooling
from spmd_worker.engine.calls.prompt_calls import PromptCalls, UseTqdm
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.outputs import (
    Pooled,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from spmd_worker.replica.sequence.pooling_params import (
    PoolingParams,
    check_pooling,
    check_task,
    similarity,
)

_Output = TypeVar("_Output", bound=PoolingRequestOutput[Any])

GivenParams = PoolingParams | Sequence[PoolingParams] | None
"""For all prompts, for each, or what the model does."""


class PoolingCalls:
    """The pooling calls of one engine. Arguments are those of `LLM`'s methods, and so is what they raise."""

    def __init__(self, engine: Engine, calls: PromptCalls) -> None:
        self._engine, self._calls = engine, calls

    def pool(
        self,
        call: str,
        task: str | None,
        prompts: Prompt | Sequence[Prompt] | Callable[[], Sequence[Prompt | TextPair]],
        given: GivenParams,
        make: Callable[[list[float]], Pooled],
        output_class: type[_Output],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        gather: bool = False,
        use_tqdm: UseTqdm = False,
    ) -> list[_Output]:
        """`call` is what the user called; `make` is given each row's vector, or scores, and `output_class` what it
        makes. What `prompts` raises, where it
        makes them, is this rank's error, and the others hear of it.
        """

        def encode() -> list[Encoded]:
            if task is not None:
                check_task(task, self._engine.limits.pooling)
            cut = given if truncate_prompt_tokens is None else PoolingParams(truncate_prompt_tokens=-1)
            encoded = self._calls.encode(prompts() if callable(prompts) else prompts, cut)
            check_extras(len(encoded), lora_request, None, tokenization_kwargs)
            for each, params in zip(encoded, _listed(given, len(encoded)), strict=True):
                self._take(each, params, task, truncate_prompt_tokens)
            return encoded

        outputs = self._calls.run(call, encode, None, gather=gather, use_tqdm=use_tqdm)
        return [_pooled(output, make, output_class) for output in outputs]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        given: PoolingParams | None,
        chat_template: str | None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """See `LLM.score`."""
        config = self._engine.limits.pooling
        are_pairs = config is None or config.task == "classify"
        num_firsts = 0

        def prompts() -> Sequence[str | TextPair]:
            nonlocal num_firsts
            if chat_template:
                raise ValueError(
                    f"chat_template={repr(chat_template)[:80]} is refused: two texts are joined as the model's "
                    f"tokenizer joins them; write them as the template would, and leave it out"
                )
            firsts, seconds = _as_texts("text_1", text_1), _as_texts("text_2", text_2)
            num_firsts = len(firsts)
            if num_firsts not in (1, len(seconds)):
                raise ValueError(f"text_1 has {num_firsts} texts and text_2 {len(seconds)}: give one, or as many")
            if are_pairs:
                firsts = firsts * len(seconds) if num_firsts == 1 else firsts
                both = zip(firsts, seconds, strict=True)
                if config is not None and config.encodes_inside:
                    return [TextPair(first, second) for first, second in both]
                return [first + second for first, second in both]
            return [*firsts, *seconds]

        if are_pairs:
            score = "score", "score", prompts, given, lambda scores: ScoringOutput(scores[0]), ScoringRequestOutput
            return self.pool(*score, **options)
        both: list[PoolingRequestOutput[PoolingOutput]]
        both = self.pool("score", "score", prompts, given, PoolingOutput, PoolingRequestOutput, **options)
        firsts, seconds = both[:num_firsts], both[num_firsts:]
        firsts = firsts * len(seconds) if num_firsts == 1 else firsts
        name = "cosine" if config is None else config.similarity
        return [_compared(name, first, second) for first, second in zip(firsts, seconds, strict=True)]

    def _take(self, encoded: Encoded, params: PoolingParams, task: str | None, length: int | None) -> None:
        if task is not None and params.task not in (None, task):
            raise ValueError(f"pooling_params.task={params.task!r} is not what was called: {task}")
        engine, wanted = self._engine, replace(params, task=task or params.task)
        wanted = wanted if length is None else replace(wanted, truncate_prompt_tokens=length)
        take_pooling(encoded, wanted, engine.limits.pooling, engine.max_model_len, engine.need_tokenizer)


def _pooled(output: RequestOutput, make: Callable[[list[float]], Pooled], output_class: type[_Output]) -> _Output:
    if output.error is not None:
        raise ValueError(output.error)
    assert output.vector is not None, "a row that was pooled to its end has one"
    return output_class(output.request_id, make(output.vector), output.prompt_token_ids, output.num_cached_tokens)


def _compared(
    name: str, first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        first.request_id,
        ScoringOutput(similarity(name, first.outputs.data, second.outputs.data)),
        [*first.prompt_token_ids, *second.prompt_token_ids],
        first.num_cached_tokens + second.num_cached_tokens,
    )


def _listed(given: GivenParams, count: int) -> list[PoolingParams]:
    if isinstance(given, Sequence):
        if len(given) != count:
            raise ValueError(f"{len(given)} pooling params for {count} prompts: give one, or one for each prompt")
        for each in given:
            check_pooling(each)
        return list(given)
    params = PoolingParams() if given is None else given
    check_pooling(params)
    return [params] * count


def _as_texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise TypeError(f"{name} is a {type(given).__name__}: give a text, or a list of texts")
    return list(texts)
