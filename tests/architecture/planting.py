"""Writes small houses for the checkers to find violations in."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

CLEAN_HOUSE = {
    "kv_cache/__init__.py": "",
    "kv_cache/block.py": '"""Blocks."""\n',
    "kv_cache/block_pool.py": '"""Pool."""\n\nfrom kv_cache.block import BlockId\n',
    "kv_cache/cache_engine.py": '"""Tensors."""\n\nimport torch\n\nfrom kv_cache import block_pool\n',
    "spmd_worker/__init__.py": '"""Facade."""\n\n\ndef __getattr__(name):\n    from spmd_worker.llm import LLM\n',
    "spmd_worker/config/schema.py": '"""Config."""\n\nimport json\n',
    "spmd_worker/config/compose.py": '"""C."""\n\nimport hydra\n\nfrom spmd_worker.config.schema import RunConfig\n',
    "spmd_worker/sequence/__init__.py": "",
    "spmd_worker/sequence/request.py": '"""Requests."""\n\nfrom kv_cache.block import BlockId\n',
    "spmd_worker/scheduler/__init__.py": "",
    "spmd_worker/scheduler/scheduler.py": '"""Plans."""\n\nfrom spmd_worker.sequence.request import Request\n',
    "spmd_worker/distributed/__init__.py": "",
    "spmd_worker/distributed/topology.py": '"""Layout."""\n\nimport math\n',
    "spmd_worker/distributed/groups.py": '"""Groups."""\n\nimport torch.distributed\n',
    "spmd_worker/lockstep/__init__.py": "",
    "spmd_worker/lockstep/wire/codec.py": '"""Codec."""\n\nfrom spmd_worker.distributed.topology import Layout\n',
    "spmd_worker/lockstep/transport/channel.py": '"""Star."""\n\nimport time\nimport spmd_worker.distributed.groups\n',
    "spmd_worker/llm.py": '"""LLM."""\n\nimport torch\n\nfrom spmd_worker.distributed.groups import Groups\n',
    "spmd_worker/batch/__init__.py": "",
    "spmd_worker/batch/input/row_reader.py": '"""Rows."""\n\nfrom spmd_worker.sequence.request import Request\n',
    "spmd_worker/batch/output/output_file.py": '"""Writes."""\n',
    "spmd_worker/batch/job.py": '"""."""\nimport spmd_worker.batch.input.row_reader\nfrom spmd_worker.llm import LLM\n',
    "spmd_worker/config/__init__.py": "",
    "spmd_worker/lockstep/wire/__init__.py": "",
    "spmd_worker/lockstep/transport/__init__.py": "",
    "spmd_worker/batch/input/__init__.py": "",
    "spmd_worker/batch/output/__init__.py": "",
    "launch.py": '"""Starts."""\n\nimport argparse\n\n\ndef main():\n    from spmd_worker.batch.job import run\n',
    "conf/config.yaml": "seed: 0\n",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write the clean house under `root` with `files` added; a text that starts with `+` is appended to the old."""
    house = dict(CLEAN_HOUSE)
    for path, text in files.items():
        house[path] = house[path] + text[1:] if text.startswith("+") else text
    for path, text in house.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root
