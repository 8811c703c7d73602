"""The house as literal data: the wings in their order, where torch may be, what is replicated, what is forbidden.

A path says the rule. The one place to edit when a wing is added. Knows nothing of how the rules are checked.
"""

PACKAGES = ("kv_cache", "spmd_worker")
FACADE = "spmd_worker"
"""The package whose `__init__.py` offers names lazily; every other `__init__.py` is empty."""
MAY_COMPUTE_IMPORTS = (FACADE, "spmd_worker.worker.worker_wrapper", "kv_cache.connectors.factory")
"""The facade offers names lazily; the wrapper resolves classes that users give by qualified name."""

WINGS = (
    "kv_cache",
    *(
        f"spmd_worker.{name}"
        for name in (
            *("base", "model_config", "tokenizer", "native", "ranks", "replica", "media", "resolved_draft", "resolved"),
            "chat",
            *("ops", "model", "compat", "worker", "executor", "engine", "llm_engine", "llm"),
            *("frontends", "integrations"),
        )
    ),
)
"""Each imports itself and those before it."""
APART = ("spmd_worker.ranks", "spmd_worker.replica")
"""Neither imports the other: what every rank computes alike, and what carries it."""
COMMANDS = ("launch", FACADE, "spmd_worker.serve", "spmd_worker.tools")
"""The facade and what starts a program: they stand over all wings, and no module imports them."""

WITHOUT_TORCH = (
    *("kv_cache", "spmd_worker.base", "spmd_worker.model_config", "spmd_worker.tokenizer", "spmd_worker.replica"),
    *("spmd_worker.resolved", "spmd_worker.resolved_draft", "spmd_worker.chat", "spmd_worker.compat"),
    "spmd_worker.media",
)
"""Nothing in them imports torch, or what needs it, anywhere, in functions and for types either."""
WITH_TORCH = (
    *("kv_cache.block_memory", "kv_cache.cache_engine", "kv_cache.host_memory"),
    *("kv_cache.byte_comparison", "kv_cache.layer_states", "kv_cache.moves", "kv_cache.state_engine"),
    "kv_cache.host_tier_engine",
)
"""The exceptions to WITHOUT_TORCH: the cache's tensors."""
TORCH_LATE = (
    *COMMANDS,
    *(
        f"spmd_worker.frontends.{name}"
        for name in ("rank_program", "report", "tools", "serve.command", "batch.input", "batch.pool")
    ),
    *("spmd_worker.executor.worker_process", "spmd_worker.worker.worker_wrapper"),
)
"""They are imported without torch, by what plans, reports and explains on a machine that has none."""

TORCH_NAMES = ("torch",)
THIRD_PARTY = ("torch", "numpy", "hydra", "omegaconf", "yaml", "tokenizers", "jinja2", "tqdm")
OPTIONAL = {
    "zstandard": ("spmd_worker.frontends.batch.input.input_files", "spmd_worker.frontends.batch.output_file"),
    "pyarrow": (
        *("spmd_worker.frontends.batch.input.input_files", "spmd_worker.frontends.batch.output_file"),
        *("spmd_worker.integrations.pipeline_rows", "spmd_worker.integrations.ray_data"),
    ),
    "ray": ("spmd_worker.integrations.ray_data",),
    "datatrove": ("spmd_worker.integrations.datatrove_server", "spmd_worker.integrations.datatrove_step"),
    "datasets": ("spmd_worker.integrations.datasets_map",),
    "daft": ("spmd_worker.integrations.daft_provider",),
    "prometheus_client": ("spmd_worker.base.metrics.prometheus",),
    "h11": ("spmd_worker.frontends.serve.http_protocol",),
    "uvicorn": (
        "spmd_worker.frontends.serve.connections",
        "spmd_worker.frontends.serve.http_protocol",
        "spmd_worker.frontends.serve.http_server",
    ),
    "starlette": ("spmd_worker.frontends.serve.app", "spmd_worker.frontends.serve.http_server"),
    "python_multipart": ("spmd_worker.frontends.serve.multipart", "spmd_worker.frontends.serve.http_server"),
    "matplotlib": ("spmd_worker.frontends.report.drawing", "spmd_worker.frontends.report.pool_drawing"),
    "lm_eval": ("spmd_worker.integrations.lm_eval_model",),
    "transformers": (
        *("spmd_worker.compat.script_tokenizer", "spmd_worker.compat.engine_model_config"),
        "spmd_worker.tokenizer.conversion",
    ),
    "sentencepiece": ("spmd_worker.tokenizer.conversion",),
    "trl": ("spmd_worker.integrations.trl", "spmd_worker.integrations.swift"),
    "inspect_ai": ("spmd_worker.integrations.inspect_ai_model",),
    "mteb": ("spmd_worker.integrations.mteb_model",),
    "verl": ("spmd_worker.integrations.verl",),
    "peft": ("spmd_worker.integrations.policy_adapter",),
    "llguidance": ("spmd_worker.replica.grammar.llguidance_input",),
    "triton": ("spmd_worker.ops.kernels.triton",),
    "PIL": ("spmd_worker.media",),
    "soundfile": ("spmd_worker.media",),
    "soxr": ("spmd_worker.media",),
    "av": ("spmd_worker.media",),
    "gguf": ("spmd_worker.model.weights.gguf_checkpoint",),
    "fsspec": ("spmd_worker.base.remote_files", "spmd_worker.base.remote_store"),
    "huggingface_hub": ("spmd_worker.integrations.trl", "spmd_worker.model_config.hub"),
}
"""Packages of extras: the modules and folders that may import them, where they are needed and not before."""
NEED_OPTIONAL = (
    "spmd_worker.integrations.lm_eval_model",
    "spmd_worker.integrations.inspect_ai_model",
    "spmd_worker.integrations.mteb_model",
    "spmd_worker.integrations.trl",
    "spmd_worker.integrations.swift",
    "spmd_worker.integrations.verl",
    "spmd_worker.integrations.ray_data",
    "spmd_worker.integrations.datatrove_server",
    "spmd_worker.integrations.datatrove_step",
    "spmd_worker.integrations.daft_provider",
)
"""Modules that are nothing without one of them, and that no other module imports."""
IN_OPTIONAL_LANGUAGE = (
    "spmd_worker.ops.kernels.triton",
    "spmd_worker.ops.attention.triton",
    "spmd_worker.worker.backends.triton",
    "spmd_worker.frontends.serve.connections",
    "spmd_worker.frontends.serve.http_protocol",
)
"""Modules and folders of code in an optional package's language, nothing without it: imported when a module is, but
where they are needed and not before by all others.
"""
COMPOSITION_NAMES = ("hydra", "omegaconf", "yaml")
COMPOSITION_MODULES = ("spmd_worker.base.config.compose",)

