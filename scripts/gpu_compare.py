"""Compares this runtime with transformers on one device, on small random checkpoints made for the purpose.

    python scripts/gpu_compare.py [--device cuda] [--prompts 8] [--tokens 64] [--dtypes float32 bfloat16]
        [--families llama qwen3] [--device-backend NAME] [--strict] [--tiny] [--only-look]

For each family and dtype: our greedy tokens, each judged by what transformers thinks of it after the same tokens, and
our log-probabilities beside its own. A token that transformers would not have chosen is near enough when transformers
gives its own choice hardly more; a row without all its tokens is wrong. Prints a table and, as its last line, one JSON
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
from typing import Any

import torch
from gpu_checkpoints import FAMILIES, TINY, MissingFamilyError, make_checkpoint, make_prompts
from torch import Tensor

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import ConfigError

TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.15}
"""Largest difference of log-probabilities, nats, and largest lead of transformers' own choice over ours."""

JUDGED_AT_ONCE = 32
TIED = 3e-5
"""Experts whose router logits are nearer than that may change places by rounding."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One family in one dtype. Differences and leads are in nats; tokens are output tokens of all prompts. Error rows
    have fewer than were asked for: what they have is compared all the same. Tied rows are not compared: see `is_tied`.
    """

    dtype: str
    device: str
    num_tokens: int
    num_same_tokens: int
    num_error_rows: int
    worst_lead: float
    worst_logprob_difference: float
    tokens_per_s: float
    family: str = "llama"
    num_tied_rows: int = 0

    @property
    def is_near(self) -> bool:
        # Each by itself: max() may drop what is no number.
        return not self.num_error_rows and all(
            each <= TOLERANCE[self.dtype] for each in (self.worst_lead, self.worst_logprob_difference)
        )


def run_ours(
    folder: Path, prompts: list[list[int]], num_tokens: int, dtype: str, device: str, backend: str = "auto"
) -> tuple[list[RequestOutput], float]:
    """Outputs and the seconds of generating them, without loading."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    num_blocks = max(1024, sum(-(-(len(prompt) + num_tokens) // 16) for prompt in prompts))
    with LLM(folder, dtype=dtype, device=device, num_blocks=num_blocks, device_backend=backend) as llm:
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return outputs, time.perf_counter() - started_s


@torch.inference_mode()
def compare(
    folder: Path,
    prompts: list[list[int]],
    num_tokens: int,
    dtype: str,
    device: str,
    backend: str = "auto",
    family: str = "llama",
) -> Comparison:
    """Transformers sees each prompt with our tokens after it, and says at each of them what it thinks comes next."""
    from transformers import AutoModelForCausalLM

    outputs, elapsed_s = run_ours(folder, prompts, num_tokens, dtype, device, backend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    num_same, num_errors, num_tied, count, leads, differences = 0, 0, 0, 0, [0.0], [0.0]
    answered = []
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = output.outputs[0].token_ids if output.outputs else []
        logprobs = output.outputs[0].logprobs or [] if output.outputs else []
        num_errors += output.error is not None or len(token_ids) != num_tokens
        if token_ids:
            answered.append((prompt, token_ids, logprobs))
    # Of equal lengths as far as possible.
    answered.sort(key=lambda row: len(row[0]))
    for first in range(0, len(answered), JUDGED_AT_ONCE):
        some = answered[first : first + JUDGED_AT_ONCE]
        for (prompt, token_ids, logprobs), (logits, is_tied) in zip(some, judged(model, some), strict=True):
            num_tied += is_tied
            if is_tied:
                continue
            count += len(token_ids)
            logits = logits[len(prompt) - 1 : len(prompt) - 1 + len(token_ids)].double()
            theirs = torch.log_softmax(logits, -1).cpu()
            chosen = torch.tensor(token_ids)
            of_ours = theirs.gather(1, chosen[:, None])[:, 0]
            num_same += int((theirs.argmax(-1) == chosen).sum())
            leads.append(float((theirs.max(-1).values - of_ours).max()))
            own = torch.tensor([at[token].logprob for at, token in zip(logprobs, token_ids, strict=True)])
            differences.append(float((own - of_ours).abs().max()))
    lead, difference = (float(torch.tensor(each, dtype=torch.float64).max()) for each in (leads, differences))
    rate = sum(len(token_ids) for _, token_ids, _ in answered) / elapsed_s
    return Comparison(dtype, device, count, num_same, num_errors, lead, difference, rate, family, num_tied)


def judged(model: Any, rows: list[tuple[list[int], list[int], object]]) -> list[tuple[Tensor, bool]]:
    """Judgement of prompts with their tokens, filled up on the right since attention is causal: logits [T, V], and
    whether a token's experts are tied.
    """
    texts = [[*prompt, *token_ids] for prompt, token_ids, _ in rows]
    longest = max(len(text) for text in texts)
    ids = torch.tensor([[*text, *[1] * (longest - len(text))] for text in texts], device=model.device)
    routed: list[Tensor] = []
    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("router")]
    if not routers:
        return [(logits, False) for logits in model(ids).logits]
    num_chosen = model.config.num_experts_per_tok
    hooks = [each.register_forward_hook(lambda _, __, found: routed.append(_first(found))) for each in routers]
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    gaps = [gap_behind(layer.float().view(*ids.shape, -1), num_chosen) for layer in routed]
    gap = torch.stack(gaps).amin(0)
    is_tied = [bool((row[: len(text)] < TIED).any()) for row, text in zip(gap, texts, strict=True)]
    return list(zip(logits, is_tied, strict=True))


def _first(found: Any) -> Tensor:
    """A router's logits, of all that it returns."""
    logits: Tensor = found if isinstance(found, Tensor) else found[0]
    return logits


