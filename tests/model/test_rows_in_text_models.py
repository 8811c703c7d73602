"""Rows of images in the text models against transformers, and in any steps: positions, deepstack, sight within images.

No tower: rows are given. Float32, 1e-4 of the largest logit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_checkpoints import delta_folder, delta_reference
from expert_checkpoints import expert_folder, expert_reference
from family_checkpoints import family_folder, family_reference
from image_models import image_folder, image_reference
from image_rows import ImageRow, ImageRun, image_model, image_row, image_stages
from qwen4_checkpoints import qwen4_folder, qwen4_reference
from reference_models import random_prompt, relative_error
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import Stage
from spmd_worker.worker.runner import image_layout
from spmd_worker.worker.runner.image_layout import Integers, Media, last_visible, rope_positions

TOLERANCE = 1e-4
THREE = {"has_three_positions": True}
SIGHT = {"sees_whole_image": True}


@dataclass(frozen=True, slots=True)
class Case:
    """Files and transformers' model, numbers of `VisionConfig`, and the layers behind which rows are added."""

    folder: Callable[[str], Path]
    reference: Callable[[str], Any]
    numbers: dict[str, Any]
    num_added: int = 0


CASES = {
    "qwen2_5_vl": Case(family_folder, family_reference, THREE),
    "qwen3_vl": Case(family_folder, family_reference, THREE, num_added=3),
    "qwen3_5_images": Case(delta_folder, delta_reference, THREE),
    "qwen4_images": Case(qwen4_folder, qwen4_reference, {**THREE, "run_length": 4}),
    "qwen4_images_tokens": Case(qwen4_folder, qwen4_reference, THREE),
    "gemma3_images": Case(family_folder, family_reference, SIGHT),
    "gemma4": Case(image_folder, image_reference, {**SIGHT, "sees_in_windows": True}),
    "gemma4_clipped": Case(image_folder, image_reference, {"input_token_id": 3}),
    "glm4v": Case(family_folder, family_reference, THREE),
    "paddleocr_vl": Case(family_folder, family_reference, THREE),
    "glm_ocr": Case(family_folder, family_reference, THREE),
    "glm4v_moe": Case(expert_folder, expert_reference, THREE),
    "qwen3_vl_moe": Case(expert_folder, expert_reference, THREE, num_added=1),
}
"""Sections one after another; interleaved, with deepstack; of a part of the head, in a hybrid, and in one that chooses
keys by runs, also of one token; sight, with a window shorter than an image, the same in some layers; layers' own
inputs; neighbours as pairs; experts, of a part of the head.
"""
IMAGES = ((3, 2, 4), (20, 3, 2))
IN_GATE = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5_images", "qwen4_images", "qwen4_images_tokens"),
    *("gemma3_images", "gemma4", "gemma4_clipped"),
)
CASE_MARKS = [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.stress) for name in CASES]


@cache
def model_of(name: str, dtype: str = "float32") -> DecoderForCausalLM:
    case = CASES[name]
    return image_model(case.folder(name), dtype, num_added=case.num_added, **case.numbers)


@cache
def rows_of(name: str) -> tuple[ImageRow, ...]:
    """Two images, two with text of one token between them, and text alone."""
    config, case = model_of(name).model_config, CASES[name]
    of_row = (config.hidden_size, case.num_added)
    prompts = [random_prompt(length, seed=length, vocab_size=config.vocab_size) for length in (37, 30, 19)]
    return (
        image_row(prompts[0], IMAGES, *of_row, seed=1),
        image_row(prompts[1], ((0, 3, 3), (10, 1, 5)), *of_row, seed=2),
        ImageRow(tuple(prompts[2])),
    )


