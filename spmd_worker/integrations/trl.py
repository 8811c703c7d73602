"""TRL's trainers on this runtime: the engine that samples completions is this one, in the trainer's own ranks.

    import spmd_worker.integrations.trl  # before a trainer is made; nothing else in the script changes

    python -m spmd_worker.integrations.trl train.py ...
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.trl train.py ...

For `use_vllm=True, vllm_mode="colocate"`. Five names of `trl.generation.vllm_generation` become this package's; no
package named vllm is needed, and one that is there is not used by that mode. Importing this module does it; it is an
error, before anything is replaced, for another release of TRL than the one whose calls were read.
"""

import logging
import os
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from spmd_worker.errors import ConfigError
from spmd_worker.llm import LLM
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.sampling_params import REFUSED, SamplingParams

logger = logging.getLogger(__name__)

RELEASE: Final = "1.16"
"""Of TRL."""
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


class TrainerLLM(LLM):
    """`LLM` for a model that the trainer has loaded by its folder, or by its name on the hub: the folder that
    huggingface_hub keeps of it is read, and nothing is downloaded. Raises ConfigError where there is none.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        super().__init__(local_folder(model), **arguments)


class StructuredOutputsParams:
    """Constrained decoding, which does not exist here: raises ValueError."""

    def __init__(self, **wanted: Any) -> None:
        raise ValueError(f"structured_outputs={wanted!r} is refused: {REFUSED['structured_outputs']}")


def is_vllm_available(min_version: str | None = None) -> bool:
    """What TRL asks before it makes an engine: yes, that of this package."""
    del min_version
    return True


REPLACEMENTS: Final[dict[str, Any]] = {
    "is_vllm_available": is_vllm_available,
    "LLM": TrainerLLM,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "RequestOutput": RequestOutput,
}


def local_folder(model: str | Path) -> str:
    """The folder of a model that is a folder already, or that huggingface_hub's cache has under this name.

    Raises ConfigError for a name of which there is no whole copy on this machine.
    """
    name = os.fspath(model)
    if os.path.isdir(os.path.expanduser(name)) or _HUB_ID.fullmatch(name) is None:
        return name
    try:
        hub: Any = import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise ConfigError(
            f"model={name} is no folder, and huggingface_hub, which knows where models from the hub are, is not "
            f"installed: give the folder"
        ) from None
    try:
        return str(hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:  # of which the hub's own errors are kinds
        raise ConfigError(
            f"model={name} is neither a folder nor in huggingface_hub's cache on this machine: give a folder, or "
            f"download it first (hf download {name})"
        ) from error


def install() -> str:
    """Put this package's names in the place of vLLM's. Returns what was replaced, in words. Idempotent.

    Raises ImportError where TRL is not there, or is another release, or does not have what is to be replaced.
    """
    trl: Any = import_module("trl")
    version = str(getattr(trl, "__version__", "of no version"))
    if not (version == RELEASE or version.startswith(f"{RELEASE}.")):
        raise ImportError(
            f"trl {version} is installed and this package knows the calls of {RELEASE}: pip install 'trl=={RELEASE}.*'"
        )
    module: Any = import_module("trl.generation.vllm_generation")
    if not callable(getattr(module, "is_vllm_available", None)) or not hasattr(module, "VLLMGeneration"):
        raise ImportError(
            f"trl.generation.vllm_generation of trl {version} has no is_vllm_available or VLLMGeneration: nothing is "
            f"replaced"
        )
    instead = "vLLM's" if hasattr(module, "LLM") else "none: vLLM is not installed"
    if getattr(module, "LLM", None) is not TrainerLLM:
        for name, value in REPLACEMENTS.items():
            setattr(module, name, value)
        logger.info("%s", _words(version, instead))
    return _words(version, instead)


def _words(version: str, instead: str) -> str:
    names = ", ".join(REPLACEMENTS)
    return f"spmd_worker samples for trl {version}: {names} of trl.generation.vllm_generation are replaced ({instead})"


def main(arguments: list[str]) -> None:
    """Run a script as `python SCRIPT ...` does, with the names replaced. Raises SystemExit where none is given."""
    if not arguments:
        raise SystemExit("usage: python -m spmd_worker.integrations.trl SCRIPT.py [ARGUMENT ...]")
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{replaced}\n")
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


replaced: Final = install()
"""What importing this module has done, in words."""

if __name__ == "__main__":
    # The script may import this module too, and gets this one.
    sys.modules["spmd_worker.integrations.trl"] = sys.modules["__main__"]
    main(sys.argv[1:])
