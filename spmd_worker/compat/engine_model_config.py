"""The model of a run, by the names of vLLM's ModelConfig that scripts read; config.json as an object."""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.names import hint
from spmd_worker.replica.sequence.sampling_params import MAX_LOGPROBS, SamplingParams
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)

_CONFIG_NAME: Final = "config.json"


class EngineModelConfig:
    """Read-only: what the engine was started with. `model` is the folder, `dtype` a `torch.dtype`, `max_model_len`
    counts tokens of a prompt and its answer. Sizes are the whole model's, on every rank: what vLLM's methods take
    beside (a parallel config) is without effect.
    """

    trust_remote_code = False
    skip_tokenizer_init = False
    tokenizer_mode = "auto"
    is_multimodal_model = False
    is_encoder_decoder = False
    is_attention_free = False
    uses_mrope = False
    max_logprobs = MAX_LOGPROBS

    def __init__(self, resolved: ResolvedRun, dtype: Any) -> None:
        self._resolved = resolved
        self.model = self.tokenizer = str(resolved.model_folder)
        self.served_model_name = resolved.config.model.path
        self.revision, self.quantization = resolved.config.model.revision, resolved.config.model.quantization
        self.dtype, self.max_model_len, self.seed = dtype, resolved.max_model_len, resolved.config.seed
        self.enforce_eager = resolved.config.executor.enforce_eager
        self.logprobs_mode = resolved.config.model.logprobs_mode
        self.architecture = resolved.model_config.architecture
        self.architectures = [self.architecture]
        self.runner_type = "generate" if resolved.model_config.pooling is None else "pooling"

    def __getattr__(self, name: str) -> Any:
        """For names that are not here only."""
        raise AttributeError(f"model_config has no attribute {name!r}{hint(name, dir(self))}")

    @cached_property
    def hf_config(self) -> Any:
        """config.json: transformers' configuration where transformers is installed and knows it, else an object with
        its keys as attributes.
        """
        try:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(self.model, local_files_only=True, trust_remote_code=False)
        except ImportError:
            return PlainConfig(_read_config(Path(self.model)))
        except (OSError, ValueError, KeyError) as error:  # of another release, or one that needs code
            logger.info(
                "transformers cannot open the configuration of %s, so ours is handed out: %s", self.model, error
            )
            return PlainConfig(_read_config(Path(self.model)))

    @property
    def hf_text_config(self) -> Any:
        """The part of `hf_config` that is about the text, where that is a part."""
        return getattr(self.hf_config, "text_config", None) or self.hf_config

    def get_vocab_size(self) -> int:
        """Token ids that the model knows."""
        return self._resolved.model_config.vocab_size

    def get_hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self._resolved.model_config.hidden_size

    def get_head_size(self) -> int:
        """Elements of an attention head."""
        return self._resolved.model_config.head_size

    def get_num_layers(self, parallel_config: Any = None) -> int:
        """Of the whole model."""
        return self._resolved.model_config.num_layers

    def get_num_attention_heads(self, parallel_config: Any = None) -> int:
        """Query heads of a layer."""
        return self._resolved.model_config.num_heads

    def get_num_kv_heads(self, parallel_config: Any = None) -> int:
        """Key-value heads of a layer."""
        return self._resolved.model_config.num_kv_heads

    def get_total_num_kv_heads(self) -> int:
        """As `get_num_kv_heads`."""
        return self.get_num_kv_heads()

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """What prompts without parameters get, where that is not `SamplingParams()`."""
        own, plain = self._resolved.default_sampling, SamplingParams()
        names = [spec.name for spec in fields(SamplingParams)]
        return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(plain, name)}


class PlainConfig:
    """config.json with its keys as attributes, those of inner objects too."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"config.json has no {name!r}: install transformers for a configuration with defaults")
        return PlainConfig(values[name]) if isinstance(values[name], Mapping) else values[name]

    def __repr__(self) -> str:
        return f"PlainConfig({self._values!r})"

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        return json.loads(json.dumps(self._values))  # type: ignore[no-any-return]  # a copy of an object


def _read_config(folder: Path) -> Mapping[str, Any]:
    content = json.loads((folder / _CONFIG_NAME).read_text(encoding="utf-8"))
    assert isinstance(content, dict), "it was read at the start"
    return content
