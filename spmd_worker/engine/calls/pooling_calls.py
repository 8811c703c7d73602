"""Calls that pool prompts: `LLM.embed`, `encode`, `classify`, `reward` and `score`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.prompts import Encoded, Prompt, TextPair, apply_pooling
from spmd_worker.engine.calls.call_runner import CallRunner, without_error
from spmd_worker.engine.calls.progress_bar import UseTqdm
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooled,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from spmd_worker.replica.sequence.pooling_params import PoolingParams, check_pooling, check_task, similarity

_Output = TypeVar("_Output", bound=PoolingRequestOutput[Any])

GivenParams = PoolingParams | Sequence[PoolingParams] | None
"""For all prompts, for each, or what the model does."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments that every call has. `length` None does not cut prompts."""

    params: GivenParams
    length: int | None
    lora_request: Any
    tokenization_kwargs: Mapping[str, Any] | None
    gather: bool
    use_tqdm: UseTqdm


class PoolingCalls:
    """Methods of `LLM` for runs that pool."""

    def __init__(self, engine: Engine, encoder: PromptEncoder, runner: CallRunner) -> None:
        self._engine, self._encoder, self._runner = engine, encoder, runner

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in order: what the last stage's hidden states come to by the model folder's
        `modules.json`, or by `pooling_type`; float32. A row's numbers do not depend on the rows beside it, on chunks,
        preemption or what was cached.

        Needs a run that pools: a model folder that is for it, or `runner="pooling"`. `truncate_prompt_tokens` as in
        `PoolingParams`. `gather`, ranks and prompts that are refused as in `generate`. Raises ValueError for a run or a
        model that does something else, naming what it does, and for a vector that is not finite.
        """
        given = _Arguments(pooling_params, truncate_prompt_tokens, lora_request, tokenization_kwargs, gather, use_tqdm)
        return self._pool("embed", "embed", prompts, given, EmbeddingOutput, EmbeddingRequestOutput)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: GivenParams = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model gives for each prompt, as plain numbers: a vector or scores. `pooling_task` is embed,
        classify, score or reward; None is what the model does. Otherwise as `embed`.
        """
        given = _Arguments(pooling_params, truncate_prompt_tokens, lora_request, tokenization_kwargs, gather, use_tqdm)
        return self._pool("encode", pooling_task, prompts, given, PoolingOutput, PoolingRequestOutput)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The scores of each prompt's labels, of a `*ForSequenceClassification`, from its last token: after softmax,
        sigmoid for one label, or what config.json says; as they are with `use_activation=False`. Otherwise as `embed`.
        """
        given = _Arguments(pooling_params, None, lora_request, tokenization_kwargs, gather, use_tqdm)
        return self._pool("classify", "classify", prompts, given, ClassificationOutput, ClassificationRequestOutput)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The reward of each prompt: the score of a model with one label, as it is. Otherwise as `classify`."""
        given = _Arguments(pooling_params, None, lora_request, tokenization_kwargs, gather, use_tqdm)
        return self._pool("reward", "reward", prompts, given, PoolingOutput, PoolingRequestOutput)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each of `text_2` goes with its text of `text_1`, or with the only one: the cosine of their vectors,
        or of a model with one label its score of the second text behind the first. `chat_template` may ask
        for nothing. Otherwise as `embed`.
        """
        given = _Arguments(pooling_params, truncate_prompt_tokens, lora_request, tokenization_kwargs, False, use_tqdm)
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
            return self._pool(
                "score", "score", prompts, given, lambda scores: ScoringOutput(scores[0]), ScoringRequestOutput
            )
        both: list[PoolingRequestOutput[PoolingOutput]]
        both = self._pool("score", "score", prompts, given, PoolingOutput, PoolingRequestOutput)
        firsts, seconds = both[:num_firsts], both[num_firsts:]
        firsts = firsts * len(seconds) if num_firsts == 1 else firsts
        name = "cosine" if config is None else config.similarity
        return [_compared(name, first, second) for first, second in zip(firsts, seconds, strict=True)]

    def _pool(
        self,
        call: str,
        task: str | None,
        prompts: Prompt | Sequence[Prompt] | Callable[[], Sequence[Prompt | TextPair]],
        given: _Arguments,
        make: Callable[[list[float]], Pooled],
        output_class: type[_Output],
    ) -> list[_Output]:
        """`call` is what the user called; `make` is given each row's vector, or scores, and `output_class` what it
        makes. What `prompts` raises, where it makes them, is this rank's error, and the others hear of it.
        """

        def encode() -> list[Encoded]:
            if task is not None:
                check_task(task, self._engine.limits.pooling)
            cut = given.params if given.length is None else PoolingParams(truncate_prompt_tokens=-1)
            encoded = self._encoder.encode(prompts() if callable(prompts) else prompts, cut)
            check_extras(len(encoded), given.lora_request, None, given.tokenization_kwargs)
            for each, params in zip(encoded, _listed(given.params, len(encoded)), strict=True):
                self._take(each, params, task, given.length)
            return encoded

        outputs = self._runner.run(call, encode, None, gather=given.gather, use_tqdm=given.use_tqdm)
        return [_pooled(output, make, output_class) for output in outputs]

    def _take(self, encoded: Encoded, params: PoolingParams, task: str | None, length: int | None) -> None:
        if task is not None and params.task not in (None, task):
            raise ValueError(f"pooling_params.task={params.task!r} is not what was called: {task}")
        engine, wanted = self._engine, replace(params, task=task or params.task)
        wanted = wanted if length is None else replace(wanted, truncate_prompt_tokens=length)
        apply_pooling(encoded, wanted, engine.limits.pooling, engine.max_model_len, engine.need_tokenizer)


def _pooled(output: RequestOutput, make: Callable[[list[float]], Pooled], output_class: type[_Output]) -> _Output:
    vector = without_error(output).vector
    assert vector is not None, "a row that was pooled to its end has one"
    return output_class(output.request_id, make(vector), output.prompt_token_ids, output.num_cached_tokens)


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
