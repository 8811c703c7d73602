"""A copy of the product with a new family, and its logits compared with a reference's."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ranks
import torch
from ranks import REPOSITORY
from safetensors.torch import save_file
from torch import Tensor

_TABLE = "spmd_worker/model_config/families/table.py"
_BEFORE = '    "LlamaForCausalLM": Family('
_COMPARE = """
import sys, torch
from our_model import load_model, prompt_logits
folder, prompt, expected = sys.argv[1], *torch.load(sys.argv[2])
model = load_model(folder)
found = prompt_logits(model, [prompt])[0]
assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
assert torch.equal(prompt_logits(model, [prompt], 7)[0], found), "logits differ in chunks of seven tokens"
"""


def copy_with_family(root: Path, entry: str, modules: Mapping[str, str]) -> None:
    """Copy the product to `root`, with an entry of the families' table and more modules, path -> text."""
    shutil.copytree(REPOSITORY / "spmd_worker", root / "spmd_worker", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "kv_cache").symlink_to(REPOSITORY / "kv_cache")
    table = (root / _TABLE).read_text(encoding="utf-8")
    assert table.count(_BEFORE) == 1
    (root / _TABLE).write_text(table.replace(_BEFORE, entry + _BEFORE), encoding="utf-8")
    for path, text in modules.items():
        (root / path).write_text(text, encoding="utf-8")


def check_logits(
    root: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], prompt: Sequence[int], expected: Tensor
) -> None:
    """Write the checkpoint, and compare the logits of the copy in `root` with the expected ones, [tokens, vocab]."""
    (root / "model").mkdir()
    save_file(tensors, root / "model" / "model.safetensors")
    (root / "model" / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    torch.save((list(prompt), expected.detach()), root / "expected.pt")
    (root / "compare.py").write_text(_COMPARE)
    command = [sys.executable, *(str(root / name) for name in ("compare.py", "model", "expected.pt"))]
    env = {"PYTHONPATH": f"{root}:{REPOSITORY / 'tests' / 'support'}"}
    ranks.run_command(command, timeout_s=240, env=env, cwd=root).checked()
