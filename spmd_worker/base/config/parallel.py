"""The `parallel` part of the schema: how the work is divided among ranks."""

from dataclasses import dataclass

from spmd_worker.base.config.options import check_options, option, vllm_option
from spmd_worker.base.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """Division of the work among ranks: world size = data x pipeline x tensor."""

    tensor_parallel_size: int = vllm_option(
        1, "ranks that share each layer; must divide the heads", least=1, is_common=True
    )
    pipeline_parallel_size: int = vllm_option(
        1, "stages of ranks that share the layers; as many steps in flight as stages", least=1, is_common=True
    )
    data_parallel_size: int = vllm_option(
        1, "replicas of the model, which share the rows; every rank gets every output", least=1, is_common=True
    )
    pipeline_layers: list[int] | None = option(
        None, "layers of each stage, such as `[10,8]`; null: about equally many bytes of weights"
    )
    enable_expert_parallel: bool = vllm_option(
        False,
        "true: each rank of a tensor-parallel group has some experts entirely, and no tokens are exchanged; false: "
        "columns of all; replicas (`data_parallel_size`) share none, each has all, which is logged",
    )
    expert_placement: str = option(
        "linear",
        "ranks of the experts: `linear` (the first ranks the first experts), `round_robin`, or a JSON file "
        '`{"owners": [...]}` with the rank of each expert, or such a list for each layer',
        vllm_names=("expert_placement_strategy",),
    )
    invariant_experts: bool = option(
        False,
        "expert outputs are bit-identical for any number of ranks; costs top-k times the communication; always true on "
        "CPUs",
    )
    invariant_tensor_parallel: bool | None = option(
        None,
        "true: answers have the bits of one rank, with any `tensor_parallel_size` that divides the model's leaves "
        "(`max_leaves`), and another is an error; false: bits of each size; null: true on CPUs, with a warning for "
        "another size, false on GPUs",
    )
    max_leaves: int = option(
        8,
        "most leaves in which row-parallel products are summed, a power of two: sizes up to it can have the bits of "
        "one rank; answers depend on it where it lowers a model's number (`plan=true` shows that)",
        least=1,
        most=64,
    )

    def __post_init__(self) -> None:
        """Check each key alone, and that keys about complete experts are set only with expert parallelism."""
        check_options(self, "parallel")
        if self.max_leaves & (self.max_leaves - 1):
            raise ConfigError(
                f"parallel.max_leaves={self.max_leaves} is not a power of two, and leaves are added by a binary tree: "
                f"give 1, 2, 4, 8, 16, 32 or 64, or leave it out"
            )
        for key in ("expert_placement", "invariant_experts"):
            value = getattr(self, key)
            if value not in ("linear", False) and not self.enable_expert_parallel:
                raise ConfigError(
                    f"parallel.{key}={str(value).lower() if value is True else value} needs ranks that hold complete "
                    f"experts: set parallel.enable_expert_parallel=true, or leave it out"
                )
