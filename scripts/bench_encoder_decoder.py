"""Encoder-decoder models on the CPU: this runtime beside transformers' `generate`, in turns on one machine.

    python scripts/bench_encoder_decoder.py MODEL --kind text [--num-inputs 64] [--num-new 64] [--turns 3]
                                            [--lengths 16-256] [--dtype float32] [--threads 2] [--batches 1,8,32]
    python scripts/bench_encoder_decoder.py MODEL --kind audio [--lengths 5-30] [--decoder-ids 50258,50259,50359,50363]

MODEL is a folder of T5, BART, a translator (text) or Whisper (audio). Inputs are drawn: ids between the lengths, or
seconds of sound, of which features are made inside the measured time on both sides. Answers are greedy and have
`--num-new` tokens each.

A turn starts each side in a process of its own, and which is first changes. Loading and a first small call are not
measured. transformers gets its inputs sorted by length, in the batch size that was fastest in the first turn.
`ratio` is transformers' median time by ours; `equal_rows` counts answers that are the same. The last line is one JSON
object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
SIDES: Final = ("ours", "transformers")
RATE: Final = 16_000
NUM_WARM: Final = 2
LENGTHS: Final = {"text": "16-256", "audio": "5-30"}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--kind", choices=LENGTHS, required=True)
    parser.add_argument("--num-inputs", type=int, default=64, help="default 64")
    parser.add_argument("--num-new", type=int, default=64, help="tokens of each answer; default 64")
    parser.add_argument("--lengths", help="of inputs, in tokens or seconds; default 16-256 or 5-30")
    parser.add_argument("--turns", type=int, default=3, help="default 3")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--threads", type=int, default=2, help="of each side; default 2")
    parser.add_argument("--batches", default="1,8,32", help="sizes that transformers tries; default 1,8,32")
    parser.add_argument("--decoder-ids", default="50258,50259,50359,50363", help="prompt of audio's decoder")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.lengths = options.lengths or LENGTHS[options.kind]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.side:
        options.result.write_text(json.dumps(RUNS[options.side](options)))
        return 0
    words = [*sys.argv[1:]] if arguments is None else arguments
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(options.turns):
        for side in SIDES[::-1] if turn % 2 else SIDES:
            found[side].append(start_side(side, words, options.threads, found[side]))
            print(f"turn {turn + 1}: {side:<13} {found[side][-1]['seconds']:8.2f} s", flush=True)
    print(json.dumps(summary(found) | {key: str(value) for key, value in vars(options).items() if value is not None}))
    return 0


def start_side(side: str, words: list[str], threads: int, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a process of its own. A batch size that was found in an earlier turn is kept."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        kept = ["--batches", str(earlier[0]["batch"])] if earlier else []
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            *words,
            *kept,
            "--side",
            side,
            "--result",
            str(result),
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Comparison of all turns."""
    seconds = {side: [each["seconds"] for each in turns] for side, turns in found.items()}
    medians = {side: statistics.median(each) for side, each in seconds.items()}
    ours, theirs = (found[side][-1]["ids"] for side in SIDES)
    return {
        "seconds": {side: [round(each, 3) for each in own] for side, own in seconds.items()},
        "output_tokens": sum(len(each) for each in ours),
        "batch_of_transformers": found["transformers"][0]["batch"],
        "equal_rows": sum(one == other for one, other in zip(ours, theirs, strict=True)),
        "rows": len(ours),
        "ratio": round(medians["transformers"] / medians["ours"], 4),
    }


def drawn(options: argparse.Namespace, vocab_size: int) -> list[Any]:
    """Inputs: lists of ids, or sounds in float32 at 16 kHz."""
    chance = np.random.default_rng(0)
    least, most = map(int, options.lengths.split("-"))
    if options.kind == "text":
        lengths = chance.integers(least, most + 1, options.num_inputs)
        return [chance.integers(10, vocab_size - 200, length).tolist() for length in lengths]
    lengths = (chance.uniform(least, most, options.num_inputs) * RATE).astype(int)
    return [(chance.standard_normal(length) * 0.1).astype(np.float32) for length in lengths]


def vocabulary(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from spmd_worker import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=options.num_new, ignore_eos=True, detokenize=False)
    inputs = drawn(options, vocabulary(options.model))
    prompts: list[Any] = [{"prompt_token_ids": each} for each in inputs]
    if options.kind == "audio":
        ids = decoder_ids(options)
        prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"audio": (each, RATE)}} for each in inputs]
    with LLM(str(options.model), device="cpu", dtype=options.dtype, skip_tokenizer_init=True) as llm:
        llm.generate(prompts[:NUM_WARM], params, use_tqdm=False)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "batch": 0, "ids": [[*each.outputs[0].token_ids] for each in outputs]}


def decoder_ids(options: argparse.Namespace) -> list[int]:
    return [int(each) for each in options.decoder_ids.split(",")]


def run_theirs(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    model_class = {"text": transformers.AutoModelForSeq2SeqLM, "audio": transformers.AutoModelForSpeechSeq2Seq}
    dtype = getattr(torch, options.dtype)
    model = model_class[options.kind].from_pretrained(options.model, dtype=dtype).eval()
    inputs = drawn(options, vocabulary(options.model))
    best: dict[str, Any] = {}
    with torch.inference_mode():
        answers_of(model, options, inputs[:NUM_WARM], 1)
        for batch in map(int, options.batches.split(",")):
            start = time.perf_counter()
            ids = answers_of(model, options, inputs, batch)
            seconds = time.perf_counter() - start
            if not best or seconds < best["seconds"]:
                best = {"seconds": seconds, "batch": batch, "ids": ids}
    return best


def answers_of(model: Any, options: argparse.Namespace, inputs: list[Any], batch: int) -> list[list[int]]:
    """Ids of the answers, computed in batches of inputs of nearly equal length."""
    order = sorted(range(len(inputs)), key=lambda index: -len(inputs[index]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        make = padded if options.kind == "text" else features
        given = make(model, options, [inputs[each] for each in some])
        outputs = model.generate(
            **given, do_sample=False, num_beams=1, max_new_tokens=options.num_new, min_new_tokens=options.num_new
        )
        found |= {index: row[-options.num_new :] for index, row in zip(some, outputs.tolist(), strict=True)}
    return [found[index] for index in range(len(inputs))]


def padded(model: Any, options: argparse.Namespace, inputs: list[list[int]]) -> dict[str, Any]:
    """Ids of texts and their mask."""
    import torch

    longest = max(len(each) for each in inputs)
    pad = model.config.pad_token_id or 0
    ids = torch.tensor([each + [pad] * (longest - len(each)) for each in inputs])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in inputs])
    return {"input_ids": ids, "attention_mask": mask}


def features(model: Any, options: argparse.Namespace, inputs: list[np.ndarray]) -> dict[str, Any]:
    """Features of sounds and the decoder's prompts."""
    import torch
    import transformers

    extractor = transformers.WhisperFeatureExtractor.from_pretrained(options.model)
    made = extractor(inputs, sampling_rate=RATE, return_tensors="pt").input_features.to(model.dtype)
    start = torch.tensor([decoder_ids(options)] * len(inputs))
    return {
        "input_features": made,
        "decoder_input_ids": start,
        "attention_mask": torch.ones(len(inputs), made.shape[-1]),
    }


RUNS: Final = {"ours": run_ours, "transformers": run_theirs}

if __name__ == "__main__":
    sys.exit(main())