@cache
def logits_of(name: str, number: int) -> Tensor:
    """transformers' logits [T, vocabulary]."""
    row, reference, numbers = rows_of(name)[number], CASES[name].reference(name), CASES[name].numbers
    text, places = reference.model.language_model, row.places
    ids = torch.tensor([[token if token < 10**6 else 0 for token in row.token_ids]])
    with torch.no_grad():
        x = text.embed_tokens(ids)
        if row.rows is not None:
            x[0, places] = row.rows
        options: dict[str, Any] = {"inputs_embeds": x, "use_cache": False}
        types = torch.zeros_like(ids)
        types[0, places] = 1
        if name.startswith("gemma4"):
            padded = torch.where(types > 0, reference.config.text_config.pad_token_id, ids)
            if text.hidden_size_per_layer_input:
                options["per_layer_inputs"] = text.get_per_layer_inputs(padded)
            return reference(**options, mm_token_type_ids=types).logits[0]
        if numbers == SIGHT:
            return reference(**options, token_type_ids=types).logits[0]
        positions = torch.from_numpy(rope_positions(row.media, 0, len(row.token_ids)))
        options["position_ids"] = positions[:, None]
        if name.startswith("qwen4"):
            options["ple_input_ids"] = torch.tensor([row.token_ids])
        if row.added:
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[0, places] = True
            options |= {"visual_pos_masks": mask, "deepstack_visual_embeds": list(row.added)}
        return reference.lm_head(text(**options).last_hidden_state)[0]


def error_of(name: str, model: DecoderForCausalLM, rows: tuple[ImageRow, ...] | None = None) -> float:
    """The largest relative error of all rows."""
    found = ImageRun([model], rows or rows_of(name)).finish()
    return max(relative_error(each, logits_of(name, number)) for number, each in enumerate(found))


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.parametrize("name", CASE_MARKS)
def test_logits_are_transformers_with_images(name: str):
    assert error_of(name, model_of(name)) < TOLERANCE


def exchanged(config: ModelConfig) -> ModelConfig:
    """Lines and columns exchanged."""
    (rope,) = config.ropes
    time, line, column = rope.sections
    is_same = line == column
    sections = (time + 1, line - 1, column) if is_same or rope.interleaves_sections else (time, column, line)
    return replace(config, ropes=(replace(rope, sections=sections),))


def one_after_another(config: ModelConfig) -> ModelConfig:
    (rope,) = config.ropes
    num_pairs, (_, line, column) = rope.rotary_size // 2, rope.sections
    other = replace(rope, sections=(num_pairs - line - column, line, column), interleaves_sections=False)
    return replace(config, ropes=(other,))


CONTROLS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "one position": ("qwen2_5_vl", {"has_three_positions": False}, None),
    "one position with added rows": ("qwen3_vl", {"has_three_positions": False}, None),
    "one position of a hybrid": ("qwen3_5_images", {"has_three_positions": False}, None),
    "runs of other tokens": ("qwen4_images", {"run_length": 3}, None),
    "other sections": ("qwen2_5_vl", {}, exchanged),
    "sections as in others": ("qwen3_vl", {}, one_after_another),
    "causal": ("gemma3_images", {"sees_whole_image": False}, None),
    "causal in every layer": ("gemma4", {"sees_whole_image": False}, None),
    "sight in every layer": ("gemma4", {"sees_in_windows": False}, None),
    "inputs of another token": ("gemma4_clipped", {"input_token_id": 0}, None),
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("control", CONTROLS)
def test_comparison_detects_other_positions_and_sight(control: str):
    name, numbers, change = CONTROLS[control]
    case = CASES[name]
    model = image_model(case.folder(name), change=change, **{**case.numbers, "num_added": case.num_added, **numbers})
    assert error_of(name, model) > 100 * TOLERANCE


def at_one_place(media: Media, first: int, count: int) -> Integers:
    """`rope_positions`, where all tokens of an image have those of its first."""
    positions = rope_positions(media, 0, first + count)
    for item in media:
        positions[:, item.start : item.end] = positions[:, item.start : item.start + 1]
    return positions[:, first:]


def seen_by_all(media: Media, first: int, count: int) -> Integers:
    """`last_visible`, where tokens of every image see up to the end of the last image."""
    last = last_visible(media, 0, first + count)
    for item in media:
        last[item.start : item.end] = media[-1].end - 1
    return last[first:]


