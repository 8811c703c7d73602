"""inspect_ai on this runtime: the provider `spmd_worker`, which inspect finds by itself if both are installed.

    inspect eval TASK.py --model spmd_worker/FOLDER -M max_model_len=4096
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.inspect_ai_model eval TASK.py \\
        --model spmd_worker/FOLDER -M tensor_parallel_size=2

`-M` arguments are `LLM`'s, and `adapter`, a name of `adapters`, for all samples. Samples send requests at any time,
many at once: a thread steps the engine, and every request is parsed as a row of the OpenAI-compatible frontend. Under
torchrun rank 0 runs inspect's command line and sends the others the engine's arguments; they follow its steps. If a row
has no seed, its content and the number of equal requests before it name its random stream, so that no answer depends on
the order of samples.
"""

import asyncio
import atexit
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any, Final

import torch
import torch.distributed as dist

from spmd_worker.base.config.extras import package_error

try:
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        TopLogprob,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo
except ImportError as error:
    raise package_error("inspect_ai", "inspect-ai", error) from error

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.openai.engine_models import engine_models
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.serve.engine_loop import EngineLoop
from spmd_worker.frontends.serve.exchange import OpenRequest, RequestExchange
from spmd_worker.frontends.serve.request_reader import RequestReader, content_name
from spmd_worker.llm import LLM
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from spmd_worker.replica.sequence.outputs import Logprob as TokenLogprob
from spmd_worker.tokenizer.messages import InvalidRequestError

logger = logging.getLogger(__name__)

_URL: Final = "/v1/chat/completions"
_MOST_SEQUENCES: Final = 1 << 20
"""Most sequences that may wait. Inspect itself bounds its concurrent requests (`--max-connections`)."""
_DRAIN_S: Final = 5.0
"""Grace for open requests when inspect ends."""
_WAIT: Final = timedelta(days=7)
"""Time limit of the other ranks' wait for inspect to name a model."""
_STOP_REASONS: Final = {"stop": "stop", "length": "max_tokens"}
_SAME_KEYS: Final = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "max_tokens")
_open: Final[list["SpmdWorkerAPI"]] = []


