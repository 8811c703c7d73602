"""Which rank does what, and what torchrun's environment says."""

from dataclasses import replace

import pytest

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.model_config import RopeParameters, model_config_of
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment
from spmd_worker.ranks.topology import (
    RankLayout,
    Stage,
    balanced_layers,
    check_divides,
    check_world_size,
    complete_model,
    layout_of,
    shard_range,
    stage_of,
)


def test_rank_layout_of_two_by_two_by_two():
    layout = RankLayout(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert layout.world_size == 8
    places = [(layout.pipeline_rank(rank), layout.tensor_rank(rank)) for rank in range(8)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.pipeline_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 1, 1), (1, 3, 1), (2, 3, 2), (3, 2, 1)])
def test_every_rank_is_in_one_group_per_kind(sizes: tuple[int, int, int]):
    """The index in the group is the one it reports."""
    layout = RankLayout(*sizes)
    for groups, place in (
        (layout.tensor_groups(), layout.tensor_rank),
        (layout.pipeline_groups(), layout.pipeline_rank),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert all(place(rank) == index for group in groups for index, rank in enumerate(group))


def test_unequal_world_size_error_names_both_numbers():
    with pytest.raises(ConfigError, match=r" 6 ranks, but 4 .*: start 6 "):
        check_world_size(RankLayout(3, 2), 4)
    check_world_size(RankLayout(3, 2), 6)
    with pytest.raises(ConfigError, match=r"is 1 rank, but 2 were started: start 1 "):
        check_world_size(RankLayout(1), 2)


@pytest.mark.parametrize(
    ("layout", "world_size", "choices"),
    [
        (
            RankLayout(2),
            4,
            "start 2 (torchrun --nproc-per-node), or set parallel.data_parallel_size to 2, or set "
            "parallel.tensor_parallel_size to 4 (and parallel.data_parallel_size to 1)",
        ),
        (
            RankLayout(2, 2),
            6,
            "start 4 (torchrun --nproc-per-node), or set parallel.tensor_parallel_size to 3 (and "
            "parallel.data_parallel_size to 1)",
        ),
        (RankLayout(2, 2), 5, "start 4 (torchrun --nproc-per-node)"),
    ],
)
def test_unequal_world_size_error_lists_the_choices(layout: RankLayout, world_size: int, choices: str):
    with pytest.raises(ConfigError) as error_result:
        check_world_size(layout, world_size)
    assert str(error_result.value).endswith(f"ranks, but {world_size} were started: {choices}")


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (10, 2, [(0, 5), (5, 10)]),
        (10, 3, [(0, 4), (4, 7), (7, 10)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_shard_ranges_are_nearly_equal(total: int, size: int, expected: list[tuple[int, int]]):
    assert [shard_range(total, size, rank) for rank in range(size)] == expected


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_fewer_columns_than_leaves_have_ranges():
    """Of layers of experts, whose own feed-forward a file may give any number of columns."""
    assert RankLayout(1, num_leaves=4).columns(2, 0) == (0, 2)
    assert [RankLayout(2, num_leaves=4).columns(1, rank) for rank in range(2)] == [(0, 1), (1, 1)]


def test_torchrun_environment_is_read():
    environment = read_rank_environment(TORCHRUN)
    assert (environment.rank, environment.world_size) == (3, 4)
    assert (environment.local_rank, environment.local_world_size) == (1, 2)
    assert environment.is_launched
    assert not environment.is_leader


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, True)),
        ({"LOCAL_WORLD_SIZE": None, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, (3, True)),
        ({"LOCAL_WORLD_SIZE": None}, (4, False)),
    ],
)
def test_local_world_size_defaults_to_the_world(changes: dict[str, str | None], expected: object):
    """One node is assumed where nothing says how many ranks it has."""
    variables = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    environment = read_rank_environment(variables)
    assert (environment.local_world_size, environment.is_local_size_known) == expected


