"""A LoRA adapter as it is stored or as a trainer has it: matrices by module, scalings, and the digest of both.

Names of tensors are PEFT's: `base_model.model.<module>.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs,
rank], where the module's path is the checkpoint's. Knows no model: `LoadedAdapters` compares it with one.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import AdapterError, CheckpointError
from spmd_worker.base.files import JsonError, parse_json_object, read_regular_file
from spmd_worker.model.adapters.peft_config import PeftConfig, parse_config
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.safetensors_header import read_header
from spmd_worker.model.weights.tensor_checks import check_data, is_finite
from spmd_worker.model_config.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, local_adapter

_PICKLE: Final = "adapter_model.bin"
_MAX_CONFIG_BYTES: Final = 1 << 24
_MAX_LISTED: Final = 20
_PREFIX: Final = "base_model.model."
_NAME: Final = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
_SAVED: Final = re.compile(r"\.modules_to_save(\.[^.]+)?(?=\.)")
"""Part of the names of full weights in PEFT's model in memory."""
_WRAPPED: Final = ".base_layer"
"""A wrapper of a wrapper of parameters of one module, as part of a path."""
_WEIGHT: Final = "weight"
"""The parameter of a module that is not a stack of experts: a router's."""
_NUM_DIGESTS: Final[int] = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """Matrices of one module of the checkpoint: `a` [rank, inputs], `b` [outputs, rank], as they are stored; its output
    is the module's plus `scaling` b (a x). Of a stack of `num_experts`, unless 0: `a` [experts * rank, inputs], expert
    by expert, and `b` [outputs, rank * experts], whose columns are the experts' first ones, their second ones, ...
    """

    a: Tensor
    b: Tensor
    scaling: float
    num_experts: int = 0

    @property
    def rank(self) -> int:
        return len(self.a) // max(self.num_experts, 1)

    def turned(self) -> "AdapterModule":
        """A stack's update of matrices [outputs, inputs] as one of [inputs, outputs]."""
        a = self.b.reshape(len(self.b), self.rank, self.num_experts).permute(2, 1, 0).reshape(len(self.a), len(self.b))
        b = (
            self.a.reshape(self.num_experts, self.rank, self.a.shape[1])
            .permute(2, 1, 0)
            .reshape(self.a.shape[1], len(self.a))
        )
        return replace(self, a=a, b=b)

    def of_expert(self, expert: int, rows: slice) -> "AdapterModule":
        """Matrices of one expert of a stack, for these rows of its outputs."""
        a = self.a.reshape(self.num_experts, self.rank, self.a.shape[1])[expert]
        b = self.b.reshape(len(self.b), self.rank, self.num_experts)[rows, :, expert]
        return AdapterModule(a, b, self.scaling)


@dataclass(frozen=True)
class AdapterSource:
    """One adapter, with full matrices. `modules` by the module's path, without PEFT's prefix, and stacks of experts by
    the parameter's; `saved` are full weights
    that replace those of the base, by name; `subject`, the folder or the adapter, begins every error.
    """

    subject: str
    config: PeftConfig
    modules: Mapping[str, AdapterModule]
    saved: Mapping[str, Tensor]

    @cached_property
    def digest(self) -> int:
        """63 bits, above 0, of names, matrices, dtypes, scalings and `fan_in_fan_out`: it does not depend on the order
        of tensors, and two adapters of one digest compute the same, or are refused alike.
        """
        state = hashlib.sha256()
        if self.config.is_transposed:
            _add_text(state, "fan_in_fan_out")
        for name, module in sorted(self.modules.items()):
            stack = f" {module.num_experts}" if module.num_experts else ""
            _add_text(state, f"{name} {module.scaling.hex()}{stack}")
            _add_tensor(state, module.a)
            _add_tensor(state, module.b)
        for name, tensor in sorted(self.saved.items()):
            _add_text(state, name)
            _add_tensor(state, tensor)
        number = int.from_bytes(state.digest()[:8], "little")
        return number % _NUM_DIGESTS + 1


def read_adapter(path: str | Path) -> AdapterSource:
    """Read a PEFT folder, local or remote. Raises AdapterError, which names the file and the key or tensor."""
    folder = local_adapter(path)
    config = parse_config(read_config(folder), f"{path}/{CONFIG_FILE}")
    return _source(f"{path}/{WEIGHTS_FILE}", config, read_tensors(folder))


def read_peft_config(path: str | Path) -> PeftConfig:
    """The numbers of a PEFT folder, local or remote, which has a file of tensors. Raises AdapterError."""
    folder = local_adapter(path)
    config = parse_config(read_config(folder), f"{path}/{CONFIG_FILE}")
    _weights_file(folder)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a PEFT folder's adapter_config.json. Raises AdapterError."""
    if not folder.is_dir():
        raise AdapterError(f"{folder}: is not a folder: an adapter is one with {CONFIG_FILE} and {WEIGHTS_FILE}")
    return _read_config(folder / CONFIG_FILE)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a PEFT folder, by name. Raises AdapterError."""
    file = _weights_file(folder)
    try:
        header = read_header(file)
        with Checkpoint(folder, {file.name: header}, _file_of=dict.fromkeys(header.tensors, file.name)) as checkpoint:
            names = checkpoint.names()
            return {name: checkpoint.read(name, full_rectangle(checkpoint.shape(name))) for name in names}
    except (CheckpointError, OSError) as error:
        raise AdapterError(str(error)) from None


def _weights_file(folder: Path) -> Path:
    """Raises AdapterError."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        if (folder / _PICKLE).exists():
            way_out = "pickles are rejected because reading one can run code: save the adapter with save_pretrained"
            raise AdapterError(f"{folder}: has only {_PICKLE}, and no {WEIGHTS_FILE}: {way_out}")
        raise AdapterError(f"{folder}: has no {WEIGHTS_FILE}: save the adapter with save_pretrained")
    return file


