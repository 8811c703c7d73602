"""Groups of a run's layers (`kv_cache/layer_groups.py`), or the reason for one group: the same on every rank."""

from functools import lru_cache
from typing import Final

from kv_cache.block import num_blocks_for
from kv_cache.cache_sizing import format_bytes
from kv_cache.layer_groups import MAX_GROUPS, MAX_WASTE, ONE_GROUP, Grouping, group_layers, wasted_share
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory.estimate import block_layer, parts_of_entries

_FULL: Final = 0


def grouping_of(resolved: ResolvedRun) -> Grouping:
    """Groups of all layers of the model and, behind them, of the entries of those that have some: keys and rows that
    entries are made of are needed for a while, entries as long as the row.
    """
    return _choose(resolved)[0]


def reason_of(resolved: ResolvedRun) -> str:
    """The reason for layers with windows to keep all tokens; empty if they do not, or if there are none."""
    return _choose(resolved)[1]


def describe_windows(resolved: ResolvedRun, block_bytes: int, layers_bytes: int) -> list[str]:
    """The plan's line about windows; nothing for a model without any. A block of one group has `block_bytes`, of all
    layers `layers_bytes`.
    """
    groups, length, block_size = grouping_of(resolved).groups, resolved.max_model_len, resolved.config.cache.block_size
    if not any(windows_of(resolved.model_config)) or resolved.model_config.is_encoder:
        return []
    if not groups.num_windows:
        return [f"windows    layers with windows keep all tokens of a row: {reason_of(resolved)}"]
    num_full, num_blocks = num_blocks_for(length, block_size), groups.num_blocks(length, block_size)
    in_window = min(groups.num_window_blocks(block_size), num_full)
    kept = f"at most {in_window:,} blocks in {_groups(groups.num_windows, 'window')}"
    if groups.num_full:
        kept = f"all {num_full:,} blocks in {_groups(groups.num_full, 'full')}, {kept}"
    row_bytes, all_bytes = format_bytes(num_blocks * block_bytes), format_bytes(num_full * layers_bytes)
    return [
        f"windows    blocks behind windows of {_words(groups.windows)} go back to the pool (cache.window_groups): a "
        f"row of {length:,} tokens has {kept}, {row_bytes} instead of {all_bytes}"
    ]


def _groups(count: int, kind: str) -> str:
    return f"the {kind} group of layers" if count == 1 else f"each of {count} {kind} groups of layers"


def _words(windows: tuple[int, ...]) -> str:
    return ", ".join(f"{each:,}" if each > 0 else f"chunks of {-each:,}" for each in windows) + " tokens"


def windows_of(model_config: ModelConfig) -> tuple[int, ...]:
    """Windows of all layers, as in `LayerGroups`; 0, all tokens, where a layer that reads the keys has another."""
    layers = model_config.layers
    windows = [
        layer.compressed.reach if layer.compressed is not None else layer.window or -layer.chunk for layer in layers
    ]
    for index, layer in enumerate(layers):
        source = layer.kv_layer
        if source is not None and windows[source] != windows[index]:
            windows[source] = _FULL
    return tuple(windows)


def _choose(resolved: ResolvedRun) -> tuple[Grouping, str]:
    config, model_config = resolved.config, resolved.model_config
    sizes = (config.scheduler.max_num_batched_tokens, config.cache.block_size, resolved.max_model_len)
    windows = windows_of(model_config)
    one, has_full = Grouping(ONE_GROUP, (0,) * len(windows)), any(each.has_entries for each in model_config.layers)
    if model_config.is_encoder or not any(windows):
        return one, ""
    wanted = config.cache.window_groups
    if wanted is False:
        return one, "cache.window_groups=false"
    if wanted is None and resolved.device_type == "cuda" and not config.executor.enforce_eager:
        return one, "CUDA graphs have one table; cache.window_groups=true gives blocks back and records no graphs"
    if has_full and not _reads_parts(resolved):
        return one, "kernels of GPUs read keys and compressed entries in one block"
    if config.cache.connector is not None or config.cache.host_tier_gib:
        key = "cache.connector" if config.cache.connector is not None else "cache.host_tier_gib"
        return one, f"{key} keeps blocks of all layers"
    if resolved.draft is not None and all(windows) and not has_full:
        return one, "a draft, whose keys lie in the same blocks, keeps all tokens"
    kept = [block_layer(layer, layer.full_share, config.cache.block_size) for layer in model_config.layers]
    parts = [parts_of_entries(layer, config.cache.block_size) for layer in model_config.layers]
    kept = [each if part is None else part[0] for each, part in zip(kept, parts, strict=True)]
    kept += [part[1] for part in parts if part is not None]
    windows += (_FULL,) * (len(kept) - len(windows))
    return _group(tuple(0 if each is None else each.token_size for each in kept), windows, *sizes)


def _reads_parts(resolved: ResolvedRun) -> bool:
    """Whether the device backend that the run is likely to get reads entries in another group than keys. A worker class
    may bring its own.
    """
    executor = resolved.config.executor
    known = ("cpu", "torch", "auto") if resolved.device_type == "cpu" else ("cpu", "torch")
    return executor.worker_cls is None and executor.device_backend in known


@lru_cache(maxsize=16)
def _group(
    token_sizes: tuple[int, ...], windows: tuple[int, ...], num_step_tokens: int, block_size: int, max_model_len: int
) -> tuple[Grouping, str]:
    found = group_layers(token_sizes, windows, num_step_tokens)
    one = Grouping(ONE_GROUP, (0,) * len(windows))
    wasted, groups = wasted_share(token_sizes, found), found.groups
    if not groups.num_windows:
        return one, ""
    if wasted > MAX_WASTE:
        return one, f"at most {MAX_GROUPS} groups as large as each other would leave {wasted:.0%} of the memory unused"
    num_blocks = groups.num_blocks(max_model_len, block_size)
    if num_blocks >= groups.num_groups * num_blocks_for(max_model_len, block_size) * (1 - wasted):
        return one, (
            f"a row of model.max_model_len={max_model_len} tokens is no longer than a window and a step of "
            f"scheduler.max_num_batched_tokens={num_step_tokens} tokens"
        )
    return Grouping(groups, found.group_of if groups.num_groups > 1 else ()), ""


def group_of_stage(grouping: Grouping, model_config: ModelConfig, indices: range) -> tuple[int, ...]:
    """The group of each of a stage's layers: that of the layer whose keys it reads; then those of the layers' entries;
    empty if there is one group.
    """
    if grouping.groups.num_groups == 1:
        return ()
    layers = model_config.layers
    sources = [index if (source := layers[index].kv_layer) is None else source for index in indices]
    with_entries = [index for index, layer in enumerate(layers) if layer.has_entries]
    entries = [len(layers) + place for place, index in enumerate(with_entries) if index in indices]
    return tuple([grouping.group_of[source] for source in (*sources, *entries)])
