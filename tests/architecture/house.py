"""The house as literal data: which module stands where, who may import torch, what is replicated, what is forbidden.

The one place to edit when a room is added. Knows nothing of how the rules are checked.
"""

from dataclasses import dataclass

PACKAGES = ("kv_cache", "spmd_worker")
FACADE = "spmd_worker"
"""The package whose `__init__.py` offers names lazily; every other `__init__.py` is empty."""
MAY_COMPUTE_IMPORTS = (FACADE, "spmd_worker.worker.worker_wrapper")
"""The facade offers names lazily; the wrapper resolves classes that users give by qualified name."""
ENTRY_POINTS = (
    *("launch", FACADE, "spmd_worker.tools.replay"),
    *("spmd_worker.rank_program", "spmd_worker.serve.__main__"),
)
"""They may import every room, but at run time nothing that needs torch before it is asked for."""


@dataclass(frozen=True, slots=True)
class Room:
    """Modules (or folders with all that is in them) that may import each other and every room listed before."""

    modules: tuple[str, ...]
    may_import_torch: bool = False


ROOMS = (
    Room(("kv_cache.block",)),
    Room(("kv_cache.block_hash",)),
    Room(("kv_cache.block_ops",)),
    Room(("kv_cache.cache_spec",)),
    Room(("kv_cache.free_queue",)),
    Room(("kv_cache.prefix_index",)),
    Room(("kv_cache.block_pool",)),
    Room(("kv_cache.block_table",)),
    Room(("kv_cache.pending_moves",)),
    Room(("kv_cache.swap_space",)),
    Room(("kv_cache.connector",)),
    Room(("kv_cache.host_tier",)),
    Room(("kv_cache.device_tables",)),
    Room(("kv_cache.cache_manager",)),
    Room(("kv_cache.cache_sizing",)),
    Room(("kv_cache.host_reserve",)),
    Room(("kv_cache.host_memory",), may_import_torch=True),
    Room(("kv_cache.cache_engine",), may_import_torch=True),
    Room(("kv_cache.host_tier_engine",), may_import_torch=True),
    Room(("spmd_worker.version",)),
    Room(("spmd_worker.errors",)),
    Room(("spmd_worker.names",)),
    Room(("spmd_worker.files",)),
    Room(("spmd_worker.process",)),
    Room(("spmd_worker.config",)),
    Room(("spmd_worker.liveness",)),
    Room(("spmd_worker.metrics",)),
    Room(("spmd_worker.model_config",)),
    Room(("spmd_worker.tokenizer",)),
    Room(("spmd_worker.sequence",)),
    Room(("spmd_worker.scheduler",)),
    Room(("spmd_worker.grammar",)),
    Room(("spmd_worker.chat",)),
    Room(("spmd_worker.mirror",)),
    Room(("spmd_worker.native",), may_import_torch=True),
    Room(("spmd_worker.distributed",), may_import_torch=True),
    Room(("spmd_worker.resolved",)),
    Room(("spmd_worker.lockstep",)),
    Room(("spmd_worker.kernels",), may_import_torch=True),
    Room(("spmd_worker.attention",), may_import_torch=True),
    Room(("spmd_worker.sampling",), may_import_torch=True),
    Room(("spmd_worker.layers",), may_import_torch=True),
    Room(("spmd_worker.lora",), may_import_torch=True),
    Room(("spmd_worker.models",), may_import_torch=True),
    Room(("spmd_worker.weights",), may_import_torch=True),
    Room(("spmd_worker.memory",), may_import_torch=True),
    Room(("spmd_worker.runner",), may_import_torch=True),
    Room(("spmd_worker.worker",), may_import_torch=True),
    Room(("spmd_worker.executor",), may_import_torch=True),
    Room(("spmd_worker.compat",)),
    Room(("spmd_worker.engine",), may_import_torch=True),
    Room(("spmd_worker.data_parallel",), may_import_torch=True),
    Room(("spmd_worker.prompt_calls",), may_import_torch=True),
    Room(("spmd_worker.pooling_calls",), may_import_torch=True),
    Room(("spmd_worker.llm_engine",), may_import_torch=True),
    Room(("spmd_worker.llm",), may_import_torch=True),
    Room(("spmd_worker.rank_program",)),
    Room(("spmd_worker.replay",)),
    Room(("spmd_worker.batch",)),
    Room(("spmd_worker.serve",)),
    Room(("spmd_worker.tools",)),
    Room(("spmd_worker.integrations",), may_import_torch=True),
)

