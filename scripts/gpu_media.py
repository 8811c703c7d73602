"""Models that read images, and encoder-decoder models, on a GPU beside transformers on the CPU, in float32.

    python scripts/gpu_media.py {images,encoder_decoder} [--device-backend triton torch] [--dry]

`images`: tiny models of several kinds of towers, with pictures of several sizes: log-probabilities of our greedy tokens
are transformers'. `encoder_decoder`: Whisper, T5 and BART with the sizes of released models: transformers' greedy ids.
Both: the same bits once more, alone, in another order and in chunks. tests/support, whose models these are, has to be
on the path, as gpu_check.py sets it. A line a finding, and one JSON object last; exits with 1 where something is wrong.
--dry: on the CPU with its own kernels, fewer models.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_figures import Findings, NotOfferedError

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError

KINDS = (
    *("qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4", "gemma4_clipped", "internvl", "pixtral", "qwen3_5"),
    *("glm_ocr", "paddleocr_vl", "lighton_ocr", "kimi_k25", "granite_docling", "lfm2_vl", "exaone4_5"),
    *("aya_vision", "cohere2_vision", "minicpmv4_6"),
)
DRY_KINDS = ("qwen3_vl",)
SHAPES = ("t5-small", "bart-base", "whisper-tiny")
DRY_SHAPES = ("t5-small",)
NEAR = 2e-3
"""Largest difference of log-probabilities, nats."""
Answers = list[tuple[list[int], list[float]]]


class Media:
    """Models on one device with one kind of kernels."""

    def __init__(self, findings: Findings, backend: str, *, is_dry: bool) -> None:
        self.findings, self.backend, self.is_dry = findings, backend, is_dry

    def open(self, folder: Path, **settings: Any) -> LLM:
        device = {"device": "cpu"} if self.is_dry else {"device": "cuda", "device_backend": self.backend}
        try:
            return LLM(str(folder), **{"dtype": "float32", **device, **settings})
        except ConfigError as error:
            raise NotOfferedError(str(error)) from None

    def answers(self, llm: LLM, prompts: Sequence[dict[str, Any]], params: SamplingParams) -> Answers:
        found = []
        for each in llm.generate(list(prompts), params, use_tqdm=False):
            if each.error is not None:
                self.findings.must("error rows", str(each.error), "")
                found.append(([], []))
                continue
            (made,) = each.outputs
            entries = zip(made.token_ids, made.logprobs or [], strict=True)
            found.append(([*made.token_ids], [at[token].logprob for token, at in entries]))
        return found

    def same(self, name: str, found: Answers, expected: Answers) -> None:
        different = [row for row, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        self.findings.must(f"{name} by {self.backend}: rows with other bits", different, [])

    def ways(self, name: str, llm: LLM, prompts: Sequence[dict[str, Any]], params: SamplingParams) -> Answers:
        """Answers to all prompts at once, beside other ways of computing them, which plain torch need not keep."""
        expected = self.answers(llm, prompts, params)
        if self.backend != "torch":
            self.same(f"{name}, once more", self.answers(llm, prompts, params), expected)
            llm.reset_prefix_cache()
            self.same(f"{name}, in another order", self.answers(llm, prompts[::-1], params)[::-1], expected)
            llm.reset_prefix_cache()
            alone = [self.answers(llm, [each], params)[0] for each in prompts]
            self.same(f"{name}, alone", alone, expected)
        return expected

    def images(self, kind: str) -> None:
        from image_models import (
            OTHERS,
            PICTURES,
            image_folder,
            image_reference,
            image_token_id,
            prompt_of,
            their_logprobs,
        )

        pictures = (PICTURES, OTHERS, PICTURES[:1], PICTURES[1:])
        prompts = [prompt_of(kind, list(each)) for each in pictures]
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False)
        settings = {"max_model_len": 1024, "num_blocks": 512, "max_num_seqs": 8}
        folder = image_folder(kind)
        with self.open(folder, **settings) as llm:
            expected = self.ways(kind, llm, prompts, params)
            ids = [output.prompt_token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        if self.backend != "torch" and kind not in ("gemma3", "gemma4"):
            with self.open(folder, **settings, max_num_batched_tokens=64) as llm:
                self.same(f"{kind}, in chunks", self.answers(llm, prompts, params), expected)
        worst = 0.0
        for prompt, each, (chosen, logprobs) in zip(ids, pictures, expected, strict=True):
            # transformers takes a placeholder's id in an answer for one of the prompt.
            compared = chosen[: [*chosen, image_token_id(kind)].index(image_token_id(kind))]
            theirs = their_logprobs(image_reference(kind), kind, list(each), prompt or [], compared)
            ours = torch.tensor(logprobs[: len(compared)], dtype=torch.float64)
            worst = max(worst, *(theirs - ours).abs().tolist(), 0.0)
        name = f"{kind} by {self.backend}"
        self.findings.say(f"{name}: worst difference of log-probabilities", f"{worst:.1e}")
        self.findings.must(f"{name}: near transformers", worst <= NEAR, True)
        distinct = len({str(each) for each in expected})
        self.findings.must(f"{name}: control: pictures change answers", distinct == len(pictures), True)

    def encoder_decoder(self, name: str) -> None:
        from full_size_models import BLOCK_SIZE, NUM_TOKENS, PENALTY, full_size, greedy_ids

        shape = full_size(name)
        penalty = 1.0 if shape.is_audio else PENALTY
        settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": 1600, "max_num_seqs": 8}
        settings |= {"max_model_len": 40}
        settings |= {"skip_tokenizer_init": True} if shape.is_audio else {"max_encoder_len": 416}
        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, repetition_penalty=penalty
        )
        with self.open(shape.folder, **settings) as llm:
            expected = self.ways(name, llm, shape.prompts, params)
        if self.backend != "torch":
            with self.open(shape.folder, **settings, max_num_batched_tokens=shape.chunk) as llm:
                self.same(f"{name}, in chunks", self.answers(llm, shape.prompts, params), expected)
        wanted = [greedy_ids(shape, each) for each in shape.inputs]
        different = [row for row, (ids, _) in enumerate(expected) if ids != wanted[row]]
        self.findings.must(f"{name} by {self.backend}: rows with other ids than transformers'", different, [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("images", "encoder_decoder"))
    parser.add_argument("--device-backend", nargs="+", default=["triton", "torch"], metavar="NAME")
    parser.add_argument("--dry", action="store_true", help="on the CPU with its own kernels, fewer models")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    findings = Findings()
    is_images, is_dry = arguments.part == "images", arguments.dry
    names = (DRY_KINDS if is_dry else KINDS) if is_images else DRY_SHAPES if is_dry else SHAPES
    with tempfile.TemporaryDirectory(prefix="gpu-media-") as folder:
        # Where tests keep what they make once.
        os.environ["TESTS_RUN_FOLDER"] = folder
        for backend in arguments.device_backend[:1] if is_dry else arguments.device_backend:
            media = Media(findings, backend, is_dry=is_dry)
            for name in names:
                with findings.part(f"{name} by {backend}"):
                    (media.images if is_images else media.encoder_decoder)(name)
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
