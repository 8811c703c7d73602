"""Jobs and engines of models given by a hub name: from the local cache, and from a hub on loopback."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
import ranks
from hub_cache import COMMIT, serve_hub, write_snapshot

import launch
from spmd_worker import LLM, SamplingParams

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
PROMPT = "copy q ="
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
LIMIT_S = 240.0


def test_job_and_plan_of_cached_hub_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    snapshot = write_snapshot(tmp_path / "hub", "org/tiny", MODEL, refs=("v1",))
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    assert launch.main(["plan=true", "model.path=org/tiny", "model.revision=v1"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT, "max_tokens": 4}) + "\n")
    settings = ["model.path=org/tiny", "model.revision=v1", "device=cpu", "cache.num_blocks=64"]
    paths = [f"job.input={tmp_path}/in.jsonl", f"job.output={tmp_path}/out.jsonl", f"job.run_dir={tmp_path}/run"]
    ranks.run_script([ranks.REPOSITORY / "launch.py", *settings, *paths], LIMIT_S, offline).checked()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["model_revision"] == COMMIT
    assert manifest["model"] == str(snapshot.resolve())
    assert manifest["config"]["model"]["path"] == "org/tiny"
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_unknown_hub_model_is_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert launch.main(["model.path=org/tiny", "job.input=x", "job.output=y"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: model.path=org/tiny is not a folder, and not in the local cache of the hub: there is no "
    )


@pytest.mark.matrix
def test_two_ranks_download_a_hub_model_once(tmp_path: Path):
    with serve_hub(MODEL) as (address, asked):
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = ranks.run_forked([__file__, tmp_path], 2, LIMIT_S, variables)
    assert done.returncode == 0, done.output
    assert sorted(asked) == sorted(dict.fromkeys(asked)), "each file once"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(asked)
    with LLM(MODEL, device="cpu", num_blocks=64) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    for rank in range(2):
        folder, text = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert Path(folder) == tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
        assert text == expected


def test_pooling_hub_model_gives_its_folders_vectors(tmp_path: Path):
    """Mean, dense and normalised; of the hub's name alone it was the last token's state."""
    # Imports transformers, for which the ranks of the other test would wait.
    from pooling_models import pooling_folder

    folder = pooling_folder("dense")
    source = f"""
        import json
        from spmd_worker import LLM
        with LLM("org/tiny", device="cpu", num_blocks=64) as llm:
            print("vector", json.dumps(llm.embed({PROMPT!r}, use_tqdm=False)[0].outputs.embedding))
        """
    script = tmp_path / "embed.py"
    script.write_text(textwrap.dedent(source))
    with serve_hub(folder) as (address, asked):
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        runs = [ranks.run_script([script], LIMIT_S, variables) for _ in range(2)]
    for done in runs:
        assert done.returncode == 0, done.output
    assert sorted(asked) == sorted(dict.fromkeys(asked)), "each file once"
    assert {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= set(asked)
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        expected = llm.embed(PROMPT, use_tqdm=False)[0].outputs.embedding
    for done in runs:
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("vector ")]
        assert json.loads(line.removeprefix("vector ")) == expected


def main() -> None:
    """Runs on each rank."""
    with LLM("org/tiny", revision="main", tensor_parallel_size=2, device="cpu", num_blocks=64) as llm:
        text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
        answer = [str(llm.llm_engine.resolved.model_folder), text]
    (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