TORCH_MODULES_OF_TORCH_FREE_ROOMS = (
    "spmd_worker.lockstep.lockstep",
    "spmd_worker.lockstep.transport.channel",
    "spmd_worker.lockstep.transport.connect",
    "spmd_worker.lockstep.transport.membership",
    "spmd_worker.lockstep.transport.step_channel",
    "spmd_worker.replay.model",
    "spmd_worker.batch.job",
    "spmd_worker.batch.job_metrics",
    "spmd_worker.batch.pooled_rows",
    "spmd_worker.batch.row_runner",
    "spmd_worker.batch.shared_job",
    "spmd_worker.batch.run_dir.run_records",
    "spmd_worker.serve.engine_loop",
    "spmd_worker.serve.server",
)
TORCH_FREE_MODULES_OF_TORCH_ROOMS = (
    "spmd_worker.native.build",
    "spmd_worker.native.library",
    "spmd_worker.distributed.expert_layout",
    "spmd_worker.distributed.topology",
    "spmd_worker.distributed.environment",
    "spmd_worker.distributed.cores",
    "spmd_worker.distributed.network_interface",
    "spmd_worker.layers.weight_slice",
    "spmd_worker.weights.safetensors_header",
    "spmd_worker.memory.estimate",
    "spmd_worker.memory.garbage",
    "spmd_worker.memory.host",
    "spmd_worker.memory.plan",
    "spmd_worker.memory.plan_text",
    "spmd_worker.memory.swap_cost",
    "spmd_worker.engine.validation",
    "spmd_worker.data_parallel.output_coding",
    "spmd_worker.data_parallel.round",
    "spmd_worker.data_parallel.store",
)

TORCH_NAMES = ("torch",)
THIRD_PARTY = ("torch", "numpy", "hydra", "omegaconf", "yaml", "tokenizers", "jinja2", "tqdm")
OPTIONAL = {
    "zstandard": ("spmd_worker.batch.input.input_files", "spmd_worker.batch.output.output_file"),
    "pyarrow": ("spmd_worker.batch.input.input_files", "spmd_worker.batch.output.output_file"),
    "prometheus_client": ("spmd_worker.metrics.prometheus",),
    "h11": ("spmd_worker.serve.http_protocol",),
    "uvicorn": ("spmd_worker.serve.connections", "spmd_worker.serve.http_protocol", "spmd_worker.serve.http_server"),
    "starlette": ("spmd_worker.serve.app", "spmd_worker.serve.http_server"),
    "matplotlib": ("spmd_worker.metrics.report.drawing",),
    "lm_eval": ("spmd_worker.integrations.lm_eval_model",),
    "transformers": (
        *("spmd_worker.compat.script_tokenizer", "spmd_worker.compat.engine_model_config"),
        "spmd_worker.tokenizer.conversion",
    ),
    "sentencepiece": ("spmd_worker.tokenizer.conversion",),
    "trl": ("spmd_worker.integrations.trl", "spmd_worker.integrations.swift"),
    "inspect_ai": ("spmd_worker.integrations.inspect_ai_model",),
    "mteb": ("spmd_worker.integrations.mteb_model",),
    "llguidance": ("spmd_worker.grammar.forms",),
    "triton": tuple(
        f"spmd_worker.kernels.triton.{name}"
        for name in (
            "attention_kernels",
            "draw_kernels",
            "matmul_kernels",
            "norm_kernels",
            "row_kernels",
            "sum_kernels",
            "launching",
        )
    ),
    "huggingface_hub": ("spmd_worker.integrations.trl", "spmd_worker.model_config.hub"),
}
"""Packages of extras: the modules that may import them, where they are needed and not before."""
NEED_OPTIONAL = (
    "spmd_worker.integrations.lm_eval_model",
    "spmd_worker.integrations.inspect_ai_model",
    "spmd_worker.integrations.mteb_model",
    "spmd_worker.integrations.trl",
    "spmd_worker.integrations.swift",
)
"""Modules that are nothing without one of them, and that no other module imports."""
IN_OPTIONAL_LANGUAGE = (
    "spmd_worker.kernels.triton",
    "spmd_worker.attention.triton",
    "spmd_worker.worker.triton_worker",
    "spmd_worker.serve.connections",
    "spmd_worker.serve.http_protocol",
)
"""Modules and folders of code in an optional package's language, nothing without it: imported when a module is, but
where they are needed and not before by all others.
"""
COMPOSITION_NAMES = ("hydra", "omegaconf", "yaml")
COMPOSITION_MODULES = ("spmd_worker.config.compose",)

