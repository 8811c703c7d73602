"""A job with adapters: rows name them by both doors, and a resumed job has the same ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import (
    DEMO,
    adapter_tensors,
    demo_adapters,
    demo_prompt_adapters,
    write_adapter,
    write_prompt_adapter,
)
from cut_jobs import Ended, end_after
from jobs_of_rows import answers_of_job, job_config, openai_row, run_here, write_rows
from pooling_models import pooling_folder
from safetensors.torch import save_file

from spmd_worker import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.batch.run_dir.adapter_digests import adapter_digests
from spmd_worker.ranks.environment import RankEnvironment

ADAPTERS = demo_adapters("a", "b")
SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
NAMES = (None, "a", "b")


def plain_row(index: int, adapter: str | None) -> dict[str, Any]:
    return {"prompt": f"add {index} 7 =", "adapter": adapter, **SAMPLING}


def named_row(index: int, model: str | None, **body: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return openai_row(f"row {index}", "/v1/completions", {"prompt": f"add {index} 7 =", **SAMPLING, **named, **body})


@pytest.fixture(scope="module")
def texts() -> dict[tuple[int, str | None], str]:
    """Text of each prompt with each adapter, of calls of an LLM."""
    requests = [None, *(LoRARequest(name, number, path) for number, (name, path) in enumerate(ADAPTERS.items(), 1))]
    with LLM(DEMO, enable_lora=True, max_loras=2, num_blocks=64, device="cpu") as llm:
        found = {}
        for name, request in zip(NAMES, requests, strict=True):
            prompts = [f"add {index} 7 =" for index in range(12)]
            outputs = llm.generate(prompts, SamplingParams(**SAMPLING), lora_request=request, use_tqdm=False)
            found |= {(index, name): output.outputs[0].text for index, output in enumerate(outputs)}
    assert len(set(found.values())) > 30
    return found


def test_rows_name_adapters_by_both_doors(tmp_path: Path, texts: dict[tuple[int, str | None], str]):
    rows = [plain_row(index, NAMES[index % 3]) for index in range(6)]
    rows += [named_row(index, (None, "a", "b", "model", str(DEMO), "b")[index - 6]) for index in range(6, 12)]
    rows += [plain_row(0, "c"), named_row(0, "gpt"), {"embed": "a", "adapter": "a"}]
    answers = answers_of_job(tmp_path, DEMO, rows, options={"adapters": ADAPTERS})
    assert [answer["outputs"][0]["text"] for answer in answers[:6]] == [texts[i, NAMES[i % 3]] for i in range(6)]
    assert [answer.get("adapter") for answer in answers[:6]] == [NAMES[index % 3] for index in range(6)]
    bodies = [answer["response"]["body"] for answer in answers[6:12]]
    given = (None, "a", "b", None, None, "b")
    assert [body["choices"][0]["text"] for body in bodies] == [texts[6 + i, name] for i, name in enumerate(given)]
    assert [body["model"] for body in bodies] == ["model", "a", "b", "model", str(DEMO), "b"]
    unknown, other, pooled = (answer["error"] for answer in answers[12:])
    assert unknown["code"] == other["code"] == "model_not_found"
    assert unknown["message"].startswith("adapter='c' is not loaded: the run has a, b")
    assert other["message"] == "model 'gpt' is not served; served are model, a, b"
    assert pooled["code"] == "wrong_runner"
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert metrics["adapters"] == {"a": 4, "b": 4}


def test_rows_name_prompt_adapters_by_both_doors(tmp_path: Path):
    """Beside LoRA adapters, and together with one; their answers are those of a call."""
    folders, prompt = demo_prompt_adapters(soft=9, other=16), "add 1 7 ="
    rows = [
        {"prompt": prompt, **named, **SAMPLING}
        for named in ({}, {"prompt_adapter": "soft"}, {"prompt_adapter": "other", "adapter": "a"}, {"adapter": "a"})
    ]
    named = [{} if name is None else {"model": name} for name in ("other", "a", None, "model", "gpt")]
    bodies = [{"prompt": prompt, **SAMPLING, **each} for each in named]
    rows += [openai_row(str(index), "/v1/completions", body) for index, body in enumerate(bodies)]
    rows += [{"prompt": prompt, "prompt_adapter": "a"}, {"embed": "a", "prompt_adapter": "soft"}]
    options = {"adapters": {"a": ADAPTERS["a"]}, "prompt_adapters": folders}
    answers = answers_of_job(tmp_path, DEMO, rows, options=options)
    lora = LoRARequest("a", 1, ADAPTERS["a"])
    soft, other = (
        PromptAdapterRequest(name, number, path, number_of_tokens)
        for number, ((name, path), number_of_tokens) in enumerate(zip(folders.items(), (9, 16)), start=7)
    )
    given = [(None, None), (None, soft), (lora, other), (lora, None), (None, other)]
    with LLM(DEMO, enable_lora=True, num_blocks=64, device="cpu") as llm:
        adapters = {"lora_request": [each[0] for each in given], "prompt_adapter_request": [each[1] for each in given]}
        outputs = llm.generate([prompt] * 5, SamplingParams(**SAMPLING), use_tqdm=False, **adapters)
    expected = [output.outputs[0].text for output in outputs]
    assert len(set(expected)) == 5
    assert [answer["outputs"][0]["text"] for answer in answers[:4]] == expected[:4]
    assert [answer.get("prompt_adapter") for answer in answers[:4]] == [None, "soft", "other", None]
    assert {answer["usage"]["prompt_tokens"] for answer in answers[:4]} == {len(outputs[0].prompt_token_ids)}
    bodies = [answer["response"]["body"] for answer in answers[4:8]]
    assert [body["choices"][0]["text"] for body in bodies] == [expected[index] for index in (4, 3, 0, 0)]
    assert [body["model"] for body in bodies] == ["other", "a", "model", "model"]
    unknown, wrong, pooled = (answer["error"] for answer in answers[8:])
    assert wrong["message"].startswith("prompt_adapter='a' is not loaded: the run has soft, other")
    assert unknown["message"] == "model 'gpt' is not served; served are model, a, soft, other"
    assert pooled["code"] == "unknown_key"
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert metrics["adapters"] == {"a": 4, "soft": 1, "other": 2}


def test_virtual_tokens_count_in_a_rows_limits(tmp_path: Path):
    """Without `max_tokens` a row fills what its virtual tokens leave of `max_model_len`."""
    rows = [
        {"prompt_token_ids": [7] * number, "prompt_adapter": "soft", "temperature": 0, "ignore_eos": True}
        for number in (8, 22, 23)
    ]
    rows.append({**rows[0], "min_tokens": 16})
    options = {"prompt_adapters": demo_prompt_adapters(soft=9), "max_model_len": 32}
    first, second, third, fourth = answers_of_job(tmp_path, DEMO, rows, options=options)
    assert [each["usage"]["completion_tokens"] for each in (first, second)] == [15, 1]
    assert third["error"]["message"].startswith("the prompt has 9 virtual and 23 tokens but model.max_model_len is 32")
    assert fourth["error"]["message"] == "min_tokens=16 but only 15 tokens of model.max_model_len are left"


def test_without_adapters_model_names_have_no_effect(tmp_path: Path, texts: dict[tuple[int, str | None], str]):
    rows = [named_row(0, "gpt"), plain_row(1, "a"), plain_row(1, None)]
    free, refused, base = answers_of_job(tmp_path, DEMO, rows)
    assert free["response"]["body"]["choices"][0]["text"] == texts[0, None]
    assert refused["error"]["message"].startswith("adapter='a' is not loaded: the run has none")
    assert "adapter" not in base
    assert base["outputs"][0]["text"] == texts[1, None]


def test_pooled_rows_name_adapters_by_both_doors(tmp_path: Path):
    model = pooling_folder("last")
    adapters = {name: str(write_adapter(tmp_path / name, model, seed)) for seed, name in enumerate("ab")}
    rows: list[Any] = [{"embed": "hello", "adapter": name} for name in NAMES]
    rows += [openai_row(str(name), "/v1/embeddings", {"input": "hello", "model": name}) for name in ("a", "b", "c")]
    answers = answers_of_job(tmp_path, model, rows, num_blocks=32, options={"adapters": adapters})
    base, first, second = (answer["embedding"] for answer in answers[:3])
    assert len({str(each) for each in (base, first, second)}) == 3
    bodies = [answer["response"]["body"] for answer in answers[3:5]]
    assert [body["data"][0]["embedding"] for body in bodies] == [first, second]
    assert answers[5]["error"]["code"] == "model_not_found"
    assert [answer.get("adapter") for answer in answers[:3]] == list(NAMES)


def job_of(folder: Path, prompt_adapters: dict[str, str] | None = None, **adapters: str) -> RunConfig:
    rows = [plain_row(index, NAMES[index % 3]) for index in range(12)]
    write_rows(folder, rows)
    options = {"adapters": adapters or None, "prompt_adapters": prompt_adapters}
    return job_config(folder, DEMO, options=options, commit_rows=1)


def test_resumed_job_compares_contents_of_adapters(tmp_path: Path):
    """Moved files are the same adapter, and other weights or another adapter under a name are not."""
    own = tmp_path / "own"
    shutil.copytree(ADAPTERS["a"], own)
    soft = tmp_path / "soft"
    shutil.copytree(demo_prompt_adapters(soft=9)["soft"], soft)
    config = job_of(tmp_path, {"soft": str(soft)}, a=str(own), b=ADAPTERS["b"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, 5)
        with pytest.raises(Ended):
            run_here(config)
    write_adapter(own, DEMO, 3)
    with pytest.raises(ConfigError, match=r"^model.adapters.a is .*: answers would differ. Resume with what"):
        run_here(config)
    with pytest.raises(ConfigError, match=r'^model.adapters.b is null, and "[0-9a-f]{16}" in the run of'):
        run_here(replace(config, model=replace(config.model, adapters={"a": ADAPTERS["a"]})))
    write_prompt_adapter(soft, 128, 9, 1)
    with pytest.raises(ConfigError, match=r"^model.prompt_adapters.soft is .*: answers would differ"):
        run_here(replace(config, model=replace(config.model, adapters=ADAPTERS)))
    write_prompt_adapter(soft, 128, 9, sum(b"soft"))
    tensors, _ = adapter_tensors(DEMO, sum(b"a"))
    # The same contents, in another order in the file.
    save_file(dict(reversed(list(tensors.items()))), own / "adapter_model.safetensors")
    moved = replace(config, model=replace(config.model, adapters={"a": str(own), "b": ADAPTERS["b"]}))
    run_here(moved)
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert metrics["resumed_rows"] == 5
    assert metrics["adapters"] == {"a": 4, "b": 4, "soft": 0}
    whole = tmp_path / "whole"
    whole.mkdir()
    run_here(job_of(whole, **ADAPTERS))
    assert (tmp_path / "out.jsonl").read_bytes() == (whole / "out.jsonl").read_bytes()


def test_job_finds_adapters_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`LLM` did, and a job said that `~/a` is not a folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_adapter(tmp_path / "a", DEMO, 1)
    write_prompt_adapter(tmp_path / "soft", 128, 9, 1)
    named = job_of(tmp_path, {"soft": "~/soft"}, a="~/a").model
    given = job_of(tmp_path, {"soft": str(tmp_path / "soft")}, a=str(tmp_path / "a")).model
    assert adapter_digests(named) == adapter_digests(given)
    config = job_of(tmp_path, a="~/a")
    with pytest.raises(ConfigError, match=r"is in the folder of model.adapters.a=.*, which is only read"):
        run_job(replace(config, job=replace(config.job, output=str(tmp_path / "a" / "out"))), RankEnvironment())


def test_job_checks_folders_of_adapters_first(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^model.adapters.x: /nowhere: is not a folder"):
        run_here(job_of(tmp_path, x="/nowhere"))
    write_adapter(tmp_path / "inside", DEMO, 1)
    config = job_of(tmp_path, x=str(tmp_path / "inside"))
    inside = replace(config, job=replace(config.job, output=str(tmp_path / "inside" / "out.jsonl")))
    with pytest.raises(ConfigError, match=r"is in the folder of model.adapters.x=.*, which is only read"):
        run_here(inside)
    with pytest.raises(ConfigError, match=r"model.adapters has 'model', which is the model's own name"):
        run_here(job_of(tmp_path, model=ADAPTERS["a"]))
    with pytest.raises(ConfigError, match=r"^model.prompt_adapters.x: .*'LORA' is not supported: it is a LoRA"):
        run_here(job_of(tmp_path, {"x": ADAPTERS["a"]}))
