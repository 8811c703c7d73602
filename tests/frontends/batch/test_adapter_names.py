"""Names of adapters in rows: which model a row gets, and the errors of unknown names."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import DEMO

from spmd_worker.base.config.schema import JobConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.openai.row import Row, RowError
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.openai.served_models import ANY_MODEL, ServedModels
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.sequence.prompt_adapter_request import VirtualTokens
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError

TUNED = VirtualTokens(33, 5)
SERVED = ServedModels("base", {"sql": 11, "poems": 22}, ("/models/base",), {"tuned": TUNED})


def parsed(row: dict[str, Any]) -> Row | RowError:
    return parse_row(0, json.dumps(row).encode(), SamplingParams())


def plain(**keys: Any) -> dict[str, Any]:
    return {"prompt": "a", **keys}


def openai(url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    content = {"input": "a"} if url == "/v1/embeddings" else {"prompt": "a"}
    return {"custom_id": "c", "method": "POST", "url": url, "body": {**content, **body}}


@pytest.mark.parametrize(
    ("row", "adapters"),
    [
        (plain(prompt_adapter="tuned"), (0, TUNED)),
        (plain(prompt_adapter="tuned", adapter="sql"), (11, TUNED)),
        (openai(model="tuned"), (0, TUNED)),
        (plain(), 0),
        (plain(adapter=None), 0),
        (plain(adapter="sql"), 11),
        ({"embed": "a", "adapter": "poems"}, 22),
        (openai(), 0),
        (openai(model="base"), 0),
        (openai(model="/models/base"), 0),
        (openai(model="poems"), 22),
        (openai("/v1/embeddings", model="sql"), 11),
    ],
)
def test_row_gets_the_adapter_it_names(row: dict[str, Any], adapters: Any):
    found = parsed(row)
    assert isinstance(found, Row), found
    assert SERVED.adapters_of(found) == (adapters if isinstance(adapters, tuple) else (adapters, None))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (plain(adapter="prose"), "adapter='prose' is not loaded: the run has sql, poems (model.adapters="),
        # A plain row has no other name for the base model than none.
        (plain(adapter="base"), "adapter='base' is not loaded: the run has sql, poems"),
        (openai(model="prose"), "model 'prose' is not served; served are base, sql, poems, tuned"),
        (plain(adapter="tuned"), "adapter='tuned' is not loaded: the run has sql, poems"),
        (plain(prompt_adapter="sql"), "prompt_adapter='sql' is not loaded: the run has tuned (model.prompt_adapters="),
        (openai(model=""), "model '' is not served"),
    ],
)
def test_unknown_name_is_an_error_with_the_known_ones(row: dict[str, Any], message: str):
    found = parsed(row)
    assert isinstance(found, Row), found
    with pytest.raises(InvalidRequestError) as refused:
        SERVED.adapters_of(found)
    assert refused.value.code == "model_not_found"
    assert str(refused.value).startswith(message)


def test_long_list_of_names_is_cut():
    many = ServedModels("base", {f"a{number}": 1 + number for number in range(30)})
    with pytest.raises(InvalidRequestError, match=r"served are base, a0, .*, a18 and 11 more$"):
        many.adapters_of(parsed(openai(model="b")))


def test_without_adapters_any_model_name_is_the_base():
    """As for files that were written for another service; but an adapter by that key is never ignored."""
    assert ANY_MODEL.adapters_of(parsed(openai(model="gpt-4o"))) == (0, None)
    with pytest.raises(InvalidRequestError, match=r"adapter='sql' is not loaded: the run has none"):
        ANY_MODEL.adapters_of(parsed(plain(adapter="sql")))
    with pytest.raises(InvalidRequestError, match=r"prompt_adapter='tuned' is not loaded: the run has none"):
        ANY_MODEL.adapters_of(parsed(plain(prompt_adapter="tuned")))


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        (plain(adapter=3), "invalid_value", "adapter=3 must be a string"),
        (openai(adapter="sql"), "unknown_key", "a body names its adapter in model"),
        (plain(prompt_adapter=[]), "invalid_value", "a name of model.prompt_adapters"),
        (openai(prompt_adapter="tuned"), "unknown_key", "prompt_adapter is a key of a plain row: a body names its"),
        ({"embed": "a", "prompt_adapter": "tuned"}, "unknown_key", "'prompt_adapter'"),
        (openai() | {"adapter": "sql"}, "unknown_key", "'adapter'"),
    ],
)
def test_wrong_adapter_key_is_an_error_row(row: dict[str, Any], code: str, words: str):
    found = parsed(row)
    assert isinstance(found, RowError)
    assert found.code == code
    assert words in found.message


def test_adapter_may_not_have_the_models_name():
    for name in ("base", "/models/base"):
        with pytest.raises(ConfigError, match=rf"model.adapters has '{name}', which is the model's own name"):
            ServedModels("base", {name: 5}, ("/models/base",))
        with pytest.raises(ConfigError, match=rf"model.prompt_adapters has '{name}', which is the model's own name"):
            ServedModels("base", {}, ("/models/base",), {name: TUNED})


def test_adapter_of_the_models_name_begins_nothing(tmp_path: Path):
    """Before, the model was loaded first."""
    model = ModelOptions(path=str(DEMO), adapters={DEMO.name: "/none"})
    job = JobConfig(input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.jsonl"), run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=rf"model.adapters has '{DEMO.name}', which is the model's own name"):
        run_job(RunConfig(model=model, job=job), RankEnvironment())
    assert not (tmp_path / "run").exists()