@modelapi(name="spmd_worker")
class SpmdWorkerAPI(ModelAPI):  # type: ignore[misc]  # inspect_ai is no dependency
    """`model_name` is a model folder, or a name on the hub; `model_args` are `LLM`'s. `adapter` is a name of its
    `adapters`.

    Answers are text: a sample with tools is rejected, because nothing here parses tool calls. Raises ConfigError for a
    second model under torchrun, where the ranks follow one.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  # inspect's own signature
        adapter: str | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        known = [*(model_args.get("adapters") or ()), *(model_args.get("prompt_adapters") or ())]
        if adapter is not None and adapter not in known:
            named = ", ".join(known) or "none are given"
            raise ConfigError(f"adapter={adapter} is not one of adapters or prompt_adapters: {named}")
        self._adapter = adapter
        arguments = {"model": model_name, **model_args}
        _send_arguments(arguments)
        self.llm = LLM(**arguments)
        engine = self.llm.llm_engine
        context = RowContext(engine.tokenizer, engine.limits, engine.config.limits, models=engine_models(engine))
        self._reader = RequestReader(engine.default_sampling, context)
        self._exchange = RequestExchange(_MOST_SEQUENCES)
        self._loop = EngineLoop(engine, self._exchange, _DRAIN_S)
        self._asked: Counter[str] = Counter()
        self._num_asked = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._step, name="spmd-inspect", daemon=True)
        self._thread.start()
        self._owner = os.getpid()
        _open.append(self)
        # Inspect does not close models of a command line.
        atexit.register(self.shutdown)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer one request. Raises ValueError for an invalid one, RuntimeError if the engine has failed."""
        if tools and tool_choice != "none":
            raise ValueError(
                f"{len(tools)} tools were given: answers of spmd_worker are text, in which nothing reads tool calls; "
                f"leave the tools out, or parse the text in a solver"
            )
        body = self._body(input, config)
        name = content_name(_URL, body)
        with self._counting:
            self._asked[name] += 1
            self._num_asked += 1
            number, custom_id = self._num_asked, f"{name}:{self._asked[name]}"
        try:
            (row,) = self._reader.read(number, _URL, json.dumps(body).encode(), custom_id).rows
        except InvalidRequestError as error:
            if error.code != "prompt_too_long":
                raise
            choice = ChatCompletionChoice(message=_message("", self.model_name), stop_reason="model_length")
            return ModelOutput(model=self.model_name, choices=[choice], error=str(error))
        assert isinstance(row, EncodedRow), "a chat is not pooled"
        output = await self._answer(row)
        if output.error is not None:
            raise RuntimeError(output.error)
        return self._model_output(output)

    def max_connections(self) -> int:
        """Most sequences that run at once."""
        return int(self.llm.llm_engine.max_num_seqs)

    def shutdown(self) -> None:
        """End the engine, and the other ranks' `follow`. Idempotent; no effect in a forked process."""
        if os.getpid() != self._owner:
            return
        self._exchange.end("inspect has ended")
        self._thread.join()
        self.llm.close()

    def _step(self) -> None:
        try:
            self._loop.run()
        except BaseException:  # the exchange reports it to open requests
            logger.exception("the engine has failed")

    async def _answer(self, row: EncodedRow) -> RequestOutput:
        num_sequences = row.sampling.num_sequences
        self._exchange.reserve(num_sequences)
        try:
            request = OpenRequest(row, is_streamed=False, loop=asyncio.get_running_loop())
            self._exchange.submit(request)
            try:
                output = await self._exchange.newest(request)
                assert isinstance(output, RequestOutput), output
                return output
            finally:
                self._exchange.close(request)
        finally:
            self._exchange.free(num_sequences)

    def _body(self, messages: list[ChatMessage], config: GenerateConfig) -> dict[str, Any]:
        """Body that a client of the OpenAI-compatible frontend would send."""
        options = {key: getattr(config, key) for key in _SAME_KEYS}
        options |= {"stop": config.stop_seqs, "n": config.num_choices, "logit_bias": config.logit_bias}
        if config.logprobs:
            options |= {"logprobs": True, "top_logprobs": config.top_logprobs}
        if config.response_schema is not None:
            schema = config.response_schema.json_schema.model_dump(exclude_none=True)
            json_schema = {"name": config.response_schema.name, "schema": schema, "strict": True}
            options["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        given = {key: value for key, value in options.items() if value is not None}
        model = {} if self._adapter is None else {"model": self._adapter}
        return {"messages": [_as_json(message) for message in messages], **given, **model}

    def _model_output(self, output: RequestOutput) -> ModelOutput:
        num_input, num_output = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
        return ModelOutput(
            model=self.model_name,
            choices=[_choice(each, self.model_name) for each in output.outputs],
            usage=ModelUsage(input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output),
        )


def _as_json(message: ChatMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    # Parts that are not text are rejected with their type.
    parts = [{"type": part.type, "text": getattr(part, "text", "")} for part in message.content]
    return {"role": message.role, "content": parts}


def _message(text: str, model_name: str) -> ChatMessageAssistant:
    return ChatMessageAssistant(content=text, model=model_name, source="generate")


def _choice(completion: CompletionOutput, model_name: str) -> ChatCompletionChoice:
    logprobs = None
    if completion.logprobs is not None:
        positions = zip(completion.token_ids, completion.logprobs)
        logprobs = Logprobs(content=[_logprob(token_id, position) for token_id, position in positions])
    return ChatCompletionChoice(
        message=_message(completion.text, model_name),
        stop_reason=_STOP_REASONS.get(completion.finish_reason or "", "unknown"),
        logprobs=logprobs,
    )


def _logprob(token_id: int, position: TokenLogprobs) -> Logprob:
    ranked = sorted(position.values(), key=lambda each: each.rank)
    return Logprob(**_values(position[token_id]), top_logprobs=[TopLogprob(**_values(each)) for each in ranked])


def _values(entry: TokenLogprob) -> dict[str, Any]:
    token_bytes = None if entry.token_bytes is None else list(entry.token_bytes)
    return {"token": entry.decoded_token or "", "logprob": entry.logprob, "bytes": token_bytes}


def _send_arguments(arguments: dict[str, Any] | None) -> None:
    """Rank 0: send the others their engine's arguments; None to start nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if not dist.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: rank 0 alone runs inspect, which is started by torchrun -m "
            f"spmd_worker.integrations.inspect_ai_model eval ..."
        )
    if _open:
        raise ConfigError("the ranks follow one model already: evaluate one model at a time")
    content = torch.frombuffer(bytearray(json.dumps(arguments).encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor([content.numel()]), src=0)
    dist.broadcast(content, src=0)


def _follow() -> None:
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, src=0)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=0)
    arguments = json.loads(bytes(content.tolist()))
    if arguments is not None:
        with LLM(**arguments) as llm:
            llm.llm_engine.follow()


def main(arguments: Sequence[str]) -> None:
    """Inspect's command line on rank 0; the other ranks follow. Raises SystemExit as inspect does."""
    (inspect,) = entry_points(group="console_scripts", name="inspect")
    sys.argv = ["inspect", *arguments]
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        inspect.load()()
        return
    dist.init_process_group("gloo", timeout=_WAIT)
    if dist.get_rank() != 0:
        _follow()
        return
    try:
        inspect.load()()
    finally:
        if _open:
            _open[0].shutdown()
        else:
            _send_arguments(None)


if __name__ == "__main__":
    # Inspect imports this module by its name, and gets this one.
    sys.modules["spmd_worker.integrations.inspect_ai_model"] = sys.modules["__main__"]
    main(sys.argv[1:])
