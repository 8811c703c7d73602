"""Executors of ranks: one worker each, its own rank in the world, half of the model, one word from all."""

from pathlib import Path

import ranks

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"

SCRIPT = """
    import os, sys
    from spmd_worker.base.errors import ConfigError
    from spmd_worker.base.config.parallel import ParallelConfig
    from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig
    from spmd_worker.executor.executor import Executor
    from spmd_worker.ranks.transport.channel import ControlChannel
    from spmd_worker.resolved import resolve_run
    from spmd_worker.ranks.environment import read_rank_environment
    from spmd_worker.replica.sequence.step import StepPlan
    from pathlib import Path

    model, environment = Path(sys.argv[1]), read_rank_environment()

    def new_executor(size):
        config = RunConfig(
            model=ModelOptions(path=str(model)), parallel=ParallelConfig(size), cache=CacheConfig(num_blocks=32),
            device="cpu",
        )
        backend = Executor.get_class("auto", environment)
        return backend(resolve_run(config, "cpu"), environment)

    said = []
    try:
        new_executor(4).start()
    except ConfigError as error:
        said.append(str(error))
    executor = new_executor(2)
    executor.start()
    executor.load_model()
    wrapper = executor.driver_worker
    said.append((type(executor).__name__, wrapper.rpc_rank, wrapper.global_rank == int(os.environ["RANK"])))
    wrapper.initialize_from_config([(32, 0), (32, 0)])
    said.append(executor.collective_rpc("get_model_inspection")[0].splitlines()[6].strip())
    said.append(executor.get_kv_cache_specs()[0].shapes[0].num_heads)
    said.append(executor.execute_model(StepPlan(step=1)).step)
    executor.check_health()
    gathered = executor.channel.gather(f"rank {environment.rank}".encode())
    said.append([each.decode() for each in gathered])
    executor.shutdown()
    executor.shutdown()
    # In one piece: the ranks write to one pipe.
    os.write(1, "".join(f"{environment.rank} {line}\\n" for line in said).encode())
    """


def test_launched_ranks_have_one_worker_each():
    done = ranks.run_ranks(SCRIPT, nproc=2, timeout_s=240, arguments=[MODEL]).checked()
    for rank in ("0", "1"):
        assert [line[2:] for line in done.stdout.splitlines() if line.startswith(rank)] == [
            "parallel.tensor_parallel_size=4 x parallel.pipeline_parallel_size=1 x parallel.data_parallel_size=1 is 4 "
            "ranks per engine, but 2 were started: start a multiple of 4 (torchrun --nproc-per-node)",
            "('ExternalLauncherExecutor', 0, True)",
            "qkv_proj: ColumnParallelLinear weight [128, 128] float32",
            "2",
            "1",
            "['rank 0', 'rank 1']",
        ], done.output


CUSTOM_WORKERS = """
    import os, sys
    sys.path.insert(0, sys.argv[2])
    from spmd_worker import LLM, SamplingParams
    from spmd_worker.base.errors import ConfigError

    said = []
    options = dict(tensor_parallel_size=2, num_blocks=32, device="cpu", timeout_s=120)
    try:
        LLM(sys.argv[1], worker_cls="plain_worker.PlainWorker", **options)
    except ConfigError as error:
        said.append(str(error))
    with LLM(sys.argv[1], worker_cls="grouped_worker.GroupedWorker", **options) as llm:
        (output,) = llm.generate(["copy q ="], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        said.append(output.outputs[0].token_ids)
    os.write(1, "".join(f"{os.environ['RANK']} {line}\\n" for line in said).encode())
    """


def test_custom_worker_class_must_join_groups():
    """It died of `AssertionError: <class PlainWorker>`, because channels were sought in `Worker` only."""
    done = ranks.run_ranks(CUSTOM_WORKERS, nproc=2, timeout_s=240, arguments=[MODEL, Path(__file__).parent]).checked()
    for rank in ("0", "1"):
        assert [line[2:] for line in done.stdout.splitlines() if line.startswith(rank)] == [
            "worker_cls=plain_worker.PlainWorker has no process groups after init_device, and the layout has "
            "2 ranks that must agree on each step: have init_device set self.groups = join_groups(layout, environment, "
            "device, timeout_s) of spmd_worker.ranks.groups",
            "[9, 9, 9]",
        ], done.output
