"""Masks, bias and penalties of all rows of a step, from token counts and tails that the device keeps.

    start   rows that are new, or that the device does not know: counts, tail and length     a program a row and block
    decide  stop ids, bad words and bias; whether allowed ids leave a token                  a program a row
    apply   allowed ids, then penalties                                                      a program a row and block
    append  the sampled token joins counts, tail and length                                  a program a row

`sampling/processors.py` is the definition: allowed tokens, minimum length, bad words, bias, penalties, in this order; a
mask that would leave no token is not applied. Bias and allowed ids may change places, because a bias is finite and an
id that is not allowed is minus infinity either way. All is elementwise in float32 with IEEE division, so the bits are
the definition's on the CPU: torch on CUDA divides by a number by multiplying with its reciprocal.

R: rows; V: vocabulary. `logits` float32 [R, V], rows `stride` elements apart. `rows` int32 [R, FIELDS]: see the names
below. `factors` float32 [R, 3]: repetition, presence, frequency. `counts` int32 [count rows, V]: times in the output,
and bit 30 if in the prompt. `tails` int32 [slots, WIDTH]: the token at position p is at p % WIDTH; `lengths` int32
[slots]: prompt and output. `allowed` int32 [.., V / 32]: a bit an id. `stops`, `bias_ids` int32 and `biases` float32:
lists, of which a row has a part; `words` int32 [.., WIDTH]: bad words, aligned to the right, -1 before them. `before`
float32: logits that stop ids and bad words take away, until it is known whether a token is left.
"""

import triton
import triton.language as tl

SLOT = tl.constexpr(0)
COUNT_ROW = tl.constexpr(1)
ALLOWED_ROW = tl.constexpr(2)
MIN_LENGTH = tl.constexpr(3)
STOP_FROM = tl.constexpr(4)
STOP_TO = tl.constexpr(5)
WORD_FROM = tl.constexpr(6)
WORD_TO = tl.constexpr(7)
BIAS_FROM = tl.constexpr(8)
BIAS_TO = tl.constexpr(9)
BEFORE_FROM = tl.constexpr(10)
FIELDS = tl.constexpr(12)
IN_PROMPT = tl.constexpr(1 << 30)

BLOCK = 4096
WORDS = 64
"""Ids of a list, or bad words, that a program looks at together."""
LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}
APPEND_LAUNCH = {"enable_fp_fusion": False, "num_warps": 1}


@triton.jit
def clear(counts, starts, V, BLOCK: tl.constexpr):
    """Set the counts of starting rows to zero; `starts` as in `start`."""
    count_row = tl.load(starts + tl.program_id(0) * 5 + 1)
    if count_row >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + count_row.to(tl.int64) * V + i, tl.zeros([BLOCK], tl.int32), mask=i < V)


