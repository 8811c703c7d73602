"""mteb's encoder: what it asks for is what `LLM.embed` gives, behind the prompt that belongs to it.

mteb itself is not installed here: modules with the names that the encoder uses stand in for it, and
docs/guides/evaluation.md says what `scripts/compare_mteb.py` gave with it.
"""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapter_folders import write_adapter
from encoder_models import encoder_folder
from pooling_models import pooling_folder

from spmd_worker import LLM, LoRARequest
from spmd_worker.base.errors import ModelConfigError

MODULE = "spmd_worker.integrations.mteb_model"
OPTIONS = {"dtype": "float32"}
pytestmark = pytest.mark.matrix
PROMPTS = {"query": "to find: ", "passage": "kept: ", "STS": "like: "}


class AbsEncoder:
    """As much as the encoder takes of mteb's: a name by the task's kind, else by the text's."""

    model_prompts: dict[str, str] | None = None

    @staticmethod
    def validate_task_to_prompt_name(prompts: dict[str, str], raise_for_invalid_keys: bool) -> Any:
        assert not raise_for_invalid_keys
        return ({key: value for key, value in prompts.items() if key != "passage"}, ()) if prompts else (None, None)

    def get_prompt_name(self, task_metadata: Any, prompt_type: Any) -> str | None:
        names = [task_metadata.type, getattr(prompt_type, "value", None)]
        return next((name for name in names if name in (self.model_prompts or {})), None)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    models, encoders, meta = (ModuleType(f"mteb.models{name}") for name in ("", ".abs_encoder", ".model_meta"))
    vars(models).update(ModelMeta=SimpleNamespace(create_empty=lambda given: SimpleNamespace(**given)))
    vars(encoders).update(AbsEncoder=AbsEncoder)
    vars(meta).update(ScoringFunction=str)
    for module in (ModuleType("mteb"), models, encoders, meta):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    encoder_class = importlib.import_module(MODULE).SpmdWorkerEncoder
    made = []

    def make_encoder(
        settings: dict[str, Any] | None = None,
        source: Path | None = None,
        name: Callable[[Path], Any] = str,
        **options: Any,
    ) -> Any:
        folder = tmp_path / f"model{len(made)}"
        shutil.copytree(source or encoder_folder("bert_mean"), folder)
        if settings is not None:
            (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        made.append(encoder_class(name(folder), device="cpu", **OPTIONS, **options))
        return made[-1]

    yield make_encoder
    for each in made:
        each.llm.close()
    del sys.modules[MODULE]


BATCHES = [{"text": ["hello world", "the cache"]}, {"text": ["a text about the scheduler " * 40]}]


@pytest.mark.parametrize("name", [lambda folder: folder, lambda folder: f"~/{folder.name}"])
def test_prompts_are_those_of_any_path(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: Callable[[Path], Any]
):
    """Regression: a path of pathlib was refused, and below ~ there were no prompts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    encoder = make({"prompts": PROMPTS, "similarity_fn_name": "dot"}, name=name)
    assert encoder.model_prompts == {"query": "to find: ", "STS": "like: "}
    assert encoder.mteb_model_meta.similarity_fn_name == "dot"
    assert encoder.mteb_model_meta.name == "spmd_worker/model0"


def encoded(encoder: Any, kind: str, prompt_type: str | None, **options: Any) -> Any:
    wanted = None if prompt_type is None else SimpleNamespace(value=prompt_type)
    about = {"task_metadata": SimpleNamespace(type=kind, name="Task"), "hf_split": "test", "hf_subset": "default"}
    return encoder.encode(BATCHES, prompt_type=wanted, **about, **options)


@pytest.mark.guarantee("mteb's prompt comes before a text, and no second one", is_control_inside=True)
def test_vectors_equal_embed_with_the_matching_prompt(make: Callable[..., Any]):
    plain = make()
    told = make({"prompts": PROMPTS, "default_prompt_name": "query", "similarity_fn_name": "dot"})
    assert plain.mteb_model_meta.similarity_fn_name == "cosine"
    assert told.mteb_model_meta.similarity_fn_name == "dot"
    assert plain.mteb_model_meta.name == "spmd_worker/model0"
    bare = make({"prompts": PROMPTS, "default_prompt_name": "query"}, prompts={})
    with LLM(encoder_folder("bert_mean"), device="cpu", **OPTIONS) as llm:
        for encoder, kind, prompt_type, prompt in (
            (plain, "STS", None, ""),
            (bare, "STS", None, ""),
            (told, "STS", None, PROMPTS["STS"]),
            (told, "Retrieval", "query", PROMPTS["query"]),
            # mteb knows no such kind of text, sentence-transformers does.
            (told, "Retrieval", "document", PROMPTS["passage"]),
            (told, "Classification", None, PROMPTS["query"]),
        ):
            texts = [prompt + text for batch in BATCHES for text in batch["text"]]
            expected = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
            found = encoded(encoder, kind, prompt_type, batch_size=32, show_progress_bar=False)
            assert found.dtype == np.float32
            assert found.tolist() == [each.outputs.embedding for each in expected], (kind, prompt_type)
    with pytest.raises(ValueError, match=r"^precision='int8': .*float32"):
        encoded(plain, "STS", None, precision="int8")


DAMAGED = {
    "{": r"config_sentence_transformers\.json cannot be read: is not JSON",
    '{"prompts": ["a"]}': r"prompts=\['a'\] must be an object of texts",
    '{"prompts": {"a": 1}}': "must be an object of texts",
    '{"default_prompt_name": "mine"}': "default_prompt_name='mine' is not one of the folder's prompts",
    '{"default_prompt_name": 3}': "default_prompt_name=3 is not one of the folder's prompts",
    '{"similarity_fn_name": "maxsim"}': "similarity_fn_name='maxsim' is not supported, only cosine or dot or",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_settings_are_named_before_weights_load(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
):
    folder = tmp_path / "source"
    shutil.copytree(encoder_folder("bert_mean"), folder)
    (folder / "modules.json").unlink(missing_ok=True)
    (folder / "config_sentence_transformers.json").write_text(content)
    monkeypatch.setattr(f"{MODULE}.LLM", None)
    with pytest.raises(ModelConfigError, match=DAMAGED[content]) as raised:
        make(None, folder)
    assert "config_sentence_transformers.json" in str(raised.value)


def test_adapter_is_used_for_all_texts(make: Callable[..., Any], tmp_path: Path):
    folder = pooling_folder("last")
    adapter = LoRARequest("a", 1, write_adapter(tmp_path / "adapter", folder, 1))
    found = encoded(make(None, folder, lora_request=adapter), "STS", None)
    with LLM(folder, device="cpu", enable_lora=True, **OPTIONS) as llm:
        texts = [text for batch in BATCHES for text in batch["text"]]
        expected, plain = (
            [each.outputs.embedding for each in llm.embed(texts, truncate_prompt_tokens=-1, lora_request=given)]
            for given in (adapter, None)
        )
    assert found.tolist() == expected != plain
