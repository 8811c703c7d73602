"""A step's tokens: their sequences, positions and slots in the cache.

S: sequences; T: tokens; B: blocks of the longest table. Built once a step by `worker/runner/batch.py` or
`worker/runner/batch_state.py` and passed as an argument to every layer.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from spmd_worker.ops.attention.draft_replay import DraftReplay
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.recurrent import StateSegments


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """`query_starts[i]:query_starts[i + 1]` are the tokens of sequence i (S + 1 numbers on the host).

    `context_lengths[i]` is the number of keys of sequence i, those of this step included (S numbers on the host).
    `block_tables` int64 or int32 [S, B], arbitrary after a sequence's blocks; `token_blocks` and `token_offsets` int64
    [T]: the block of a token's key and value, and the offset in it. `sees_later`: attention is bidirectional, a window
    is as wide on both sides, and sequences are complete. `starts` [S + 1] and `lengths` [S] are the two tuples as int32
    on the device, if they are there, and `slots` int32 [T] are the tokens' slots in the cache, block * block size +
    offset, negative for padding tokens. `fixed` belongs to the backend, for steps whose tensors keep their addresses
    (`attention.backend.FixedAttention`): the other fields except `sees_later` and `slots` are not used then.
    Fixed steps of one number of tokens and different `kind` have different launches. `segments` are the sequences as
    layers with states take them; None if the model has no such layer. `replay`: what such layers compute in a step in
    which a row has drafts, or lags; None in others. `last_visible` int32 [T]: the position of the
    last key that a token sees, its own or a later one of the step, in ascending order within a sequence; a window
    counts from the token's own. None: the token's own. A sequence of one token sees nothing later. With `sees_later` it
    is a further bound, the same for all tokens of a sequence: tokens behind it are seen by none, and one whose window
    has no key up to it gets zeros.

    With block tables of several groups of layers `group_of` has the group of each layer of the stage, and `others` the
    metadata of all groups but the first, which differ in `block_tables`, `token_blocks` and `slots`.

    `cross` has what layers of a decoder with an encoder compute with; the other fields are then of all tokens, and only
    writes of keys and values may use them. `step_lengths` are the context lengths of the step whose tokens these are a
    part of; None if they are all. `most_keys` bounds the context lengths of fixed steps.
    """

    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    sees_later: bool = False
    starts: Tensor | None = None
    lengths: Tensor | None = None
    slots: Tensor | None = None
    fixed: object | None = None
    kind: int = 0
    segments: StateSegments | None = None
    replay: DraftReplay | None = None
    last_visible: Tensor | None = None
    others: tuple["AttentionMetadata", ...] = ()
    group_of: tuple[int, ...] = ()
    cross: "CrossStep | None" = None
    step_lengths: tuple[int, ...] | None = None
    most_keys: int | None = None

    @property
    def longest(self) -> int:
        """Keys that no sequence of the step has more than."""
        return max(self.context_lengths, default=0) if self.most_keys is None else self.most_keys

    @property
    def is_causal(self) -> bool:
        return not self.sees_later and self.last_visible is None

    def without_sight(self) -> "AttentionMetadata":
        """The same step, in which tokens see nothing later; itself if they do not."""
        if self.last_visible is None:
            return self
        others = tuple([replace(each, last_visible=None) for each in self.others])
        return replace(self, last_visible=None, others=others)

    def of_layer(self, index: int) -> "AttentionMetadata":
        """The metadata of a layer of the stage."""
        group = self.group_of[index] if self.group_of else 0
        return self.others[group - 1] if group else self

    def is_of_step(self, other: "AttentionMetadata") -> bool:
        """Whether another one is of the same step, of the same or another group of layers, or of other tokens."""
        own, others = (each.step_lengths or each.context_lengths for each in (self, other))
        return own is others

    def num_later_keys(self, window: int) -> int:
        """Number of later keys that a token may see: 0 for causal attention."""
        if not self.sees_later:
            return 0
        return window - 1 if window else max(self.context_lengths, default=0)


@dataclass(frozen=True, slots=True)
class CrossStep:
    """A step of an encoder-decoder model. The first positions of a sequence are an encoder's, in whole blocks: their
    keys and values are of the encoder's rows, by the projections of cross-attention; positions behind them are the
    decoder's tokens. Both kinds are in one block table.

    `encoder_rows` int64 [E] and `decoder_rows` int64 [D] are the tokens of the step of each kind, ascending. `written`
    is metadata to write keys and values of the E with. `own` is causal metadata of the D over the decoder's positions,
    of the sequences that have any in this step; `seen` is metadata of D sequences of one token each, over the rows of
    the encoder's input: every token sees all of them, and its bits do not depend on its chunk.
    """

    encoder_rows: Tensor
    decoder_rows: Tensor
    written: AttentionMetadata
    own: AttentionMetadata
    seen: AttentionMetadata


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The tokens of a step whose outputs are needed, not only their keys and values. `rows` int64 [W], ascending;
    `metadata` and `adapters` of a step of these alone: each is the last of a sequence.
    """

    rows: Tensor
    metadata: AttentionMetadata
    adapters: StepAdapters | None = None
