"""Files of Step 3.7 with the keys that transformers gives them when it reads them: older ones have other names, lists
with entries for layers that speculate, and a base of the rope for each layer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import MAX_LAYERS

_OTHER_NAMES: Final = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_KINDS: Final = ("full_attention", "sliding_attention")
_LISTS: Final = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)


def newer_step(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The text's config. What is left as it is, because it is wrong, is reported when it is read. Raises
    ModelConfigError.
    """
    found = {_OTHER_NAMES.get(key, key): value for key, value in config.items()}
    found |= {key: config[key] for key in _OTHER_NAMES.values() if key in config}
    num_layers, num_later = found.get("num_hidden_layers"), found.get("num_nextn_predict_layers") or 0
    if not isinstance(num_layers, int) or not 0 < num_layers <= MAX_LAYERS or not isinstance(num_later, int):
        return found
    for key in _LISTS:
        if isinstance(found.get(key), list) and len(found[key]) == num_layers + num_later:
            found[key] = found[key][:num_layers]
    _set_sparse_layers(found, num_layers, path)
    other = found.get("attention_other_setting")
    if found.get("num_sliding_attention_heads") is None and isinstance(other, Mapping):
        found["num_sliding_attention_heads"] = other.get("num_attention_heads")
    _check_heads(found, path)
    kinds = found.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == num_layers else [_KINDS[0]] * num_layers
    return _with_ropes(found, kinds, path)


def _set_sparse_layers(found: dict[str, Any], num_layers: int, path: Path) -> None:
    """`mlp_layer_types` of the older list, or text, of layers with experts."""
    listed = found.pop("moe_layers_enum", None)
    if found.get("mlp_layer_types") is not None or listed is None:
        return
    items = listed.split(",") if isinstance(listed, str) else listed
    try:
        sparse = {int(each) for each in items if str(each).strip()}
    except (TypeError, ValueError):
        raise ModelConfigError(f"{path}: moe_layers_enum={shown(listed)} must list layers, from 0 on") from None
    found["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(num_layers)]


def _check_heads(found: Mapping[str, Any], path: Path) -> None:
    """Reject settings of single layers that say something else than the keys for all layers with a window."""
    settings, heads = found.get("per_layer_config") or {}, found.get("num_sliding_attention_heads")
    if not isinstance(settings, Mapping) or any(each != {"num_attention_heads": heads} for each in settings.values()):
        raise ModelConfigError(
            f"{path}: per_layer_config={shown(settings)} is not supported, only num_attention_heads of layers with "
            f"sliding_attention, equal to num_sliding_attention_heads={shown(heads)}"
        )


def _with_ropes(found: dict[str, Any], kinds: list[Any], path: Path) -> Mapping[str, Any]:
    """The same with `rope_parameters` of each kind of layer, from those of the first layer of the kind."""
    thetas, partials = found.pop("rope_theta", None), found.pop("partial_rotary_factors", None)
    scaling, given = found.pop("rope_scaling", None) or {}, found.get("rope_parameters")
    present = [kind for kind in _KINDS if kind in kinds]
    if isinstance(given, Mapping) and all(isinstance(given.get(kind), Mapping) for kind in present):
        return found
    ropes: dict[str, dict[str, Any]] = {kind: {"rope_type": "default"} for kind in present}
    for kind, rope in ropes.items():
        for key, word, values in (
            ("rope_theta", "rope_theta", thetas),
            ("partial_rotary_factors", "partial_rotary_factor", partials or None),
        ):
            value = _first(key, values, kinds, kind, path)
            rope |= {} if value is None else {word: value}
    if not isinstance(scaling, Mapping):
        raise ModelConfigError(f"{path}: rope_scaling={shown(scaling)} must be an object")
    if "full_attention" in ropes:
        ropes["full_attention"] |= scaling
    return {**found, "rope_parameters": ropes}


def _first(key: str, values: Any, kinds: list[Any], kind: str, path: Path) -> Any:
    """The value of the first layer of this kind, or of all layers."""
    if not isinstance(values, list):
        return values
    if len(values) != len(kinds):
        raise ModelConfigError(f"{path}: {key}={shown(values)} must list {len(kinds)} numbers, one for each layer")
    return values[kinds.index(kind)]
