"""Train the demo model from nothing: tokenizer, 625 thousand weights, one Hugging Face folder.

    python scripts/demo/train.py --out scripts/demo/model

Takes about 12 minutes on one idle CPU core. The same machine, thread count and torch give the same bytes: the data come
from tasks.py's own generator, the weights from torch's generator with a fixed seed, and nothing looks at a clock. While
it trains, and at the end, it prints the percent right per task (plain form/chat form) on prompts never trained on.

Lists start short and grow, so that the attention heads that look things up form early and cheaply. Matrices are trained
with Muon (Jordan et al., 2024), which here needs several times fewer steps than AdamW; embedding and norms with AdamW.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from demo_tokenizer import CHAT_END, END_OF_TEXT, build_tokenizer, write_tokenizer
from encoded_examples import IGNORED_TARGET, Example, collate, encode_example
from evaluate import accuracy_line, held_out_examples, right_by_forward
from tasks import SplitMix64, draw_instance
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

# One draw in so many; sums are short, so they get more draws than their share of tokens.
TASK_DRAWS = ("add",) * 10 + ("sort",) * 3 + ("reverse",) * 3 + ("copy",) * 2
CHAT_ONE_IN = 3
POOL_EXAMPLES = 1024
SHORTEST_LISTS = 0.2
PROGRESS_SEED, FINAL_SEED = 99, 100
MAX_MODEL_LENGTH = 256


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to train."""

    num_steps: int = 8000
    batch_tokens: int = 1024
    num_warmup_steps: int = 100
    decay_from: float = 0.25
    lists_full_length_at: float = 0.25
    matrix_learning_rate: float = 0.007
    vector_learning_rate: float = 0.002
    seed: int = 7

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, flat, then linear decay to zero."""
        left = (self.num_steps - step) / (self.num_steps * (1 - self.decay_from))
        return min(1.0, (step + 1) / self.num_warmup_steps, left)

    def longest_lists(self, step: int) -> float:
        """The greatest list length at this step, as a share of the task's greatest length."""
        progress = step / (self.num_steps * self.lists_full_length_at)
        return min(1.0, SHORTEST_LISTS + (1 - SHORTEST_LISTS) * progress)


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        dtype="float32",
    )


def generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    end_ids = [tokenizer.token_to_id(token) for token in (END_OF_TEXT, CHAT_END)]
    return GenerationConfig(do_sample=False, eos_token_id=end_ids, pad_token_id=end_ids[0])


def draw_examples(generator: SplitMix64, tokenizer: Tokenizer, longest: float) -> list[Example]:
    examples = []
    for _ in range(POOL_EXAMPLES):
        task = TASK_DRAWS[generator.below(len(TASK_DRAWS))]
        instance = draw_instance(generator, task, held_out=False, longest=longest)
        examples.append(encode_example(tokenizer, instance, is_chat=generator.below(CHAT_ONE_IN) == 0))
    return examples


def pack_by_length(examples: list[Example], batch_tokens: int) -> list[list[Example]]:
    """Batches of examples of like length, none with more than `batch_tokens` tokens, padding included."""
    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda example: example.num_tokens):
        if (len(batches[-1]) + 1) * example.num_tokens > batch_tokens:
            batches.append([])
        batches[-1].append(example)
    return batches


def training_batches(plan: TrainingPlan, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Batches without end, in random order within each pool of examples."""
    generator, step = SplitMix64(plan.seed), 0
    while True:
        batches = pack_by_length(draw_examples(generator, tokenizer, plan.longest_lists(step)), plan.batch_tokens)
        yield from generator.distinct(batches, len(batches))
        step += len(batches)


def make_optimizers(model: LlamaForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_learning_rate, weight_decay=0.01, momentum=0.95, ns_steps=4),
        torch.optim.AdamW(others, lr=plan.vector_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor


def answer_loss(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET)


def take_step(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], loss: Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, plan: TrainingPlan, report_every: int) -> None:
    """Train `model` in place and print accuracy every `report_every` steps."""
    optimizers = make_optimizers(model, plan)
    pad_id = tokenizer.token_to_id(END_OF_TEXT)
    watched = held_out_examples(tokenizer, PROGRESS_SEED, 400)
    for step, batch in enumerate(islice(training_batches(plan, tokenizer), plan.num_steps)):
        set_learning_rate(optimizers, plan.learning_rate_factor(step))
        loss = answer_loss(model, *collate(batch, pad_id))
        take_step(model, optimizers, loss)
        if (step + 1) % report_every == 0:
            line = accuracy_line(watched, right_by_forward(model, watched, pad_id))
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  {line}", flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    write_tokenizer(folder, MAX_MODEL_LENGTH)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the model to")
    parser.add_argument("--steps", type=int, default=TrainingPlan().num_steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report-every", type=int, default=500, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    plan = TrainingPlan(num_steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(plan.seed)
    tokenizer = build_tokenizer()
    model = LlamaForCausalLM(model_config(tokenizer))
    print(f"{model.num_parameters():,} parameters, vocabulary of {tokenizer.get_vocab_size()}")
    train(model, tokenizer, plan, arguments.report_every)
    save(model, tokenizer, arguments.out)
    examples = held_out_examples(tokenizer, FINAL_SEED, 4000)
    right = right_by_forward(model, examples, tokenizer.token_to_id(END_OF_TEXT))
    print(f"final, plain/chat percent right: {accuracy_line(examples, right)}")


if __name__ == "__main__":
    main()
