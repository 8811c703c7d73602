"""Reads the experts of each layer from config.json and the family's row. Knows nothing of tensors or ranks."""

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
    experts = _experts(reader, family)
    first = checked_integer(reader.get(family.first_key, 0), reader.where(family.first_key), 0, MAX_INT)
    every = reader.count(family.every_key, 1)
    dense = reader.get(family.dense_layers_key, [])
    if not isinstance(dense, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in dense):
        raise ModelConfigError(
            f"{reader.where(family.dense_layers_key)}={shown(dense)} must be a list of layers, from 0 on"
        )
    sparse = [layer for layer in range(first, num_layers) if (layer + 1) % every == 0 and layer not in dense]
    return [experts if layer in sparse else None for layer in range(num_layers)]


def _experts(reader: ConfigReader, family: ExpertsFamily) -> ExpertsConfig:
    count_key = next((key for key in family.count_keys if reader.get(key) is not None), family.count_keys[0])
    given = reader.get(count_key, family.default_count or None)
    count = checked_integer(given, reader.where(count_key), 1, _MAX_EXPERTS)
    num_chosen, size = reader.count("num_experts_per_tok"), reader.count(family.size_key)
    num_groups, num_chosen_groups = _groups(reader, count_key, count) if family.has_groups else (1, 1)
    num_left = count // num_groups * num_chosen_groups
    if num_chosen > num_left:
        groups = f" of topk_group={num_chosen_groups} groups" if num_groups > 1 else ""
        raise ModelConfigError(
            f"{reader.where('num_experts_per_tok')}={num_chosen} is more than the {num_left} experts{groups} that a "
            f"token can choose from"
        )
    shared = checked_integer(reader.get(family.shared_key, 0), reader.where(family.shared_key), 0, MAX_INT)
    always = family.renormalises
    return ExpertsConfig(
        num_experts=count,
        num_chosen=num_chosen,
        intermediate_size=size,
        score=family.score,
        renormalises=always if isinstance(always, bool) else reader.flag(always, False),
        scaling=reader.number(family.scaling_key, 1.0) if family.scaling_key else 1.0,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        has_choice_bias=family.has_choice_bias,
        has_router_bias=family.has_router_bias,
        has_bias=family.has_bias,
        limit=reader.number(family.limit_key) if family.limit_key else 0.0,
        shared_size=shared * size if family.counts_shared else shared,
        has_shared_gate=family.has_shared_gate and shared > 0,
        is_gated=family.is_gated,
        latent_size=reader.count(family.latent_key) if reader.get(family.latent_key) is not None else 0,
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