@triton.jit
def start(tokens, starts, counts, tails, lengths, V, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`starts` int32 [n, 5]: slot, count row or -1, first of its `tokens`, those of its prompt, all. Counts are whole
    numbers, so atomics add them up in any order.
    """
    own = starts + tl.program_id(0) * 5
    slot, count_row, first = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    num_prompt, num_tokens = tl.load(own + 3), tl.load(own + 4)
    if tl.program_id(1) == 0:
        p = num_tokens - WIDTH + tl.arange(0, WIDTH)
        token = tl.load(tokens + first + p, mask=p >= 0, other=0)
        tl.store(tails + slot * WIDTH + (p + WIDTH) % WIDTH, token, mask=p >= 0)
        tl.store(lengths + slot, num_tokens)
    if count_row >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(tokens + first + i, mask=i < num_tokens, other=-1)
        inside = (token >= 0) & (token < V)
        to = counts + count_row.to(tl.int64) * V + tl.maximum(token, 0)
        tl.atomic_or(to, tl.full([BLOCK], IN_PROMPT, tl.int32), mask=inside & (i < num_prompt))
        tl.atomic_add(to, tl.full([BLOCK], 1, tl.int32), mask=inside & (i >= num_prompt))


@triton.jit
def append(ids, rows, counts, tails, lengths, V, WIDTH: tl.constexpr):
    """`ids` int64 [R]: sampled tokens; a row with a negative one has ended. A slot and its counts belong to one row."""
    which = tl.program_id(0)
    token = tl.load(ids + which)
    slot, count_row = tl.load(rows + which * FIELDS + SLOT), tl.load(rows + which * FIELDS + COUNT_ROW)
    if (slot >= 0) & (token >= 0):
        length = tl.load(lengths + slot)
        tl.store(tails + slot * WIDTH + length % WIDTH, token.to(tl.int32))
        tl.store(lengths + slot, length + 1)
        if count_row >= 0:
            to = counts + count_row.to(tl.int64) * V + token
            tl.store(to, tl.load(to) + 1)


@triton.jit
def _leaves_some(row, V, allowed, has_mask, BLOCK: tl.constexpr):
    """Whether a logit that `allowed` leaves is not minus infinity. The first block nearly always says so."""
    found = 0
    begin = 0
    while (found == 0) & (begin < V):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        word = tl.load(allowed + i // 32, mask=(i < V) & has_mask, other=-1)
        is_left = (x != float("-inf")) & (((word >> (i % 32)) & 1) == 1)
        found = tl.max(is_left.to(tl.int32), 0)
        begin += BLOCK
    return found == 1


@triton.jit
def _is_complete(words, w, to, tail, WIDTH: tl.constexpr):
    """Whether the next token may complete word `w`, below `to`: all tokens but the last are those of `tail` [WIDTH]."""
    k = tl.arange(0, WIDTH)
    word = tl.load(words + w[:, None] * WIDTH + k[None, :], mask=(w < to)[:, None], other=-3)
    is_there = (word == -1) | (word == tail[None, :]) | (k == WIDTH - 1)[None, :]
    return (w < to) & (tl.min(is_there.to(tl.int32), 1) == 1)


@triton.jit
def decide(
    logits, rows, tails, lengths, allowed, stops, words, bias_ids, biases, before, uses_mask, V, stride, num_words,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`uses_mask` int32 [R]: whether `apply` applies the row's allowed ids."""
    which = tl.program_id(0)
    row, own = logits + which.to(tl.int64) * stride, rows + which * FIELDS
    slot, allowed_row = tl.load(own + SLOT), tl.load(own + ALLOWED_ROW)
    mask = allowed + tl.maximum(allowed_row, 0).to(tl.int64) * num_words
    has_mask = allowed_row >= 0
    if has_mask:
        has_mask = _leaves_some(row, V, mask, has_mask, BLOCK)
    tl.store(uses_mask + which, has_mask.to(tl.int32))
    if slot >= 0:
        length, saved = tl.load(lengths + slot), before + tl.load(own + BEFORE_FROM)
        first, to = tl.load(own + STOP_FROM), tl.load(own + STOP_TO)
        if (first < to) & (length < tl.load(own + MIN_LENGTH)):
            for begin in tl.range(first, to, WORDS):
                i = begin + tl.arange(0, WORDS)
                x = tl.load(row + tl.load(stops + i, mask=i < to, other=0), mask=i < to)
                tl.store(saved + i - first, x, mask=i < to)
            # Threads read what others of this program wrote: before, between and after.
            tl.debug_barrier()
            for begin in tl.range(first, to, WORDS):
                i = begin + tl.arange(0, WORDS)
                tl.store(row + tl.load(stops + i, mask=i < to, other=0), float("-inf"), mask=i < to)
            tl.debug_barrier()
            is_left = _leaves_some(row, V, mask, has_mask, BLOCK)
            tl.debug_barrier()
            if is_left == 0:
                for begin in tl.range(first, to, WORDS):
                    i = begin + tl.arange(0, WORDS)
                    x = tl.load(saved + i - first, mask=i < to)
                    tl.store(row + tl.load(stops + i, mask=i < to, other=0), x, mask=i < to)
            tl.debug_barrier()
        first, to = tl.load(own + WORD_FROM), tl.load(own + WORD_TO)
        if first < to:
            p = length - (WIDTH - 1) + tl.arange(0, WIDTH)
            tail = tl.load(tails + slot * WIDTH + (p + WIDTH) % WIDTH, mask=(p >= 0) & (p < length), other=-2)
            num_complete = 0
            for begin in tl.range(first, to, WORDS):
                w = begin + tl.arange(0, WORDS)
                is_complete = _is_complete(words, w, to, tail, WIDTH)
                last = tl.load(words + w * WIDTH + WIDTH - 1, mask=is_complete, other=0)
                tl.store(saved + w - first, tl.load(row + last, mask=is_complete), mask=is_complete)
                num_complete += tl.sum(is_complete.to(tl.int32), 0)
            tl.debug_barrier()
            if num_complete > 0:
                for begin in tl.range(first, to, WORDS):
                    w = begin + tl.arange(0, WORDS)
                    is_complete = _is_complete(words, w, to, tail, WIDTH)
                    last = tl.load(words + w * WIDTH + WIDTH - 1, mask=is_complete, other=0)
                    tl.store(row + last, float("-inf"), mask=is_complete)
                tl.debug_barrier()
                is_left = _leaves_some(row, V, mask, has_mask, BLOCK)
                tl.debug_barrier()
                if is_left == 0:
                    for begin in tl.range(first, to, WORDS):
                        w = begin + tl.arange(0, WORDS)
                        is_complete = _is_complete(words, w, to, tail, WIDTH)
                        last = tl.load(words + w * WIDTH + WIDTH - 1, mask=is_complete, other=0)
                        x = tl.load(saved + w - first, mask=is_complete)
                        tl.store(row + last, x, mask=is_complete)
            tl.debug_barrier()
    first, to = tl.load(own + BIAS_FROM), tl.load(own + BIAS_TO)
    for begin in tl.range(first, to, WORDS):
        i = begin + tl.arange(0, WORDS)
        at = row + tl.load(bias_ids + i, mask=i < to, other=0)
        tl.store(at, tl.load(at, mask=i < to) + tl.load(biases + i, mask=i < to), mask=i < to)


@triton.jit
def apply(logits, rows, factors, counts, allowed, uses_mask, V, stride, num_words, BLOCK: tl.constexpr):
    """Allowed ids where `uses_mask`, then penalties."""
    which = tl.program_id(0)
    own = rows + which * FIELDS
    count_row, has_mask = tl.load(own + COUNT_ROW), tl.load(uses_mask + which) != 0
    if has_mask | (count_row >= 0):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + which.to(tl.int64) * stride + i
        x = tl.load(at, mask=i < V)
        mask = allowed + tl.maximum(tl.load(own + ALLOWED_ROW), 0).to(tl.int64) * num_words
        word = tl.load(mask + i // 32, mask=(i < V) & has_mask, other=-1)
        x = tl.where(((word >> (i % 32)) & 1) == 1, x, float("-inf"))
        if count_row >= 0:
            seen = tl.load(counts + count_row.to(tl.int64) * V + i, mask=i < V, other=0)
            repetition = tl.load(factors + which * 3)
            presence, frequency = tl.load(factors + which * 3 + 1), tl.load(factors + which * 3 + 2)
            if repetition != 1.0:
                penalised = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
                # Comparisons keep NaN, as torch's clamp does.
                penalised = tl.where(penalised > 1e30, 1e30, tl.where(penalised < -1e30, -1e30, penalised))
                x = tl.where((seen != 0) & (x != float("-inf")), penalised, x)
            times = seen & (IN_PROMPT - 1)
            x = tl.where(times > 0, x - (presence + frequency * times.to(tl.float32)), x)
        tl.store(at, x, mask=i < V)
