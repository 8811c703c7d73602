"""Calls that answer prompts with tokens, and score tokens that are there: `LLM.generate`, `chat`, `score_tokens`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spmd_worker.base.config.schema import ModelOptions
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

_NOTHING_BEFORE: Final = (
    "the prompt has no tokens: nothing comes before the first token of its completion, so that it has no score; "
    "give at least one, such as the model's bos token"
)


class PromptCalls:
    """Methods of `LLM`. `chat_template` is the one that the LLM was given, None for the model folder's."""

    def __init__(self, engine: Engine, encoder: PromptEncoder, runner: CallRunner, chat_template: str | None) -> None:
        self._engine, self._encoder, self._runner = engine, encoder, runner
        self._chat_template = chat_template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        gather: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. Prompts that can never be answered (too long for the model, ...) raise
        PromptsRefusedError, a ValueError that names all of them, before anything is computed; with `on_error="row"`
        each of them gets an output with `error` and no completions, and the rest is answered.

        A prompt whose parameters have no `seed` draws by the engine's seed, the number of the call and its index in it:
        another call draws other numbers, and a program that runs again draws the same ones.

        Under torchrun every rank of an engine, those of all its replicas, must pass the same prompts:
        RanksDisagreeError names the first that differs. Every rank gets every output. What one rank raises before any
        prompt is answered, such as TypeError or ValueError for its arguments, is RankFailedError on the others, and the
        engine can be used again. With `gather` every rank passes prompts of its own, as many as it likes or none, and
        gets their outputs only; prompts that are refused are that rank's error, and no bar is shown. In `turns` every
        call is one of those, and not every rank needs to make it.

        `use_tqdm` may be what makes the bar, such as `partial(tqdm, leave=False)`; the first rank has one, and what it
        raises is logged. Adapters do not exist here and rows are served first come, first served: ValueError for a
        `lora_request` or a `priority` that asks for anything, and for `tokenization_kwargs` and `mm_processor_kwargs`.
        """

        def encode() -> list[Encoded]:
            encoded = self._encoder.encode(prompts, sampling_params)
            check_extras(len(encoded), lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
            return encoded

        return self._runner.run("generate", encode, sampling_params, on_error, gather, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
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
    ) -> list[RequestOutput]:
        """One conversation or a list of them through the model's chat template; otherwise as `generate`.

        A message's content is a string or a list of text parts; a part that is no text (an image) is that
        conversation's error. With `chat_template_content_format="auto"` the template gets the form that it takes, with
        `string` parts are joined by line ends, with `openai` they are kept. `tools` are JSON schemas, which the
        template writes; arguments of tool calls may be JSON. `tool_choice` is auto, none, required or a named function
        as in OpenAI's API: an answer that must be a call is held to the model's own call syntax and the function's
        schema, and `chat_messages` reads it. `tool_call_format` and `reasoning_format` as in `chat_messages`.
        `chat_template` is another template's text or the name of one of the folder's, `chat_template_kwargs` are more
        variables for it. `continue_final_message`, with `add_generation_prompt=False`, leaves the last message open,
        and the answer goes on with it.
        """

        def encode() -> list[Encoded]:
            template = self._chat_template if chat_template is None else chat_template
            options = ChatOptions(
                template,
                chat_template_content_format,
                add_generation_prompt,
                continue_final_message,
                tools,
                tool_choice,
                ModelOptions(tool_call_format=tool_call_format, reasoning_format=reasoning_format),
                {} if chat_template_kwargs is None else chat_template_kwargs,
            )
            encoded = self._encoder.render(messages, options, sampling_params)
            check_extras(len(encoded), lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
            return encoded

        return self._runner.run("chat", encode, sampling_params, on_error, gather, use_tqdm)

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
        """The message of each completion of an output of `chat`, in OpenAI's shape, to be appended to the conversation.

        `tools`, `tool_choice` and `sampling_params` are those that `chat` had: with tools, calls in the text become
        `tool_calls`, and reasoning becomes `reasoning_content`. In which form a model writes them is found in its chat
        template, or said as in `model.tool_call_format` and `model.reasoning_format`. What is no call stays content.
        Raises ConfigError for a model folder without a tokenizer, ValueError for tools that are none.
        """
        tokenizer = self._engine.need_tokenizer()
        model = ModelOptions(tool_call_format=tool_call_format, reasoning_format=reasoning_format)
        options = ChatOptions(self._chat_template, tools=tools, tool_choice=tool_choice, model=model)
        return answer_messages(output, options, tokenizer, sampling_params or SamplingParams())

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gather: bool = False,
        use_tqdm: UseTqdm = False,
    ) -> list[list[float]]:
        """The log-probability of each token of `completions[i]`, token ids, given `prompts[i]` and the tokens before.

        They come from the kernels that sample, with weights as they are now: of what `generate` sampled they are the
        bits that it reports as `logprobs` (those of the unprocessed logits, `raw_logprobs`), however rows were batched,
        cut into chunks or preempted then and now (with `logprobs=-1` under tensor parallelism, but for the rounding of
        a sum). `gather` as in `generate`.

        `sampling_params` are those that the completions were sampled with. A model with LongRoPE needs them where it
        depends on their `max_tokens` how positions are turned; nothing else of them counts.

        Raises ValueError, before anything is computed, for a completion or a prompt without tokens, and as `generate`
        does for what is too long; and for a row whose logits are not finite.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        lengths: list[int] = []

        def encode() -> list[Encoded]:
            listed = as_list(prompts)
            if not isinstance(completions, Sequence) or isinstance(completions, str | bytes):
                kind = type(completions).__name__
                raise TypeError(f"completions is a {kind}: give a list of token ids for each prompt")
            if len(listed) != len(completions):
                raise ValueError(f"{len(completions)} completions for {len(listed)} prompts: give one for each prompt")
            given = (
                [None] * len(listed) if sampling_params is None else self._encoder.params(sampling_params, len(listed))
            )
            joined = []
            for prompt, completion, sampling in zip(listed, completions, given, strict=True):
                encoded, tokens = self._encoder.encode_one(prompt, is_cut=False), as_token_ids(completion)
                if not tokens:
                    raise ValueError("a completion has no tokens: there is nothing to score")
                lengths.append(len(tokens))
                error = encoded.error if encoded.error or encoded.token_ids else _NOTHING_BEFORE
                both = Encoded(encoded.text, (*encoded.token_ids, *tokens), error)
                both.cache_salt = encoded.cache_salt
                both.rope_regime = self._scored_regime(len(encoded.token_ids), len(tokens), sampling)
                joined.append(both)
            return joined

        outputs = self._runner.run("score_tokens", encode, params, gather=gather, use_tqdm=use_tqdm)
        return [_last_logprobs(without_error(output), length) for output, length in zip(outputs, lengths, strict=True)]

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


def _last_logprobs(output: RequestOutput, count: int) -> list[float]:
    """Of the last tokens of a prompt."""
    assert output.prompt_logprobs is not None, "they were asked for"
    tokens, positions = output.prompt_token_ids[-count:], output.prompt_logprobs[-count:]
    found = [position[token].logprob for token, position in zip(tokens, positions, strict=True) if position is not None]
    assert len(found) == count, (len(found), count)
    return found
