"""A row's tokens and log-probabilities on a GPU: the same bits for every way of computing it.

    python scripts/gpu_bits.py {dense,gemma,...,encoder,stored,adapters,expert_adapters} [--device-backend triton]
    python scripts/gpu_bits.py dense --dry       the same code with the CPU's own kernels, tiny

A small random model in bfloat16; rows that are sampled in many ways, each with a seed. The same rows: once more, in
another order, alone, in chunks, preempted for want of blocks, kernel by kernel, after sleep, without a step ahead. An
encoder's vectors: in another order, alone, and near transformers'. `stored`: experts in MXFP4 and FP8, with the bits of
dequantised ones (tests/support has to be on the path, as gpu_check.py sets it). `adapters`: rows with one of two
adapters, and rows without, which have the bits of a run that has none; `expert_adapters`: of experts and routers.
`states`, `mamba` and `conv` have recurrent states: rows begin from snapshots when repeated. `latent` has latent
attention and experts, `chosen` keys that an indexer chooses, too, `compressed` windows and entries, `shapes` heads of
two sizes. Controls: rows were preempted, other seeds give other tokens. A line a finding, and one JSON object last;
exits with 1 where something is wrong.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_checkpoints import (
    TINY,
    MissingFamilyError,
    long_and_short_prompts,
    make_adapter,
    make_checkpoint,
    make_encoder,
    make_expert_adapter,
    make_prompts,
)
from gpu_figures import Findings, NotOfferedError

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import ConfigError

STATES = {"states": "qwen3_5", "mamba": "falcon_h1", "conv": "lfm2"}
"""Models with recurrent states."""
FAMILIES = {
    "dense": "qwen3",
    "gemma": "gemma3",
    "experts": "qwen3_moe",
    **STATES,
    "latent": "deepseek_v3",
    "chosen": "deepseek_v32",
    "compressed": "deepseek_v4",
    "shapes": "gemma4",
}
BLOCK_SIZE = 16
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -3.0}, "min_tokens": 3},
)
Answers = list[tuple[list[int], list[dict[int, float]]]]


class Bits:
    """One model's rows, in all ways."""

    def __init__(
        self, folder: Path, findings: Findings, backend: str, *, is_dry: bool, has_states: bool = False
    ) -> None:
        self.folder, self.findings, self.is_dry, self.has_states = folder, findings, is_dry, has_states
        self.num_tokens = 3 if is_dry else 40
        # Snapshots are of 64 tokens.
        longest = 150 if has_states else 40
        self.prompts = make_prompts(4, longest, TINY["vocab_size"]) if is_dry else long_and_short_prompts(32)
        self.alone = (0, 3) if is_dry else (0, 1, 2, 3, 4, 5, 7)
        self.settings: dict[str, Any] = {
            "device": "cpu" if is_dry else "cuda",
            "dtype": "float32" if is_dry else "bfloat16",
            "device_backend": "auto" if is_dry else backend,
            "block_size": BLOCK_SIZE,
            "num_blocks": 64 if is_dry else 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64 if is_dry else 2048,
        }
        self.adapters: tuple[LoRARequest | None, ...] = (None,)
        """Rows have them in turns."""

    def params(self, seed: int = 0) -> list[SamplingParams]:
        return [
            SamplingParams(
                max_tokens=self.num_tokens, ignore_eos=True, logprobs=2, seed=seed + row, **WAYS[row % len(WAYS)]
            )
            for row in range(len(self.prompts))
        ]

    def open(self, **settings: Any) -> LLM:
        return LLM(self.folder, **{**self.settings, **settings})

    def open_first(self, **settings: Any) -> LLM:
        """Raises NotOfferedError for a model that is refused; later the same is an error."""
        try:
            return self.open(**settings)
        except ConfigError as error:
            raise NotOfferedError(str(error)) from None

    def answers(self, llm: LLM, rows: Sequence[int] | None = None, seed: int = 0) -> Answers:
        """Answers of `rows`, in their order, computed in one call."""
        rows = range(len(self.prompts)) if rows is None else rows
        params = self.params(seed)
        prompts, chosen = [{"prompt_token_ids": self.prompts[row]} for row in rows], [params[row] for row in rows]
        adapters = [self.adapters[row % len(self.adapters)] for row in rows]
        lora_request = adapters if any(adapters) else None
        outputs = llm.generate(prompts, chosen, use_tqdm=False, lora_request=lora_request)
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            self.findings.must("error rows", errors[:3], [])
        found = []
        for output in outputs:
            completion = output.outputs[0]
            entries = [{token: each.logprob for token, each in at.items()} for at in completion.logprobs or []]
            found.append((completion.token_ids, entries))
        return found

    def same(self, name: str, found: Answers, expected: Answers) -> None:
        different = [row for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs]
        self.findings.must(f"{name}: rows with other bits", different, [])

    def ask(self) -> Answers:
        """The rows' answers."""
        every = list(range(len(self.prompts)))
        with self.open_first(enable_sleep_mode=True) as llm:
            expected = self.answers(llm)
            self.same("once more", self.answers(llm), expected)
            num_hits = llm.llm_engine.counters.num_snapshot_hits
            self.findings.must("control: rows began from snapshots", num_hits > 0, self.has_states)
            self.same("in another order", self.answers(llm, every[::-1])[::-1], expected)
            alone = [self.answers(llm, [row])[0] for row in self.alone]
            self.same("alone", alone, [expected[row] for row in self.alone])
            if not self.is_dry:
                llm.sleep(level=1)
                llm.wake_up()
                self.same("after sleep", self.answers(llm), expected)
            seeded = self.answers(llm, seed=1000)
            ids = [[row[0] for row in each] for each in (seeded, expected)]
            self.findings.must("control: other seeds give other tokens", ids[0] != ids[1], True)
        chunk = (64 if self.has_states else BLOCK_SIZE) if self.is_dry else 96
        with self.open(max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
            self.same("in chunks, 8 at a time", self.answers(llm), expected)
        # As many as the longest row needs, and a few.
        longest = max(len(prompt) for prompt in self.prompts) + self.num_tokens
        num_blocks = -(-longest // BLOCK_SIZE) + 4
        with self.open(num_blocks=num_blocks, max_model_len=longest) as llm:
            self.same("preempted", self.answers(llm), expected)
            num_preempted = llm.llm_engine.scheduler.counters.num_preemptions
            # Dry rows are too few for that.
            self.findings.must("control: rows were preempted", num_preempted > 0 or self.is_dry, True)
        if self.is_dry:
            return expected
        with self.open(enforce_eager=True) as llm:
            self.same("kernel by kernel", self.answers(llm), expected)
        with self.open(async_scheduling=False) as llm:
            self.same("without a step ahead", self.answers(llm), expected)
        return expected

    def ask_adapters(self, *, of_experts: bool = False) -> None:
        """One adapter of all linear layers and one of queries and values, of other ranks; or two of experts."""
        with self.open_first() as llm:
            plain = self.answers(llm)
        config = json.loads((self.folder / "config.json").read_text())
        # A filtered, a greedy and a penalised row of each kind: `WAYS` has six.
        if of_experts:
            made = (make_expert_adapter(config, 1, 16), make_expert_adapter(config, 2, 8))
        else:
            made = (make_adapter(config, 1, 16), make_adapter(config, 2, 8, ("self_attn.q_proj", "self_attn.v_proj")))
        requests = [
            LoRARequest(f"a{number}", number, lora_tensors=tensors, peft_config=settings)
            for number, (tensors, settings) in enumerate(made, 1)
        ]
        self.adapters = (None, None, *requests, *requests[:1])
        self.settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "lora_experts": of_experts}
        found = self.ask()
        has_none = [self.adapters[row % len(self.adapters)] is None for row in range(len(found))]
        without = [[each for each, is_plain in zip(rows, has_none) if is_plain] for rows in (found, plain)]
        self.same("rows without an adapter, beside a run without", *without)
        changed = [ours != theirs for ours, theirs, is_plain in zip(found, plain, has_none) if not is_plain]
        self.findings.must("control: adapters change answers", all(changed) and bool(changed), True)

    def ask_stored(self, kind: str) -> None:
        """The same file as stored and with experts dequantised."""
        self.settings["max_model_len"] = 128 if self.is_dry else 1024
        with self.open_first() as llm:
            found, (stored,) = self.answers(llm), llm.collective_rpc(_expert_bytes)
            alone = [self.answers(llm, [row])[0] for row in self.alone[:3]]
            self.same(f"{kind}: alone", alone, [found[row] for row in self.alone[:3]])
        with self.open(dequantize_weights=True) as llm:
            expected, (plain,) = self.answers(llm), llm.collective_rpc(_expert_bytes)
        self.same(f"{kind}: beside dequantised experts", found, expected)
        self.findings.must(f"{kind}: experts take fewer bytes", stored < 0.6 * plain or self.is_dry, True)

    @torch.inference_mode()
    def ask_encoder(self) -> None:
        from transformers import AutoModel

        prompts = [prompt[:400] for prompt in self.prompts]
        with self.open_first(runner="pooling", max_model_len=None if self.is_dry else 512) as llm:

            def vectors(rows: Sequence[int]) -> torch.Tensor:
                outputs = llm.embed([{"prompt_token_ids": prompts[row]} for row in rows], use_tqdm=False)
                return torch.tensor([output.outputs.embedding for output in outputs])

            every = list(range(len(prompts)))
            expected = vectors(every)
            reordered = vectors(every[::-1]).flip(0)
            alone = torch.cat([vectors([row]) for row in self.alone])
        self.findings.must("once more in another order: same bits", torch.equal(reordered, expected), True)
        self.findings.must("alone: same bits", torch.equal(alone, expected[list(self.alone)]), True)
        self.findings.must("control: rows differ", torch.equal(expected[0], expected[1]), False)
        device, dtype = self.settings["device"], getattr(torch, self.settings["dtype"])
        model = AutoModel.from_pretrained(self.folder, dtype=dtype).to(device).eval()
        theirs = [
            model(torch.tensor([prompt], device=device)).last_hidden_state[0].float().mean(0) for prompt in prompts
        ]
        wanted = torch.nn.functional.normalize(torch.stack(theirs), dim=-1).cpu()
        found = torch.nn.functional.normalize(expected, dim=-1)
        self.findings.must_be_near("beside transformers", found, wanted, 0.02)


def _expert_bytes(worker: Any) -> int:
    """Bytes of experts' parameters and scales."""
    modules = [module for name, module in worker.get_model().named_modules() if ".experts." in name]
    return sum(
        each.nbytes
        for module in modules
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )


def _ask_stored(folder: Path, findings: Findings, backend: str, *, is_dry: bool) -> None:
    from stored_checkpoints import write_stored

    sizes: dict[str, Any] = {} if is_dry else {"hidden_size": 512, "vocab_size": 4096, "num_hidden_layers": 4}
    sizes |= {"vocab_size": TINY["vocab_size"]} if is_dry else {"max_position_embeddings": 1024}
    own = {"mxfp4": {"intermediate_size": 320}, "fp8_block": {"moe_intermediate_size": 384}, "fp8_row": {}}
    for kind, keys in own.items():
        path = write_stored(folder / kind, kind, **sizes, **({} if is_dry else keys))
        Bits(path, findings, backend, is_dry=is_dry).ask_stored(kind)


def _make_checkpoint(folder: Path, family: str, *, is_tiny: bool) -> None:
    try:
        make_checkpoint(folder, family, is_tiny=is_tiny)
    except MissingFamilyError as error:
        raise NotOfferedError(str(error)) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=(*FAMILIES, "encoder", "stored", "adapters", "expert_adapters"))
    parser.add_argument("--device-backend", default="triton", metavar="NAME")
    parser.add_argument("--dry", action="store_true", help="float32 on the CPU by its own kernels, tiny")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    findings = Findings()
    for name in arguments.models:
        with tempfile.TemporaryDirectory(prefix="gpu-bits-") as folder, findings.part(name):
            if name == "stored":
                _ask_stored(Path(folder), findings, arguments.device_backend, is_dry=arguments.dry)
                continue
            if name == "encoder":
                make_encoder(Path(folder), is_tiny=arguments.dry)
            else:
                family = {"adapters": "llama", "expert_adapters": FAMILIES["experts"]}.get(name) or FAMILIES[name]
                _make_checkpoint(Path(folder), family, is_tiny=arguments.dry)
            options = {"is_dry": arguments.dry, "has_states": name in STATES}
            bits = Bits(Path(folder), findings, arguments.device_backend, **options)
            of_experts = partial(bits.ask_adapters, of_experts=True)
            asked = {"encoder": bits.ask_encoder, "adapters": bits.ask_adapters, "expert_adapters": of_experts}
            asked.get(name, bits.ask)()
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
