"""lm-evaluation-harness on this runtime: `spmd_worker` is a model of the harness once this module is imported.

    python -m spmd_worker.integrations.lm_eval_model run --model spmd_worker --model_args pretrained=DIR --tasks TASK
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.lm_eval_model run --model spmd_worker \\
        --model_args pretrained=DIR,tensor_parallel_size=2 --tasks TASK

Under torchrun every rank runs the harness with all requests and gets all results; the engine divides the work between
the ranks and checks that their requests are equal. Knows nothing about ranks or steps.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from spmd_worker.base.config.extras import package_error

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise package_error("lm_eval", "lm-eval", error) from error

from spmd_worker.base.errors import ConfigError
from spmd_worker.llm import LLM
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_DEFAULT_MAX_GEN_TOKS: Final = 256
_SAMPLING_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed")
_IGNORED_KEYS: Final = ("do_sample", "num_beams", "use_cache")
"""Ignored generation arguments: `do_sample` has become a temperature, and there is always one beam."""

logger = logging.getLogger(__name__)


def _device_of(given: str | None) -> str:
    """`LLM`'s device for one of the harness, such as cpu and cuda:0.

    The harness's command says cuda:0 unless it is told otherwise; where torch has no CUDA device its own models run on
    the CPU then, and so does this one.
    """
    device = str(given or "auto").split(":")[0]
    if device == "cuda" and not torch.cuda.is_available():
        logger.warning("device=%s of the harness, but torch finds no CUDA device here: the CPU is used", given)
        return "cpu"
    return device


_Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""(texts of context and continuation, their token ids)."""