REPLICATED = ("kv_cache", "spmd_worker.replica")
NOT_REPLICATED = (*WITH_TORCH, "kv_cache.cache_sizing", "kv_cache.connectors")

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
MAY_USE = {"spmd_worker.integrations.vllm_modules": ("runpy",)}
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

COMPUTES_ON_DEVICE = (
    *("spmd_worker.ops.attention", "spmd_worker.ops.sampling", "spmd_worker.ops.kernels.triton"),
    *("spmd_worker.model.layers", "spmd_worker.worker.runner"),
)
"""Where a step is computed: the host must not wait for the device in the middle of it."""
READS_BACK = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "bincount", "synchronize")
"""Methods for which the host waits until the device has done everything that is queued."""
COPIES_AND_WAITS = ("torch.tensor", "torch.as_tensor")
"""With `device=`, a copy that waits; `torch.from_numpy(...).to(device, non_blocking=True)` does not."""
_EXPERTS = "experts are called one by one, after their tokens were counted; and counts are reported"
_ANSWER = "a vector is the answer of a row that ends"
_READ = "of what was read back already, or where reading costs nothing"
_ERROR = "of two numbers that differ, for the error that ends the run"
_OF_HOST = "of numbers that the host has"
_PIXELS = "pixels come to the host of the rank that makes their rows"
_ADAPTERS = "in steps of encoders whose rows have adapters of embedded distances"
MAY_READ_BACK = {
    "spmd_worker.model.layers.distances": {"tolist": (1, _ADAPTERS), "nonzero": (1, _ADAPTERS)},
    "spmd_worker.model.layers.experts": {"tolist": (2, _EXPERTS), "nonzero": (1, _OF_HOST)},
    "spmd_worker.worker.runner.media_store": {"tolist": (2, _PIXELS), "cpu": (1, _PIXELS), "numpy": (1, _PIXELS)},
    "spmd_worker.worker.runner.pooling": {"cpu": (1, _ANSWER), "numpy": (1, _ANSWER)},
    "spmd_worker.ops.kernels.top_k": {"nonzero": (1, _READ), "tolist": (2, _READ)},
    "spmd_worker.ops.sampling.processors": {"unique": (2, _OF_HOST)},
    "spmd_worker.worker.runner.batch_state": {"tolist": (2, _OF_HOST)},
    "spmd_worker.worker.runner.row_repeat": {"nonzero": (1, _ERROR), "item": (2, _ERROR)},
    "spmd_worker.worker.runner.cross_step": {"tolist": (3, _OF_HOST)},
    "spmd_worker.ops.sampling.sampler": {"tolist": (2, _READ)},
    "spmd_worker.ops.sampling.kept_ids": {"numpy": (1, _READ)},
    "spmd_worker.ops.sampling.shard_scores": {"numpy": (2, _READ)},
    "spmd_worker.worker.runner.routed_experts": {"numpy": (1, _READ)},
    "spmd_worker.ops.sampling.shard_logprobs": {"tolist": (4, _READ)},
}
"""How often a module does so today, and why; one more is found, and one less has to be said here."""


def wing_index(module: str) -> int | None:
    """The place of the module's wing in the order, or None where the module stands in none."""
    return next((index for index, wing in enumerate(WINGS) if is_within(module, wing)), None)


def is_command(module: str) -> bool:
    """Whether the module starts a program, or is the facade itself."""
    return module == FACADE or is_within_any(module, tuple(name for name in COMMANDS if name != FACADE))


def may_import_torch(module: str) -> bool:
    """Whether the module may import torch, or what needs it, at least where it is asked for."""
    return not is_within_any(module, WITHOUT_TORCH) or is_within_any(module, WITH_TORCH)


def is_torch_late(module: str) -> bool:
    """Whether the module is imported without torch, and may import it where it is asked for."""
    return is_command(module) or is_within_any(module, tuple(name for name in TORCH_LATE if name != FACADE))


def is_replicated(module: str) -> bool:
    """Whether every rank runs this module on the same input and must come to the same result."""
    return is_within_any(module, REPLICATED) and not is_within_any(module, NOT_REPLICATED)


def is_within(name: str, prefix: str) -> bool:
    """Whether the dotted `name` is `prefix` or lies inside it."""
    return name == prefix or name.startswith(prefix + ".")


def is_within_any(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `prefixes` or lies inside one."""
    return any(is_within(name, prefix) for prefix in prefixes)