MISTAKES = {
    "one place for an image": ("qwen3_vl", "rope_positions", at_one_place),
    "images see each other": ("gemma3_images", "last_visible", seen_by_all),
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_a_mistaken_layout(mistake: str, monkeypatch: pytest.MonkeyPatch):
    """Plain torch computes it: compiled attention refuses tokens that see less than one before them."""
    name, function, wrong = MISTAKES[mistake]
    case, num_layers = CASES[name], model_of(name).model_config.num_layers
    whole = Stage(0, num_layers, is_first=True, is_last=True)
    (model,) = image_stages(case.folder(name), whole, **case.numbers, num_added=case.num_added)
    assert error_of(name, model) < TOLERANCE
    monkeypatch.setattr(image_layout, function, wrong)
    assert error_of(name, model) > 100 * TOLERANCE


def test_comparison_detects_rows_left_out():
    rows = rows_of("qwen3_vl")
    without = tuple(replace(row, added=row.added[:2]) for row in rows)
    assert error_of("qwen3_vl", model_of("qwen3_vl"), without) > 100 * TOLERANCE
    scaled = tuple(replace(row, rows=None if row.rows is None else row.rows * 8.0) for row in rows_of("gemma3_images"))
    assert error_of("gemma3_images", model_of("gemma3_images"), scaled) > 100 * TOLERANCE, "as embeddings are"


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gate("gemma4-bfloat16", "qwen3_5_images-bfloat16", "qwen3_vl-bfloat16")
@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASE_MARKS)
def test_rows_have_one_answer_in_any_steps(name: str, dtype: str):
    model, rows = model_of(name, dtype), rows_of(name)
    whole = ImageRun([model], rows).finish()
    for chunk in (1, 7, 16):
        assert same(ImageRun([model], rows).finish(chunk, is_fused=chunk != 16), whole), chunk
    for row, expected in zip(rows, whole, strict=True):
        assert same(ImageRun([model], [row]).finish(), [expected]), "alone"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3_images", "gemma4"])
def test_prefix_hit_inside_an_image_changes_nothing(name: str):
    run = ImageRun([model_of(name)], rows_of(name)[:2])
    cold = run.finish()
    for num_cached in (16, 6):
        run.forget(num_cached)
        assert same(run.finish(), [each[num_cached:] for each in cold]), num_cached


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3_images", "gemma4"])
def test_stages_and_ranks_have_the_answers_of_one(name: str):
    """Stages behind the first have positions and sight from the request."""
    case, rows = CASES[name], rows_of(name)
    numbers = {**case.numbers, "num_added": case.num_added}
    num_layers = model_of(name).model_config.num_layers
    whole = Stage(0, num_layers, is_first=True, is_last=True)
    alone = ImageRun(image_stages(case.folder(name), whole, **numbers), rows).finish(16)
    cut = (Stage(0, 3, is_first=True, is_last=False), Stage(3, num_layers, is_first=False, is_last=True))
    assert same(ImageRun(image_stages(case.folder(name), *cut, **numbers), rows).finish(16), alone)

    def run(group: GroupHandle) -> list[Tensor]:
        models = image_stages(case.folder(name), whole, group=group, **numbers)
        num_owned = models[0].lm_head.shard.num_owned
        return [each[:, :num_owned] for each in ImageRun(models, rows).finish()]

    found = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
    errors = [relative_error(each, logits_of(name, number)) for number, each in enumerate(found)]
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("num_added", [3, 4])
def test_last_layer_leaves_out_tokens_of_images(num_added: int):
    """Rows may be added behind the last layer too."""
    model, config = model_of("qwen3_vl"), model_of("qwen3_vl").model_config
    assert config.num_layers == 4
    row = image_row(random_prompt(40, seed=3, vocab_size=config.vocab_size), IMAGES, config.hidden_size, num_added)
    whole = ImageRun([model], [row]).finish()[0]
    assert torch.equal(ImageRun([model], [row], leaves_out=True).finish()[0], whole[-1:])
    without = replace(row, added=(0 * row.added[0], *row.added[1:]))
    assert not torch.equal(ImageRun([model], [without], leaves_out=True).finish()[0], whole[-1:])