@register_model("spmd_worker")
class SpmdWorkerLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """`pretrained` is a model folder; `batch_size` and `max_batch_size`, which the harness gives every model, have no
    effect. All others are `LLM`'s.

    `max_length` is the most tokens before a scored one, `max_gen_toks` the most that are generated if a task names no
    number. `lora_local_path` is the folder of a LoRA adapter (`use_adapter`). Text is encoded with the tokenizer's
    default special tokens, unless `add_bos_token` decides.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = _DEFAULT_MAX_GEN_TOKS,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        lora_local_path: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        options["device"] = _device_of(options.get("device"))
        if lora_local_path is not None:
            options.setdefault("enable_lora", True)
        self.llm = LLM(pretrained, **options)
        self._lora_request: LoRARequest | None = None
        self._adapter_ids: dict[str, int] = {}
        self.use_adapter(lora_local_path)
        self.tokenizer = self.llm.llm_engine.need_tokenizer()
        self._max_gen_toks, self._name = max_gen_toks, str(pretrained)
        self._prefix_token_id, self._add_bos_token = prefix_token_id, add_bos_token
        self._chat_template_args = dict(chat_template_args or {})
        # A scored text is a prompt here, with its last token, and one more token is generated.
        most = self.llm.llm_engine.max_model_len - 2
        if max_length is not None and max_length > most:
            raise ConfigError(f"max_length={max_length} must be at most {most}, two below max_model_len={most + 2}")
        self._max_length = max_length or most

    def use_adapter(self, path: str | None) -> None:
        """Answer later requests with the LoRA adapter in a folder, None: without one. So one engine evaluates several
        checkpoints of a fine-tune one after the other; answers that the harness has cached are not renewed.
        """
        self._lora_request = None
        if path is not None:
            number = self._adapter_ids.setdefault(str(path), len(self._adapter_ids) + 1)
            self._lora_request = LoRARequest(str(path), number, str(path))

    @property
    def max_length(self) -> int:
        """Most tokens before a scored one, or of context and answer together."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        token_id = self.tokenizer.eos_token_id
        if token_id is None:
            raise ConfigError(f"pretrained={self._name}: the tokenizer names no eos_token")
        return int(token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: the beginning of a sequence, else its end."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        token_id = self.tokenizer.bos_token_id
        return self.eot_token_id if token_id is None else int(token_id)

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's cache of requests."""
        return f"{self._name.replace('/', '__')}__{self.tokenizer.fingerprint()}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Source of the template, which the harness writes into its results."""
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ConfigError(f"chat_template={chat_template}: a model folder has one template here; give True")
        return self.tokenizer.chat_template_source or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Text of a chat; without `add_generation_prompt` it ends with the last message, for the model to continue."""
        text = self.tokenizer.apply_chat_template(chat_history, add_generation_prompt, self._chat_template_args)
        if add_generation_prompt or not chat_history:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; one that begins with the beginning-of-sequence token does not get another."""
        adds = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.token_text(self.prefix_token_id)):
            adds = False
        return self.tokenizer.encode(string, add_special_tokens=adds is None or adds)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text up to the first of the task's stop strings, which is left out."""
        asked = [self._as_prompt(*request.args) for request in requests]
        outputs = self._answer([token_ids for token_ids, _ in asked], [params for _, params in asked], disable_tqdm)
        texts = []
        for request, (_, params), output in zip(requests, asked, outputs, strict=True):
            text = postprocess_generated_text(output.outputs[0].text, list(params.stop), None)
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of complete texts, in windows if they are longer than `max_length`."""
        windows: list[_Request] = []
        counts: list[int] = []
        for request in requests:
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in found]
            windows += [(None, list(context), list(continuation)) for context, continuation in own]
            counts.append(len(own))
        answers = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        sums = []
        for request, count in zip(requests, counts, strict=True):
            total = sum(next(answers)[0] for _ in range(count))
            sums.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would have produced it."""
        prompts = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        outputs = self._answer(prompts, [params] * len(prompts), disable_tqdm)
        answers = []
        for (key, _, scored), prompt, output in zip(requests, prompts, outputs, strict=True):
            answer = _score(prompt, min(len(scored), len(prompt) - 1), output)
            answers.append(answer)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _as_prompt(self, context: str, arguments: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        """Token ids of the end of the context, as many as leave capacity for the answer."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(dict(arguments), self.max_gen_toks))
        eos = self.tokenizer.token_text(self.eot_token_id)
        stop = handle_stop_sequences(given.pop("until", None), eos=eos)
        max_tokens = int(given.pop("max_gen_toks"))
        unknown = [key for key in given if key not in (*_SAMPLING_KEYS, *_IGNORED_KEYS)]
        if unknown:
            raise ConfigError(f"generation argument {unknown[0]!r} is unknown; known: {', '.join(_SAMPLING_KEYS)}")
        num_context = self.max_length - max_tokens
        if num_context < 1:
            raise ConfigError(f"max_gen_toks={max_tokens} leaves no context in max_length={self.max_length}")
        sampling = {key: given[key] for key in _SAMPLING_KEYS if given.get(key) is not None}
        params = SamplingParams(max_tokens=max_tokens, stop=tuple(each for each in stop if each), **sampling)
        return self.tok_encode(context)[-num_context:], params

    def _answer(
        self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool
    ) -> list[RequestOutput]:
        """Raises ValueError for a request that cannot be answered: scores without it would be wrong."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(given, params, use_tqdm=not disable_tqdm, lora_request=self._lora_request)


def _score(prompt: list[int], num_scored: int, output: RequestOutput) -> tuple[float, bool]:
    """Log-probability of the last `num_scored` tokens of the prompt, and whether all are the argmax."""
    assert output.prompt_logprobs is not None, "requested by the caller"
    start = len(prompt) - num_scored
    total, is_greedy = 0.0, True
    for token_id, position in zip(prompt[start:], output.prompt_logprobs[start:], strict=True):
        assert position is not None, "only the first token has none"
        total += position[token_id].logprob
        is_greedy = is_greedy and position[token_id].rank == 1
    return total, is_greedy


def main() -> None:
    """Run the harness's own command line, with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
