"""The wheel that `pip install .` makes has every package and every file, and runs where there is no checkout."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from ranks import REPOSITORY
from waiting import LIMIT_S

from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStats, StepStatsWriter

SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
TOPS = ("conf", "kv_cache", "spmd_worker")


def files_of_the_packages() -> list[str]:
    found = [path for top in TOPS for path in (REPOSITORY / top).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(REPOSITORY)) for path in found if path.suffix != ".pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy, so that nothing of a build is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for top in TOPS:
        shutil.copytree(REPOSITORY / top, sources / top, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "launch.py"):
        shutil.copy(REPOSITORY / name, sources)
    # With the setuptools that is here: no registry is asked.
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(sources)]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.matrix
def test_wheel_has_every_file_of_the_packages(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = files_of_the_packages()
    assert {"conf/config.yaml", "spmd_worker/native/attention.cpp"} <= set(expected)
    assert sorted(names) == sorted([*expected, "launch.py"])


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has this one's dependencies, by a path of its own, and of the project nothing but the wheel."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_S)
    python = folder / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names has no .pth files of its own read: the checkout that is installed here stays out.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def run_installed(environment: Path, folder: Path, program: str, *arguments: object) -> str:
    """Standard output of a program of the environment, run in `folder`, outside the checkout; it must end with 0."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    command = [str(environment / "bin" / program), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.stress
def test_commands_run_from_wheel_in_separate_environment(environment: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "add 123 + 456 =", "max_tokens": 8}\n')
    shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", tmp_path / "model")
    job = ["model.path=model", "device=cpu", "cache.num_blocks=64", "job.input=rows.jsonl", "job.output=out.jsonl"]
    for program, arguments, expected in (
        ("spmd-worker", ["--help"], "usage: torchrun --nproc-per-node N --no-python spmd-worker KEY=VALUE..."),
        ("python", ["-m", "launch", "--help"], "usage: torchrun --nproc-per-node N -m launch KEY=VALUE..."),
        ("spmd-worker", ["plan=true", "model.path=model"], "LlamaForCausalLM"),
        # On two ranks: test_demo_from_the_wheel_takes_its_files, in the stress tier.
        ("spmd-worker", job, ""),
    ):
        assert expected in run_installed(environment, tmp_path, program, *arguments)
    (row,) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["outputs"][0]["text"] == " 579"
    code = "import spmd_worker; print(spmd_worker.__file__)"
    assert Path(run_installed(environment, tmp_path, "python", "-c", code).strip()).is_relative_to(environment)


@pytest.mark.matrix
@pytest.mark.finding(number="D10")
def test_demo_from_the_wheel_names_missing_files(environment: Path, tmp_path: Path):
    with pytest.raises(AssertionError, match=r"error: model\.path=scripts/demo/model .*repository"):
        run_installed(environment, tmp_path, "spmd-worker", "experiment=demo", "plan=true")


@pytest.mark.stress
@pytest.mark.finding(number="D10")
def test_demo_from_the_wheel_takes_its_files(environment: Path, tmp_path: Path):
    demo = REPOSITORY / "scripts" / "demo"
    files = [f"model.path={demo / 'model'}", f"job.input={demo / 'prompts.jsonl'}"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch"]
    run_installed(environment, tmp_path, "python", *ranks, "experiment=demo", *files, "job.max_rows=2", "device=cpu")
    assert (tmp_path / "runs" / "demo" / "output.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.stress
def test_tools_run_from_wheel_under_their_own_name(environment: Path, tmp_path: Path):
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch"]
    model = f"model.path={REPOSITORY / 'scripts' / 'demo' / 'model'}"
    assert "LlamaForCausalLM" in run_installed(environment, tmp_path, "python", *ranks, "plan=true", model)
    for command, entry in SETTINGS["project"]["scripts"].items():
        _, _, tool = entry.removesuffix(":main").rpartition(".")
        if tool == "launch":
            continue
        text = run_installed(environment, tmp_path, command, "--help")
        assert text.startswith(f"usage: {command} [-h]")
        if tool == "torchrun":
            continue  # its help is that of torch
        assert f"\n    {command} " in text
        assert "python -m" not in text
        module = f"python -m spmd_worker.tools.{tool}"
        assert f"\n    {module} " in run_installed(environment, tmp_path, *module.split(), "--help")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with StepStatsWriter(run_dir / STEP_STATS_NAME) as writer:
        for step in (1, 2, 3):
            writer.write(StepStats(step, step * 1_000, 10, 20, 600, 30, *[0] * 15))
    (run_dir / "metrics.json").write_text(json.dumps({"rows": 7, "error_rows": 0}))
    assert "7 rows" in run_installed(environment, tmp_path, "python", "-m", "spmd_worker.tools.report", run_dir)
    assert "<h1>Run run</h1>" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert "The run ended well: 7 rows" in run_installed(environment, tmp_path, "spmd-worker-doctor", run_dir)


@pytest.mark.stress
def test_modules_named_in_docs_are_in_the_wheel(environment: Path, tmp_path: Path, control):
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    modules = {name for text in texts for name in re.findall(r"(?:-m|import|from) (spmd_worker[a-z_.]*[a-z])\b", text)}
    offered = {
        name
        for text in texts
        for line in re.findall(r"from spmd_worker import ([\w, ]+)", text)
        for name in line.split(", ")
    }
    assert {"spmd_worker.serve", "spmd_worker.tools.report", "spmd_worker.integrations.trl"} <= modules
    assert {"LLM", "SamplingParams"} <= offered

    def missing(modules: set[str], offered: set[str]) -> list[str]:
        code = (
            "import importlib.util, json, sys, spmd_worker\n"
            "modules, offered = json.loads(sys.argv[1])\n"
            "print([name for name in modules if importlib.util.find_spec(name) is None]"
            " + [name for name in offered if not hasattr(spmd_worker, name)])"
        )
        names = json.dumps([sorted(modules), sorted(offered)])
        return ast.literal_eval(run_installed(environment, tmp_path, "python", "-c", code, names))

    assert missing(modules, offered) == []
    with control("spmd_worker.attic"):
        assert missing(modules | {"spmd_worker.attic"}, offered) == []


def test_imports_of_the_code_are_among_dependencies():
    names = {line.split(">")[0].split("=")[0] for line in SETTINGS["project"]["dependencies"]}
    assert {"torch", "hydra-core", "omegaconf", "pyyaml", "tokenizers", "numpy", "jinja2"} <= names
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").lower()
    assert [name for name in sorted(names) if f"{name}==" not in pins] == []


def test_every_tool_has_command_and_extras_are_pinned():
    tools = {path.stem for path in (REPOSITORY / "spmd_worker" / "tools").glob("[a-z]*.py")}
    assert SETTINGS["project"]["scripts"] == {
        "spmd-worker": "launch:main",
        **{f"spmd-worker-{tool}": f"spmd_worker.frontends.tools.{tool}:main" for tool in tools},
    }
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    extras = SETTINGS["project"]["optional-dependencies"]
    names = {re.split(r"[\[><=]", line)[0].replace("_", "-") for lines in extras.values() for line in lines}
    assert {"matplotlib", "prometheus-client"} <= names
    assert [name for name in sorted(names) if f"\n{name}==" not in pins] == []
    assert [line for name in ("metrics", "report") for line in extras[name] if line not in extras["dev"]] == []
