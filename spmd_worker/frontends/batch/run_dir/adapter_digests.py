"""Digests of the contents of a job's adapters, which its answers depend on."""

from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.model.adapters.prompt_adapter import read_prompt_adapter
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model_config.adapter_folder import adapter_folders


def adapter_digests(model: ModelOptions) -> dict[str, str]:
    """Digest of each adapter's contents, by its key. Raises ConfigError for a folder that is no adapter of its kind."""
    return {key: _digest_of(key, folder) for key, folder in adapter_folders(model).items()}


def hex_digest(digest: int) -> str:
    """A digest as the manifest has it."""
    return f"{digest:016x}"


def _digest_of(key: str, folder: str) -> str:
    is_prompt_adapter = key.startswith("model.prompt_adapters.")
    try:
        read = read_prompt_adapter(folder) if is_prompt_adapter else read_adapter(folder)
    except AdapterError as error:
        raise ConfigError(f"{key}: {error}") from None
    return hex_digest(read.digest)
