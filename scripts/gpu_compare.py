"""Compares this runtime with transformers on one device, on a small random checkpoint made for the purpose.

    python scripts/gpu_compare.py [--device cuda] [--prompts 8] [--tokens 64] [--dtypes float32 bfloat16]
        [--worker-cls CLASS] [--only-look]

For each dtype: our greedy tokens, each judged by what transformers thinks of it after the same tokens, and our
log-probabilities beside its own. A token that transformers would not have chosen is near enough when transformers gives
its own choice hardly more; a row without all its tokens is wrong. Prints a table and, as its last line, one JSON
object; exits with 1 when something is too far off, and where the device is missing.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from spmd_worker import LLM, RequestOutput, SamplingParams

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest difference of log-probabilities, nats, and largest lead of transformers' own choice over ours."""

VOCAB_SIZE = 4096
SEED = 20240229


@dataclass(frozen=True, slots=True)
class Comparison:
    """One dtype. Differences and leads are in nats; tokens are output tokens of all prompts. Error rows have fewer than
    were asked for: what they have is compared all the same.
    """

    dtype: str
    device: str
    num_tokens: int
    num_same_tokens: int
    num_error_rows: int
    worst_lead: float
    worst_logprob_difference: float
    tokens_per_s: float

    @property
    def is_near(self) -> bool:
        # Each by itself: max() may drop what is no number.
        return not self.num_error_rows and all(
            each <= TOLERANCE[self.dtype] for each in (self.worst_lead, self.worst_logprob_difference)
        )


def make_checkpoint(folder: Path) -> None:
    """A Llama of two million parameters, whose logits are spread enough for a likeliest token to be one."""
    # Imported here and below, so that a machine without a GPU hears of it at once.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_prompts(count: int) -> list[list[int]]:
    """Token ids of mixed lengths, from 1 to a few hundred."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = [1 + 37 * index % 300 for index in range(count)]
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def run_ours(
    folder: Path, prompts: list[list[int]], num_tokens: int, dtype: str, device: str, worker_cls: str | None
) -> tuple[list[RequestOutput], float]:
    """Outputs and the seconds of generating them, without loading."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    with LLM(folder, dtype=dtype, device=device, num_blocks=1024, worker_cls=worker_cls) as llm:
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return outputs, time.perf_counter() - started_s


@torch.inference_mode()
def compare(
    folder: Path, prompts: list[list[int]], num_tokens: int, dtype: str, device: str, worker_cls: str | None = None
) -> Comparison:
    """Transformers sees each prompt with our tokens after it, and says at each of them what it thinks comes next."""
    from transformers import LlamaForCausalLM

    outputs, elapsed_s = run_ours(folder, prompts, num_tokens, dtype, device, worker_cls)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    num_same, num_errors, count, leads, differences = 0, 0, 0, [0.0], [0.0]
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = output.outputs[0].token_ids if output.outputs else []
        logprobs = output.outputs[0].logprobs or [] if output.outputs else []
        num_errors += output.error is not None or len(token_ids) != num_tokens
        count += len(token_ids)
        if not token_ids:
            continue
        ids = torch.tensor([prompt + token_ids], device=device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
        theirs = torch.log_softmax(logits, -1).cpu()
        chosen = torch.tensor(token_ids)
        of_ours = theirs.gather(1, chosen[:, None])[:, 0]
        num_same += int((theirs.argmax(-1) == chosen).sum())
        leads.append(float((theirs.max(-1).values - of_ours).max()))
        own = torch.tensor([at[token].logprob for at, token in zip(logprobs, token_ids, strict=True)])
        differences.append(float((own - of_ours).abs().max()))
    lead, difference = (float(torch.tensor(each, dtype=torch.float64).max()) for each in (leads, differences))
    return Comparison(dtype, device, count, num_same, num_errors, lead, difference, count / elapsed_s)


def print_table(results: list[Comparison]) -> None:
    print(f"{'dtype':<10}{'tokens':>8}{'same':>8}{'errors':>8}", end="")
    print(f"{'worst lead':>14}{'worst logprob':>16}{'tokens/s':>12}  result")
    for each in results:
        numbers = f"{each.num_tokens:>8}{each.num_same_tokens:>8}{each.num_error_rows:>8}{each.worst_lead:>14.2e}"
        rest = f"{each.worst_logprob_difference:>16.2e}{each.tokens_per_s:>12.0f}"
        print(f"{each.dtype:<10}{numbers}{rest}  {'near' if each.is_near else 'WRONG'}")


def device_name(device: str) -> str | None:
    """What is there, or None where it is missing."""
    if device == "cpu":
        return "CPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--worker-cls", metavar="CLASS", help="a worker class, as executor.worker_cls takes it")
    parser.add_argument("--only-look", action="store_true", help="say which device there is and compare nothing")
    arguments = parser.parse_args()
    name = device_name(arguments.device)
    if name is None:
        print("gpu_compare.py: torch finds no CUDA device here, so nothing was compared", file=sys.stderr)
        return 1
    print(f"{name}, torch {torch.__version__}")
    if arguments.only_look:
        return 0
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with tempfile.TemporaryDirectory(prefix="gpu-compare-") as folder:
        make_checkpoint(Path(folder))
        prompts = make_prompts(arguments.prompts)
        results = [
            compare(Path(folder), prompts, arguments.tokens, dtype, arguments.device, arguments.worker_cls)
            for dtype in arguments.dtypes
        ]
    print_table(results)
    is_near = all(each.is_near for each in results)
    print(json.dumps({"device": name, "is_near": is_near, "results": [asdict(each) for each in results]}))
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
