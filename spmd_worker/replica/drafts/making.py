"""Makes the proposer of a method."""

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.drafts.ngram import NgramProposer
from spmd_worker.replica.drafts.proposer import Proposer
from spmd_worker.replica.drafts.suffix import SuffixProposer
from spmd_worker.replica.sequence.sequence import Sequence


def make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer | None:
    """The replica's proposer; None for methods whose drafts come from the workers."""
    if config.method == "ngram":
        proposer: Proposer = NgramProposer(*config.lookup_tokens, vocab_size)
    elif config.method == "suffix":
        proposer = SuffixProposer(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
    else:
        return None
    return _WithinVocabulary(proposer, vocab_size)


class _WithinVocabulary:
    """Cuts drafts before an id that the model cannot sample: prompts may hold placeholders beyond the vocabulary."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer, self._vocab_size = proposer, vocab_size

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        drafts = self._proposer.propose(sequence, most)
        for number, token_id in enumerate(drafts):
            if not 0 <= token_id < self._vocab_size:
                return drafts[:number]
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._proposer.forget(sequence)
