"""Calls that generate or score tokens: `LLM.generate`, `chat`, `chat_messages` and `score_tokens`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import PromptsRefusedError
from spmd_worker.base.names import counted
from spmd_worker.compat.adapter_requests import LoRARequests, PromptAdapterRequests, set_adapters
from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.chat import ChatOptions, answer_messages
from spmd_worker.compat.prompts import Encoded, Prompt
from spmd_worker.engine.calls.call_runner import CallRunner, OnError, without_error
from spmd_worker.engine.calls.progress_bar import UseTqdm
from spmd_worker.engine.calls.prompt_encoding import Messages, PromptEncoder, as_list
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.request import as_token_ids
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_EMPTY_PROMPT: Final = (
    "the prompt has no tokens, so the first token of its completion has no score: give at least one, such as the "
    "model's bos token"
)


class PromptCalls:
    """Methods of `LLM` for prompts. `chat_template` is that of the LLM, None for the model folder's."""

    def __init__(self, engine: Engine, encoder: PromptEncoder, runner: CallRunner, chat_template: str | None) -> None:
        self._engine, self._encoder, self._runner = engine, encoder, runner
        self._chat_template = chat_template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        gather: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[RequestOutput]:
        """Generate completions; returns one output per prompt, in order. Prompts that cannot be answered (too long for
        the model, ...) raise PromptsRefusedError, a ValueError that names all of them, before anything is computed;
        with `on_error="row"` each of them gets an output with `error` and no completions, and the others are answered.

        Without a `seed`, the engine's seed, the number of the call and the index in it name the random numbers of a
        prompt: they differ from call to call, and are the same when the program runs again.

        Under torchrun every rank of an engine, with all its replicas, must pass the same prompts: RanksDisagreeError
        names the first difference. Every rank gets every output. An error that one rank raises before any prompt is
        answered, such as TypeError or ValueError for its arguments, is RankFailedError on the others, and the engine
        can be used again. With `gather` each rank passes any number of its own prompts and gets only their outputs;
        rejected prompts are an error of that rank, and no progress bar is shown. In `turns()` every call is such a
        call, and ranks may differ in their number of calls.

        `lora_request` is the adapter of all prompts, or a list with one, or None, for each; those that are not loaded
        are loaded first (`add_lora`), with its errors. With `gather` and in `turns()` they must be loaded before. So it
        is with `prompt_adapter_request`, whose virtual tokens come before each prompt: they count in `max_model_len`,
        and not in the prompt's tokens, log-probabilities and penalties.

        A prompt `{"prompt_embeds": rows}` is a tensor [tokens, width] in place of ids: the rows that transformers takes
        as `inputs_embeds`. Its output has placeholders as ids; `prompt_logprobs` and `truncate_prompt_tokens` reject
        it, and penalties count its output alone.

        A prompt of text or ids may have images, `"multi_modal_data": {"image": image or list}`, each a PIL image, an
        array [height, width, 3] of uint8, bytes, a data URL, or a path under `allowed_local_media_path`; the text has
        the model's placeholder for each of them. All images of a call are prepared before its first step, and pixels
        beyond 2 GiB once more before their prompt starts: MediaError for an image that has changed by then.

        `use_tqdm` may be a function that makes the progress bar, such as `partial(tqdm, leave=False)`, which is called
        on the first rank; its errors are logged. `tokenization_kwargs` and `mm_processor_kwargs` raise ValueError.

        `priority` is that of all prompts, or a list with one for each: lower numbers are served earlier, with
        `scheduling_policy="priority"`; otherwise a non-zero one raises ValueError. Answers do not depend on it.
        """

        def encode() -> list[Encoded]:
            encoded = self._encoder.encode(prompts, sampling_params)
            check_extras(tokenization_kwargs, mm_processor_kwargs)
            self._encoder.set_priorities(encoded, priority)
            set_adapters(encoded, lora_request, prompt_adapter_request)
            return encoded

        return self._runner.run("generate", encode, sampling_params, on_error, gather, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        tool_call_format: str = "auto",
        reasoning_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        gather: bool = False,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered with the chat template, otherwise as `generate`.

        A message's content is a string or a list of parts, of text or images (`image_url`, `image`, `image_pil`), which
        only templates that read lists can write; parts of other types are an error of that conversation.
        `chat_template_content_format="auto"` passes content in the form that the template reads; "string" joins parts
        with newlines, "openai" keeps them. `tools` are JSON schemas for the template; arguments of tool calls may be
        JSON. `tool_choice` is auto, none, required or a named function as in OpenAI's API: a required call is
        constrained to the model's tool-call syntax and the function's schema, and `chat_messages` parses it.
        `tool_call_format` and `reasoning_format` are as in `chat_messages`. `chat_template` is the text of another
        template or the name of one of the folder's; `chat_template_kwargs` are further variables for it.
        `continue_final_message`, with `add_generation_prompt=False`, leaves the last message open, for the answer to
        continue.
        """
        continued: list[str | None] = []

        def encode() -> list[Encoded]:
            template = self._chat_template if chat_template is None else chat_template
            options = ChatOptions(
                template,
                chat_template_content_format,
                add_generation_prompt,
                continue_final_message,
                tools,
                tool_choice,
                self._formats(tool_call_format, reasoning_format),
                {} if chat_template_kwargs is None else chat_template_kwargs,
            )
            encoded = self._encoder.render(messages, options, sampling_params)
            continued.extend([each.continued for each in encoded])
            check_extras(tokenization_kwargs, mm_processor_kwargs)
            self._encoder.set_priorities(encoded, priority)
            set_adapters(encoded, lora_request, prompt_adapter_request)
            return encoded

        outputs = self._runner.run("chat", encode, sampling_params, on_error, gather, use_tqdm)
        for output, text in zip(outputs, continued, strict=True):
            output.continued = text
        return outputs

    def chat_messages(
        self,
        output: RequestOutput,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        tool_call_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> list[dict[str, Any]]:
        """Parse an output of `chat`: one assistant message per completion, as in OpenAI's API, to be appended to the
        conversation.

        `tools`, `tool_choice` and `sampling_params` are those of the call of `chat`: with tools, tool calls in the text
        become `tool_calls`; reasoning becomes `reasoning_content`. Their formats are detected from the chat template,
        or given as in `model.tool_call_format` and `model.reasoning_format` (a keyword of `LLM` too). Other text stays
        content. Raises ConfigError for a model folder without a tokenizer, ValueError for invalid tools.
        """
        tokenizer = self._engine.need_tokenizer()
        model = self._formats(tool_call_format, reasoning_format)
        options = ChatOptions(self._chat_template, tools=tools, tool_choice=tool_choice, model=model)
        return answer_messages(output, options, tokenizer, sampling_params or SamplingParams())

    def _formats(self, tool_call_format: str, reasoning_format: str) -> ModelOptions:
        """The formats of a call, where it says nothing those of the run."""
        own = self._engine.config.model.reasoning_format if reasoning_format == "auto" else reasoning_format
        return ModelOptions(tool_call_format=tool_call_format, reasoning_format=own)

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gather: bool = False,
        use_tqdm: UseTqdm = False,
        lora_request: LoRARequests = None,
        prompt_adapter_request: PromptAdapterRequests = None,
        top_k: int = 0,
        candidate_ids: Sequence[Any] | None = None,
        start: int | Sequence[int] | None = None,
    ) -> list[Any]:
        """Log-probability of each token of `completions[i]`, token ids, given `prompts[i]` and the preceding tokens.

        They are computed by the kernels that sample, with the current weights. For completions of `generate` they are
        bit-identical to its `logprobs` (those of the unprocessed logits, `raw_logprobs`), however rows were batched,
        cut into chunks or preempted in either call (with `logprobs=-1` under tensor parallelism, up to the rounding of
        a sum). `gather`, `lora_request` and `prompt_adapter_request` are as in `generate`.

        `sampling_params` are those with which the completions were sampled. Only a model with LongRoPE needs them, if
        their `max_tokens` decides on the scaling of positions; they have no other effect.

        A list of floats for each completion; with `top_k`, `candidate_ids` or `start`, `PromptScores`, whose arrays
        also have the `top_k` most probable tokens of each row (at most 1024), and those of `candidate_ids[i]`: token
        ids for all rows, or a list for each row. Row r predicts token r + 1 of prompt and completion: the first scored
        row is `start`, or one for each prompt, by default that of the completion's first token. What is before it comes
        from the prefix cache where it is there; the arrays take memory for scored rows alone.

        Raises ValueError, before anything is computed, for a completion or a prompt without tokens, and as `generate`
        for one that is too long; and for a row with non-finite logits.
        """
        params: Any = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        has_arrays = bool(top_k) or candidate_ids is not None or start is not None
        params = [] if has_arrays else params
        lengths: list[int] = []

        def encode() -> list[Encoded]:
            listed = as_list(prompts)
            if not isinstance(completions, Sequence) or isinstance(completions, str | bytes):
                kind = type(completions).__name__
                raise TypeError(f"completions is a {kind}: give a list of token ids for each prompt")
            if len(listed) != len(completions):
                raise ValueError(
                    f"{len(completions)} completions for {counted(len(listed), 'prompt')}: give one for each prompt"
                )
            given: Sequence[SamplingParams | None] = [None] * len(listed)
            if sampling_params is not None:
                given = self._encoder.params(sampling_params, len(listed))
            if has_arrays and candidate_ids is not None and len(candidate_ids) != len(listed):
                raise ValueError(
                    f"{len(candidate_ids)} candidate_ids for {counted(len(listed), 'prompt')}: give one for each prompt"
                )
            starts = _starts(start, len(listed))
            joined: list[Encoded] = []
            all_encoded = self._encoder.encode(listed)
            set_adapters(all_encoded, lora_request, prompt_adapter_request)
            for encoded, completion, sampling in zip(all_encoded, completions, given, strict=True):
                name = f"completions[{len(joined)}]"
                tokens = as_token_ids(completion, name)
                if not tokens:
                    raise ValueError(f"{name} has no tokens: there is nothing to score")
                lengths.append(len(tokens))
                error = encoded.error if encoded.error or encoded.token_ids else _EMPTY_PROMPT
                both = replace(encoded, token_ids=(*encoded.token_ids, *tokens), error=error, rules=None)
                num_before = both.num_virtual_tokens + len(encoded.token_ids)
                both.rope_regime = self._scored_regime(num_before, len(tokens), sampling)
                if has_arrays:
                    index = len(joined)
                    own = None if candidate_ids is None else candidate_ids[index]
                    default = max(len(encoded.token_ids) - 1, 0)
                    params.append(_scoring(top_k, own, default if starts[index] is None else starts[index]))
                joined.append(both)
            return joined

        try:
            outputs = self._runner.run("score_tokens", encode, params, gather=gather, use_tqdm=use_tqdm)
        except PromptsRefusedError as error:
            error.args = (_in_scored_words(str(error)),)
            error.reasons = {index: _in_scored_words(reason) for index, reason in error.reasons.items()}
            raise
        if has_arrays:
            return [without_error(output).prompt_scores for output in outputs]
        return [_last_logprobs(without_error(output), length) for output, length in zip(outputs, lengths, strict=True)]

    def _scored_regime(self, num_prompt_tokens: int, num_tokens: int, sampling: SamplingParams | None) -> int:
        """RoPE regime in which a completion was sampled. Raises ValueError if it is ambiguous."""
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


def _starts(start: int | Sequence[int] | None, count: int) -> list[Any]:
    """The first scored row of each prompt, None for the default."""
    if not isinstance(start, list | tuple):
        return [start] * count
    if len(start) != count:
        raise ValueError(f"{len(start)} numbers of start for {counted(count, 'prompt')}: give one for each prompt")
    return list(start)


def _scoring(top_k: int, candidates: Any, start: int) -> SamplingParams:
    """Parameters of one scored row."""
    try:
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top_k,
            prompt_logprob_token_ids=candidates,
            prompt_logprob_start=start,
            detokenize=False,
        )
    except ValueError as error:
        raise ValueError(_in_scored_words(str(error))) from None


def _in_scored_words(text: str) -> str:
    """An error about sampling parameters with the arguments of `score_tokens` that set them."""
    text = text.replace("prompt_logprob_token_ids", "candidate_ids").replace("prompt_logprob_start", "start")
    return text.replace("prompt_logprobs", "top_k")


def _last_logprobs(output: RequestOutput, count: int) -> list[float]:
    """Log-probabilities of the last tokens of a prompt."""
    assert output.prompt_logprobs is not None, "requested by score_tokens"
    tokens, positions = output.prompt_token_ids[-count:], output.prompt_logprobs[-count:]
    found = [position[token].logprob for token, position in zip(tokens, positions, strict=True) if position is not None]
    assert len(found) == count, (len(found), count)
    return found
