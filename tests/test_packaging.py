"""The wheel that `pip install .` makes has every package and every file, and runs where there is no checkout."""

import json
import os
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
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sources)]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.matrix
def test_the_wheel_has_every_file_of_the_packages(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = files_of_the_packages()
    assert {"conf/config.yaml", "spmd_worker/native/attention.cpp"} <= set(expected)
    assert sorted(names) == sorted([*expected, "launch.py"])


@pytest.mark.matrix
def test_the_command_runs_from_the_wheel_in_an_environment_of_its_own(wheel: Path, tmp_path: Path):
    """The environment has this one's dependencies, by a path of its own, and of the project nothing but the wheel."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=LIMIT_S)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A folder that a .pth file names has no .pth files of its own read: the checkout that is installed here stays out.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "add 123 + 456 =", "max_tokens": 8}\n')
    shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", tmp_path / "model")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments, expected in (
        (["--help"], "usage: torchrun --nproc-per-node N launch.py"),
        (["plan=true", "model.path=model"], "LlamaForCausalLM"),
        (["model.path=model", "device=cpu", "cache.num_blocks=64", "job.input=rows.jsonl", "job.output=out.jsonl"], ""),
    ):
        command = [str(python), "-m", "launch", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    (row,) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["outputs"][0]["text"] == " 579"
    where = [str(python), "-c", "import spmd_worker; print(spmd_worker.__file__)"]
    place = subprocess.run(where, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout
    assert Path(place.strip()).is_relative_to(environment)


def test_what_the_code_imports_is_among_the_dependencies():
    names = {line.split(">")[0].split("=")[0] for line in SETTINGS["project"]["dependencies"]}
    assert {"torch", "hydra-core", "omegaconf", "pyyaml", "tokenizers", "numpy", "jinja2"} <= names
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").lower()
    assert [name for name in sorted(names) if f"{name}==" not in pins] == []
