"""vLLM's requests of a weight transfer, read as plain records: handles of memory, or the way out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_SHARDS: Final = (
    "ranks of this program give tensors, their shards (DTensors), or source=rank to update_weights; a process on the "
    "same node gives ipc_handles"
)
_KEYS: Final = ("names", "dtype_names", "shapes", "ipc_handles", "tensor_sizes")


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Tensors by name, dtype and shape; each has a mapping of handles by device, or, with `tensor_sizes` in bytes, all
    have one.
    """

    names: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    ipc_handles: Sequence[Mapping[str, tuple[Any, ...]]] | Mapping[str, tuple[Any, ...]]
    tensor_sizes: Sequence[int] | None = None


def is_request(given: object) -> bool:
    """Whether it is vLLM's `WeightTransferUpdateRequest`, or a dict of its field."""
    return hasattr(given, "update_info") or (isinstance(given, Mapping) and "update_info" in given)


def read_request(given: Any) -> TransferRequest:
    """Raises ValueError for another transport than handles, and for lists of different lengths."""
    info = given["update_info"] if isinstance(given, Mapping) else given.update_info
    if not isinstance(info, Mapping):
        raise ValueError(f"update_info is a {type(info).__name__}: give a dict of {', '.join(_KEYS)}")
    info = {name: value for name, value in info.items() if value is not None and value is not False}
    if "ipc_handles_pickled" in info:
        raise ValueError("update_info.ipc_handles_pickled is never unpickled, because that runs code: give ipc_handles")
    if "ipc_handles" not in info:
        raise ValueError(f"update_info has no ipc_handles, and no process sends to this one: {_SHARDS}")
    unknown = [name for name in info if name not in (*_KEYS, "packed")]
    missing = [name for name in _KEYS[:3] if name not in info]
    if unknown or missing:
        raise ValueError(f"update_info: unknown {unknown}, missing {missing}: give {', '.join(_KEYS)}")
    request = TransferRequest(**{name: info[name] for name in _KEYS if name in info})
    lists: dict[str, Sequence[object]] = {"dtype_names": request.dtype_names, "shapes": request.shapes}
    if isinstance(request.ipc_handles, Mapping):
        lists["tensor_sizes"] = request.tensor_sizes or ()
    else:
        lists["ipc_handles"] = request.ipc_handles
    for name, values in lists.items():
        if len(values) != len(request.names):
            raise ValueError(f"update_info.{name} has {len(values)} entries, but names has {len(request.names)}")
    return request


def check_init(given: Any) -> None:
    """Raise ValueError for a transport that has to be initialised: handles need nothing."""
    info = given.get("init_info", given) if isinstance(given, Mapping) else getattr(given, "init_info", given)
    if not isinstance(info, Mapping | None):
        raise TypeError(f"init_info is a {type(info).__name__}: give a dict, empty for handles")
    if info:
        raise ValueError(f"init_info={dict(info)!r} names a group with processes of a trainer: {_SHARDS}")
