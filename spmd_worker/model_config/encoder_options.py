"""Settings of a run with an encoder-decoder model: the lengths of both parts, and what such models do not support."""

from typing import Final

from kv_cache.block import num_blocks_for
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.model_config import ENCODERS, ModelConfig

_CLASSIFIES: Final = "classifies with an encoder-decoder model"


def max_encoder_len(config: RunConfig, model_config: ModelConfig, max_model_len: int) -> int:
    """Rows of the longest input of the encoder; 0 for a model without one. `max_model_len` is the run's: of a model
    that classifies, encoder and decoder read the same row. Raises ConfigError for an unsupported setting.
    """
    part, wanted = model_config.encoder_part, config.scheduler.max_encoder_len
    if part is None:
        if wanted is not None:
            raise ConfigError(
                f"scheduler.max_encoder_len={wanted} is for encoder-decoder models, and {model_config.architecture} "
                f"has no encoder: leave it out"
            )
        return 0
    _check_options(config, model_config)
    if model_config.pooling is not None:
        if wanted not in (None, max_model_len):
            raise ConfigError(
                f"scheduler.max_encoder_len={wanted} must be model.max_model_len={max_model_len} in a run that "
                f"{_CLASSIFIES}, whose encoder and decoder read the same row: leave it null"
            )
        return max_model_len
    if part.max_rows and wanted is not None and wanted > part.max_rows:
        raise ConfigError(
            f"scheduler.max_encoder_len={wanted} is more than the {part.max_rows} positions of the model's encoder: "
            f"lower it or leave it null"
        )
    if part.audio is not None and wanted is not None and wanted < part.max_rows:
        raise ConfigError(
            f"scheduler.max_encoder_len={wanted} is less than the {part.max_rows} rows that audio of any length has: "
            f"leave it null"
        )
    return wanted or part.max_rows or model_config.max_model_len


def num_encoder_positions(config: RunConfig, model_config: ModelConfig, max_model_len: int) -> int:
    """Positions of the longest input, which takes whole blocks."""
    block_size = config.cache.block_size
    return num_blocks_for(max_encoder_len(config, model_config, max_model_len), block_size) * block_size


def _check_options(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError for what an encoder-decoder model does not support."""
    model, architecture, pooling = config.model, model_config.architecture, model_config.pooling
    if pooling is not None and pooling.shifted is not None and pooling.pooling_type != "last":
        raise ConfigError(
            f"model.pooling_type={pooling.pooling_type} is not supported in a run that {_CLASSIFIES}, by its decoder's "
            f"last state: leave it out"
        )
    if pooling is not None and pooling.shifted is None:
        encoder = f"{architecture.removesuffix('ForConditionalGeneration')}EncoderModel"
        way_out = f", or name {encoder} in architectures of config.json to pool its encoder's rows"
        raise ConfigError(
            f"model.runner=pooling is not supported for {architecture}, an encoder-decoder model: set it to generate"
            f"{way_out if encoder in ENCODERS else ''}"
        )
    given = {
        "model.enable_lora=true": model.adapter_limits is not None,
        "model.prompt_adapters": bool(model.prompt_adapters),
        f"model.quantization={model.quantization}": model.quantization is not None,
        "cache.window_groups=true": config.cache.window_groups is True,
    }
    for key, is_given in given.items():
        if is_given:
            raise ConfigError(f"{key} is not supported for {architecture}, an encoder-decoder model: leave it out")
