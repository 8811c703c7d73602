"""TRL's GRPOTrainer on a tiny random model, with completions by this package. A short run that shows a sync is exact.

    python -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --tp 2 --sleep
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --tp 2 --tools
    python -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --model qwen3_5_text --sleep

After each step it prints the mean difference between the engine's log-probabilities of what it sampled and those of
the trainer's own forward pass, with the weights of the sync before (`sampling/sampling_logp_difference` of TRL's log),
and the least and the largest importance ratio that TRL makes of it.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<pad>", "<eos>"]
TEMPLATE = """
{%- for message in messages %}{{ message.role[0] }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}
{{- '<eos>' }}{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""
DIFFERENCES = [f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max")]
RATIOS = [f"sampling/importance_sampling_ratio/{kind}" for kind in ("min", "max")]
SHOWN = ["step", "reward", *DIFFERENCES, *RATIOS, "tools/call_frequency"]


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
"""What shapes with recurrent states have besides."""


def write_model(folder: Path, kind: str) -> None:
    """Two layers, 258 ids, the same random weights each time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        **HYBRIDS.get(kind, {}),
        vocab_size=len(LETTERS) + len(SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=kind == "qwen2",
        initializer_range=0.1,  # so that a step of the optimiser changes what is likely
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


class TokenizerWithCalls(PreTrainedTokenizerFast):
    """Reads a vowel in a completion as a call of the tool: a random model writes no call that is well formed."""

    response_schema = {"type": "object"}  # noqa: RUF012  # that there is one makes TRL ask `parse_response`

    def parse_response(self, ids: list[int]) -> dict[str, Any]:
        content = self.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": content[:4]}}}
        return {
            "role": "assistant",
            "content": content,
            **({"tool_calls": [call]} if set("aeiou") & set(content) else {}),
        }


def look_up(word: str) -> str:
    """Say something of a word.

    Args:
        word: Any.
    """
    return f"{len(word)} letters"


def share_of_vowels(completions: list[Any], **_: Any) -> list[float]:
    """The reward: something that a tiny model can learn."""
    texts = [
        each if isinstance(each, str) else "".join(part["content"] for part in each if part["role"] == "assistant")
        for each in completions
    ]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", choices=["qwen2", "qwen3", "llama", *HYBRIDS], default="qwen2", help="Qwen2's head is tied"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor_parallel_size of the engine")
    parser.add_argument("--sleep", action="store_true", help="give the engine's memory back while the trainer trains")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true", help="train an adapter of PEFT, which each sync pushes")
    parser.add_argument("--tools", action="store_true", help="let completions call a tool, again and again")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the likeliest alone")
    parser.add_argument("--skip-sync", action="store_true", help="never sync, to see how that looks")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, options.model)
        train(folder, Path(scratch) / "out", options)


def lora() -> Any:
    """Adapters beside all linear weights."""
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules="all-linear")


def train(folder: Path, output: Path, options: argparse.Namespace) -> None:
    """As any script for TRL does it."""
    arguments = GRPOConfig(
        output_dir=str(output),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_tensor_parallel_size=options.tp,
        vllm_enable_sleep_mode=options.sleep,
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=128,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=64 if options.tools else 16,
        max_tool_calling_iterations=3,
        generation_kwargs={"max_tokens": 16},
        top_k=options.top_k,
        max_steps=options.steps,
        learning_rate=2e-2 if options.lora else 2e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    prompts: list[Any] = [f"say {word}: " for word in ("ah", "oh", "eh", "uh")] * 8
    tools: dict[str, Any] = {}
    if options.tools:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        tokenizer = TokenizerWithCalls.from_pretrained(folder, chat_template=TEMPLATE)
        tools = {"tools": [look_up], "processing_class": tokenizer}
    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=share_of_vowels,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=lora() if options.lora else None,
        **tools,
    )
    if options.skip_sync:
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    if trainer.accelerator.is_main_process:
        for entry in trainer.state.log_history:
            found = [f"{name} {entry[name]:{'.7f' if name in RATIOS else '.3g'}}" for name in SHOWN if name in entry]
            sys.stdout.write(", ".join(found) + "\n" if "reward" in entry else "")


if __name__ == "__main__":
    main()
