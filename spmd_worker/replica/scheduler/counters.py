"""Sums over a scheduler's steps for summaries and reports; no decision depends on them."""

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.

    `num_preemptions` counts both kinds: `num_swapped_out` sequences went to the host, the others lost their blocks. Of
    the requests that ended, `num_finished`, `num_finished_by_length` have a sample that ended by its length,
    `num_finished_by_repetition` one that repeated itself, `num_aborted` were aborted and `num_failed` have no answer:
    each is counted once, by the worst of its samples. `num_recomputed_tokens` were computed more than once because of
    that; `num_cached_prompt_tokens` were found in the cache by requests that began, of the `num_queried_prompt_tokens`
    of those that were looked up. `num_stored_blocks` went to the connector, less those that a rank could not save, if
    no block was to be loaded in the same step, and `num_loaded_blocks` came back from it on every rank. `num_snapshots`
    of recurrent states were kept, `num_snapshots_skipped` were not because sequences owned every slot, and
    `num_snapshot_hits` sequences began from one. Finished requests had `num_images` of `num_image_tokens`, `num_videos`
    of `num_video_tokens` and `num_recordings` of `num_recording_tokens`; rows of `num_rows_encoded` image tokens were
    made, those of `num_rows_reused` were there when a sequence began the image. With `cache.verify_hits`,
    `num_verified_hits` were computed again and compared completely; `num_unverified_hits` were chosen, but the sequence
    was preempted or ended, or what it had found was evicted or forgotten. With `executor.verify_steps`, of
    `num_verified_steps` a row was computed again. Of `num_drafted_tokens`, in `num_drafts` steps of a row,
    `num_accepted_tokens` were what was sampled; so many first, second, ... drafts of a row were made and accepted.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_queried_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_finished: int = 0
    num_finished_by_length: int = 0
    num_finished_by_repetition: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_snapshots: int = 0
    num_snapshots_skipped: int = 0
    num_snapshot_hits: int = 0
    num_images: int = 0
    num_image_tokens: int = 0
    num_videos: int = 0
    num_video_tokens: int = 0
    num_recordings: int = 0
    num_recording_tokens: int = 0
    num_rows_encoded: int = 0
    num_rows_reused: int = 0
    num_verified_hits: int = 0
    num_unverified_hits: int = 0
    num_verified_steps: int = 0
    num_drafts: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafts_by_position: list[int] = field(default_factory=list)
    num_accepted_by_position: list[int] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """The single numbers, by name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.type is int}

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of a row in a step."""
        self.num_drafts += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for counts, number in (
            (self.num_drafts_by_position, num_drafted),
            (self.num_accepted_by_position, num_accepted),
        ):
            counts += [0] * (num_drafted - len(counts))
            for position in range(number):
                counts[position] += 1
