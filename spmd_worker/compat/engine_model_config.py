"""The model of a run under the names of vLLM's ModelConfig that scripts read, and config.json as an object."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

from spmd_worker.base.config.extras import package_fault
from spmd_worker.base.config.schema import MAX_LOGPROBS
from spmd_worker.base.names import hint
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)


def _size(name: str) -> Callable[..., int]:
    """Method that returns a size of the full model; a parallel config has no effect. Without attention there are no
    heads.
    """

    def get(config: "EngineModelConfig", parallel_config: Any = None) -> int:
        is_of_heads = name in ("head_size", "num_heads", "num_kv_heads")
        return 0 if is_of_heads and config.is_attention_free else int(getattr(config._resolved.model_config, name))

    return get


class EngineModelConfig:
    """Read-only properties of the running model. `model` is the folder, `dtype` a `torch.dtype`; `max_model_len` counts
    tokens of prompt and answer. Sizes are those of the full model on every rank: the parallel config that vLLM's
    methods take has no effect.
    """

    trust_remote_code = False
    skip_tokenizer_init = False
    tokenizer_mode = "auto"
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
        part = resolved.model_config.encoder_part
        self.is_encoder_decoder = part is not None
        self.is_attention_free = resolved.model_config.is_attention_free
        vision, limits = resolved.model_config.vision, resolved.config.limits
        parts = () if vision is None else vision.parts
        is_taken = any((limits.max_images if each.sees else limits.max_audios) > 0 for each in parts)
        vision = vision if is_taken else None
        self.is_multimodal_model = vision is not None or (part is not None and part.audio is not None)
        self.uses_mrope = vision is not None and vision.has_three_positions
        self.runner_type = "generate" if resolved.model_config.pooling is None else "pooling"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"model_config has no attribute {name!r}{hint(name, dir(self))}")

    @cached_property
    def hf_config(self) -> Any:
        """config.json: transformers' configuration if transformers supports it, else an object with its keys."""
        try:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(self.model, local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            logger.info("transformers %s: ours is used", package_fault("transformers", None, error).reason)
        except (OSError, ValueError, KeyError) as error:  # of another release, or one that needs code
            logger.info("transformers cannot open the configuration of %s, so ours is used: %s", self.model, error)
        content = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        assert isinstance(content, dict), "validated at the start"
        return PlainConfig(content)

    @property
    def hf_text_config(self) -> Any:
        """The `text_config` of `hf_config` if it has one, else `hf_config`."""
        return getattr(self.hf_config, "text_config", None) or self.hf_config

    get_vocab_size = _size("vocab_size")
    get_hidden_size = _size("hidden_size")
    get_head_size = _size("head_size")
    get_num_layers = _size("num_layers")
    get_num_attention_heads = _size("num_heads")
    get_num_kv_heads = _size("num_kv_heads")
    get_total_num_kv_heads = _size("num_kv_heads")

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Default sampling parameters that differ from `SamplingParams()`."""
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
            raise AttributeError(
                f"config.json has no key {name!r}: install transformers for a configuration with defaults"
            )
        return PlainConfig(values[name]) if isinstance(values[name], Mapping) else values[name]

    def __repr__(self) -> str:
        return f"PlainConfig({self._values!r})"

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(self._values))  # type: ignore[no-any-return]  # a copy of an object
