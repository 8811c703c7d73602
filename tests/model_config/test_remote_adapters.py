"""Adapters in S3: those of a configuration, of calls and of rows have the bits of local folders, on every rank."""

import json
import shutil
from pathlib import Path

import pytest
import ranks
from adapter_folders import DEMO, write_adapter, write_prompt_adapter
from jobs_of_rows import answers_of_job

from spmd_worker import LLM, LoRARequest, PromptAdapterRequest
from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.base.remote_files import delete_remote, replace_remote
from spmd_worker.frontends.batch.run_dir.adapter_digests import adapter_digests
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model_config.adapter_folder import local_adapter

FILES = ["adapter_config.json", "adapter_model.safetensors"]
LAUNCH = ranks.REPOSITORY / "launch.py"
SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def folders(s3, tmp_path, monkeypatch) -> dict[str, Path]:
    """Local folders, whose remote copies are `<bucket>/adapters/NAME`; the cache is empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    made = {name: write_adapter(tmp_path / name, DEMO, seed) for seed, name in enumerate("ab")}
    made["soft"] = write_prompt_adapter(tmp_path / "soft", 128, 5, 7)
    for name, folder in made.items():
        for path in [*folder.iterdir(), folder / "adapter_model.bin"]:
            replace_remote(f"{s3.bucket}/adapters/{name}/{path.name}", path.read_bytes() if path.exists() else b"x")
    s3.requests.clear()
    return made


def downloads(s3) -> list[str]:
    found = [
        path.rstrip("?").rpartition("/")[2] for method, path in s3.requests if method == "GET" if "list-" not in path
    ]
    s3.requests.clear()
    return found


def test_remote_adapter_is_downloaded_once(s3, folders):
    s3.fault = lambda number, method, path: ("throttle", "reset", None, None)[number % 4]
    remote = f"{s3.bucket}/adapters/a"
    found = local_adapter(remote)
    s3.fault = None
    assert sorted(path.name for path in found.iterdir()) == FILES
    assert read_adapter(remote).digest == read_adapter(folders["a"]).digest
    downloads(s3)
    read_adapter(f"{remote}")
    assert downloads(s3) == []
    write_adapter(folders["a"], DEMO, 5)
    replace_remote(f"{remote}/{FILES[1]}", (folders["a"] / FILES[1]).read_bytes())
    assert read_adapter(remote).digest == read_adapter(folders["a"]).digest
    assert local_adapter(remote) != found


def test_job_with_remote_adapters_has_local_bytes(s3, folders, tmp_path):
    rows = [{"prompt": f"add {index} 7 =", "adapter": "ab"[index % 2], **SAMPLING} for index in range(4)]
    rows += [{"prompt": "add 1 7 =", "prompt_adapter": "soft", **SAMPLING}]
    found = []
    for where in ("", f"{s3.bucket}/adapters/"):
        named = {name: f"{where}{name}/" if where else str(folder) for name, folder in folders.items()}
        options = {"adapters": {name: named[name] for name in "ab"}, "prompt_adapters": {"soft": named["soft"]}}
        folder = tmp_path / ("remote" if where else "local")
        folder.mkdir()
        found.append((answers_of_job(folder, DEMO, rows, options=options), adapter_digests(ModelOptions(**options))))
    assert found[0] == found[1]


@pytest.mark.guarantee(
    "A remote adapter is downloaded once a node, and all ranks compute with its bits", is_control_inside=True
)
def test_ranks_share_one_download_of_remote_adapters(s3, folders, tmp_path):
    rows = [{"prompt": f"add {index} 7 =", "adapter": "ab"[index % 2], **SAMPLING} for index in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    outputs = []
    for where in (f"{s3.bucket}/adapters", str(tmp_path)):
        command = [
            *(LAUNCH, f"model.path={DEMO}", "device=cpu", "cache.num_blocks=64", "parallel.tensor_parallel_size=2"),
            *(f"model.adapters={{a: '{where}/a', b: '{where}/b'}}", f"job.input={tmp_path}/rows.jsonl"),
            *(f"job.output={tmp_path}/out{len(outputs)}.jsonl", "job.step_log=true"),
        ]
        ranks.run_forked(command, nproc=2, timeout_s=240).checked()
        outputs.append((tmp_path / f"out{len(outputs)}.jsonl").read_bytes())
    assert outputs[0] == outputs[1]
    assert sorted(downloads(s3)) == [FILES[0]] * 2 + [FILES[1]] * 2
    # A control: without the copies they are downloaded again.
    shutil.rmtree(tmp_path / "cache")
    local_adapter(f"{s3.bucket}/adapters/a")
    assert sorted(downloads(s3)) == FILES
    # The step log names the remote folder, from which a replay reads.
    header = read_step_log(tmp_path / "out0.jsonl.run" / "steps.log").header
    assert header.adapter_paths == (f"{s3.bucket}/adapters/a", f"{s3.bucket}/adapters/b")


def test_calls_name_remote_adapters(s3, folders):
    with LLM(DEMO, enable_lora=True, max_loras=2, num_blocks=64, device="cpu") as llm:
        texts = []
        for number, (lora, soft) in enumerate([(folders["a"], folders["soft"]), ("a", "soft")], 1):
            lora, soft = (
                f"{s3.bucket}/adapters/{each}" if isinstance(each, str) else str(each) for each in (lora, soft)
            )
            requests = {"lora_request": LoRARequest(f"a{number}", number, lora)}
            requests["prompt_adapter_request"] = PromptAdapterRequest(f"s{number}", number, soft, 5)
            texts.append(llm.generate("add 1 7 =", use_tqdm=False, **requests)[0].outputs[0].text)
        assert texts[0] == texts[1]
        with pytest.raises(
            AdapterError, match=r"s3://\S+/adapters/none has no adapter_config\.json: an adapter is a fo"
        ):
            llm.add_lora(LoRARequest("none", 9, f"{s3.bucket}/adapters/none"))
    with LLM(DEMO, num_blocks=64, device="cpu", lora_merge=f"{s3.bucket}/adapters/a") as llm:
        remote = llm.generate("add 1 7 =", use_tqdm=False)[0].outputs[0].text
    with LLM(DEMO, num_blocks=64, device="cpu", lora_merge=str(folders["a"])) as llm:
        assert remote == llm.generate("add 1 7 =", use_tqdm=False)[0].outputs[0].text


def test_unusable_remote_adapters_are_rejected(s3, folders):
    remote = f"{s3.bucket}/adapters/a"
    delete_remote(f"{remote}/{FILES[1]}")
    # The pickle beside it is not downloaded.
    with pytest.raises(
        AdapterError, match=r"^s3://\S+/adapters/a has no adapter_model\.safetensors: an adapter is a fold"
    ):
        read_adapter(remote)
    replace_remote(f"{remote}/{FILES[1]}", b"x")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        read_adapter(remote)
    s3.fault = lambda number, method, path: "throttle"
    with pytest.raises(ConfigError, match=r"^model.adapters.a: s3://\S+ cannot be downloaded: .*after 10 tries"):
        LLM(DEMO, num_blocks=64, device="cpu", adapters={"a": remote})


@pytest.mark.parametrize("name", ["https://host/a?X-Amz-Signature=planted", "https://me:planted@host/a"])
def test_adapter_names_with_secrets_are_rejected(name):
    for options, key in (({"adapters": {"a": name}}, "adapters.a"), ({"lora_merge": name}, "lora_merge")):
        with pytest.raises(
            ConfigError, match=rf"^model\.{key}=https://host/a\S* has a user or query, .* leave it out"
        ) as caught:
            ModelOptions(path="x", **options)
        assert "planted" not in str(caught.value)
    with pytest.raises(ValueError, match="has a user or query"):
        LoRARequest("a", 1, name)
