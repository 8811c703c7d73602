"""Every torch-free module imports where torch cannot be imported: on a head node, in a replay tool, in a test."""

import json
import subprocess
import sys
from pathlib import Path

from import_rules import is_torch_free
from planting import REPOSITORY, plant
from source_tree import read_modules

# Refuses torch as if it were not installed, imports what it is told on stdin, prints {module: error} of what fails.
IMPORT_WITHOUT_TORCH = """
import importlib, json, sys


class RefuseTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"torch is blocked, and {name} was asked for", name=name)


sys.meta_path.insert(0, RefuseTorch())
sys.path.insert(0, sys.argv[1])
failures = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


def import_without_torch(root: Path, names: list[str]) -> dict[str, str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, str(root)]
    done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def torch_free_modules(root: Path) -> list[str]:
    return [name for name in read_modules(root) if is_torch_free(name)]


def test_every_torch_free_module_imports_without_torch():
    assert import_without_torch(REPOSITORY, torch_free_modules(REPOSITORY)) == {}


def test_torch_check_detects_import_through_other_modules(tmp_path: Path):
    planted = {
        "kv_cache/block.py": '"""Blocks."""\n\nBlockId = int\n',
        "kv_cache/block_pool.py": '"""Pool."""\n\nfrom kv_cache.cache_engine import engine\n',
        "kv_cache/cache_manager.py": '"""Manager."""\n\nimport kv_cache.block_pool\n',
        "kv_cache/cache_engine.py": '"""Tensors."""\n\nimport torch\n',
    }
    names = ["kv_cache.block", "kv_cache.block_pool", "kv_cache.cache_manager"]
    blocked = "ModuleNotFoundError: torch is blocked, and torch was asked for"
    found = import_without_torch(plant(tmp_path, planted), names)
    assert found == {"kv_cache.block_pool": blocked, "kv_cache.cache_manager": blocked}


def test_cache_manager_and_scheduler_import_no_torch():
    command = (
        "import kv_cache.cache_manager, spmd_worker.replica.scheduler.scheduler, sys; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