def test_unlaunched_process_is_alone():
    assert read_rank_environment({}) == RankEnvironment()
    assert read_rank_environment({"LOCAL_RANK": "1"}) == RankEnvironment()
    assert RankEnvironment().is_leader


def test_incomplete_environment_error_names_missing_variables():
    half = {key: value for key, value in TORCHRUN.items() if not key.startswith("MASTER")}
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT is not"):
        read_rank_environment(half)
    with pytest.raises(ConfigError, match=r"^RANK='x' must .*number"):
        read_rank_environment({**TORCHRUN, "RANK": "x"})


SHAPE = model_config_of(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
    },
    "config.json",
)


def test_stages_balance_weights_including_embedding_and_head():
    table, layer = SHAPE.vocab_size * SHAPE.hidden_size, SHAPE.layer_parameters[0]
    assert 1 < table / layer < 2
    assert balanced_layers(SHAPE, 1) == (10,)
    assert balanced_layers(SHAPE, 2) == (5, 5)
    assert balanced_layers(SHAPE, 4) == (2, 3, 3, 2)
    assert balanced_layers(SHAPE, 10) == (1,) * 10


def test_stage_is_a_run_of_layers_with_ends():
    layout = RankLayout(2, 3, 1, (1, 7, 2))
    assert stage_of(layout, SHAPE, 0) == stage_of(layout, SHAPE, 1) == Stage(0, 1, is_first=True, is_last=False)
    assert stage_of(layout, SHAPE, 3) == Stage(1, 8, is_first=False, is_last=False)
    assert stage_of(layout, SHAPE, 5) == Stage(8, 10, is_first=False, is_last=True)
    assert stage_of(RankLayout(1), SHAPE, 0) == complete_model(SHAPE)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (RankLayout(1, 11), r"^parallel\.pipeline_parallel_size=11 .*more .*10 layers"),
        (RankLayout(1, 2, 1, (10,)), r"\[10\] has 1 stages but parallel.pipeline_parallel_size is 2"),
        (RankLayout(1, 2, 1, (5, 6)), r"\[5,6\] makes 11 layers .*10, .*\[5,5\]"),
        (RankLayout(1, 2, 1, (10, 0)), r"\[10,0\] makes 10 layers.*each"),
    ],
)
def test_invalid_stages_error_suggests_a_valid_cut(layout: RankLayout, message: str):
    with pytest.raises(ConfigError, match=message):
        check_divides(layout, SHAPE)


def test_parallel_config_sets_the_layers_per_stage():
    assert layout_of(ParallelConfig(2, 2, 1, [4, 6])) == RankLayout(2, 2, 1, (4, 6))
    assert layout_of(ParallelConfig()) == RankLayout(1)


@pytest.mark.parametrize(
    ("layout", "rope", "vision", "message"),
    [
        (
            RankLayout(1, 2, 1, (2, 8)),
            {},
            {"num_added": 3},
            r"=2 leaves 2 layers .*first 3 \(deepstack\).*max_images=0",
        ),
        (RankLayout(1, 1), {"sections": ()}, {}, "type default has no sections"),
        (RankLayout(1, 1), {"rope_type": "dynamic", "factor": 2.0}, {}, "type dynamic has no sections"),
    ],
)
def test_images_without_places_are_refused(
    layout: RankLayout, rope: dict[str, object], vision: dict[str, object], message: str
):
    """Rows are added behind layers of the first stage; positions are three numbers."""
    plain = RopeParameters(8, sections=(1, 1, 2))
    images = VisionConfig("", 3, has_three_positions=True)
    good = replace(SHAPE, ropes=(plain,), vision=replace(images, num_added=3))
    check_divides(RankLayout(1, 2, 1, (3, 7)), good)
    check_divides(layout, replace(good, ropes=(replace(plain, **rope),), vision=None))
    with pytest.raises(ConfigError, match=message):
        check_divides(layout, replace(good, ropes=(replace(plain, **rope),), vision=replace(images, **vision)))
