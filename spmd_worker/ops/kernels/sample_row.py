"""One row to sample: what the sampler needs of a sequence, independent of its index in the batch."""

from collections.abc import Sequence
from typing import NamedTuple

from spmd_worker.replica.sequence.sampling_params import SamplingParams


class SampleRow(NamedTuple):
    """The next token of sample `sample_index`. `output_token_ids` is the sequence's own list: the row is good for every
    step until the sequence is sent again. `first_position`: prompt tokens before it.
    """

    sampling: SamplingParams
    stream: int
    sample_index: int
    first_position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    @property
    def position(self) -> int:
        """Prompt and output tokens before the next one."""
        return self.first_position + len(self.output_token_ids)

    @property
    def must_not_stop(self) -> bool:
        """Whether the output has fewer than `min_tokens`."""
        return len(self.output_token_ids) < self.sampling.min_tokens

    @property
    def bad_token_ids(self) -> list[int]:
        """The tokens that would complete one of `bad_words_ids`."""
        sequences = self.sampling.bad_words_ids
        num_before = max(map(len, sequences), default=1) - 1
        num_outputs = len(self.output_token_ids)
        tail: list[int] = []
        if num_before > num_outputs:
            tail += self.prompt_token_ids[max(len(self.prompt_token_ids) - (num_before - num_outputs), 0) :]
        tail += self.output_token_ids[max(num_outputs - num_before, 0) :]
        found = [each[-1] for each in sequences if len(each) == 1]
        for each in sequences:
            # The last token first: few sequences match it.
            if len(each) > 1 and tail and each[-2] == tail[-1] and each[:-1] == tuple(tail[1 - len(each) :]):
                found.append(each[-1])
        return found

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the argmax is all that is needed."""
        return self.sampling.needs_argmax_only and not self.must_not_stop

    @property
    def needs_all_logits(self) -> bool:
        """Whether the token, or the ids that are returned with it, depend on more than maxima and sums over vocabulary
        shards. Log-probabilities and grammar masks do not.
        """
        sampling = self.sampling
        return self.has_processors or sampling.return_sampling_mask or (sampling.has_filters and not sampling.is_greedy)

    @property
    def has_processors(self) -> bool:
        """Whether `process_logits` changes the row."""
        sampling = self.sampling
        return sampling.has_penalties or bool(sampling.logit_bias) or self.must_not_stop or sampling.has_masks
