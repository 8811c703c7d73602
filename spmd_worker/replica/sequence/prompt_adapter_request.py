"""PromptAdapterRequest, the prompt adapter of a call's rows, in vLLM's words; VirtualTokens, what rows have of it."""

from dataclasses import dataclass
from typing import Final

from spmd_worker.base.config.plain_values import plain_folder, plain_int, plain_text, sendable_text, shown
from spmd_worker.replica.sequence.input_rows import EMBEDDINGS, KEYS_VALUES, InputRows
from spmd_worker.replica.sequence.record_checks import CheckedRecord

ADD_PROMPT_ADAPTER: Final = "add_prompt_adapter"
REMOVE_PROMPT_ADAPTER: Final = "remove_prompt_adapter"


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter: a name, an id from 1 on, its PEFT folder, and the number of its virtual tokens.

    An id belongs to one adapter until that is removed or evicted. Rows are computed with an adapter's contents: equal
    contents share cached blocks under any name, and other contents never do. Raises ValueError for an id or a number
    below 1, for an empty name or path and for one that UTF-8 cannot encode; TypeError for other types.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def __post_init__(self) -> None:
        for name in ("prompt_adapter_name", "prompt_adapter_local_path"):
            value = getattr(self, name)
            value = value.__fspath__() if hasattr(value, "__fspath__") else value
            text = plain_text(value)
            if text is None:
                raise TypeError(f"PromptAdapterRequest.{name}={shown(value)} is a {type(value).__name__}: give text")
            if not text:
                raise ValueError(f"PromptAdapterRequest.{name} is empty")
            text = sendable_text(f"PromptAdapterRequest.{name}", text)
            object.__setattr__(self, name, text if name == "prompt_adapter_name" else plain_folder(text))
        for name in ("prompt_adapter_id", "prompt_adapter_num_virtual_tokens"):
            value = getattr(self, name)
            number = plain_int(value)
            if number is None:
                kind = type(value).__name__
                raise TypeError(f"PromptAdapterRequest.{name}={shown(value)} is a {kind}: give a whole number")
            if not 1 <= number < 2**63:
                raise ValueError(f"PromptAdapterRequest.{name}={number} must be from 1 to {2**63 - 1}")
            object.__setattr__(self, name, number)

    @property
    def adapter_id(self) -> int:
        """`prompt_adapter_id`, in words of vLLM's."""
        return self.prompt_adapter_id

    @property
    def name(self) -> str:
        return self.prompt_adapter_name

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path


@dataclass(frozen=True, slots=True)
class VirtualTokens(CheckedRecord):
    """The first `num_tokens` positions of a row, those of the prompt adapter whose content has this digest: 63 bits, of
    which the lowest tells whether it is keys and values.
    """

    digest: int
    num_tokens: int

    @property
    def rows(self) -> InputRows:
        return InputRows(content_of(self.digest), 0, self.num_tokens, KEYS_VALUES if self.digest & 1 else EMBEDDINGS)


def content_of(digest: int) -> bytes:
    """Name of an adapter's rows in requests and block hashes."""
    return digest.to_bytes(16, "big")


def digest_in(rows: InputRows) -> int:
    """The inverse of `content_of`."""
    return int.from_bytes(rows.content, "big")
