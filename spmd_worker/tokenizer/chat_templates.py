"""Chat templates of a model folder, by name, and the choice between them, which is transformers'.

A folder has one in `chat_template.jinja`, others in `additional_chat_templates`; older ones in `chat_template.json`, or
in tokenizer_config.json as text or as a list with names. Separate files take precedence over the configuration.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ChatTemplateError, ConfigError, TokenizerError
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


def load_template(key: str, given: str | Path, sources: Mapping[str, str]) -> str:
    """Text of the chat template of the setting `key`: the text itself (anything with a brace or newline), that of one
    of `sources`, the folder's by name, or the content of a file. Raises ConfigError for a missing file.
    """
    text = str(given)
    if isinstance(given, str) and (text in sources or any(each in text for each in "{}\n")):
        return sources.get(text, text)
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror
    except ValueError as error:  # an invalid file name, or text that is not UTF-8
        why = str(error)
    raise ConfigError(
        f"{key}={shown(text)} is neither a template's text nor a file, nor the name of one of the model folder's "
        f"templates ({', '.join(sorted(sources)) or 'none'}): {why}"
    )


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
