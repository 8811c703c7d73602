"""Sums over a scheduler's steps for summaries and reports; no decision depends on them."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.

    `num_preemptions` counts both kinds: `num_swapped_out` sequences went to the host, the others lost their blocks.
    `num_recomputed_tokens` were computed more than once because of that; `num_cached_prompt_tokens` were found in the
    cache by requests that began. `num_stored_blocks` went to the connector, less those that a rank could not save, if
    no block was to be loaded in the same step, and `num_loaded_blocks` came back from it on every rank.
    `num_snapshots` of recurrent states were kept, `num_snapshots_skipped` were not because sequences owned every slot,
    and `num_snapshot_hits` sequences began from one. Finished requests had `num_images` of `num_image_tokens`; rows of
    `num_rows_encoded` image tokens were made, those of `num_rows_reused` were there when a sequence began the image.
    With `cache.verify_hits`, `num_verified_hits` were computed again and compared completely; `num_unverified_hits`
    were chosen, but the sequence was preempted or ended, or what it had found was evicted or forgotten.
    With `executor.verify_steps`, of `num_verified_steps` a row was computed again.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_finished: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_snapshots: int = 0
    num_snapshots_skipped: int = 0
    num_snapshot_hits: int = 0
    num_images: int = 0
    num_image_tokens: int = 0
    num_rows_encoded: int = 0
    num_rows_reused: int = 0
    num_verified_hits: int = 0
    num_unverified_hits: int = 0
    num_verified_steps: int = 0
