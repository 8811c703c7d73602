"""adapter_config.json of PEFT (https://huggingface.co/docs/peft): numbers that are used, and keys that are refused.

Needs no torch. Ranks and scalings follow PEFT: a pattern's key, a regular expression, must match the END of a module's
path from a dot or from its beginning on; the first that matches counts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Final

from spmd_worker.base.errors import AdapterError
from spmd_worker.model_config.bounded_patterns import MAX_PATTERN, MAX_REPEATS, is_bounded

_PEFT_ALPHA: Final = 8
"""PEFT's `lora_alpha` where a file has none."""
_PLAIN_STARTS: Final = (True, False, None, "gaussian", "orthogonal")
"""`init_lora_weights` that leave the base as it is."""
_REFUSED: Final = {
    "use_dora": "magnitudes of DoRA are not computed: merge the adapter into its base with merge_and_unload",
    "lora_bias": "biases of adapters are not computed: train with lora_bias=false",
    "layer_replication": "layers are not repeated: save the merged model",
    "trainable_token_indices": "embeddings of tokens are not adapted: merge the adapter into its base",
    "alora_invocation_tokens": "adapters apply to all tokens of a row: activated LoRA is not supported",
    "use_qalora": "grouped inputs of QA-LoRA are not computed",
    "use_bdlora": "block-diagonal LoRA is not computed",
    "arrow_config": "routing between adapters is not computed",
    "kasa_config": "KaSA changes the base weights: merge the adapter into its base",
    "monteclora_config": "MonteCLoRA is not computed",
    "velora_config": "VeLoRA is not computed",
}
"""Keys that must be unset, and the reason."""
_HARMLESS: Final = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *(
        "inference_mode",
        "r",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "fan_in_fan_out",
    ),
    *("bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    # ms-swift's: of its optimiser, and the dtype that it trains in.
    *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),
)
"""Keys that are read here or do not change what a trained adapter computes."""

_STACKS: Final = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "down_proj", "down_proj_bias")
"""Parameters of one module in the order in which transformers' classes have them."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The numbers of a LoRA adapter. `targets` are names or a regular expression, None if the file has none; `saved`
    are `modules_to_save`; `parameters` are names of stacks of experts and routers' weights, ends of their paths, that
    adapters add to as to modules; `subject`, the file or the adapter, begins every error.
    """

    subject: str
    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str | None
    is_transposed: bool
    saved: tuple[str, ...]
    parameters: tuple[str, ...]
    base_model: str

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_matching_key(self.rank_pattern, module), self.rank)

    @property
    def rank_of_all(self) -> int:
        """Rank of every module; 0 where some have others."""
        return 0 if self.rank_pattern else self.rank

    def scaling_of(self, module: str) -> float:
        """Factor of B (A x)."""
        alpha, rank = (
            self.alpha_pattern.get(_matching_key(self.alpha_pattern, module), self.alpha),
            self.rank_of(module),
        )
        return alpha / sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def parameters_of(self, module: str) -> tuple[str, ...]:
        """Parameters of a module that adapters add to, in PEFT's order of wrapping: the outermost wrapper is the last
        one's.
        """
        found = dict.fromkeys(
            leaf
            for owner, _, leaf in (each.rpartition(".") for each in self.parameters)
            if module == (owner or "experts") or module.endswith(f".{owner or 'experts'}")
        )
        return tuple(sorted(found, key=_STACKS.index)) if all(each in _STACKS for each in found) else tuple(found)

    def has_target(self, module: str) -> bool:
        """Whether `target_modules` names the module."""
        if self.targets is None or self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            # Trainers write long ones, which might take years to match; the tensors are the truth.
            return not is_bounded(self.targets) or re.fullmatch(self.targets, module) is not None
        return any(module == each or module.endswith(f".{each}") for each in self.targets)


def parse_config(config: Mapping[str, Any], subject: str) -> PeftConfig:
    """Raises AdapterError, which names the key, for whatever is not plain LoRA of linear layers."""

    def refuse(key: str, reason: str) -> AdapterError:
        return AdapterError(f"{subject}: {key}={config.get(key)!r}: {reason}")

    kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    if kind.upper() != "LORA":
        raise refuse("peft_type", "adapters are of the type LORA")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise refuse(key, reason)
    if config.get("bias", "none") not in ("none", None):
        raise refuse("bias", "biases of the base are not changed: train with bias='none'")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise refuse(
            "init_lora_weights",
            "an adapter that starts from the weights of its base belongs to a changed base: save it with "
            "path_initial_model_for_weight_conversion, which converts it, or, if its base has not changed, set the key "
            "to true",
        )
    unknown = [key for key, value in config.items() if key not in _HARMLESS and key not in _REFUSED and value]
    if unknown:
        raise refuse(unknown[0], "an unknown key: set it to null if the adapter is plain LoRA without it")
    rank = _whole(config, "r", refuse)
    alpha = _number(config.get("lora_alpha", _PEFT_ALPHA), "lora_alpha", refuse)
    ranks, alphas = _pattern(config, "rank_pattern", refuse), _pattern(config, "alpha_pattern", refuse)
    for value in ranks.values():
        if type(value) is not int or value < 1:
            raise refuse("rank_pattern", "ranks must be whole numbers from 1 on")
    return PeftConfig(
        subject=subject,
        rank=rank,
        alpha=alpha,
        is_rank_stabilised=bool(config.get("use_rslora")),
        rank_pattern=ranks,
        alpha_pattern={key: _number(value, "alpha_pattern", refuse) for key, value in alphas.items()},
        targets=_targets(config, refuse),
        is_transposed=bool(config.get("fan_in_fan_out")),
        saved=_names(config, "modules_to_save", refuse),
        parameters=_names(config, "target_parameters", refuse),
        base_model=str(config.get("base_model_name_or_path") or ""),
    )


def _matching_key(patterns: Mapping[str, Any], module: str) -> str:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _whole(config: Mapping[str, Any], key: str, refuse: Any) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise refuse(key, "must be a whole number from 1 on")
    return value


def _number(value: Any, key: str, refuse: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise refuse(key, "must be a finite number")
    return float(value)


def _pattern(config: Mapping[str, Any], key: str, refuse: Any) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise refuse(key, "must map regular expressions of module names to numbers")
    for each in value:
        if not is_bounded(each):
            rule = f"of {MAX_PATTERN} characters and {MAX_REPEATS} repeats at most, none of a group"
            raise refuse(key, f"{each!r} must be a regular expression {rule}")
    return dict(value)


def _targets(config: Mapping[str, Any], refuse: Any) -> tuple[str, ...] | str | None:
    value = config.get("target_modules")
    if not isinstance(value, str):
        return _names(config, "target_modules", refuse) or None
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse("target_modules", f"is not a regular expression: {error}") from None
    return value


def _names(config: Mapping[str, Any], key: str, refuse: Any) -> tuple[str, ...]:
    value = config.get(key) or ()
    if isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise refuse(key, "must be a list of names")
    return tuple(sorted(value))
