"""What one family of models does with experts, as data: how config.json counts them, and how a token's are chosen.
`Family.experts` refers to it. Needs no torch.

Entries that end in `_key` are keys of config.json, "" where the family has no such thing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Matrices of all experts as slices of one checkpoint tensor. `name` and `bias`, that of their biases, are whole
    names within a layer; `parts` are the matrices of a slice, one below the other, in our words. A tensor is [experts,
    outputs, inputs], or [experts, inputs, outputs] where `is_transposed`, and one of biases [experts, outputs].
    `may_be_turned`: some files have it the other way round, which its shape says; one that is square is as here.
    """

    name: str
    parts: tuple[str, ...]
    bias: str = ""
    is_transposed: bool = False
    may_be_turned: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsFamily:
    """How a sparse layer is found, chooses and computes.

    `count_keys` are spellings of one key: files have one of them, or none for `default_count` experts. `size_key` is
    the columns of an expert. A layer is dense before `first_key`, where `every_key` does not divide its number, counted
    from 1, and where `dense_layers_key` lists it. `score` is as in `ExpertsConfig`; `renormalises` True is always, a
    text the key that says. `limit_key` is the bound of clamped gates. `shared_key` is the columns of the
    expert that every token visits, or, with `counts_shared`, how many times `size_key` they are.
    """

    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    default_count: int = 0
    size_key: str = "moe_intermediate_size"
    first_key: str = ""
    every_key: str = ""
    dense_layers_key: str = ""
    score: str = "softmax"
    renormalises: bool | str = "norm_topk_prob"
    has_choice_bias: bool = False
    has_groups: bool = False
    scaling_key: str = ""
    has_router_bias: bool = False
    has_bias: bool = False
    limit_key: str = ""
    shared_key: str = ""
    counts_shared: bool = False
    has_shared_gate: bool = False
