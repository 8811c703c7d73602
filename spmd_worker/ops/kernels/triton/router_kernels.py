"""Routers of sparse layers on a GPU: float32 logits, then each token's experts and their weights.

Bits: a logit is the sum of pieces of PIECE inputs, each one chain over its inputs, in ascending order; the rest is one
program a token. So a token's choice depends on it alone.

T: tokens; H: hidden size; E: experts; C: experts of a token; R: rows of the router's weight, E or, with a shared
expert's gate, E + 1. One dtype of x: float16, bfloat16 or float32; all else is float32.
"""

import triton
import triton.language as tl

LAUNCH = {"enable_fp_fusion": False}
PIECE = 256


@triton.jit(do_not_specialize=["T"])
def partial_logits(
    x, weight, partials, T, R, H, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """x [T, H], weight [R, H] -> `partials` [pieces, T, R], by a program per tile and piece."""
    piece = tl.program_id(2)
    t, r = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    rows = x + (tl.where(t < T, t, 0).to(tl.int64) * H)[:, None]
    columns = weight + (tl.where(r < R, r, 0) * H)[:, None]
    sums = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, PIECE, BK):
        h = piece * PIECE + start + tl.arange(0, BK)
        is_there = (h < H)[None, :]
        a = tl.load(rows + h[None, :], mask=is_there, other=0.0).to(tl.float32)
        b = tl.load(columns + h[None, :], mask=is_there, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    to = partials + (piece.to(tl.int64) * T + t)[:, None] * R + r[None, :]
    tl.store(to, sums, mask=(t < T)[:, None] & (r < R)[None, :])


@triton.jit
def _key(value, index):
    """int64 keys in the order of `value`, of equal ones the lower index first, NaN first of all."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (ordered.to(tl.int64) << 16) | (0xFFFF - index)


@triton.jit
def _sigmoid(x):
    """Softmax of two, as `model.layers.experts` computes it."""
    top = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    power = tl.exp(x - top)
    return power / (power + tl.exp(-top))


@triton.jit
def _kept_groups(
    choice, e, E, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BY_BEST: tl.constexpr
):  # fmt: skip
    """Whether experts are in one of the groups whose two best have the highest sums or, BY_BEST, whose best are the
    highest.
    """
    lowest = tl.full(e.shape, -(1 << 62), tl.int64)
    group, keys = e // (E // GROUPS), _key(choice, e)
    g = tl.arange(0, GROUPS_PADDED)
    sums = tl.full([GROUPS_PADDED], float("-inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        inside = tl.where((group == index) & (e < E), keys, lowest)
        first = tl.max(inside, 0)
        second = tl.max(tl.where(inside == first, lowest, inside), 0)
        best = tl.sum(tl.where(inside == first, choice, 0.0), 0)
        if not BY_BEST:
            best += tl.sum(tl.where(inside == second, choice, 0.0), 0)
        sums = tl.where(g == index, best, sums)
    left = tl.where(g < GROUPS, _key(sums, g), -(1 << 62))
    is_kept = e < 0
    for _ in tl.static_range(CHOSEN_GROUPS):
        top = tl.max(left, 0)
        is_kept = is_kept | (group == 0xFFFF - (top & 0xFFFF).to(tl.int32))
        left = tl.where(left == top, -(1 << 62), left)
    return is_kept


@triton.jit
def _sparse_weight(scores, is_best, is_left, reach):
    """Softmax at the best of the scores that are left, of those within `reach` of it (`ExpertsConfig`)."""
    best = tl.sum(tl.where(is_best, scores, 0.0), 0)
    is_far = (best - scores) / tl.maximum(tl.abs(scores), best) > reach
    return 1.0 / tl.sum(tl.where(is_left & (is_far == 0), tl.exp(scores - best), 0.0), 0)


@triton.jit(do_not_specialize=["T"])
def choose(
    partials, bias, choice_bias, ids, weights, gates, T, scaling, added, min_sum, reach,
    E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, PIECES: tl.constexpr, CHOSEN: tl.constexpr,
    SCORE: tl.constexpr, RENORMALISES: tl.constexpr, BIAS: tl.constexpr, CHOICE_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BY_BEST: tl.constexpr,
):  # fmt: skip
    """`model.layers.experts.select_experts` of the sums of `partials`, except for exp and the order of sums: `ids`
    int64 [T, C], ascending, `weights` [T, C]; with R above E, `gates` [T] are the shared expert's. EP: E up to a power
    of two.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    inside = e < E
    logits = tl.zeros([EP], tl.float32)
    for piece in tl.static_range(PIECES):
        logits += tl.load(partials + (piece * T + token) * R + e, mask=inside, other=0.0)
    if R > E:
        gate = tl.load(partials + token * R + E)
        for piece in tl.static_range(1, PIECES):
            gate += tl.load(partials + (piece * T + token) * R + E)
        tl.store(gates + token, _sigmoid(gate))
    if BIAS:
        logits += tl.load(bias + e, mask=inside, other=0.0)
    if SCORE == "softmax":
        power = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), 0)), 0.0)
        scores = power / tl.sum(power, 0)
    elif SCORE == "sigmoid":
        scores = _sigmoid(logits)
    else:
        scores = logits
    choice = scores
    if CHOICE_BIAS:
        choice += tl.load(choice_bias + e, mask=inside, other=0.0)
    if GROUPS > 1:
        is_kept = _kept_groups(choice, e, E, GROUPS, GROUPS_PADDED, CHOSEN_GROUPS, BY_BEST)
        choice = tl.where(is_kept, choice, float("-inf"))
    left = tl.where(inside, _key(choice, e), -(1 << 62))
    is_chosen = e < 0
    mixed = tl.zeros([EP], tl.float32)
    for _ in tl.static_range(CHOSEN):
        is_top = left == tl.max(left, 0)
        if SCORE == "sparsemixer":
            weight = _sparse_weight(scores, is_top, inside & (left > -(1 << 62)), reach)
            mixed = tl.where(is_top, weight, mixed)
        is_chosen = is_chosen | is_top
        left = tl.where(is_top, -(1 << 62), left)
    values = tl.where(is_chosen, scores, 0.0)
    if SCORE == "sparsemixer":
        values = mixed
    if SCORE == "softmax_chosen":
        power = tl.exp(scores - tl.max(tl.where(is_chosen, scores, float("-inf")), 0))
        power = tl.where(is_chosen, power, 0.0)
        values = power / tl.sum(power, 0)
    if SCORE == "sigmoid_chosen":
        values = tl.where(is_chosen, _sigmoid(scores), 0.0)
    if RENORMALISES:
        values = values / tl.maximum(tl.sum(values, 0) + added, min_sum)
    is_nan = tl.max(tl.where(inside & (scores != scores), 1, 0), 0) == 1
    values = tl.where(is_nan, float("nan"), values * scaling)
    place = token * CHOSEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(ids + place, e.to(tl.int64), mask=is_chosen)
    tl.store(weights + place, values, mask=is_chosen)
