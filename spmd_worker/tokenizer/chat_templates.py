"""Chat templates of a model folder, by name, and the choice between them, which is transformers'.

A folder has one in `chat_template.jinja`, others in `additional_chat_templates`; older ones in `chat_template.json`, or
in tokenizer_config.json as text or as a list with names. Separate files take precedence over the configuration.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ChatTemplateError, TokenizerError
from spmd_worker.tokenizer.template_process import IsolatedTemplate

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Used for conversations with tools, if it exists."""
_MAX_PROCESSES: Final = 4


class ChatTemplates:
    """Templates of one tokenizer. `sources`: name -> text; `variables` are the special tokens by name."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._variables = dict(variables)
        self._templates: dict[str, IsolatedTemplate] = {}

    def source(self, given: str | None = None, *, has_tools: bool = False) -> str:
        """Text of a template: the one that `given` names, `given` itself, or the folder's. Raises ChatTemplateError."""
        if given is not None:
            return self.sources.get(given, given)
        if not self.sources:
            raise ChatTemplateError(
                "the model folder has no chat template (chat_template.jinja or in tokenizer_config.json): give one as "
                "chat_template=, a text or a file, or put a file of that name there"
            )
        for name in (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,):
            if name in self.sources:
                return self.sources[name]
        raise ChatTemplateError(
            f"the model folder has the chat templates {', '.join(sorted(self.sources))} but no {DEFAULT}: name one by "
            f"chat_template"
        )

    def template(self, given: str | None = None, *, has_tools: bool = False) -> IsolatedTemplate:
        """The template of `source`, ready to be rendered; the last ones are cached. Raises ChatTemplateError."""
        source = self.source(given, has_tools=has_tools)
        template = self._templates.pop(source, None) or IsolatedTemplate(source, self._variables)
        self._templates[source] = template
        if len(self._templates) > _MAX_PROCESSES:
            del self._templates[next(iter(self._templates))]
        return template


def named_templates(path: Path, value: Any) -> dict[str, str]:
    """Name -> text of a `chat_template`: a text, or a list of objects with name and template. Raises TokenizerError."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = value if isinstance(value, list) else []
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)]
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if not named:
        raise TokenizerError(f"{path}: chat_template must be a string, or a list of objects with name and template")
    return named
