"""What `pip install .` takes along: every package, and every file in them that is not Python."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from ranks import REPOSITORY

SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = SETTINGS["tool"]["setuptools"]
TOPS = ("conf", "kv_cache", "spmd_worker")


def data_files(root: Path) -> list[Path]:
    found = [path for top in TOPS for path in (root / top).rglob("*") if path.is_file()]
    return [path.relative_to(root) for path in found if path.suffix not in (".py", ".pyc")]


def left_behind(files: list[Path], package_data: dict[str, list[str]]) -> list[str]:
    """The files that no pattern of package-data matches; a pattern belongs to its package and those below."""
    return [
        str(path)
        for path in files
        if not any(
            path.is_relative_to(package.replace(".", "/"))
            and fnmatch(str(path.relative_to(package.replace(".", "/"))), pattern.replace("**/", "*"))
            for package, patterns in package_data.items()
            for pattern in patterns
        )
    ]


def test_every_package_is_found():
    patterns = SETUPTOOLS["packages"]["find"]["include"]
    packages = [path for top in TOPS for path in (REPOSITORY / top).rglob("*") if path.is_dir()]
    names = [".".join(path.relative_to(REPOSITORY).parts) for path in packages if path.name != "__pycache__"]
    assert len(names) > 20
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert SETUPTOOLS["py-modules"] == ["launch"]


def test_files_that_are_not_python_are_taken_along():
    files = data_files(REPOSITORY)
    assert Path("conf/config.yaml") in files
    assert any(path.suffix == ".cpp" for path in files)
    assert left_behind(files, SETUPTOOLS["package-data"]) == []
    # The control: without its pattern a file stays behind.
    assert left_behind(files, {"conf": ["**/*.yaml"]}) != []
    assert left_behind([Path("spmd_worker/notes.txt")], SETUPTOOLS["package-data"]) == ["spmd_worker/notes.txt"]


def test_what_the_code_imports_is_among_the_dependencies():
    names = {line.split(">")[0].split("=")[0] for line in SETTINGS["project"]["dependencies"]}
    assert {"torch", "hydra-core", "omegaconf", "pyyaml", "safetensors", "tokenizers", "numpy", "jinja2"} <= names
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").lower()
    assert [name for name in sorted(names) if f"{name}==" not in pins] == []
