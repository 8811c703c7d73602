"""PEFT folders of adapters: those of the configuration, and local copies of remote ones (`s3://bucket/adapters/sql`)."""

from pathlib import Path
from typing import Final

from spmd_worker.base.config.plain_values import plain_folder
from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.base.remote_names import is_remote
from spmd_worker.model_config.remote_model import copy_once, find_remote_files
from spmd_worker.model_config.unreadable_files import unreadable_file

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"


def adapter_folders(model: ModelOptions) -> dict[str, str]:
    """Folder of each adapter, by the key that names it: `model.adapters.NAME`, `model.prompt_adapters.NAME` and
    `model.lora_merge`.
    """
    named = {"adapters": model.adapters or {}, "prompt_adapters": model.prompt_adapters or {}}
    folders = {
        f"model.{key}.{name}": plain_folder(path) for key, given in named.items() for name, path in given.items()
    }
    if model.merged_adapter is not None:
        folders["model.lora_merge"] = model.merged_adapter
    return folders


def fetch_adapters(model: ModelOptions) -> None:
    """Download remote adapters of the configuration, before ranks wait for each other, and look whether the files of
    all can be read. Raises ConfigError.
    """
    for key, folder in adapter_folders(model).items():
        try:
            local = local_adapter(folder)
        except AdapterError as error:
            raise ConfigError(f"{key}: {error}") from None
        fault = unreadable_file(local, (CONFIG_FILE, WEIGHTS_FILE))
        if fault is not None:
            raise ConfigError(f"{key}={folder} cannot be read: {fault}, or give another folder")


def local_adapter(path: str | Path) -> Path:
    """The folder; of a remote one the local copy, which is downloaded first if it is missing or its files have changed.
    Raises AdapterError.
    """
    name = str(path)
    if not is_remote(name):
        return Path(path)
    try:
        wanted = find_remote_files(name, (CONFIG_FILE, WEIGHTS_FILE))
        if len(wanted) == 2:
            return copy_once(name, f"adapter {name}", wanted)
    except (OSError, ConfigError) as error:
        raise AdapterError(f"{name} cannot be downloaded: {error}") from None
    missing = WEIGHTS_FILE if CONFIG_FILE in wanted else CONFIG_FILE
    raise AdapterError(f"{name} has no {missing}: an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
