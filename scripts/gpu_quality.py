"""Perplexity of a model with quantised weights beside the same without, on a GPU.

    python scripts/gpu_quality.py [--quantization fp8] [--device-backend triton]
    python scripts/gpu_quality.py --dry           the CPU's int8, on few pieces

Of the demo's prompts with their answers, by the model that ships; and of 60,000 characters of this repository's
documentation, cut into pieces, by the same model after some training on them: it knows no text, and where a model knows
nothing its perplexity says nothing of quantisation. A line a figure, and one JSON object last.
"""

import argparse
import json
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_figures import Findings, NotOfferedError

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "scripts" / "demo" / "model"
NUM_CHARACTERS, PIECE = 60000, 240
NUM_STEPS, BATCH, LEARNING_RATE = 600, 32, 4e-3
WORST_PERCENT = 0.5


def demo_texts() -> list[str]:
    """Prompts with their answers, as the model was trained on them."""
    rows = [json.loads(line) for line in (ROOT / "scripts" / "demo" / "prompts.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (ROOT / "scripts" / "demo" / "answers.jsonl").read_text().splitlines()]
    by_id = {row["custom_id"]: row["answer"] for row in answers}
    return [f"{row['prompt']} {by_id[row['custom_id']]}" for row in rows if isinstance(row.get("prompt"), str)]


def documentation() -> list[str]:
    """Pieces of plain ASCII."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    text = text.encode("ascii", "ignore").decode()[:NUM_CHARACTERS]
    return [text[first : first + PIECE] for first in range(0, len(text), PIECE)]


def perplexity(llm: LLM, texts: Sequence[str]) -> float:
    """Perplexity of all tokens but each text's first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate(list(texts), params, use_tqdm=False):
        if output.error is not None:
            raise ValueError(f"a text was refused: {output.error}")
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
            if entry is not None:
                total, count = total + entry[token].logprob, count + 1
    return math.exp(-total / count)


def write_trained(folder: Path, texts: Sequence[str], device: str, num_steps: int) -> None:
    """The model that ships, trained on these texts, with its tokenizer."""
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode("".join(texts), add_special_tokens=False).ids)
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    # As long as what is measured: a model knows nothing at positions that it was not trained on.
    draw, length = torch.Generator().manual_seed(1), PIECE
    for _ in range(num_steps):
        starts = torch.randint(len(ids) - length, (BATCH, 1), generator=draw)
        batch = ids[starts + torch.arange(length)].to(device)
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.cpu().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)


def measured(folder: Path, texts: Sequence[str], settings: dict[str, Any]) -> float:
    try:
        llm = LLM(folder, **settings)
    except ConfigError as error:
        raise NotOfferedError(str(error)) from None
    with llm:
        return perplexity(llm, texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--device-backend", default="triton", metavar="NAME")
    parser.add_argument("--dry", action="store_true", help="int8 on the CPU, few pieces")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    findings = Findings()
    texts = {"demo": demo_texts(), "documentation": documentation()}
    settings = {"device": "cuda", "dtype": "bfloat16", "device_backend": arguments.device_backend, "num_blocks": 4096}
    quantization, num_steps = arguments.quantization, NUM_STEPS
    if arguments.dry:
        quantization, num_steps, texts = "int8", 2, {name: some[:8] for name, some in texts.items()}
        settings |= {"device": "cpu", "device_backend": "auto"}
    with findings.part("quality"), tempfile.TemporaryDirectory() as folder:
        write_trained(Path(folder), texts["documentation"], str(settings["device"]), num_steps)
        for name, model in (("demo", MODEL), ("documentation", Path(folder))):
            quantised = measured(model, texts[name], {**settings, "quantization": quantization})
            plain = measured(model, texts[name], settings)
            percent = abs(quantised / plain - 1) * 100
            findings.say(f"perplexity on {name}: {quantization}, bf16", [round(quantised, 4), round(plain, 4)])
            most = None if arguments.dry else WORST_PERCENT
            findings.figure(f"{quantization}: perplexity on {name} off by", percent, "%", most=most)
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
