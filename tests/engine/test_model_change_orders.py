"""Random orders of calls that change an engine's weights, move, replace or hook what a caller has of its model, put it
to sleep and select adapters: every answer has the bits of a new engine with these weights.

What was moved or replaced is NaN afterwards, so that a step that still reads it shows.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import adapter_tensors
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from latent_checkpoints import latent_folder
from native_libraries import needs_products
from reference_models import CheckpointSpec, write_checkpoint
from run_folder import made_once
from safetensors.torch import load_file, save_file
from stress_seed import SEED
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.model.decoder import DecoderForCausalLM

NUM_OPERATIONS = 40
FACTORS = (1.0, 1.0, -1.0, 0.5)
"""Of a weight; exact in every dtype."""

ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}


def dense_folder(name: str, **changes: Any) -> Path:
    """A model whose layers are joined."""
    spec = CheckpointSpec(Qwen3Config if name == "qwen3" else LlamaConfig, {"intermediate_size": 128, **changes})
    return made_once(f"joined {name} {changes}", lambda folder: write_checkpoint(folder, spec))


MODELS: dict[str, tuple[Callable[[], Path], dict[str, Any]]] = {
    "dense": (lambda: dense_folder("llama"), {**ADAPTERS}),
    "dense, bfloat16": (lambda: dense_folder("qwen3", head_dim=16), {"dtype": "bfloat16"}),
    "dense, int8": (lambda: dense_folder("llama"), {"quantization": "int8"}),
    "tied": (lambda: dense_folder("llama", tie_word_embeddings=True), {"dtype": "bfloat16", **ADAPTERS}),
    "four norms": (lambda: family_folder("gemma3"), {}),
    "experts": (lambda: expert_folder("qwen3_moe"), {"dtype": "bfloat16"}),
    "experts, clamped": (lambda: expert_folder("gpt_oss"), {}),
    "experts, shared": (lambda: latent_folder("deepseek_v3"), {}),
}


class History:
    """An engine, the factor of each weight that it was given, and the answers of new engines."""

    def __init__(self, folder: Path, options: dict[str, Any], chance: random.Random, root: Path) -> None:
        self.base = load_file(folder / "model.safetensors")
        self._folder, self._root, self._chance = folder, root, chance
        self._options = {"dtype": "float32", "device": "cpu", "max_model_len": 128, **options}
        self._factors = dict.fromkeys(self.base, 1.0)
        self._prompts = [[3 + (7 * each + start) % 80 for each in range(length)] for start, length in PROMPTS]
        self._adapters: list[LoRARequest | None] = [None, *self._written_adapters(options)]
        self._expected: dict[tuple[str, int, int], str] = {}
        self._undo: list[Callable[[], None]] = []
        self._held: nn.Module | None = None
        self.num_calls = 0
        settings = {"num_blocks": chance.choice((20, 64)), "max_num_batched_tokens": chance.choice((24, 256))}
        self.llm = LLM(folder, **self._options, **settings)

    def _written_adapters(self, options: dict[str, Any]) -> list[LoRARequest]:
        if "enable_lora" not in options:
            return []
        made = [adapter_tensors(self._folder, seed, ("q_proj", "o_proj", "down_proj")) for seed in (1, 2)]
        return [
            LoRARequest(f"a{i}", i, lora_tensors=each, peft_config=config) for i, (each, config) in enumerate(made, 1)
        ]

    # What must be answered.

    def expected(self, prompt: int, adapter: int) -> str:
        name = repr(sorted(self._factors.items()))
        if (name, prompt, adapter) not in self._expected:
            with LLM(self._current_folder(), **self._options, num_blocks=64) as llm:
                for index in range(len(self._adapters)):
                    for number, answer in enumerate(self.answers(llm, [*range(len(PROMPTS))], [index] * len(PROMPTS))):
                        self._expected[name, number, index] = answer
        return self._expected[name, prompt, adapter]

    def _current_folder(self) -> Path:
        folder = self._root / f"weights {len(list(self._root.iterdir()))}"
        shutil.copytree(self._folder, folder)
        save_file(dict(self._pairs([*self.base])), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def _pairs(self, names: list[str]) -> list[tuple[str, Tensor]]:
        return [(name, self.base[name] * self._factors[name]) for name in names]

    def answers(self, llm: LLM, prompts: list[int], adapters: list[int]) -> list[str]:
        given = [{"prompt_token_ids": self._prompts[each]} for each in prompts]
        more = {"lora_request": [self._adapters[each] for each in adapters]} if len(self._adapters) > 1 else {}
        outputs = llm.generate(given, PARAMS, use_tqdm=False, **more)
        return [repr((each.prompt_logprobs, each.outputs[0].token_ids, each.outputs[0].logprobs)) for each in outputs]

    # What is done.

    def generate(self) -> None:
        prompts = self._chance.sample(range(len(PROMPTS)), self._chance.randint(1, len(PROMPTS)))
        adapters = [self._chance.randrange(len(self._adapters)) for _ in prompts]
        found = self.answers(self.llm, prompts, adapters)
        assert found == [self.expected(*each) for each in zip(prompts, adapters, strict=True)]

    def _new_factors(self, *, is_partial: bool) -> list[str]:
        names = self._chance.sample(sorted(self.base), len(self.base) // 2 if is_partial else len(self.base))
        # Norms keep their sign: not every family multiplies with them.
        self._factors |= {
            name: self._chance.choice(FACTORS) if self.base[name].ndim > 1 else self._factors[name] for name in names
        }
        return names

    def load_all(self) -> None:
        self.llm.load_weights(self._pairs(self._new_factors(is_partial=False)))

    def load_by_the_model(self) -> None:
        self.model().load_weights(self._pairs(self._new_factors(is_partial=False)))
        self.llm.reset_prefix_cache()

    def load_some(self) -> None:
        with self.llm.weight_update(partial=True) as load:
            for pair in self._pairs(self._new_factors(is_partial=True)):
                load(*pair)

    def reload(self) -> None:
        self._new_factors(is_partial=False)
        self.llm.collective_rpc("reload_weights", args=(str(self._current_folder()),))

    def load_in_a_pause(self) -> None:
        ids = self.llm.enqueue([{"prompt_token_ids": each} for each in self._prompts], PARAMS)
        for _ in range(self._chance.randrange(4)):
            self.llm.llm_engine.step()
        self.llm.pause_generation(self._chance.choice(("keep", "abort")), clear_cache=self._chance.random() < 0.5)
        self.load_all()
        self.llm.resume_generation()
        self.llm.wait_for_completion(ids, use_tqdm=False)

    def change_in_place(self) -> None:
        factors = {name: self._chance.choice(FACTORS) for name, each in self.base.items() if each.ndim > 1}

        def change(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                parameter.mul_(factors.get(name, 1.0))

        self.llm.apply_model(change)
        self._factors = {name: factor * factors.get(name, 1.0) for name, factor in self._factors.items()}

    def sleep(self) -> None:
        level = self._chance.choice((1, 2))
        self.llm.sleep(level)
        self.llm.wake_up(["weights"])
        if level == 2:
            self.load_all()
        self.llm.wake_up()

    def model(self) -> Any:
        """The model that the caller has, or has from now on."""
        driver = self.llm.llm_engine.model_executor.driver_worker
        ways = (lambda: self._held, driver.worker.get_model, lambda: driver.model_runner.model)
        self._held = self._chance.choice(ways)() or driver.worker.get_model()
        return self._held

    def move(self) -> None:
        for parameter in self._chance.sample([*self.model().parameters()], 5):
            earlier, parameter.data = parameter.data, parameter.detach().clone()
            spoil(earlier)

    def replace(self) -> None:
        model = self.model()
        for name in self._chance.sample([name for name, _ in model.named_parameters() if ".layers." in name], 5):
            owner, _, leaf = name.rpartition(".")
            earlier = model.get_parameter(name)
            made = nn.Parameter(earlier.detach().clone(), requires_grad=False)
            vars(made).update(vars(earlier))
            setattr(model.get_submodule(owner), leaf, made)
            spoil(earlier.data)

    def count_calls(self) -> None:
        """By a hook, or in place of `forward`."""
        layer = self._chance.choice([*self.model().model.layers])
        module = self._chance.choice((layer, layer.mlp, layer.self_attn, layer.self_attn.o_proj))
        if "forward" in vars(module):
            return

        def count() -> None:
            self.num_calls += 1

        if self._chance.random() < 0.5:
            self._undo.append(module.register_forward_hook(lambda *_: count()).remove)
        else:
            forward = module.forward
            module.forward = lambda *inputs, **options: (count(), forward(*inputs, **options))[1]
            self._undo.append(lambda: delattr(module, "forward"))
        before = self.num_calls
        self.generate()
        assert self.num_calls > before

    def count_no_calls(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []


PROMPTS = ((0, 1), (0, 20), (0, 37), (5, 9))
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0, prompt_logprobs=0)
OPERATIONS: tuple[Callable[[History], None], ...] = (
    *(History.generate,) * 6,
    *(History.load_all, History.load_by_the_model, History.load_some, History.reload, History.load_in_a_pause),
    *(History.change_in_place, History.sleep, History.move, History.replace),
    *(History.count_calls, History.count_no_calls),
)


def spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point() and not tensor.is_mkldnn:
        tensor.fill_(torch.nan)


def live(model: str, seed: str, root: Path, num_operations: int = NUM_OPERATIONS) -> None:
    write, options = MODELS[model]
    chance, done = random.Random(seed), list[str]()
    history = History(write(), options, chance, root)
    with history.llm:
        for _ in range(num_operations):
            operation = chance.choice(OPERATIONS)
            done.append(operation.__name__)
            try:
                operation(history)
            except Exception as error:
                error.add_note(f"seed {seed}: {', '.join(done)}")
                raise
        history.generate()


@pytest.mark.stress
@pytest.mark.parametrize("model", MODELS)
def test_answers_follow_any_order_of_changes(model: str, tmp_path: Path):
    live(model, f"{SEED} {model}", tmp_path)


@needs_products
@pytest.mark.stress
def test_orders_detect_weights_that_are_not_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The control: joined layers and experts keep what they read first."""
    monkeypatch.setattr(DecoderForCausalLM, "forget_addresses", lambda model: None)
    with pytest.raises(AssertionError):
        live("dense", "control", tmp_path)
