"""The inputs of bench_encoder_decoder.py answered by CTranslate2, greedy, float32.

    ct2-transformers-converter --model MODEL --output_dir FOLDER
    CTRANSLATE2_PYTHON scripts/ctranslate2_answers.py MODEL FOLDER --kind text [further options of the other script]

CTRANSLATE2_PYTHON is the interpreter of an environment with ctranslate2, and for audio with transformers, whose
features are made inside the measured time, as there. A first small call is not measured; the batch size is the fastest
of `--batches`. The last line is one JSON object.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_encoder_decoder import NUM_WARM, RATE, decoder_ids, drawn, parse_arguments, vocabulary

Answers = Callable[[list[Any], int], list[list[int]]]


def main() -> None:
    if len(sys.argv) < 3 or "--help" in sys.argv:
        print(__doc__)
        return
    model, folder, *others = sys.argv[1:]
    options = parse_arguments([model, *others])
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    inputs, best = drawn(options, vocabulary(options.model)), dict[str, Any]()
    answers = {"text": answers_to_texts, "audio": answers_to_sounds}[options.kind](options, folder)
    answers(inputs[:NUM_WARM], 1)
    for batch in map(int, options.batches.split(",")):
        start = time.perf_counter()
        ids = answers(inputs, batch)
        seconds = time.perf_counter() - start
        if not best or seconds < best["seconds"]:
            best = {"seconds": seconds, "batch": batch, "output_tokens": sum(map(len, ids))}
    print(json.dumps(best))


def answers_to_texts(options: argparse.Namespace, folder: str) -> Answers:
    import ctranslate2

    model = ctranslate2.Translator(folder, compute_type="float32", intra_threads=options.threads)
    names = json.loads((Path(folder) / "shared_vocabulary.json").read_text(encoding="utf-8"))
    number = {name: index for index, name in enumerate(names)}

    def answers(inputs: list[list[int]], batch: int) -> list[list[int]]:
        texts, length = [[names[each] for each in ids] for ids in inputs], options.num_new
        of_length = {"min_decoding_length": length, "max_decoding_length": length}
        found = model.translate_batch(texts, beam_size=1, max_batch_size=batch, batch_type="examples", **of_length)
        return [[number[each] for each in one.hypotheses[0]] for one in found]

    return answers


def answers_to_sounds(options: argparse.Namespace, folder: str) -> Answers:
    import ctranslate2
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(options.model)
    model = ctranslate2.models.Whisper(folder, compute_type="float32", intra_threads=options.threads)
    end = json.loads((options.model / "config.json").read_text())["eos_token_id"]

    def answers(inputs: list[np.ndarray], batch: int) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(inputs), batch):
            made = extractor(inputs[first : first + batch], sampling_rate=RATE, return_tensors="np").input_features
            features = ctranslate2.StorageView.from_array(np.ascontiguousarray(made, np.float32))
            # It counts twice the tokens of an answer.
            of_length = {"max_length": 2 * options.num_new, "suppress_tokens": [end], "suppress_blank": False}
            prompts = [decoder_ids(options)] * len(made)
            found += [each.sequences_ids[0] for each in model.generate(features, prompts, beam_size=1, **of_length)]
        return found

    return answers


if __name__ == "__main__":
    main()
