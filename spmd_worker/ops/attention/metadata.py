"""Where each token of a step stands: in which sequence, at which position, in which block of the cache.

S: sequences; T: tokens; B: blocks of the longest table. Built once a step by `worker/runner/batch.py` or
`worker/runner/batch_state.py` and passed as an argument to every layer.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """`query_starts[i]:query_starts[i + 1]` are the tokens of sequence i (S + 1 numbers on the host).

    `context_lengths[i]` counts the keys sequence i may look at, those of this step included (S numbers on the host).
    `block_tables` int64 or int32 [S, B], behind a sequence's blocks anything; `token_blocks` and `token_offsets` int64
    [T]: the block that takes a token's key and value, and the place inside it. `sees_later`: tokens see those behind
    them too, and a window is as wide to that side; rows are whole then. `starts` [S + 1] and `lengths` [S] are the two
    tuples as int32 on the device, where they are there. `fixed` is the backend's own, of steps whose tensors stay where
    they are (`attention.backend.FixedAttention`): nothing else but `sees_later` is looked at then.
    """

    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    sees_later: bool = False
    starts: Tensor | None = None
    lengths: Tensor | None = None
    fixed: object | None = None


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Of a step's tokens those of which more is wanted than keys and values. `rows` int64 [W], ascending; `metadata`
    of a step that computes these alone: each is the last of a sequence.
    """

    rows: Tensor
    metadata: AttentionMetadata
