"""Hooks of mkdocs.yml: pages keep the links and the Markdown that GitHub renders, and the site shows the same.

CONTRIBUTING.md, CHANGELOG.md and SECURITY.md of the repository's root become pages. Links between them and docs/ are
rewritten, links to other files of the repository become text. Python-Markdown needs an empty line before a list or a
table; GitHub does not.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
DOCS = "docs/"
STACKED = {
    "lab/guarantees.md": "site-tests",
    "reference/configuration.md": "site-keys",
    "reference/models.md": "site-models",
    "reference/vllm_names.md": "site-names",
}
"""Pages of which each row of a table is a block on a narrow screen, with their classes (docs/assets/site.css)."""

_LINK = re.compile(r"(?<!!)\[([^\]\n]*(?:\n[^\]\n]+)?)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(?ms)^ *```.*?^ *```[^\S\n]*$")
_NAME = re.compile(r"(?<=<code>)[a-z0-9_.]+(?=</code>)")
_ITEM = re.compile(r" *(?:[*+-]|\d+\.) ")
_FIRST_ITEM = re.compile(r"(?:[*+-]|1\.) ")


def on_config(config: Any) -> Any:
    """Anchors of headings as GitHub makes them."""
    from pymdownx.slugs import slugify

    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        if (ROOT / name).is_file():
            files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page's Markdown for the site. Pages of no section have the room of the empty sidebar."""
    name = page.file.src_uri
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    return for_site(markdown, name if name in ROOT_PAGES else DOCS + name)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Classes of pages whose tables the style sheet knows. Names of keys may break behind a dot or an underscore."""
    kind = STACKED.get(page.file.src_uri)
    if kind is None:
        return html
    if kind == "site-keys":
        html = _NAME.sub(lambda name: re.sub(r"(?<=[._])(?=\w)", "<wbr>", name[0]), html)
    return f'<div class="site-stacked {kind}">{html}</div>'


def for_site(markdown: str, path: str) -> str:
    """Markdown of the file at `path` in the repository -> Markdown of the site. Code blocks stay as they are."""
    parts, end = [], 0
    for fence in _FENCED.finditer(markdown):
        parts += [_text_for_site(markdown[end : fence.start()], path), fence[0]]
        end = fence.end()
    return "".join([*parts, _text_for_site(markdown[end:], path)])


def _text_for_site(text: str, path: str) -> str:
    return _with_empty_lines(_LINK.sub(lambda link: _link_for_site(link, path), text))


def _link_for_site(link: re.Match[str], path: str) -> str:
    """The link with the site's path; its text alone where it leads to a file that the site does not have."""
    words, target = link.groups()
    name, _, anchor = target.partition("#")
    if not name or re.match(r"[a-z]+:|/", name):
        return link[0]
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    if found == "README.md":
        found, anchor = f"{DOCS}index.md", ""
    if found in ROOT_PAGES or found.startswith(DOCS):
        own = posixpath.dirname(path.removeprefix(DOCS)) or "."
        shown = posixpath.relpath(found.removeprefix(DOCS), own)
        return f"[{words}]({shown}{'#' if anchor else ''}{anchor})"
    # A file that does not exist stays a link, which the strict build reports.
    return words if (ROOT / found).exists() else link[0]


def _with_empty_lines(text: str) -> str:
    """An empty line before each list and table that follows a paragraph."""
    lines = [""]
    for line in text.split("\n"):
        before = lines[-1]
        starts_list = bool(_FIRST_ITEM.match(line)) and not _ITEM.match(before) and not before.startswith(" ")
        starts_table = line.startswith("|") and not before.startswith("|")
        if before.strip() and (starts_list or starts_table):
            lines.append("")
        lines.append(line)
    return "\n".join(lines[1:])
