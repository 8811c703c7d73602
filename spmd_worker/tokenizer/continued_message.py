"""Last messages that a prompt leaves open, for the answer to continue: rendered with a mark at their end, at which the
prompt is cut. Prompts equal those of transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spmd_worker.base.errors import ChatTemplateError

_MARK: Final = "\ue0f1\ue0f2"
"""End of the continued message while it is rendered. A space is appended, to detect templates that strip it."""


def continued_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text of the last message, or of its last text part; "" without one."""
    content = messages[-1].get("content") if messages else None
    texts = [content] if isinstance(content, str) else [part["text"] for part in _parts(content) if _has_text(part)]
    return texts[-1] if texts else ""


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with the mark at the end of the text of the last one. Raises ChatTemplateError without a text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        return [*messages[:-1], {**messages[-1], "content": f"{content}{_MARK} "}]
    parts = _parts(content)
    texts = [part for part in parts if _has_text(part)]
    if not texts:
        raise ChatTemplateError("continue_final_message=True, but the last message has no content to continue")
    texts[-1]["text"] += f"{_MARK} "
    return [*messages[:-1], {**messages[-1], "content": parts}]


def before_mark(text: str) -> str:
    """Text before the mark, without trailing spaces if the template strips its messages. Raises ChatTemplateError."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ChatTemplateError(
            "continue_final_message=True, but the chat template does not write the last message: pass "
            "continue_final_message=False"
        )
    return before if after.startswith(" ") else before.rstrip()


def _parts(content: Any) -> list[dict[str, Any]]:
    """Copies of the parts."""
    return [dict(part) if isinstance(part, Mapping) else {"type": "text", "text": part} for part in content or ()]


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)
