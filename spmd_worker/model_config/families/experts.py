"""The experts of one family of models, as data: how config.json counts them, and how a token's are chosen.

`Family.experts` refers to it. Entries that end in `_key` are keys of config.json, "" if the family has none. Needs no
torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Matrices of all experts as slices of one checkpoint tensor. `name` and `bias`, that of their biases, are full
    names within a layer; `parts` are our names of the matrices of a slice, concatenated by rows. A tensor is [experts,
    outputs, inputs], or [experts, inputs, outputs] with `is_transposed`, and one of biases [experts, outputs].
    `may_be_transposed`: some files have the other order, which the shape shows; square matrices are as here.
    `is_flat`: the tensor is [experts * outputs, inputs], or [experts * inputs, outputs].
    """

    name: str
    parts: tuple[str, ...]
    bias: str = ""
    is_transposed: bool = False
    may_be_transposed: bool = False
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsFamily:
    """Sparse layers: which layers they are, and how they choose and compute.

    `count_keys` are names of one key: files have one of them, or none for `default_count` experts. `size_key` is the
    columns of an expert. A layer is dense before `first_key`, or before layer `first` if the file has no such key,
    after `last_key`, unless that is -1, if `every_key` does not divide its number, counted from 1, and if
    `dense_layers_key` lists it. A list in `kinds_key`, of "dense" and "sparse", takes precedence. `chosen_key` is the
    number of experts of a token; with `may_be_lists` it and the count may be lists, a number for each layer. `score`
    and `groups_by_best` are as in `ExpertsConfig`; `renormalises` is True or False in every file, or the key that has
    the flag. `min_sum_key`, `sum_eps` and `jitter_key` are as in `ExpertsConfig`. `limit_key` is the bound of clamped
    gates, and `bounds_key` lists `ExpertsConfig.bound` of each layer, null or 0 for none. `shared_key` is the columns
    of the expert that every token visits, or, with `counts_shared`, how many times `size_key` they are. `shared_bias`
    is True or False in every file, or the key that has the flag. `is_gated` and the size at `latent_key`, if the file
    has one, are as in `ExpertsConfig`, and so are the number at `identity_key`, `skips_layer` and `weighs_inputs`.
    """

    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    default_count: int = 0
    size_key: str = "moe_intermediate_size"
    first_key: str = ""
    first: int = 0
    last_key: str = ""
    every_key: str = ""
    dense_layers_key: str = ""
    kinds_key: str = ""
    chosen_key: str = "num_experts_per_tok"
    may_be_lists: bool = False
    score: str = "softmax"
    renormalises: bool | str = "norm_topk_prob"
    min_sum_key: str = ""
    sum_eps: float = 1e-20
    jitter_key: str = ""
    has_choice_bias: bool = False
    has_groups: bool = False
    groups_by_best: bool = False
    scaling_key: str = ""
    has_router_bias: bool = False
    has_bias: bool = False
    limit_key: str = ""
    bounds_key: str = ""
    shared_key: str = ""
    counts_shared: bool = False
    shared_bias: bool | str = False
    has_shared_gate: bool = False
    is_gated: bool = True
    latent_key: str = ""
    identity_key: str = ""
    skips_layer: bool = False
    weighs_inputs: bool = False
