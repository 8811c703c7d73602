"""Towers of every kind against transformers: rows of images, kernels, weights by name, and what makes rows wrong."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kimi_names import WRITTEN
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor
from torch_threads import threads
from vision_checkpoints import (
    CASES,
    IMAGE_TOKEN,
    MEAN,
    OF_PICTURES,
    OF_TOKEN_GRIDS,
    PADDED,
    REAL_HEADS,
    STD,
    image_of,
    their_rows,
    vision_folder,
    vision_reference,
)

from spmd_worker.base.errors import CheckpointError
from spmd_worker.media.prepared import ImagePixels
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice
from spmd_worker.model.registry import build_model
from spmd_worker.model.towers import gemma4, glm, granite, kimi, llama4, minicpm, naflex, pixtral, qwen, squares
from spmd_worker.model.towers.attention import ImageAttention
from spmd_worker.model.towers.gemma4 import ClippedLinear, Gemma4Tower, StandardTable
from spmd_worker.model.towers.layers import JoinedGates, TowerLinear, TowerTable
from spmd_worker.model.towers.squares import SquareTower
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.native.library import native_library
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.int8 import int8_kernels
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import RankLayout, Stage
from spmd_worker.worker.memory.estimate import activation_bytes, weights_bytes

TOLERANCE = 2e-5
ALIKE = ("llava_next_mistral", "qwen4", "glm46v", "glm4v_moe", "lfm2_vl_plain")
"""Cases that differ from others in numbers and texts alone."""
EVERY = [
    pytest.param(each, marks=pytest.mark.stress) if each in ALIKE else each for each in sorted({*CASES} - {*REAL_HEADS})
]
IN_MATRIX = [pytest.param(each, marks=pytest.mark.matrix) for each in REAL_HEADS]
CPU = torch.device("cpu")


def context(dtype: torch.dtype = torch.float32, *, is_native: bool = True, is_int8: bool = False) -> LayerContext:
    library = native_library()
    assert not isinstance(library, str), library
    attention = CpuBackend(library, dtype, (16,), 16) if is_native else SdpaBackend()
    kernels: Any = cpu_kernels(dtype)[0] if is_native else ReferenceKernels()
    quantised = int8_kernels(dtype)[0] if is_int8 else None
    return LayerContext(single_group(), quantised or kernels, attention, dtype, CPU, quantised=quantised)


def config_of(name: str, **changes: Any) -> ModelConfig:
    """The config of the case's folder, with some numbers of its tower, or of its vision, changed."""
    config = read_model_files(vision_folder(name), with_images=True).model_config
    vision = config.vision
    assert vision is not None
    assert vision.tower is not None
    changes = {"image_mean": MEAN, "image_std": STD, **changes}
    own = {key: value for key, value in changes.items() if hasattr(vision, key)}
    tower = replace(vision.tower, **{key: value for key, value in changes.items() if key not in own})
    return replace(config, vision=replace(vision, tower=tower, **own))


def new_model(
    name: str, config: ModelConfig | None = None, *, is_packed: bool = True, **options: Any
) -> DecoderForCausalLM:
    model = build_model(context(**options), config or config_of(name))
    with model.weights.open(vision_folder(name)) as source:
        model.weights.fill(source)
    if is_packed:
        model.pack_weights()
    return model


@torch.inference_mode()
def our_rows(model: DecoderForCausalLM, image: ImagePixels) -> tuple[Tensor, ...]:
    assert model.tower is not None
    found = model.tower(image)
    return found.rows, *found.added


def difference(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """The largest of any rows, relative to their largest number; infinite for other shapes."""
    if [each.shape for each in ours] != [each.shape for each in theirs]:
        return math.inf
    pairs = zip(ours, theirs, strict=True)
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)


@pytest.mark.parametrize("name", [*EVERY, *REAL_HEADS])
def test_rows_equal_those_of_transformers(name: str):
    images = [image_of(name, number) for number in range(3)]
    expected = [their_rows(name, image) for image in images]
    for is_native in (True, False):
        model = new_model(name, is_native=is_native)
        found = [our_rows(model, image) for image in images]
        for mine, theirs in zip(found, expected, strict=True):
            assert difference(mine, theirs) < TOLERANCE
        # Nothing is left of the images before.
        again = our_rows(model, images[0])
        assert all(map(torch.equal, again, found[0]))


