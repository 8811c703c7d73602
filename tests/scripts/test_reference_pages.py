"""The reference pages and the keywords' types are what scripts/reference_pages.py writes of the records."""

import typing
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
from ranks import REPOSITORY

import launch
from spmd_worker.base.config.options import keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.compat.keywords import KEYWORDS
from spmd_worker.compat.llm_keywords import LLMKeywords
from spmd_worker.compat.methods import ENGINE_METHODS, LLM_ABSENT, LLM_METHODS
from spmd_worker.replica.sequence.sampling_params import SamplingParams


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return import_module("reference_pages")


def written(pages: ModuleType) -> dict[str, str]:
    return {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in pages.documents()}


@pytest.mark.guarantee("Reference pages are made from the options' records")
def test_reference_pages_are_current(pages: ModuleType):
    assert len(written(pages)) == 4
    assert pages.documents() == written(pages), "run python scripts/reference_pages.py"


def test_models_page_has_what_the_command_prints(capsys):
    page = (REPOSITORY / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert launch.main(["families"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.split("\n\n")) == 5
    position = 0
    for part in printed.split("\n\n"):
        # Sentences are wrapped in the page.
        words = part.strip() if part.startswith("|") else part.split()[0]
        position = page.index(words, position)
    assert " ".join(printed.split("\n\n")[-1].split()) in " ".join(page.split())


def test_every_name_of_vllm_is_in_its_page():
    page = (REPOSITORY / "docs" / "reference" / "vllm_names.md").read_text(encoding="utf-8")
    for name in (*KEYWORDS, *SamplingParams.__struct_fields__, *LLM_METHODS, *LLM_ABSENT, *ENGINE_METHODS):
        assert page.count(f"`{name}`") >= 1, name


@pytest.mark.control("Reference pages are made from the options' records")
def test_comparison_detects_another_table(pages: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Negative control: a keyword less, and a key with another sentence."""
    before = written(pages)
    monkeypatch.setattr(pages, "KEYWORDS", {name: row for name, row in KEYWORDS.items() if name != "quantization"})
    changed = [path for path, text in pages.documents().items() if text != before[path]]
    assert changed == ["docs/reference/vllm_names.md", "spmd_worker/compat/llm_keywords.py"]
    keys = keys_of(RunConfig)
    keys["seed"] = replace(keys["seed"], option=replace(keys["seed"].option, meaning="another"))
    monkeypatch.setattr(pages, "keys_of", lambda run: keys)
    assert pages.documents()["docs/reference/configuration.md"] != before["docs/reference/configuration.md"]


def test_types_name_every_keyword_of_llm():
    typed = typing.get_type_hints(LLMKeywords)
    assert sorted(typed) == sorted(KEYWORDS)
    assert (typed["max_num_seqs"], typed["trust_remote_code"]) == (int | None, typing.Any)
