"""Memory of the rows of images: how many are kept, on which ranks, and that the plan counts them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, RowLimits, RunConfig, SchedulerConfig
from spmd_worker.model_config.model_config import ModelConfig, ModelFiles, model_config_of
from spmd_worker.model_config.vision_config import TowerConfig, TowerNames, VisionConfig
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA, MediaRowLimits
from spmd_worker.resolved import ResolvedRun, resolve
from spmd_worker.worker.memory.media_memory import (
    longest_media,
    media_row_bytes,
    media_row_limits,
    media_rows_bytes_of,
)
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan


def model_config() -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    return model_config_of(config, Path("config.json"))


def run(vision: VisionConfig | None, tensor: int = 1, pipeline: int = 1, **options: Any) -> ResolvedRun:
    scheduler = SchedulerConfig(max_num_seqs=4, **options)
    parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    config = RunConfig(scheduler=scheduler, parallel=parallel)
    return resolve(config, ModelFiles(replace(model_config(), vision=vision), {}, ""), "cpu")


PLAIN = VisionConfig("table", 7)
DEEP = VisionConfig("table", 7, num_added=3, sees_whole_image=True)
_NAMES = TowerNames((), "layers", (), "output", ("norm1", "norm2"), (), "patches")
TOWER = TowerConfig(_NAMES, 64, 64, 1, 4, 14, "gelu", 1e-6)


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        (run(None), NO_MEDIA),
        (run(PLAIN), MediaRowLimits(4096, 16_384, 1, False, 2048, True)),
        (run(DEEP, 2, max_num_batched_tokens=3000), MediaRowLimits(6000, 16_384, 2, True, 3000, True)),
        (
            run(PLAIN, max_num_batched_tokens=8192, max_encode_patches=9, enable_chunked_prefill=False),
            MediaRowLimits(16_384, 9, 1, False, 8192, False),
        ),
    ],
)
def test_limits_follow_from_the_settings(resolved: ResolvedRun, expected: MediaRowLimits):
    assert media_row_limits(resolved) == expected


def test_memory_given_in_gib_is_divided_into_rows():
    resolved = run(DEEP)
    given = replace(resolved, config=replace(resolved.config, cache=CacheConfig(media_rows_gib=0.25)))
    # Of 512 numbers of 2 bytes, and those of three layers.
    assert media_row_bytes(given) == 4096
    assert media_row_limits(given).num_rows == 65_536


def with_options(resolved: ResolvedRun, **options: Any) -> ResolvedRun:
    return replace(resolved, config=replace(resolved.config, **options))


def test_rows_of_the_largest_image_are_kept():
    """Regression: an image within limits.max_image_tokens was an error row that asked for cache.media_rows_gib."""
    assert media_row_limits(with_options(run(PLAIN), limits=RowLimits(max_image_tokens=9000))).num_rows == 9000


def test_longest_image_follows_from_memory_and_batch_sizes():
    """A resumed job compares it: rows beyond it are error rows."""
    assert longest_media(run(None)) == {}
    for resolved in (run(PLAIN), run(PLAIN, max_num_batched_tokens=64)):
        assert longest_media(resolved) == {"tokens of the longest image": 4096}
    few = CacheConfig(media_rows_gib=0.001)
    assert longest_media(with_options(run(PLAIN), cache=few)) == {"tokens of the longest image": 1048}
    one_step = with_options(run(PLAIN, enable_chunked_prefill=False, max_num_batched_tokens=8192), cache=few)
    assert longest_media(one_step)["tokens of the images of a row"] == 1048
    square = replace(DEEP, tower=replace(TOWER, num_crop_tokens=256))
    longest = [longest_media(run(square, max_num_batched_tokens=each)).popitem()[1] for each in (2048, 256, 255)]
    assert longest == [4096, 4096, 255]
    # Gemma 4 has images of any size, of at most so many tokens.
    other = replace(DEEP, tower=TOWER)
    longest = [longest_media(run(other, max_num_batched_tokens=each)).popitem()[1] for each in (2048, 1120, 1119)]
    assert longest == [4096, 4096, 1119]


def test_only_ranks_of_the_first_stage_have_rows():
    resolved = run(PLAIN, 2, 2)
    assert [media_rows_bytes_of(resolved, rank) for rank in range(4)] == [4096 * 1024] * 2 + [0, 0]


def test_plan_counts_rows_of_images():
    with_rows, without = (make_plan(run(vision)) for vision in (PLAIN, None))
    assert with_rows.shares[0].weights_bytes - without.shares[0].weights_bytes == 4096 * 1024
    words = "images     rows of 4,096 tokens are kept (cache.media_rows_gib), 4.0 MiB of a rank's weights"
    assert words in describe_plan(with_rows).splitlines()
    assert "images" not in describe_plan(without)