CONTROLS: dict[str, list[dict[str, Any]]] = {
    "qwen3_vl": [
        {"rope_theta": 100.0},
        {"activation": "silu"},
        {"added_layers": (0, 1, 2)},
        {"image_mean": (0.5,) * 3},
    ],
    "qwen3_5": [{"rope_theta": 100.0}],
    "qwen2_vl": [{"rope_theta": 100.0}, {"activation": "gelu"}, {"eps": 0.01}, {"num_heads": 1}],
    "qwen2_5_vl": [{"window_size": 56}, {"full_layers": (0, 3)}, {"image_std": (0.5,) * 3}],
    "exaone4_5": [{"window_size": 56}, {"full_layers": (0, 3)}, {"rope_theta": 100.0}],
    "gemma4": [
        *({"rope_theta": 100.0}, {"score_scale": 0.0}, {"activation": "silu"}),
        *({"eps": 1e-6}, {"image_mean": (0.5,) * 3}),
    ],
    "gemma4_unified": [{"eps": 0.1}, {"projector_eps": 1e-6}, {"image_mean": (0.5,) * 3}],
    "glm4v": [{"rope_theta": 100.0}, {"eps": 1e-5}, {"activation": "gelu"}, {"projector_eps": 0.03}],
    "glm_ocr": [{"rope_theta": 100.0}, {"eps": 1e-5}, {"activation": "gelu"}, {"projector_activation": "gelu"}],
    "glm46v": [{"projector_activation": "gelu"}, {"num_heads": 1}],
    "paddleocr_vl": [{"rope_theta": 100.0}, {"eps": 1e-6}, {"activation": "silu"}, {"projector_eps": 0.03}],
    "kimi_k25": [{"rope_theta": 100.0}, {"activation": "silu"}, {"projector_eps": 1e-5}, {"num_heads": 1}],
    "gemma3": [{"eps": 1e-6}, {"activation": "silu"}],
    "llava": [{"activation": "gelu"}, {"eps": 1e-5}, {"projector_activation": "silu"}],
    "deepseek_vl": [{"activation": "silu"}, {"eps": 1e-5}, {"projector_activation": "silu"}],
    "llava_next": [{"max_crops": 1}, {"activation": "gelu"}, {"projector_activation": "silu"}],
    "llava_onevision": [{"max_crops": 9}, {"num_heads": 1}],
    "internvl": [{"projector_eps": 0.1}, {"activation": "quick_gelu"}],
    "internvl_of_6b": [{"eps": 1e-6}],
    "aya_vision": [{"eps": 1e-6}, {"activation": "silu"}, {"projector_eps": 1e-6}, {"projector_activation": "gelu"}],
    "cohere2_vision": [{"eps": 1e-6}, {"num_heads": 1}, {"projector_activation": "gelu"}],
    "llama4": [{"rope_theta": 100.0}, {"num_heads": 1}, {"has_bfloat16_pixels": False}, {"activation": "quick_gelu"}],
    "mistral3": [{"projector_eps": 1e-6}, {"rope_theta": 100.0}],
    "mistral_large4": [{"pairs_neighbours": False}, {"projector_eps": 1e-6}],
    "lighton_ocr": [{"projector_eps": 1e-6}, {"projector_activation": "silu"}, {"rope_theta": 100.0}],
    "pixtral": [{"activation": "silu"}],
    "smolvlm": [{"num_heads": 1}],
    "idefics3": [{"eps": 1e-6}],
    "minicpmv4_6": [{"eps": 1e-6}, {"num_heads": 1}, {"num_unmerged": 3}, {"projector_eps": 0.03}],
    "lfm2_vl": [{"eps": 1e-6}, {"activation": "silu"}, {"projector_eps": 0.03}, {"projector_activation": "silu"}],
    "granite_docling": [{"added_layers": (0, 1)}, {"projector_eps": 0.03}, {"num_heads": 1}],
}


