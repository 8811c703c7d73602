"""Reads the experts of each layer from config.json and the family's row. Knows nothing of tensors or ranks."""

from dataclasses import replace

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.layer_config import ExpertsConfig

_MAX_EXPERTS = 4_096
"""A layer is built expert by expert: a count that no model has must not become a list of that length."""


def read_experts(reader: ConfigReader, family: ExpertsFamily | None, num_layers: int) -> list[ExpertsConfig | None]:
    """One entry a layer, None for a dense one. Raises ModelConfigError."""
    if family is None:
        return [None] * num_layers
    bounds = reader.amounts(family.bounds_key, num_layers) or (0.0,) * num_layers
    is_sparse, of_layers = _sparse_layers(reader, family, num_layers), _experts_of_layers(reader, family, num_layers)
    return [
        (replace(experts, bound=bound) if bound else experts) if sparse else None
        for sparse, bound, experts in zip(is_sparse, bounds, of_layers, strict=True)
    ]


def _sparse_layers(reader: ConfigReader, family: ExpertsFamily, num_layers: int) -> list[bool]:
    kinds = reader.get(family.kinds_key)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in ("dense", "sparse") for k in kinds):
            raise reader.error(family.kinds_key, f"must list {num_layers} of dense and sparse")
        return [kind == "sparse" for kind in kinds]
    first = checked_integer(reader.get(family.first_key, family.first), reader.where(family.first_key), 0, MAX_INT)
    last = checked_integer(reader.get(family.last_key, -1), reader.where(family.last_key), -1, MAX_INT)
    every = reader.count(family.every_key, 1)
    dense = reader.get(family.dense_layers_key, [])
    if not isinstance(dense, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in dense):
        raise ModelConfigError(
            f"{reader.where(family.dense_layers_key)}={shown(dense)} must be a list of layers, from 0 on"
        )
    return [
        first <= layer and (last == -1 or layer <= last) and (layer + 1) % every == 0 and layer not in dense
        for layer in range(num_layers)
    ]


def _experts_of_layers(reader: ConfigReader, family: ExpertsFamily, num_layers: int) -> list[ExpertsConfig]:
    keys = (*family.count_keys, family.chosen_key) if family.may_be_lists else ()
    lists = {reader.key(key): reader.get(key) for key in keys if isinstance(reader.get(key), list)}
    if not lists:
        return [_experts(reader, family)] * num_layers
    for key, values in lists.items():
        if len(values) < num_layers:
            raise reader.error(key, f"must list {num_layers} numbers, one for each layer")
    configs = ({**reader.config, **{key: lists[key][layer] for key in lists}} for layer in range(num_layers))
    return [_experts(replace(reader, config=config), family) for config in configs]


def _experts(reader: ConfigReader, family: ExpertsFamily) -> ExpertsConfig:
    count_key = next((key for key in family.count_keys if reader.get(key) is not None), family.count_keys[0])
    given = reader.get(count_key, family.default_count or None)
    count = checked_integer(given, reader.where(count_key), 1, _MAX_EXPERTS)
    num_chosen, size = reader.count(family.chosen_key), reader.count(family.size_key)
    num_groups, num_chosen_groups = _groups(reader, count_key, count) if family.has_groups else (1, 1)
    identity_key = family.identity_key
    num_identity = checked_integer(reader.get(identity_key, 0), reader.where(identity_key), 0, _MAX_EXPERTS)
    num_left = (count + num_identity) // num_groups * num_chosen_groups
    if num_chosen > num_left:
        groups = f" of topk_group={num_chosen_groups} groups" if num_groups > 1 else ""
        raise ModelConfigError(
            f"{reader.where(family.chosen_key)}={num_chosen} is more than the {num_left} experts{groups} that a "
            f"token can choose from"
        )
    shared = checked_integer(reader.get(family.shared_key, 0), reader.where(family.shared_key), 0, MAX_INT)
    always, shared_bias = family.renormalises, family.shared_bias
    return ExpertsConfig(
        num_experts=count,
        num_chosen=num_chosen,
        intermediate_size=size,
        score=family.score,
        renormalises=always if isinstance(always, bool) else reader.flag(always, False),
        scaling=reader.number(family.scaling_key, 1.0) if family.scaling_key else 1.0,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        groups_by_best=family.groups_by_best and num_groups > 1,
        has_choice_bias=family.has_choice_bias,
        has_router_bias=family.has_router_bias,
        has_bias=family.has_bias,
        limit=reader.number(family.limit_key) if family.limit_key else 0.0,
        shared_size=shared * size if family.counts_shared else shared,
        has_shared_bias=shared > 0
        and (shared_bias if isinstance(shared_bias, bool) else reader.flag(shared_bias, False)),
        has_shared_gate=family.has_shared_gate and shared > 0,
        is_gated=family.is_gated,
        skips_layer=family.skips_layer,
        weighs_inputs=family.weighs_inputs,
        num_identity=num_identity,
        latent_size=reader.count(family.latent_key) if reader.get(family.latent_key) is not None else 0,
        min_sum=reader.number(family.min_sum_key) if family.min_sum_key else 0.0,
        sum_eps=family.sum_eps,
        jitter=reader.number(family.jitter_key) if family.jitter_key else 0.0,
    )


def _groups(reader: ConfigReader, count_key: str, count: int) -> tuple[int, int]:
    """Number of groups, and of those from which a token chooses."""
    num_groups, num_chosen = reader.count("n_group", 1), reader.count("topk_group", 1)
    if count % num_groups or (num_groups > 1 and count < 2 * num_groups):
        raise ModelConfigError(
            f"{reader.where(count_key)}={count} cannot be cut into n_group={num_groups} equal groups of two or more"
        )
    if num_chosen > num_groups:
        raise ModelConfigError(f"{reader.where('topk_group')}={num_chosen} is more than n_group={num_groups}")
    return num_groups, num_chosen
