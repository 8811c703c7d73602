"""Measure a demo model on held-out prompts: the share of answers that greedy decoding gets right, task by task.

    python scripts/demo/evaluate.py --model scripts/demo/model --count 4000 --dtype bfloat16 --generate

Without `--generate` one forward pass over prompt and right answer is enough: greedy decoding gives the right answer
exactly when the right token is the likeliest one at every position of that answer. `--generate` decodes token by token.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_tokenizer import END_OF_TEXT
from encoded_examples import IGNORED_TARGET, Example, collate, encode_example
from tasks import TASK_NAMES, held_out_instances
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

BATCH_SIZE = 128
MAX_NEW_TOKENS = 64
FRESH_SEED = 77_001


def load_model(folder: Path, dtype: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def held_out_examples(tokenizer: Tokenizer, seed: int, count: int) -> list[Example]:
    """`count` held-out prompts, half of them in the chat form, shortest first so that batches need little padding."""
    instances = held_out_instances(seed, count)
    examples = [
        encode_example(tokenizer, instance, is_chat=number // len(TASK_NAMES) % 2 == 1)
        for number, instance in enumerate(instances)
    ]
    return sorted(examples, key=lambda example: example.num_tokens)


def in_batches(examples: Sequence[Example]) -> list[Sequence[Example]]:
    return [examples[start : start + BATCH_SIZE] for start in range(0, len(examples), BATCH_SIZE)]


@torch.no_grad()
def right_by_forward(model: LlamaForCausalLM, examples: Sequence[Example], pad_id: int) -> list[bool]:
    """Whether every token of each right answer is the likeliest one after what precedes it."""
    right: list[bool] = []
    for batch in in_batches(examples):
        inputs, targets = collate(batch, pad_id)
        likeliest = model(inputs, use_cache=False).logits.argmax(dim=-1)
        right += ((likeliest == targets) | (targets == IGNORED_TARGET)).all(dim=1).tolist()
    return right


def pad_left(prompts: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompt ids and attention mask, both int64 [B, S]."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


@torch.no_grad()
def generate_answers(model: LlamaForCausalLM, tokenizer: Tokenizer, batch: Sequence[Example]) -> list[str]:
    """Greedy answers without surrounding whitespace; generation stops at the end tokens of generation_config.json."""
    pad_id = tokenizer.token_to_id(END_OF_TEXT)
    ids, mask = pad_left([example.prompt_ids for example in batch], pad_id)
    outputs = model.generate(
        ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=pad_id
    )
    return [text.strip() for text in tokenizer.decode_batch(outputs[:, ids.shape[1] :].tolist())]


def right_by_generation(model: LlamaForCausalLM, tokenizer: Tokenizer, examples: Sequence[Example]) -> list[bool]:
    right: list[bool] = []
    for batch in in_batches(examples):
        answers = generate_answers(model, tokenizer, batch)
        right += [example.instance.answer == answer for example, answer in zip(batch, answers, strict=True)]
    return right


def accuracy_line(examples: Sequence[Example], right: Sequence[bool]) -> str:
    """Percent right per task, plain/chat, and in total."""
    asked, correct = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    for example, is_right in zip(examples, right, strict=True):
        asked[example.instance.task, example.is_chat] += 1
        correct[example.instance.task, example.is_chat] += is_right
    percent = {key: f"{100 * correct[key] / asked[key]:.2f}" for key in asked}
    tasks = [f"{task} {percent.get((task, False), '-')}/{percent.get((task, True), '-')}" for task in TASK_NAMES]
    return f"{'  '.join(tasks)}  all {100 * sum(right) / len(right):.3f} % of {len(right)}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=FRESH_SEED)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--generate", action="store_true", help="decode token by token instead of one forward pass")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = load_model(arguments.model, arguments.dtype)
    examples = held_out_examples(tokenizer, arguments.seed, arguments.count)
    if arguments.generate:
        right = right_by_generation(model, tokenizer, examples)
    else:
        right = right_by_forward(model, examples, tokenizer.token_to_id(END_OF_TEXT))
    print(f"{arguments.dtype}, plain/chat percent right: {accuracy_line(examples, right)}")


if __name__ == "__main__":
    main()