@pytest.mark.gate("qwen3_vl", "gemma4*", "lfm2_vl", "minicpmv4_6", "lighton_ocr")
@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_comparison_detects_changed_numbers(name: str):
    """Negative control: each makes rows differ."""
    numbers = range(3) if name.startswith(OF_PICTURES) else (2,)
    images = [image_of(name, number) for number in numbers]
    expected = [their_rows(name, image) for image in images]
    for changes in CONTROLS[name]:
        model = new_model(name, config_of(name, **changes))
        pairs = zip(images, expected, strict=True)
        assert any(difference(our_rows(model, image), rows) > 10 * TOLERANCE for image, rows in pairs), changes


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("is_native", [True, False])
def test_comparison_detects_filled_padding_of_heads(name: str, is_native: bool, monkeypatch: pytest.MonkeyPatch):
    """Negative control: numbers behind a head's own take part in its products."""
    model, image = new_model(name, is_native=is_native), image_of(name, 2)
    expected, make = their_rows(name, image), ImageAttention.__init__

    def filled(attention: ImageAttention, *args: Any) -> None:
        make(attention, *args)
        assert attention._padded is not None
        generator = torch.Generator().manual_seed(1)
        for each in attention._padded:
            assert each.shape[-1] == 80
            each.normal_(generator=generator)

    assert difference(our_rows(model, image), expected) < TOLERANCE
    monkeypatch.setattr(ImageAttention, "__init__", filled)
    assert difference(our_rows(model, image), expected) > 10 * TOLERANCE


right_angles, right_unpadded, right_table = pixtral.axial_angles, squares._unpadded, TowerTable.forward
right_numbers = gemma4._numbers_of
right_positions, right_pooled = Gemma4Tower._positions_of, Gemma4Tower._pooled
right_resampled, right_taps = glm.resampled, qwen._taps
right_sines = granite.square_positions
right_nearest = minicpm.nearest_places
right_halves, right_merged = JoinedGates.weight_slices, SquareTower._merged


