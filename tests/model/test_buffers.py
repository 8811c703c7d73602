"""Checkpoint tensors that are buffers in transformers, which trainers that pass `named_parameters()` leave out.

They stay as they are where they do not come, also through `sleep(level=2)`, and are taken where they do.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_checkpoints
import pytest
import torch
import transformers
from bailing_checkpoints import bailing_reference
from compressed_checkpoints import compressed_reference
from conv_checkpoints import CASES as CONVOLUTIONS
from conv_checkpoints import conv_config, conv_suffix
from cross_rows import CASES as WITH_ENCODERS
from delta_checkpoints import DELTA_CASES, delta_config
from expert_checkpoints import CASES as EXPERTS
from expert_checkpoints import CLASSES, expert_folder, expert_reference
from expert_checkpoints import WITH_IMAGES as EXPERTS_WITH_IMAGES
from expert_models import load
from family_checkpoints import BASE, CASES, WITH_IMAGES, config_class, family_folder, family_reference
from kimi_checkpoints import kimi_reference
from latent_checkpoints import CASES as LATENTS
from latent_checkpoints import WITH_IMAGES as LATENTS_WITH_IMAGES
from mamba_checkpoints import MAMBA_CASES, mamba_config
from newer_checkpoints import NEWER
from omni_models import omni_reference
from qwen4_checkpoints import QWEN4_CASES, qwen4_reference
from recent_checkpoints import CASES as RECENT
from recent_checkpoints import recent_config

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import MissingWeightsError
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.model.weights.weight_update import WeightUpdate
from spmd_worker.model_config.families.omni_rows import OMNI_ROWS
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import Stage

META = torch.device("meta")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3, 4, 5, 6]}, {"prompt_token_ids": [9, 8, 7]}]


def configs(*, with_experts: bool) -> Iterator[tuple[str, Any]]:
    """Architecture and transformers config of every small checkpoint."""
    for family, keys in CONVOLUTIONS.values():
        if with_experts == ("num_experts" in keys):
            yield family + conv_suffix(family), conv_config(family, keys)
    for name, (_, architecture, keys) in DELTA_CASES.items():
        if with_experts == ("num_experts" in keys.get("text_config", keys)):
            yield architecture, delta_config(name)
    if with_experts:
        for name, (_, architecture, _) in QWEN4_CASES.items():
            yield architecture, qwen4_reference(name).config
    of_omni = "qwen3_omni" if with_experts else "qwen2_5_omni"
    yield type(omni_reference(of_omni)).__name__, omni_reference(of_omni).config
    if with_experts:
        yield "KimiLinearForCausalLM", kimi_reference("kimi_linear").config
        yield "BailingHybridForCausalLM", bailing_reference("bailing_hybrid").config
        yield "DeepseekV4ForCausalLM", compressed_reference("deepseek_v4").config
    for name, (family, _) in MAMBA_CASES.items():
        if with_experts == (family in ("NemotronH", "GraniteMoeHybrid", "Jamba")):
            yield f"{family}ForCausalLM", mamba_config(name)
    for name, (family, _) in RECENT.items():
        if with_experts == (family not in ("Gemma4Unified", "Gemma3n")):
            text = recent_config(name)
            yield f"{family}ForCausalLM", text
            if family == "Gemma3n":
                continue
            whole = getattr(transformers, f"{family}Config")(text_config=text.to_dict())
            yield f"{family}ForConditionalGeneration", whole
    if with_experts:
        for family, keys in EXPERTS.values():
            text, suffix = {**BASE, **keys}, "ForCausalLM"
            if family in EXPERTS_WITH_IMAGES:
                text, suffix = {"text_config": text, **EXPERTS_WITH_IMAGES[family]}, "ForConditionalGeneration"
            yield CLASSES.get(family, family + suffix), getattr(transformers, f"{family}Config")(**text)
        for family, keys in LATENTS.values():
            text, suffix = {**BASE, **keys}, "ForCausalLM"
            if family in LATENTS_WITH_IMAGES:
                text, suffix = {"text_config": text, **LATENTS_WITH_IMAGES[family]}, "ForConditionalGeneration"
            if family not in ("Mistral3", "MiniCPM3", "Youtu"):
                yield family + suffix, getattr(transformers, f"{family}Config")(**text)
        return
    yield "MiniCPM3ForCausalLM", transformers.MiniCPM3Config(**{**BASE, **LATENTS["minicpm3"][1]})
    yield "YoutuForCausalLM", transformers.YoutuConfig(**{**BASE, **LATENTS["youtu"][1]})
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        yield f"{family}ForCausalLM", getattr(transformers, f"{family}Config")(**BASE)
    for name, (family, keys) in CASES.items():
        suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
        yield family + suffix, config_class(name)(**{**family_checkpoints._base(family), **keys})
    for family, keys in [*WITH_ENCODERS.values(), ("MT5", {})]:
        suffix = "MTModel" if family == "Marian" else "ForConditionalGeneration"
        yield family + suffix, getattr(transformers, f"{family}Config")(**keys)
    for family, keys, beside in WITH_IMAGES.values():
        text = {**BASE, **keys}
        yield f"{family}ForConditionalGeneration", getattr(transformers, f"{family}Config")(text_config=text, **beside)


@pytest.mark.gate("True")
@pytest.mark.parametrize("with_experts", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_buffers_of_each_family_equal_transformers(with_experts: bool):
    found, seen = set(), set()
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, META)
    for architecture, config in configs(with_experts=with_experts):
        if architecture in seen:
            continue
        seen.add(architecture)
        with META:
            theirs = getattr(transformers, architecture)(config)
        keys = {**config.to_dict(), "architectures": [architecture]}
        ours = build_model(context, model_config_of(keys, Path("config.json")))
        parameters = {name for name, _ in theirs.named_parameters(remove_duplicate=False)}
        buffers = {ours.model_config.names.canonical(name) for name in theirs.state_dict() if name not in parameters}
        assert ours.weights.buffer_names == buffers & set(ours.weights.shapes), architecture
        found |= {architecture} if ours.weights.buffer_names else set()
    # Kimi K2.5 and LightOnOCR have one name more on the hub; complete Omni models are their thinkers here.
    of_hub = ("KimiK25ForConditionalGeneration", "LightOnOCRForConditionalGeneration")
    complete = [name for name in OMNI_ROWS if "Thinker" not in name]
    # Its class needs a library of towers.
    complete.append("Gemma3nForConditionalGeneration")
    known = {name: family for name, family in FAMILIES.items() if name not in (*of_hub, *complete, *NEWER)}
    assert seen == {name for name, family in known.items() if (family.experts is not None) == with_experts}
    with_bias = {"MiniMaxM2ForCausalLM", "Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "Dots1ForCausalLM"}
    with_bias |= {"Lfm2MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"}
    with_bias |= {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM"}
    with_bias |= {"Kimi_K25ForConditionalGeneration", "KimiLinearForCausalLM"}
    with_bias |= {"Step3p7ForConditionalGeneration", "ExaoneMoeForCausalLM", "SolarOpenForCausalLM", "HYV3ForCausalLM"}
    with_bias |= {"LongcatFlashForCausalLM", "BailingHybridForCausalLM", "Kolibri1ForCausalLM"}
    # Factors of a rope's frequencies.
    with_bias |= {"MiMoV2FlashForCausalLM", "MistralLarge4ForConditionalGeneration"}
    with_bias |= {"MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"}
    with_bias |= {"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "NemotronHForCausalLM"}
    others = {
        "ApertusForCausalLM",
        "MarianMTModel",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    }
    others |= {f"{name}ForConditionalGeneration" for name in ("Bart", "MBart", "Pegasus", "Blenderbot")}
    assert found == (with_bias if with_experts else others), "negative control: they have some"


def test_stage_knows_buffers_of_other_stages():
    folder = expert_folder("glm4_moe")
    (whole, _), first = load(folder), Stage(0, 1, is_first=True, is_last=False)
    names = {f"model.layers.{number}.mlp.gate.e_score_correction_bias" for number in (1, 2, 3)}
    assert whole.weights.buffer_names == load(folder, stage=first)[0].weights.buffer_names == names
    assert load(folder, stage=first)[0].weights.buffer_parameters == frozenset()


@pytest.mark.parametrize("was_on_host", [False, True])
def test_buffers_stay_when_weights_are_dropped(was_on_host: bool):
    model, kernels = load(expert_folder("minimax_m2"))[0], ReferenceKernels()
    buffers, before = model.weights.buffer_parameters, {name: each.clone() for name, each in model.named_parameters()}
    assert buffers == {f"model.layers.{number}.mlp.gate.choice_bias" for number in range(4)}
    memory = WeightMemory(model, kernels)
    if was_on_host:
        memory.release(memory.copy_to_host())
    memory.release(None)
    assert all(each.is_meta for each in model.parameters())
    assert not memory.restore(memory.allocate()), "all else has to come"
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name] if name in buffers else torch.zeros_like(each)), name
    assert all(before[name].count_nonzero() for name in buffers), "negative control"


def test_kept_buffers_are_writable_after_inference_mode_sleep():
    """Restored as inference tensors, they made the next update with one fail halfway."""
    model = load(expert_folder("minimax_m2"))[0]
    memory = WeightMemory(model, ReferenceKernels())
    with torch.inference_mode():
        memory.release(None)
        memory.restore(memory.allocate())
    assert model.weights.buffer_parameters
    for name in model.weights.buffer_parameters:
        with torch.no_grad():
            model.get_parameter(name).add_(1.0)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize("name", ["glm4_moe", "apertus"])
def test_parameters_without_buffers_are_a_complete_update(name: str):
    is_sparse = name == "glm4_moe"
    trained = expert_reference(name) if is_sparse else family_reference(name)
    folder = expert_folder(name) if is_sparse else family_folder(name)
    parameters, state = dict(trained.named_parameters()), trained.state_dict()
    buffers = {each: tensor for each, tensor in state.items() if each not in parameters}
    assert buffers
    with LLM(folder, num_blocks=40, dtype="float32") as llm:
        inner = llm.llm_engine.model_executor.driver_worker.model_runner.model
        expected = answers(llm)
        inner.load_weights(parameters.items())
        llm.reset_prefix_cache()
        assert answers(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        missing = next(each for each in parameters if "norm" in each)
        inner.load_weights([pair for pair in parameters.items() if pair[0] != missing])
        with pytest.raises(MissingWeightsError) as raised:
            llm.reset_prefix_cache()
        assert raised.value.names == [missing]
        inner.load_weights([(missing, parameters[missing])])
        llm.reset_prefix_cache()
        assert answers(llm) == expected
        # They are taken where they come.
        assert inner.load_weights([(each, tensor + 2.0) for each, tensor in state.items() if each in buffers])
        inner.load_weights(parameters.items())
        (shown,) = llm.apply_model(lambda model: {each: model.get_parameter(each).clone() for each in buffers})
        assert all(torch.equal(shown[each], tensor + 2.0) for each, tensor in buffers.items())
        answers(llm)


class Rank:
    """One rank's weights: `a` and the buffer `b`."""

    def __init__(self) -> None:
        self.update = WeightUpdate()
        executor: Any = SimpleNamespace(
            num_workers=1,
            watch_requests=lambda num_in_flight: None,
            attach_engine=lambda engine: None,
            get_weight_updates=lambda: [self.update.report(["a", "b"], {"b"})],
            end_weight_update=self.update.end,
        )
        self._updates = WeightUpdates(executor, 0, lambda: 0)

    def load(self, **values: float) -> None:
        self.update.begin()
        for name, value in values.items():
            self.update.add(name, torch.tensor([value]))

    def sleep(self, *, keeps: bool) -> None:
        """Sleep at level 2 and wake up."""
        self.update.drop({"b"} if keeps else ())
        self.update.wake(were_dropped=True)

    def compare(self, *, is_partial: bool = False) -> tuple[dict[str, str], int | None]:
        event = self._updates.commit(is_partial=is_partial)
        return self._updates.uncompared, None if event is None else event.version


def test_ranks_with_different_buffers_are_detected():
    def are_equal(*, sleeps: bool, keeps: bool = True, **last: float) -> bool:
        first, other = Rank(), Rank()
        for rank, value in ((first, 1.0), (other, 2.0)):
            rank.load(b=value)
            if sleeps:
                rank.sleep(keeps=keeps)
            else:
                rank.compare(is_partial=True)
            rank.load(**last)
        return first.compare() == other.compare()

    assert [are_equal(sleeps=each, a=3.0) for each in (False, True)] == [False, False]
    # All came anew, buffers too.
    assert [are_equal(sleeps=each, a=3.0, b=4.0) for each in (False, True)] == [True, True]
    assert are_equal(sleeps=True, keeps=False, a=3.0), "negative control: forgotten"


def test_rejected_buffer_change_is_remembered_through_sleep():
    first, other = Rank(), Rank()
    other.update.rejected_calls.append(1)
    for rank in (first, other):
        rank.sleep(keeps=True)
        rank.load(a=3.0)
    assert first.compare() != other.compare()
    assert Rank().compare() == Rank().compare()