def gap_behind(logits: Tensor, count: int) -> Tensor:
    """Router logits [..., E] -> how far the last chosen of `count` experts is before the first that is not, [...].
    Where that is nothing, rounding decides, and either choice is right.
    """
    best = logits.topk(count + 1, dim=-1).values
    return best[..., -2] - best[..., -1]


def print_table(results: list[Comparison]) -> None:
    print(f"{'family':<12}{'dtype':<10}{'tokens':>8}{'same':>8}{'errors':>8}{'tied':>6}", end="")
    print(f"{'worst lead':>14}{'worst logprob':>16}{'tokens/s':>12}  result")
    for each in results:
        numbers = f"{each.num_tokens:>8}{each.num_same_tokens:>8}{each.num_error_rows:>8}"
        numbers += f"{each.num_tied_rows:>6}{each.worst_lead:>14.2e}"
        rest = f"{each.worst_logprob_difference:>16.2e}{each.tokens_per_s:>12.0f}"
        print(f"{each.family:<12}{each.dtype:<10}{numbers}{rest}  {'near' if each.is_near else 'WRONG'}")


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
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=["llama"])
    parser.add_argument("--device-backend", default="auto", metavar="NAME", help="as executor.device_backend takes it")
    parser.add_argument("--tiny", action="store_true", help="a smaller model and prompts, for interpreted kernels")
    parser.add_argument("--strict", action="store_true", help="in float32 every token has to be transformers' own")
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
    # transformers' convolutions are to be float32, as ours are.
    torch.backends.cudnn.allow_tf32 = False
    results: list[Comparison] = []
    not_offered: dict[str, str] = {}
    prompts = make_prompts(arguments.prompts)
    if arguments.tiny:
        prompts = make_prompts(arguments.prompts, 24, TINY["vocab_size"])
    for family in arguments.families:
        with tempfile.TemporaryDirectory(prefix="gpu-compare-") as folder:
            try:
                make_checkpoint(Path(folder), family, is_tiny=arguments.tiny)
            except MissingFamilyError as error:
                not_offered[family] = str(error)
                print(f"{family} is not offered: {error}")
                continue
            for dtype in arguments.dtypes:
                how = (arguments.tokens, dtype, arguments.device, arguments.device_backend, family)
                try:
                    results.append(compare(Path(folder), prompts, *how))
                except ConfigError as error:
                    not_offered[f"{family} in {dtype}"] = str(error)
                    print(f"{family} in {dtype} is not offered: {error}")
    print_table(results)
    is_near = all(each.is_near for each in results)
    different = [each for each in results if each.dtype == "float32" and each.num_same_tokens != each.num_tokens]
    wrong = [f"{each.family}: tokens" for each in different] if arguments.strict else []
    report = {"is_near": is_near, "wrong": wrong, "not_offered": not_offered}
    print(json.dumps({"device": name, **report, "results": [asdict(each) for each in results]}))
    return 0 if is_near and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