def cut_at_end(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """The picture without as many lines and columns as there are of padding, all cut from the end."""
    lines, columns = right_unpadded(picture, size).shape[:2]
    return picture[:lines, :columns]


def exchanged_angles(rows: Tensor, columns: Tensor, *rest: Any, **kinds: Any) -> Any:
    """Angles of lines and columns exchanged."""
    return right_angles(columns, rows, *rest, **kinds)


def exchanged_halves(gates: JoinedGates, prefix: str) -> Iterator[WeightSlice]:
    """Rows of gate and up in each other's place."""
    slices = list(right_halves(gates, prefix))
    for each, other in zip(slices, (slices[index ^ 1] for index in range(len(slices))), strict=True):
        yield replace(each, source=other.source)


MISTAKES: dict[str, tuple[str, Any, str, Any]] = {
    "lines and columns of positions exchanged": (
        *("glm4v", glm, "resampled"),
        lambda table, grid: right_resampled(table.transpose(0, 1), grid),
    ),
    "columns and lines of positions exchanged": (
        *("paddleocr_vl", qwen, "_taps"),
        lambda rows, columns, *rest, **kinds: right_taps(columns, rows, *rest, **kinds),
    ),
    "pairs of columns and lines exchanged": ("kimi_k25", kimi, "axial_angles", exchanged_angles),
    "pairs of lines behind those of columns": ("kimi_k25", kimi, "_in_turns", lambda x: x),
    "lines and columns of a table exchanged": (
        *("kimi_k25", kimi, "resampled"),
        lambda table, grid: right_resampled(table.transpose(0, 1), grid),
    ),
    "another curve between positions": ("glm46v", glm, "_A", 0.0),
    "padding of a picture cut at one end": ("llava_next", squares, "_unpadded", cut_at_end),
    "padding cut at one end": ("llava_onevision", squares, "_unpadded", cut_at_end),
    "angles of columns and lines exchanged": ("llama4", llama4, "axial_angles", exchanged_angles),
    "positions in another order": ("smolvlm", TowerTable, "forward", lambda table: right_table(table).flip(0)),
    "lines and columns exchanged": ("mistral3", pixtral, "axial_angles", exchanged_angles),
    "angles of axes exchanged": ("gemma4", gemma4, "axial_angles", exchanged_angles),
    "pairs of other numbers": ("gemma4", gemma4, "_by_axis", lambda x: x),
    "positions of axes exchanged": (
        *("gemma4", Gemma4Tower, "_positions_of"),
        lambda tower, lines, columns: right_positions(tower, columns, lines),
    ),
    "squares of another grid": (
        *("gemma4", Gemma4Tower, "_pooled"),
        lambda tower, x, grid: right_pooled(tower, x, grid[::-1]),
    ),
    "shifts of other numbers": ("gemma4", StandardTable, "forward", lambda table: right_table(table).flip(1)),
    "axes of a position exchanged": ("gemma4_unified", TowerTable, "forward", lambda table: right_table(table).flip(0)),
    "patches of other squares": (
        *("gemma4_unified", gemma4, "_numbers_of"),
        lambda plane, size: right_numbers(plane.transpose(1, 2), size),
    ),
    "lines and columns of NaFlex's table exchanged": (
        *("lfm2_vl", naflex, "resampled"),
        lambda table, grid, taps: right_resampled(table.transpose(0, 1), grid, taps),
    ),
    "positions of lines and columns exchanged": (
        *("granite_docling", granite, "square_positions"),
        lambda side, size: right_sines(side, size).roll(size // 2, 1),
    ),
    "halves of the gates exchanged": ("aya_vision", JoinedGates, "weight_slices", exchanged_halves),
    "nearest places of the next line and column": (
        *("minicpmv4_6", minicpm, "nearest_places"),
        lambda length, side: right_nearest(length, side).roll(1, 0),
    ),
    "patches of a token exchanged": (
        *("cohere2_vision", SquareTower, "_merged"),
        lambda tower, x: right_merged(tower, x.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)),
    ),
    "not clipped": ("gemma4_clipped", ClippedLinear, "forward", TowerLinear.forward),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_other_places(mistake: str, monkeypatch: pytest.MonkeyPatch):
    """Negative control: rows are found at, or told, other places of the image, or computed without a step."""
    name, *patched = MISTAKES[mistake]
    if patched[1] in ("square_positions", "weight_slices"):
        # Made with the tower.
        monkeypatch.setattr(*patched)
    model, images = new_model(name), [image_of(name, number) for number in range(2)]
    expected = [their_rows(name, image) for image in images]
    monkeypatch.setattr(*patched)
    for image, rows in zip(images, expected, strict=True):
        assert difference(our_rows(model, image), rows) > 1000 * TOLERANCE


@pytest.mark.gate("gemma4_clipped", "qwen2_vl", "qwen3_vl_heads_of_72", "llava", "gemma3", "llama4", "glm4v", "qwen3_5")
@pytest.mark.parametrize("name", [*EVERY, *IN_MATRIX])
def test_bfloat16_rows_are_near(name: str):
    model, image = new_model(name, dtype=torch.bfloat16), image_of(name, 0)
    ours = tuple([each.float() for each in our_rows(model, image)])
    theirs = tuple([each.float() for each in their_rows(name, image, torch.bfloat16)])
    assert difference(ours, theirs) < 0.06


@pytest.mark.gate(
    "qwen3_vl_heads_of_24-*",
    "qwen2_5_vl-*",
    "llava*",
    "gemma3-*",
    "gemma3_heads_of_72-dtype8",
    "qwen2_5_vl_heads_of_80-dtype10",
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_vl_heads_of_24", torch.bfloat16),
        ("qwen2_5_vl", torch.float32),
        pytest.param("llava", torch.bfloat16, marks=pytest.mark.matrix),
        pytest.param("gemma3", torch.float32, marks=pytest.mark.matrix),
        pytest.param("glm4v", torch.float32, marks=pytest.mark.matrix),
        *[
            pytest.param(name, dtype, marks=pytest.mark.matrix)
            for name in REAL_HEADS
            for dtype in (torch.float32, torch.bfloat16)
        ],
    ],
)
def test_rows_do_not_depend_on_threads(name: str, dtype: torch.dtype):
    model, image = new_model(name, dtype=dtype), image_of(name, 2)
    with threads(1):
        alone = our_rows(model, image)
    with threads(2):
        together = our_rows(model, image)
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize(("name", "num_rows"), [("granite_docling", (16, 48)), ("minicpmv4_6", (8, 16))])
def test_fine_route_has_rows_of_transformers(name: str, num_rows: tuple[int, int]):
    """Four times as many, by layers of its own or without a merger."""
    model = new_model(name, config_of(name, merge_size=2))
    for number in range(2):
        image = image_of(name, number)
        ours, theirs = our_rows(model, image), their_rows(name, image, is_fine=True)
        assert len(ours[0]) == num_rows[number]
        assert difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("grid", [(16, 16), (9, 23), (40, 5), (3, 64), (1, 1)])
def test_resampled_positions_are_those_of_transformers(grid: tuple[int, int]):
    """Of NaFlex, from more lines than there are and from fewer; without what it leaves out they are others."""
    table = torch.randn(16, 16, 8, generator=torch.Generator().manual_seed(1))
    planes, options = table.permute(2, 0, 1)[None], {"mode": "bilinear", "align_corners": False}
    found = glm.resampled(table, grid, naflex.antialiased_taps).permute(2, 0, 1)
    for is_right in (True, False) if min(grid) < 8 else (True,):
        theirs = torch.nn.functional.interpolate(planes, grid, antialias=is_right, **options)[0]
        assert (float((found - theirs).abs().max()) < 1e-5) == is_right


def test_squares_do_not_see_each_other():
    model, image = new_model("smolvlm"), image_of("smolvlm", 1)
    (rows,) = our_rows(model, image)
    alone = [our_rows(model, replace(image, crops=(crop,)))[0] for crop in image.crops]
    assert torch.equal(rows, torch.cat(alone))


def test_towers_of_int8_models_are_not_quantised():
    name = "qwen3_vl"
    ours, plain = (our_rows(new_model(name, is_int8=is_int8), image_of(name, 0)) for is_int8 in (True, False))
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("name", EVERY)
def test_weights_go_by_the_names_of_files_and_memory(name: str):
    model, files = new_model(name), load_file(vision_folder(name) / "model.safetensors")
    names = {ours: each for each, tensor in files.items() for ours in model.weights.names.parts(each, tensor.shape)}
    with model.as_checkpoint() as view:
        assert all(torch.equal(tensor, files[names[each]]) for each, tensor in view.named_parameters())
    reordered = {
        "kimi_k25": "model.vision_tower.layers.0.attn.q_proj.weight",
        "mistral_large4": "model.vision_tower.transformer.layers.0.attention.q_proj.weight",
    }
    if name in reordered:
        # Whose queries and keys transformers puts in another order.
        with pytest.raises(CheckpointError, match=r"layers\.0.*: the model has no such weight: use the names of its"):
            model.load_weights([(reordered[name], torch.ones(32, 32))])
        model.load_weights([(each, tensor) for each, tensor in files.items() if "vision_" not in each])
        return
    image, memory = image_of(name, 0), vision_reference(name).state_dict()
    before = our_rows(model, image)
    model.load_weights([(each, -tensor) for each, tensor in memory.items()])
    assert not torch.equal(our_rows(model, image)[0], before[0])
    model.load_weights(list(memory.items()))
    assert all(map(torch.equal, our_rows(model, image), before))


def model_of_files(config: ModelConfig, folder: Path, files: dict[str, Tensor]) -> DecoderForCausalLM:
    """A model of these tensors, which are written into the folder."""
    save_file(files, folder / "model.safetensors")
    model = build_model(context(), config)
    with model.weights.open(folder) as source:
        model.weights.fill(source)
    model.pack_weights()
    return model


@pytest.mark.parametrize("name", ["llava", "gemma3", "llava_next", "llava_onevision", "lfm2_vl", "cohere2_vision"])
def test_hub_names_of_a_vision_model_load(name: str, tmp_path: Path):
    """Files from before transformers 5 have one more module, and what the tower leaves out."""
    files = load_file(vision_folder(name) / "model.safetensors")
    older = {each.replace("vision_tower.", "vision_tower.vision_model."): tensor for each, tensor in files.items()}
    top = "model." * (name in ("lfm2_vl", "cohere2_vision"))
    older[f"{top}vision_tower.vision_model.embeddings.position_ids"] = torch.arange(36)[None]
    model, image = model_of_files(config_of(name), tmp_path, older), image_of(name, 0)
    assert all(map(torch.equal, our_rows(model, image), our_rows(new_model(name), image)))


def test_missing_and_unknown_tower_tensors_are_errors(tmp_path: Path):
    name = "qwen3_vl"
    files = load_file(vision_folder(name) / "model.safetensors")
    files["model.visual.blocks.4.norm1.weight"] = files.pop("model.visual.blocks.3.norm1.weight")
    save_file(files, tmp_path / "model.safetensors")
    model = build_model(context(), config_of(name))
    with model.weights.open(tmp_path) as source, pytest.raises(CheckpointError) as caught:
        model.weights.fill(source)
    assert "model.visual.blocks.3.norm1.weight" in str(caught.value)
    assert "model.visual.blocks.4.norm1.weight" in str(caught.value)


def test_infinite_bounds_are_loaded_and_bound_nothing(tmp_path: Path):
    """As transformers saves a model that was never trained. NaN is refused."""
    name, image = "gemma4_clipped", image_of("gemma4_clipped", 0)
    files = load_file(vision_folder(name) / "model.safetensors")
    bounds = [each for each in files if each.endswith(("_min", "_max"))]
    assert len(bounds) == 4 * 7 * 3
    opened = {**files, **{each: files[each] * math.inf for each in bounds}}
    model = model_of_files(config_of(name), tmp_path, opened)
    open_rows, tower = our_rows(model, image), config_of(name, clips=False)
    plain = model_of_files(tower, tmp_path, {each: files[each] for each in {*files} - {*bounds}})
    assert all(map(torch.equal, open_rows, our_rows(plain, image)))
    with pytest.raises(CheckpointError, match=r"_max.* has nan at"):
        model.load_weights([(bounds[0].replace("_min", "_max"), torch.tensor(math.nan))])


def test_tables_and_head_of_paddleocr_are_ignored(tmp_path: Path):
    """The hub's files have them, and no image goes through them."""
    name, top = "paddleocr_vl", "visual.vision_model."
    files = load_file(vision_folder(name) / "model.safetensors")
    files |= {
        f"{top}embeddings.packing_position_embedding.weight": torch.ones(9, 48),
        f"{top}head.probe": torch.ones(1),
    }
    model, image = model_of_files(config_of(name), tmp_path, files), image_of(name, 0)
    assert all(map(torch.equal, our_rows(model, image), our_rows(new_model(name), image)))


def test_names_that_transformers_writes_of_kimi_load(tmp_path: Path):
    name, files = "kimi_k25", load_file(vision_folder("kimi_k25") / "model.safetensors")
    for written, ours in WRITTEN.items():
        files = {each.replace(ours, written): tensor for each, tensor in files.items()}
    model, image = model_of_files(config_of(name), tmp_path, files), image_of(name, 0)
    assert all(map(torch.equal, our_rows(model, image), our_rows(new_model(name), image)))


def test_text_alone_has_no_tower():
    config = read_model_files(vision_folder("qwen3_vl")).model_config
    model = new_model("qwen3_vl", config)
    assert config.vision is None
    assert model.tower is None
    assert not any("visual" in each for each in model.weights.tensors)
    with pytest.raises(AssertionError):
        our_rows(model, image_of("qwen3_vl", 0))


@pytest.mark.gate("gemma4_clipped", "qwen2_vl", "llava", "llama4", "pixtral")
@pytest.mark.parametrize("name", EVERY)
def test_dummy_weights_fill_towers(name: str):
    model = build_model(context(), config_of(name))
    model.weights.fill(model.weights.dummy())
    model.pack_weights()
    assert all(each.isfinite().all() for each in our_rows(model, image_of(name, 1)))


@pytest.mark.parametrize("name", EVERY)
def test_vision_config_says_what_images_need(name: str):
    vision = config_of(name).vision
    assert vision is not None
    assert vision.image_token_id == IMAGE_TOKEN
    image, rows = image_of(name, 0), their_rows(name, image_of(name, 0))
    assert vision.num_added == len(rows) - 1
    assert vision.has_three_positions == name.startswith(OF_TOKEN_GRIDS)
    assert vision.sees_whole_image == (name in ("gemma3", "gemma4_unified"))
    if name.startswith((*OF_TOKEN_GRIDS, "mistral", "pixtral", "lighton", "gemma", "kimi", "lfm2", "exaone")):
        assert len(rows[0]) == math.prod([side // vision.merge_size for side in image.grid])


@pytest.mark.parametrize("name", EVERY)
def test_planned_parameters_are_those_of_towers(name: str):
    config = config_of(name)
    tower = build_model(replace(context(), device=torch.device("meta")), config).tower
    assert tower is not None
    assert config.num_tower_parameters == sum(each.numel() for each in tower.parameters())
    text = replace(config, vision=None)
    layout, planned = RankLayout(1), []
    for each in (config, text):
        planned.append(weights_bytes(each, layout, 0, "float32", "cuda"))
        assert activation_bytes(each, layout, 0, "float32", 8, 1, num_tower_rows=(4096,)) > 0
    assert planned[0] - planned[1] == 4 * config.num_tower_parameters


def test_every_rank_of_the_first_stage_has_the_tower():
    name, config = "qwen3_vl", config_of("qwen3_vl")
    image, expected = image_of(name, 1), our_rows(new_model(name), image_of(name, 1))

    def run(group: GroupHandle) -> tuple[Tensor, ...]:
        model = build_model(replace(context(), tensor_group=group), config)
        with model.weights.open(vision_folder(name)) as source:
            model.weights.fill(source)
        model.pack_weights()
        return our_rows(model, image)

    for rows in on_ranks(2, run):
        assert all(map(torch.equal, rows, expected))
    later = build_model(context(), config, Stage(1, 1, is_first=False, is_last=True))
    assert later.tower is None
    assert "model.visual.pos_embed.weight" in later.weights.tensors
