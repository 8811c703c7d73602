"""Calls that pool prompts: `LLM.embed`, `encode`, `classify`, `reward` and `score`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from spmd_worker.base.names import counted
from spmd_worker.compat.adapter_requests import LoRARequests, check_no_prompt_adapter, set_adapters
from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.prompts import Encoded, Prompt, TextPair, apply_pooling
from spmd_worker.compat.text_offsets import late_chunks
from spmd_worker.engine.calls.call_runner import CallRunner, without_error
from spmd_worker.engine.calls.progress_bar import UseTqdm
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.engine.engine import Engine
from spmd_worker.model_config.late_interaction import INPUT_TYPES
from spmd_worker.replica.sequence.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooled,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from spmd_worker.replica.sequence.pooling_params import PoolingParams, check_pooling, check_task
from spmd_worker.replica.sequence.similarity import compared

_Output = TypeVar("_Output", bound=PoolingRequestOutput[Any])

GivenParams = PoolingParams | Sequence[PoolingParams] | None
"""Parameters of all prompts, of each prompt, or None for the model's defaults."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments common to all calls. `length` None does not truncate prompts, unless the model does: `is_truncated`."""

    params: GivenParams
    length: int | None
    adapters: tuple[LoRARequests, None]
    tokenization_kwargs: Mapping[str, Any] | None
    gather: bool
    use_tqdm: UseTqdm
    is_truncated: bool = False


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
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt, in order: float32 vectors, the last hidden states pooled as the model folder's
        `modules.json` or `pooling_type` says. A vector does not depend on the other rows of a batch, chunks, preemption
        or the cache.

        Needs a pooling model, or `runner="pooling"`. `truncate_prompt_tokens` is as in `PoolingParams`; `gather`,
        `lora_request`, ranks and rejected prompts are as in `generate`. Raises ValueError for a run of another task,
        naming it, for a `prompt_adapter_request`, and for a non-finite vector.
        """
        adapters = (lora_request, prompt_adapter_request)
        given = _Arguments(pooling_params, truncate_prompt_tokens, adapters, tokenization_kwargs, gather, use_tqdm)
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
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each prompt: a vector or scores, as plain numbers. `pooling_task` is embed, classify, score or reward,
        or token_embed or token_classify, with a list of numbers for each token; None is the model's task. Otherwise as
        `embed`.
        """
        adapters = (lora_request, prompt_adapter_request)
        given = _Arguments(pooling_params, truncate_prompt_tokens, adapters, tokenization_kwargs, gather, use_tqdm)
        return self._pool("encode", pooling_task, prompts, given, PoolingOutput, PoolingRequestOutput)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        gather: bool = False,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: None = None,
    ) -> list[ClassificationRequestOutput]:
        """Classify each prompt: the scores of all labels of a `*ForSequenceClassification`, from the last token, after
        softmax (sigmoid for one label, or as config.json says); raw with `use_activation=False`. Otherwise as `embed`.
        """
        adapters = (lora_request, prompt_adapter_request)
        given = _Arguments(pooling_params, None, adapters, tokenization_kwargs, gather, use_tqdm)
        return self._pool("classify", "classify", prompts, given, ClassificationOutput, ClassificationRequestOutput)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        gather: bool = False,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Score each prompt with a reward model: the raw score of its only label. Otherwise as `classify`."""
        adapters = (lora_request, prompt_adapter_request)
        given = _Arguments(pooling_params, None, adapters, tokenization_kwargs, gather, use_tqdm)
        return self._pool("reward", "reward", prompts, given, PoolingOutput, PoolingRequestOutput)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        prompt_adapter_request: None = None,
    ) -> list[ScoringRequestOutput]:
        """Score each text of `text_2` against its text of `text_1`, or the only one: the similarity of their vectors,
        the score that a model with one label gives to the pair, or with late interaction the sum over the tokens of
        the query, `text_1`, of the highest product with a token of the document, `text_2`. `chat_template` is not
        supported. A list of `lora_request` is for pairs: vectors of two adapters cannot be compared. Otherwise as
        `embed`.
        """
        adapters = (lora_request, prompt_adapter_request)
        given = _Arguments(pooling_params, truncate_prompt_tokens, adapters, tokenization_kwargs, False, use_tqdm)
        config = self._engine.limits.pooling
        are_pairs = config is None or config.task == "classify"
        if config is not None and config.late is not None and given.length is None:
            # Queries and documents have lengths of their own.
            given = replace(given, is_truncated=True)
        num_firsts = 0

        def prompts() -> Sequence[str | TextPair]:
            nonlocal num_firsts
            if chat_template:
                raise ValueError(
                    f"chat_template={repr(chat_template)[:80]} is rejected: the model's tokenizer joins the two "
                    f"texts; render them yourself and leave it out"
                )
            if isinstance(lora_request, Sequence) and not are_pairs:
                raise ValueError("lora_request is a list, but vectors of two adapters cannot be compared: give one")
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

        if config is None or are_pairs:
            return self._pool(
                "score", "score", prompts, given, lambda scores: ScoringOutput(scores[0]), ScoringRequestOutput
            )
        both: list[PoolingRequestOutput[PoolingOutput]]
        input_type_of = None if config.late is None else lambda index: INPUT_TYPES[index >= num_firsts]
        both = self._pool("score", "score", prompts, given, PoolingOutput, PoolingRequestOutput, input_type_of)
        firsts, seconds = both[:num_firsts], both[num_firsts:]
        firsts = firsts * len(seconds) if num_firsts == 1 else firsts
        return [
            ScoringRequestOutput(
                first.request_id,
                ScoringOutput(compared(config, first.outputs.data, second.outputs.data)),
                [*first.prompt_token_ids, *second.prompt_token_ids],
                first.num_cached_tokens + second.num_cached_tokens,
            )
            for first, second in zip(firsts, seconds, strict=True)
        ]

    def _pool(
        self,
        call: str,
        task: str | None,
        prompts: Prompt | Sequence[Prompt] | Callable[[], Sequence[Prompt | TextPair]],
        given: _Arguments,
        make: Callable[[list[float]], Pooled],
        output_class: type[_Output],
        input_type_of: Callable[[int], str] | None = None,
    ) -> list[_Output]:
        """Run the user's `call`: `make` builds the content of an `output_class` from each row's vector or scores. An
        error that a callable `prompts` raises is raised on this rank and reported to the others. `input_type_of`: of
        each prompt by its index, once `prompts` was called.
        """
        engine = self._engine
        own: list[Encoded] = []

        def encode() -> list[Encoded]:
            if task is not None or engine.limits.pooling is None:
                check_task(task or call, engine.limits.pooling)
            is_truncated = given.length is not None or given.is_truncated
            truncation = PoolingParams(truncate_prompt_tokens=-1) if is_truncated else given.params
            encoded = self._encoder.encode(prompts() if callable(prompts) else prompts, truncation)
            check_extras(given.tokenization_kwargs)
            loras, prompt_adapter = given.adapters
            check_no_prompt_adapter(prompt_adapter)
            set_adapters(encoded, loras, None)
            for index, (each, params) in enumerate(zip(encoded, _listed(given.params, len(encoded)), strict=True)):
                if task is not None and params.task not in (None, task):
                    raise ValueError(f"pooling_params.task={params.task!r} does not match the call: {task}")
                if input_type_of is not None and params.input_type is not None:
                    raise ValueError("input_type is not supported here: text_1 are queries and text_2 documents")
                input_type = params.input_type if input_type_of is None else input_type_of(index)
                wanted = replace(params, task=task or params.task, input_type=input_type)
                wanted = wanted if given.length is None else replace(wanted, truncate_prompt_tokens=given.length)
                apply_pooling(each, wanted, engine.limits.pooling, engine.max_model_len, engine.need_tokenizer)
            own.extend(encoded)
            return encoded

        outputs = self._runner.run(call, encode, None, gather=given.gather, use_tqdm=given.use_tqdm)
        made = []
        for encoded, output in zip(own, outputs, strict=True):
            numbers = make(without_error(output).pooled)
            chunks = late_chunks(encoded, engine.limits.pooling, engine.need_tokenizer)
            given_ids = (output.prompt_token_ids, output.num_cached_tokens)
            made.append(output_class(output.request_id, numbers, *given_ids, late_chunking=chunks))
        return made


def _listed(given: GivenParams, count: int) -> list[PoolingParams]:
    listed = list(given) if isinstance(given, Sequence) else [PoolingParams() if given is None else given]
    for each in listed:
        check_pooling(each)
    if not isinstance(given, Sequence):
        return listed * count
    if len(listed) != count:
        raise ValueError(
            f"{len(listed)} pooling params for {counted(count, 'prompt')}: give one, or one for each prompt"
        )
    return listed


def _as_texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise TypeError(f"{name} is a {type(given).__name__}: give a text, or a list of texts")
    return list(texts)