REPLICATED = (
    *("kv_cache", "spmd_worker.sequence", "spmd_worker.scheduler", "spmd_worker.grammar", "spmd_worker.mirror"),
    "spmd_worker.lockstep",
)
NOT_REPLICATED = (
    *("kv_cache.cache_engine", "kv_cache.cache_sizing", "kv_cache.host_memory", "kv_cache.host_tier_engine"),
    # What carries the messages waits, and so needs a clock; what is in them is replicated.
    "spmd_worker.lockstep.transport",
)

FORBIDDEN_NAMES = (
    # Code or objects out of bytes.
    *("pickle", "_pickle", "marshal", "shelve", "numpy.load", "torch.load", "torch.serialization.load"),
    *("torch.jit.load", "torch.hub", "torch.package", "runpy", "importlib.util.spec_from_file_location"),
    # They pickle what they send.
    *(
        f"torch.distributed.{name}"
        for name in (
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
            "recv_object_list",
            "scatter_object_list",
            "send_object_list",
        )
    ),
    # Configuration that names code.
    *(f"hydra.utils.{name}" for name in ("call", "get_class", "get_method", "get_object", "instantiate")),
    "hydra._internal.instantiate",
)
MAY_USE = {"spmd_worker.integrations.trl": ("runpy",), "spmd_worker.integrations.swift": ("runpy",)}
"""Modules that may use one of these names: launchers run the script that their command line names, as python does."""
FORBIDDEN_BUILTINS = ("eval", "exec", "__import__")
FORBIDDEN_WORD = "_target_"

REPLICA_FORBIDDEN_NAMES = {
    **dict.fromkeys(("time", "datetime", "calendar"), "a clock"),
    **dict.fromkeys(("random", "secrets", "uuid", "numpy.random", "os.urandom"), "randomness"),
    **dict.fromkeys(("os.environ", "os.environb", "os.getenv", "os.getpid"), "the environment of one process"),
}
REPLICA_FORBIDDEN_BUILTINS = {
    **dict.fromkeys(("set", "frozenset"), "a set has no order: use a tuple or a dict"),
    "hash": "differs between processes",
    "id": "differs between processes",
}

COMPUTES_ON_DEVICE = tuple(
    f"spmd_worker.{name}" for name in ("runner", "attention", "layers", "sampling", "kernels.triton")
)
"""Where a step is computed: the host must not wait for the device in the middle of it."""
READS_BACK = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "bincount", "synchronize")
"""Methods for which the host waits until the device has done everything that is queued."""
COPIES_AND_WAITS = ("torch.tensor", "torch.as_tensor")
"""With `device=`, a copy that waits; `torch.from_numpy(...).to(device, non_blocking=True)` does not."""
_EXPERTS = "experts are called one by one, after their tokens were counted"
_ANSWER = "a vector is the answer of a row that ends"
_READ = "of what was read back already, or where reading costs nothing"
_OF_HOST = "of numbers that the host has"
MAY_READ_BACK = {
    "spmd_worker.layers.experts": {"tolist": (1, _EXPERTS)},
    "spmd_worker.runner.pooling": {"cpu": (1, _ANSWER), "numpy": (1, _ANSWER)},
    "spmd_worker.sampling.logprobs": {"nonzero": (1, _READ), "tolist": (2, _READ)},
    "spmd_worker.sampling.processors": {"unique": (2, _OF_HOST)},
    "spmd_worker.sampling.sampler": {"tolist": (2, _READ)},
    "spmd_worker.sampling.shard_logprobs": {"tolist": (4, _READ)},
}
"""How often a module does so today, and why; one more is found, and one less has to be said here."""


def room_index(module: str) -> int | None:
    """The room's place in the order, or None where the module stands nowhere in the house."""
    for index, room in enumerate(ROOMS):
        if any(is_within(module, name) for name in room.modules):
            return index
    return None


def may_import_torch(module: str) -> bool:
    """Whether the module is marked (T). An unlisted module is not."""
    if module in TORCH_FREE_MODULES_OF_TORCH_ROOMS:
        return False
    index = room_index(module)
    is_in_torch_room = index is not None and ROOMS[index].may_import_torch
    return is_in_torch_room or module in TORCH_MODULES_OF_TORCH_FREE_ROOMS


def is_replicated(module: str) -> bool:
    """Whether every rank runs this module on the same input and must come to the same result."""
    return is_within_any(module, REPLICATED) and not is_within_any(module, NOT_REPLICATED)


def is_within(name: str, prefix: str) -> bool:
    """Whether the dotted `name` is `prefix` or lies inside it."""
    return name == prefix or name.startswith(prefix + ".")


def is_within_any(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `prefixes` or lies inside one."""
    return any(is_within(name, prefix) for prefix in prefixes)
