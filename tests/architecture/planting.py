"""Writes small houses for the checkers to find violations in."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

CLEAN_HOUSE = {
    "kv_cache/block.py": '"""Blocks."""\n',
    "kv_cache/block_pool.py": '"""Pool."""\n\nfrom kv_cache.block import BlockId\n',
    "kv_cache/cache_engine.py": '"""Tensors."""\n\nimport torch\n\nfrom kv_cache import block_pool\n',
    "spmd_worker/__init__.py": '"""Facade."""\n\n\ndef __getattr__(name):\n    from spmd_worker.llm import LLM\n',
    "spmd_worker/base/config/schema.py": '"""Config."""\n\nimport json\n',
    "spmd_worker/base/config/compose.py": '"""C."""\n\nimport hydra\n\nimport spmd_worker.base.config.schema\n',
    "spmd_worker/replica/sequence/request.py": '"""Requests."""\n\nfrom kv_cache.block import BlockId\n',
    "spmd_worker/replica/scheduler/scheduler.py": '"""Plans."""\n\nimport spmd_worker.replica.sequence.request\n',
    "spmd_worker/replica/lockstep/codec.py": '"""Codec."""\n\nimport spmd_worker.replica.scheduler.scheduler\n',
    "spmd_worker/ranks/topology.py": '"""Layout."""\n\nimport math\n',
    "spmd_worker/ranks/groups.py": '"""Groups."""\n\nimport torch.distributed\n',
    "spmd_worker/ranks/transport/channel.py": '"""Star."""\n\nimport time\nimport spmd_worker.ranks.groups\n',
    "spmd_worker/llm.py": '"""LLM."""\n\nimport torch\n\nfrom spmd_worker.ranks.groups import Groups\n',
    "spmd_worker/frontends/batch/input/row_reader.py": '"""."""\n\nfrom spmd_worker.ranks.topology import Layout\n',
    "spmd_worker/frontends/batch/output_file.py": '"""Writes."""\n',
    "spmd_worker/frontends/batch/job.py": (
        '"""."""\nimport spmd_worker.frontends.batch.input.row_reader\nfrom spmd_worker.llm import LLM\n'
    ),
    "launch.py": '"""Starts."""\n\n\ndef main():\n    from spmd_worker.frontends.batch.job import run\n',
    "conf/config.yaml": "seed: 0\n",
}
"""The files with something in them; every folder of modules has its empty `__init__.py`."""


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write the clean house under `root` with `files` added; a text that starts with `+` is appended to the old."""
    house = dict(CLEAN_HOUSE)
    for path, text in files.items():
        house[path] = house[path] + text[1:] if text.startswith("+") else text
    for path, text in house.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    for folder in {folder for path in CLEAN_HOUSE for folder in Path(path).parents if path.endswith(".py")}:
        if str(folder) != ".":
            (root / folder / "__init__.py").touch()
    return root
