"""Token ids for the demo model: an instance of a task, in the plain or the chat form, as prompt ids and answer ids.

Shape legend: B examples in a batch, S tokens of the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from demo_tokenizer import CHAT_END, END_OF_TEXT, chat_prompt
from tasks import Instance
from tokenizers import Tokenizer
from torch import Tensor

IGNORED_TARGET = -100


@dataclass(frozen=True, slots=True)
class Example:
    """One instance as the model sees it; the answer ends with the token that ends generation."""

    instance: Instance
    is_chat: bool
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


def encode_example(tokenizer: Tokenizer, instance: Instance, *, is_chat: bool) -> Example:
    """Plain: the answer follows `=` and a space. Chat: the prompt is the user's message, the answer the assistant's."""
    prompt = chat_prompt(instance.prompt) if is_chat else instance.prompt
    answer = f"{instance.answer}{CHAT_END}" if is_chat else f" {instance.answer}{END_OF_TEXT}"
    return Example(instance, is_chat, tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids)


def collate(examples: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both int64 [B, S], padded on the right; only the tokens of answers are targets."""
    longest = max(example.num_tokens for example in examples)
    inputs, targets = [], []
    for example in examples:
        padding = longest - example.num_tokens
        inputs.append(example.prompt_ids + example.answer_ids + [pad_id] * padding)
        not_asked = [IGNORED_TARGET] * (len(example.prompt_ids) - 1)
        targets.append(not_asked + example.answer_ids + [IGNORED_TARGET] * (padding + 1))
    return torch.tensor(inputs), torch.tensor(targets)
