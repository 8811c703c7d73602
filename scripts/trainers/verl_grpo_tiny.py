"""GRPO on a tiny random model by verl's own worker, with completions by this package. A short run that shows a sync is
exact.

    python scripts/trainers/verl_grpo_tiny.py
    torchrun --nproc-per-node 2 scripts/trainers/verl_grpo_tiny.py --tp 2

verl's `ActorRolloutRefWorker` has the actor (FSDP2) and makes this package's rollout; the loop around it is the one of
verl's trainer, without Ray: `generate_sequences`, `compute_log_prob`, GRPO's advantages, `update_actor`, and
`update_weights`, before which the rollout's memory is released. verl knows no CPUs: this script gives it a platform.
It needs `pip install --no-deps verl==0.9.1` and what that imports (ray, tensordict, codetiming, fastapi, orjson,
uvicorn, pillow, accelerate, datasets, pandas, peft).

After each step it prints the mean and the largest difference between the rollout's log-probabilities of what it sampled
and those of the actor's forward pass. With `--skip-sync` the rollout keeps its first weights.
"""

import argparse
import asyncio
import os
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PROMPTS = ["add 1 + 2", "the sun", "once upon"]
NUM_SAMPLES, NUM_PROMPT_TOKENS = 4, 12


def make_model(folder: str) -> None:
    """A Qwen2 of two layers with a token for each byte."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    config = transformers.Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,  # so that a step of the optimiser changes what is likely
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    made.save_pretrained(folder)


def use_cpu() -> None:
    """Make the CPU verl's device."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    device: Any = types.ModuleType("cpu")
    device.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("empty_cache", "set_device", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
        setattr(device, name, lambda *_: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(device, name, lambda *_: 0)
    device.get_device_name = lambda *_: "CPU"
    device.mem_get_info = lambda *_: (2**30, 2**30)
    device.get_rng_state, device.set_rng_state = torch.get_rng_state, torch.set_rng_state

    class PlatformCPU(PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "cpu", device
        set_device = synchronize = set_allocator_settings = empty_cache = lambda *_: None

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager._current_platform = PlatformCPU()


def worker_of(folder: str, arguments: argparse.Namespace) -> Any:
    """verl's worker with an actor and a rollout."""
    import verl
    from verl.workers.engine_workers import ActorRolloutRefWorker

    num_rows = len(PROMPTS) * NUM_SAMPLES
    overrides = {
        "model.path": folder,
        "model.external_lib": "spmd_worker.integrations.verl",
        "model.use_remove_padding": "false",
        "+model.override_config.attn_implementation": "eager",
        "rollout.name": "spmd_worker",
        "rollout.tensor_model_parallel_size": arguments.tp,
        "rollout.dtype": "float32",
        "rollout.prompt_length": NUM_PROMPT_TOKENS,
        "rollout.response_length": 12,
        "rollout.n": NUM_SAMPLES,
        "rollout.top_k": arguments.top_k,
        "rollout.calculate_log_probs": "true",
        "rollout.log_prob_micro_batch_size_per_gpu": num_rows // 2,
        "actor.strategy": "fsdp2",
        "actor.ppo_micro_batch_size_per_gpu": num_rows // 2,
        "actor.ppo_mini_batch_size": len(PROMPTS),
        "actor.optim.lr": 3e-3,
        "++actor.fsdp_config.dtype": "float32",
        "++actor.fsdp_config.model_dtype": "fp32",
        "++actor.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    }
    given = [
        f"{key[: len(key) - len(key.lstrip('+'))]}actor_rollout_ref.{key.lstrip('+')}={value}"
        for key, value in overrides.items()
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=given)
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    return worker


def prompts_of(tokenizer: Any) -> Any:
    """The prompts as verl's data loader gives them, each repeated as its trainer does."""
    from verl import DataProto

    rows = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ids = torch.tensor([[0] * (NUM_PROMPT_TOKENS - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (NUM_PROMPT_TOKENS - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    uids = np.array([str(number) for number in range(len(rows))], dtype=object)
    meta = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    made = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids}, meta_info=meta)
    return made.repeat(NUM_SAMPLES, interleave=True)


def train_step(worker: Any, tokenizer: Any) -> torch.Tensor:
    """One step of verl's trainer; returns the differences of log-probabilities of sampled tokens."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    batch = worker.rollout.generate_sequences(prompts_of(tokenizer))
    assert isinstance(batch, DataProto), type(batch)
    mask = batch.batch["response_mask"].bool()
    batch.meta_info["temperature"] = worker.rollout.config.temperature
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
    own = no_padding_2_padding(tu.get(worker.compute_log_prob(data), "log_probs"), data)
    batch.batch["old_log_probs"] = own.float()
    rewards = torch.zeros(mask.shape)
    rewards[:, -1] = (batch.batch["responses"] % 2 * mask).sum(dim=1) / mask.sum(dim=1)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask.float(), batch.non_tensor_batch["uid"])
    batch.batch["advantages"], batch.batch["returns"] = advantages, returns
    data = left_right_2_no_padding(batch.to_tensordict())
    settings = {"calculate_entropy": False, "distillation_use_topk": False, "distillation_only": False}
    size = len(PROMPTS) * NUM_SAMPLES
    sizes = {"global_batch_size": size, "mini_batch_size": size, "epochs": 1, "seed": 0}
    tu.assign_non_tensor(data, **settings, **sizes, dataloader_kwargs={"shuffle": False}, compute_loss=True)
    worker.update_actor(data)
    return (own - batch.batch["rollout_log_probs"])[mask].abs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor_model_parallel_size of the rollout")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--skip-sync", action="store_true", help="keep the rollout's first weights")
    arguments = parser.parse_args()
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 29517}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    use_cpu()
    torch.distributed.init_process_group("gloo")
    with TemporaryDirectory() as own:
        # transformers writes files on the first rank alone.
        folders = [own]
        torch.distributed.broadcast_object_list(folders)
        folder = folders[0]
        if folder == own:
            make_model(folder)
        torch.distributed.barrier()
        worker = worker_of(folder, arguments)
        asyncio.run(worker.update_weights(global_steps=0, mode="naive"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for step in range(arguments.steps):
            differences = train_step(worker, tokenizer)
            if torch.distributed.get_rank() == 0:
                mean, most = differences.mean(), differences.max()
                print(f"step {step + 1}, difference of log-probabilities: mean {mean:.2e}, max {most:.2e}", flush=True)
            if not arguments.skip_sync:
                asyncio.run(worker.rollout.release())
                asyncio.run(worker.update_weights(global_steps=step + 1, mode="naive"))
        worker.rollout.llm.close()
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
