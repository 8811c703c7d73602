"""Renders chat templates in a small process of its own (`bounded_process.py`).

The limits of `chat_template.py` end mistakes with an explanation; a template that escapes them ends here, as one row's
error, after `CPU_S` or at `MEMORY_BYTES`. The process imports Jinja and nothing else of size.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.tokenizer.bounded_process import BoundedProcess, BoundedProcessError, pack, serve
from spmd_worker.tokenizer.chat_template import ChatTemplate, explained

CPU_S: Final = 5
MEMORY_BYTES: Final = 512 * 1024 * 1024
LARGE_BYTES: Final = 64 * 1024
"""Size from which a conversation is rendered in the second process, so that small ones do not wait for it."""


class IsolatedTemplate:
    """One template; `variables` are the special tokens by name (`bos_token`, ...). Not shared with forked processes:
    each starts a process of its own. Threads take turns; large conversations have a second process.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        start = {"source": source, "variables": dict(variables)}
        self._process, self._for_large = (BoundedProcess(__name__, start, CPU_S, MEMORY_BYTES) for _ in range(2))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        content_format: str | None = "auto",
    ) -> str:
        """`ChatTemplate.render` in the process. Raises ChatTemplateError."""
        try:
            request = pack(
                {
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "variables": variables,
                    "content_format": content_format,
                }
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(explained(error)) from None
        process = self._for_large if len(request) > LARGE_BYTES else self._process
        try:
            return str(process.ask(request)["text"])
        except BoundedProcessError as error:
            raise ChatTemplateError(f"chat template: {error}") from None


def _open(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    template = ChatTemplate(start["source"], start["variables"])

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return {"text": template.render(**request)}
        except ChatTemplateError as error:
            if isinstance(error.__cause__, MemoryError):
                raise MemoryError from None
            return {"error": str(error).removeprefix("chat template: ")}

    return answer


if __name__ == "__main__":
    sys.exit(serve(_open))
