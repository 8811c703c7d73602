"""TRL's GRPOTrainer on a tiny random model, with completions by this package. A short run that shows a sync is exact.

    python -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --tp 2 --sleep
    torchrun --nproc-per-node 2 -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --tp 2 --tools
    python -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --model qwen3_5_text --sleep
    python -m spmd_worker.integrations.trl scripts/trainers/grpo_tiny.py --model qwen3_vl --sleep

After each step it prints the mean difference between the engine's log-probabilities of what it sampled and those of
the trainer's own forward pass, with the weights of the sync before (`sampling/sampling_logp_difference` of TRL's log),
and the least and the largest importance ratio that TRL makes of it.

Prompts of `--model qwen3_vl` and `qwen2_5_vl` have random images, and the tower is trained too. Their processors in
transformers need torchvision.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<pad>", "<eos>"]
IMAGE_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
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
"""Settings that shapes with recurrent states have besides."""


TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
IMAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"mrope_section": [2, 3, 3]},
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
}
"""Class, rotations and the rest of the tower of models that take images."""
IMAGE_TEMPLATE = """
{%- for message in messages %}{{ message.role[0] }}:{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}
{%- if add_generation_prompt %}a:{% endif %}"""


def new_tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    """A token for each byte, behind the special ones."""
    vocabulary = {token: index for index, token in enumerate([*special, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def sizes(num_special: int) -> dict[str, Any]:
    """Two layers, and a few ids more than there are bytes."""
    return {
        "vocab_size": len(LETTERS) + num_special,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,  # so that a step of the optimiser changes what is likely
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }


def write_model(folder: Path, kind: str) -> None:
    """The same random weights each time, and what belongs to them."""
    torch.manual_seed(0)
    if kind in IMAGE_MODELS:
        write_image_model(folder, kind)
        return
    numbers = {**HYBRIDS.get(kind, {}), **sizes(len(SPECIAL))}
    config = AutoConfig.for_model(kind, **numbers, tie_word_embeddings=kind == "qwen2")
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    new_tokenizer(SPECIAL).save_pretrained(folder)


def write_image_model(folder: Path, kind: str) -> None:
    """A model with a tower, its tokenizer and its processor."""
    name, rotations, tower = IMAGE_MODELS[kind]
    tokenizer = new_tokenizer([*SPECIAL, *IMAGE_SPECIAL])
    start, end, image, video = tokenizer.convert_tokens_to_ids(IMAGE_SPECIAL)
    text = {**sizes(len(SPECIAL) + len(IMAGE_SPECIAL)), "head_dim": 16}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **rotations}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={**TOWER, **tower, "initializer_range": 0.1},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    side = 2 * tower["patch_size"]
    pixels = {"patch_size": tower["patch_size"], "size": {"shortest_edge": side**2, "longest_edge": 16 * side**2}}
    videos = transformers.Qwen3VLVideoProcessor() if name == "Qwen3VL" else transformers.Qwen2VLVideoProcessor()
    processor = getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**pixels), tokenizer, videos, chat_template=IMAGE_TEMPLATE
    )
    processor.save_pretrained(folder)


def random_images(kind: str, num_images: int, *, is_resized: bool) -> list[Any]:
    """Pictures that no processor resizes, or that every one does."""
    from PIL import Image  # comes with torchvision; runs without images have neither

    side = 2 * IMAGE_MODELS[kind][2]["patch_size"]
    random = np.random.default_rng(0)
    images = []
    for index in range(num_images):
        height, width = ((1 + count) * side + 5 * is_resized for count in divmod(index % 4, 2))
        # In blocks, as pictures are: noise of single pixels has hardly a resize that agrees with another.
        blocks = random.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        images.append(Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width]))
    return images


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
        "--model",
        choices=["qwen2", "qwen3", "llama", *HYBRIDS, *IMAGE_MODELS],
        default="qwen2",
        help="Qwen2's head is tied",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor_parallel_size of the engine")
    parser.add_argument("--sleep", action="store_true", help="give the engine's memory back while the trainer trains")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true", help="train an adapter of PEFT, which each sync pushes")
    parser.add_argument("--exclude-tower", action="store_true", help="with --lora: adapters of the text alone")
    parser.add_argument("--tools", action="store_true", help="let completions call a tool, again and again")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the likeliest alone")
    parser.add_argument("--resize", action="store_true", help="images of sizes that processors change")
    parser.add_argument("--backend", choices=["torchvision", "pil"], help="processor of the trainer's images")
    parser.add_argument("--skip-sync", action="store_true", help="never sync, to see how that looks")
    options = parser.parse_args()
    if options.tools and options.model in IMAGE_MODELS:
        parser.error("--tools is for models of text")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, options.model)
        train(folder, Path(scratch) / "out", options)


def lora(*, has_tower: bool) -> Any:
    """Adapters beside all linear weights, perhaps without those of the tower."""
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules="all-linear", exclude_modules=None if has_tower else r".*visual.*")


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
    columns: dict[str, list[Any]] = {}
    tools: dict[str, Any] = {}
    if options.model in IMAGE_MODELS:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        columns["image"] = random_images(options.model, len(prompts), is_resized=options.resize)
        # TRL pads from the left, and this is what its own has: https://github.com/huggingface/trl/issues/5785
        processor = transformers.AutoProcessor.from_pretrained(folder, padding_side="left")
        if options.backend == "pil":
            processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        tools = {"processing_class": processor}
        # An image's id in a completion would be one more image for the trainer's own forward pass.
        special = processor.tokenizer.convert_tokens_to_ids(IMAGE_SPECIAL)
        arguments.generation_kwargs["logit_bias"] = dict.fromkeys(special, -100.0)
    if options.tools:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        tokenizer = TokenizerWithCalls.from_pretrained(folder, chat_template=TEMPLATE)
        tools = {"tools": [look_up], "processing_class": tokenizer}
    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=share_of_vowels,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts, **columns}),
        peft_config=lora(has_tower=not options.exclude_tower) if options.lora else None,
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