def adapter_from_tensors(peft_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> AdapterSource:
    """The adapter that a trainer has: the contents of adapter_config.json, and tensors by the names of PEFT's file (or
    of the model, with the adapter's name). They are copied to host memory. Raises AdapterError.
    """
    config = parse_config(peft_config, "peft_config")
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided):
            kind = getattr(tensor, "layout", type(tensor).__name__)
            raise AdapterError(f"lora_tensors: {shown(name)} is a {kind}: give dense tensors by PEFT's names")
        try:
            check_data(name, tensor)
        except CheckpointError as error:
            raise AdapterError(str(error)) from None
    return _source("lora_tensors", config, {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()})


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return parse_json_object(read_regular_file(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from None
    except JsonError as error:
        raise AdapterError(f"{path}: {error}") from None


def _source(subject: str, config: PeftConfig, tensors: Mapping[str, Tensor]) -> AdapterSource:
    """Pairs of matrices. Raises AdapterError that lists all tensors at fault."""
    pairs: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in sorted(tensors.items()):
        if not is_finite(tensor, torch.float32):
            problems.append(f"{name}: has values that are not finite: its training diverged, or the file is damaged")
        found = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if found is not None:
            if found["matrix"] in pairs.setdefault(found["module"], {}):
                problems.append(f"{name}: a second lora_{found['matrix']} of its module")
            pairs[found["module"]][found["matrix"]] = tensor
        elif "lora_" in name:
            problems.append(f"{name}: {_reason(name)}")
        else:
            saved_name = _SAVED.sub("", name.removeprefix(_PREFIX))
            if saved_name in saved:
                problems.append(f"{name}: a second {saved_name}: save the adapter with save_pretrained")
            saved[saved_name] = tensor
    modules = {}
    for path, pair in pairs.items():
        module, parameter = _target(config, path)
        full_name = f"{module}.{parameter}" if parameter else module
        is_stack = parameter not in ("", _WEIGHT)
        problem = _pair_problem(config, full_name, pair, is_stack=is_stack)
        if parameter.endswith("bias"):
            problem = f"target_parameters of {config.subject} has {parameter}, and adapters of biases are not computed"
        if not problem and not parameter and not config.has_target(module):
            problem = f"is not among target_modules of {config.subject}"
        if problem:
            problems.append(f"{path}: {problem}")
            continue
        num_experts = len(pair["A"]) // config.rank_of(full_name) if is_stack else 0
        matrices = AdapterModule(pair["A"], pair["B"], config.scaling_of(full_name), num_experts)
        modules[full_name if is_stack else module] = matrices
    if config.saved and not saved:
        rule = "no such weights are in the file: it is not complete, or they are not saved"
        problems.append(f"{config.subject}: modules_to_save={list(config.saved)}: {rule}")
    if not pairs and not problems:
        problems.append("no tensor is named lora_A or lora_B")
    raise_problems(subject, problems)
    return AdapterSource(subject, config, modules, saved)


def raise_problems(subject: str, problems: list[str]) -> None:
    """Raise one AdapterError with all problems, if there are any."""
    if not problems:
        return
    num_more = len(problems) - _MAX_LISTED
    more = [f"and {num_more} more"] if num_more > 0 else []
    raise AdapterError("\n  ".join([f"{subject}: the adapter cannot be used:", *problems[:_MAX_LISTED], *more]))


def _reason(name: str) -> str:
    if "lora_embedding" in name:
        return "adapters of embeddings and token heads are not supported: train with other target_modules"
    if "lora_magnitude" in name:
        return "magnitudes of DoRA are not computed: merge the adapter into its base"
    return "not a tensor of plain LoRA, lora_A.weight or lora_B.weight"


def _target(config: PeftConfig, path: str) -> tuple[str, str]:
    """The module of a pair of matrices and, if they add to a parameter of `target_parameters`, its name; else "". PEFT
    has a wrapper for each parameter of a module, around that of the one before it.
    """
    module = re.sub(rf"({re.escape(_WRAPPED)})+$", "", path)
    depth = (len(path) - len(module)) // len(_WRAPPED)
    parameters = config.parameters_of(module)
    return (module, parameters[-1 - depth]) if depth < len(parameters) else (path, "")


def _pair_problem(config: PeftConfig, module: str, pair: Mapping[str, Tensor], *, is_stack: bool) -> str:
    if len(pair) != 2:
        return f"has lora_{'A' if 'A' in pair else 'B'} alone: the file is not complete"
    a, b = pair["A"], pair["B"]
    # Those of convolutions have more dimensions: a tower's are left out later.
    if not 2 <= a.ndim == b.ndim or len(a) != b.shape[1]:
        return f"lora_A {list(a.shape)} and lora_B {list(b.shape)} must be [rank, inputs] and [outputs, rank]"
    rank = config.rank_of(module)
    if is_stack and (a.ndim > 2 or len(a) % rank or not len(a)):
        shape = list(a.shape)
        return f"lora_A {shape} must be [experts * rank, inputs], of the rank {rank} of {config.subject}"
    if not is_stack and len(a) != rank:
        return f"lora_A has the rank {len(a)}, but {config.subject} says {rank} (r, rank_pattern)"
    return ""


def _add_text(state: Any, text: str) -> None:
    data = text.encode()
    state.update(len(data).to_bytes(8, "little") + data)


def _add_tensor(state: Any, tensor: Tensor) -> None:
    _add_text(state, f"{tensor.dtype} {list(tensor.shape)}")
    # Without dimensions it could not be viewed as bytes.
    state.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
