"""Which requests an engine can answer at all: checked before anything is queued, so that one costs the others nothing.

Knows prompts, sampling parameters and limits. Knows nothing about ranks or steps.
"""

from spmd_worker.sequence.sampling_params import SamplingParams


def check_request(
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    has_tokenizer: bool,
) -> None:
    """Raise ValueError, naming what to change, for a request that could never be answered."""
    if not prompt_token_ids:
        raise ValueError("the prompt has no tokens: give at least one")
    outside = next((token for token in prompt_token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary of {vocab_size} tokens")
    if len(prompt_token_ids) + 1 > max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt_token_ids)} tokens but model.max_model_len is {max_model_len}, which "
            f"must hold the prompt and at least one output token: shorten the prompt or raise model.max_model_len"
        )
    if sampling.num_sequences > max_num_seqs:
        key = "n" if sampling.best_of is None else "best_of"
        raise ValueError(
            f"{key}={sampling.num_sequences} is more than scheduler.max_num_seqs="
            f"{max_num_seqs}: lower {key} or raise scheduler.max_num_seqs"
        )
    if sampling.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer.json in the model folder: use stop_token_ids")
    sampling.check_vocabulary(vocab_size)
