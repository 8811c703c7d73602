"""LoRARequest: the adapter of a call's rows, in vLLM's words, or with the tensors of a trainer."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Final

from spmd_worker.base.config.plain_values import (
    asks,
    plain_bool,
    plain_folder,
    plain_int,
    plain_text,
    sendable_text,
    shown,
)


class TensorSnapshot(dict[str, Any]):
    """Copies of a trainer's tensors on the host, which nobody changes: a request that has the same snapshot as the one
    that was loaded names that, and its contents need not be compared again.
    """

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "TensorSnapshot":
        return cls({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: a name, an id from 1 on, and either `lora_path`, its PEFT folder, or `lora_tensors`, tensors by the
    names of PEFT's files, with `peft_config`, the contents of adapter_config.json.

    An id belongs to one adapter until that is removed or evicted, or, with `load_inplace`, replaced by this one. Rows
    are computed with an adapter's contents: equal contents share cached blocks under any name, and other contents never
    do. `base_model_name`, which changes nothing, is for those who read the request.

    Raises ValueError for an id below 1, an empty name, text that UTF-8 cannot encode, unless exactly one of path and
    tensors is given, and for other fields of vLLM's unless they are neutral; TypeError for other types.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    _: KW_ONLY
    # Not compared: a comparison of tensors is a tensor.
    lora_tensors: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    peft_config: Mapping[str, Any] | None = field(default=None, compare=False)
    load_inplace: bool = False
    base_model_name: str | None = field(default=None, compare=False)
    lora_local_path: InitVar[Any] = None
    long_lora_max_len: InitVar[Any] = None
    tensorizer_config_dict: InitVar[Any] = None
    is_3d_lora_weight: InitVar[Any] = False

    def __post_init__(self, *refused: Any) -> None:
        for (name, reason), value in zip(_REFUSED.items(), refused, strict=True):
            if asks(value):
                raise ValueError(f"LoRARequest.{name}={shown(value)} is not supported: {reason}")
        for name, plain, kind in _FIELDS:
            value = getattr(self, name)
            if name == "lora_path" and hasattr(value, "__fspath__"):
                value = value.__fspath__()
            if name == "base_model_name" and value is None:
                continue
            found = plain(value)
            if found is None:
                raise TypeError(f"LoRARequest.{name}={shown(value)} is a {type(value).__name__}: give {kind}")
            if isinstance(found, str):
                sendable_text(f"LoRARequest.{name}", found)
                found = plain_folder(found) if name == "lora_path" and found else found
            object.__setattr__(self, name, found)
        if not 1 <= self.lora_int_id < 2**63:
            raise ValueError(f"LoRARequest.lora_int_id={self.lora_int_id} must be from 1 to {2**63 - 1}")
        if not self.lora_name:
            raise ValueError("LoRARequest.lora_name is empty: give the adapter a name")
        for name in ("lora_tensors", "peft_config"):
            value = getattr(self, name)
            if not isinstance(value, Mapping | None):
                raise TypeError(f"LoRARequest.{name} is a {type(value).__name__}: give a dict, or leave it out")
        self._check_source()

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`, in words of vLLM's."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def local_path(self) -> str:
        """`lora_path`, in words of older releases of vLLM's."""
        return self.lora_path

    def _check_source(self) -> None:
        where = f"LoRARequest {self.lora_name!r} (id {self.lora_int_id})"
        if self.lora_tensors is None and self.peft_config is not None:
            raise ValueError(f"{where} has peft_config without lora_tensors: give both, or lora_path alone")
        if self.lora_path and self.lora_tensors is not None:
            raise ValueError(f"{where} has lora_path and lora_tensors: give one of them")
        if not self.lora_path and self.lora_tensors is None:
            raise ValueError(f"{where}: lora_path cannot be empty, unless lora_tensors and peft_config are given")
        if self.lora_tensors is not None and not self.peft_config:
            raise ValueError(f"{where} has lora_tensors without peft_config: give the contents of adapter_config.json")


_FIELDS = (
    ("lora_name", plain_text, "text"),
    ("lora_int_id", plain_int, "a whole number"),
    ("lora_path", plain_text, "the path of a folder"),
    ("load_inplace", plain_bool, "true or false"),
    ("base_model_name", plain_text, "text, or leave it out"),
)
_REFUSED: Final = {
    "lora_local_path": "give the folder as lora_path",
    "long_lora_max_len": "longer contexts come with the base model's rope scaling, not with an adapter: leave it out",
    "tensorizer_config_dict": "adapters are read from PEFT folders: give one as lora_path",
    "is_3d_lora_weight": "the format of an adapter of experts is seen in its tensors: leave it out",
}
"""Fields of vLLM's that must be neutral, and the reason, in the order of `InitVar` fields."""
