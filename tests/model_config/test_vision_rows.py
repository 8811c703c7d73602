"""Reading of config.json and of the image processor's file: defaults of transformers' classes, and bad values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from vision_checkpoints import vision_folder

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.media.image_processor import CLIP_MEAN, CLIP_STD
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.families.vision_rows import VISION_ROWS, read_vision
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.model_config.vision_config import TowerConfig, VisionConfig
from spmd_worker.resolved import resolve_run

PATH = Path("config.json")
CLASSES = {
    "qwen3_vl": ("Qwen3VLConfig", 3584),
    "qwen3_5": ("Qwen3_5Config", 3584),
    "qwen2_vl": ("Qwen2VLConfig", 3584),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", 3584),
    "exaone4_5": ("Exaone4_5_Config", 3584),
    "glm4v": ("Glm4vConfig", 4096),
    "glm4v_moe": ("Glm4vMoeConfig", 4096),
    "glm_ocr": ("GlmOcrConfig", 1536),
    "lighton_ocr": ("LightOnOcrConfig", 1024),
    "deepseek_vl": ("DeepseekVLConfig", 2048),
    "paddleocr_vl": ("PaddleOCRVLConfig", 1024),
    "kimi_k25": ("Kimi_K25Config", 7168),
    "gemma3": ("Gemma3Config", 2304),
    "gemma4": ("Gemma4Config", 2304),
    "gemma4_unified": ("Gemma4UnifiedConfig", 2304),
    "llama4": ("Llama4Config", 5120),
    "internvl": ("InternVLConfig", 896),
    "aya_vision": ("AyaVisionConfig", 4096),
    "cohere2_vision": ("Cohere2VisionConfig", 12288),
    "minicpmv4_6": ("MiniCPMV4_6Config", 4096),
    "mistral3": ("Mistral3Config", 4096),
    "mistral_large4": ("MistralLarge4Config", 6144),
    "smolvlm": ("SmolVLMConfig", 2048),
    "granite_docling": ("GraniteDoclingConfig", 1024),
    "lfm2_vl": ("Lfm2VlConfig", 2560),
    "llava": ("LlavaConfig", 4096),
    "llava_next": ("LlavaNextConfig", 4096),
    "llava_onevision": ("LlavaOnevisionConfig", 3584),
}
FITTING: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 896, "patch_size": 14},
    "smolvlm": {"image_size": 256},
    "llava_next": {"image_size": 336},
    "llama4": {"hidden_size": 1408, "vision_output_dim": 4096},
}
"""Numbers that the class's own ones fit."""
SIZES = (
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "intermediate_size"),
    ("num_attention_heads", "num_heads"),
)


def read(row: str, config: dict[str, Any], hidden_size: int | None = None) -> tuple[VisionConfig, TowerConfig]:
    found = read_vision(row, config, PATH, hidden_size or CLASSES[row][1], 1e-5)
    assert found is not None
    assert found.tower is not None
    return found, found.tower


@pytest.mark.parametrize("row", sorted(CLASSES))
def test_missing_keys_have_the_defaults_of_transformers(row: str):
    """All but the kind of the tower, which names its class."""
    # Its class has no tower without one in the file.
    theirs = getattr(transformers, CLASSES[row][0])(**({"vision_config": {}} if row.startswith("gemma4") else {}))
    kind = theirs.vision_config.model_type
    bare = type(theirs.vision_config)(**FITTING.get(row, {}))
    # Its class has no token of its own.
    whole = {"image_token_id": 5} if row == "minicpmv4_6" else {}
    vision, tower = read(row, {**whole, "vision_config": {"model_type": kind, **FITTING.get(row, {})}})
    if row == "gemma4_unified":
        sizes = (tower.hidden_size, tower.num_positions, tower.patch_size, vision.merge_size, tower.projector_eps)
        assert sizes == (bare.mm_embed_dim, bare.mm_posemb_size, 16, bare.pooling_kernel_size, bare.rms_norm_eps)
        assert (vision.image_token_id, vision.sees_in_windows) == (theirs.image_token_id, True)
        return
    sizes = [getattr(bare, key, None) for key, _ in SIZES]
    if row == "qwen2_vl":
        sizes = [bare.embed_dim, bare.embed_dim * bare.mlp_ratio, bare.num_heads]
    if row.startswith("glm4v"):
        sizes = [bare.hidden_size, bare.out_hidden_size, bare.num_heads]
        assert (tower.projector_size, tower.num_positions) == (bare.intermediate_size, 24**2)
        assert (tower.eps, tower.has_qkv_bias) == (bare.rms_norm_eps, bare.attention_bias)
        assert tower.rope_theta == bare.rope_parameters["rope_theta"]
    if row == "glm_ocr":
        sizes = [bare.hidden_size, bare.intermediate_size, bare.num_heads]
        assert (tower.projector_size, tower.num_positions) == (3 * bare.out_hidden_size, 0)
        assert (tower.eps, tower.has_qkv_bias, tower.has_bias) == (bare.rms_norm_eps, *[bare.attention_bias] * 2)
        assert tower.rope_theta == bare.rope_parameters["rope_theta"]
    if row == "paddleocr_vl":
        numbers = (tower.num_positions, vision.merge_size, tower.eps, tower.rope_theta, tower.crop_size)
        assert numbers == (27**2, bare.spatial_merge_size, bare.layer_norm_eps, bare.rope_parameters["rope_theta"], 0)
    assert [getattr(tower, ours) for _, ours in SIZES] == sizes
    side = bare.patch_size
    assert tower.patch_size == (side if isinstance(side, int) else side[0])
    token = getattr(theirs, "image_token_id", None) or whole.get("image_token_id")
    assert vision.image_token_id == (theirs.image_token_index if token is None else token)
    deepstack = getattr(bare, "deepstack_visual_indexes", ())
    assert tower.added_layers == tuple(deepstack if row in ("qwen3_vl", "granite_docling") else ())
    if row == "gemma4":
        assert (tower.head_size, tower.num_positions, tower.rope_theta) == (64, 10240, 100.0)
        assert [bare.head_dim, bare.position_embedding_size, bare.pooling_kernel_size] == [64, 10240, vision.merge_size]
        assert (tower.clips, tower.standardises, tower.activation) == (False, False, "gelu_tanh")
    if row == "qwen2_5_vl":
        assert (tower.window_size, tower.full_layers) == (bare.window_size, tuple(bare.fullatt_block_indexes))
    if row == "llava_next":
        assert [list(each) for each in tower.pinpoints] == theirs.image_grid_pinpoints
    if row in ("llava", "llava_next"):
        assert tower.num_layers == bare.num_hidden_layers - 1
        assert tower.drops_first_row
    else:
        assert tower.num_layers == bare.num_hidden_layers


@pytest.mark.parametrize("row", ["llava", "llava_next", "llava_onevision"])
def test_files_without_towers_have_their_classes(row: str):
    theirs = getattr(transformers, CLASSES[row][0])().vision_config
    _, tower = read(row, {})
    numbers = [getattr(theirs, key) for key, _ in SIZES]
    assert [getattr(tower, ours) for _, ours in SIZES] == numbers
    assert (tower.crop_size, tower.patch_size) == (theirs.image_size, theirs.patch_size)
    assert tower.num_layers == theirs.num_hidden_layers - (row != "llava_onevision")
    assert bool(tower.names.class_token) == (theirs.model_type == "clip_vision_model")


def test_every_row_is_of_a_family():
    assert {row for family in FAMILIES.values() for row in (family.vision, family.audio)} == {"", *VISION_ROWS}


@pytest.mark.parametrize(
    ("row", "whole", "vision", "words"),
    [
        (
            "qwen3_vl",
            {},
            {"out_hidden_size": 64},
            "vision_config.out_hidden_size=64 is not the hidden size of the text",
        ),
        ("qwen3_vl", {}, {"num_position_embeddings": 50}, "must be a square number"),
        ("qwen3_vl", {}, {"deepstack_visual_indexes": [27]}, "must be a whole number from 0 to 26"),
        ("qwen3_vl", {}, {"deepstack_visual_indexes": 8}, "must be a list of layers"),
        ("qwen3_vl", {}, {"num_heads": 7}, "must divide hidden_size=1152"),
        ("qwen3_vl", {}, {"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ("qwen3_vl", {}, {"patch_size": [16, 8]}, "must be one length for both sides"),
        ("qwen2_vl", {}, {"hidden_size": 64}, "vision_config.hidden_size=64 is not the hidden size of the text"),
        ("qwen2_vl", {}, {"embed_dim": 100}, "num_heads=None must divide embed_dim=100"),
        ("qwen2_vl", {}, {"embed_dim": -1}, "vision_config.embed_dim=-1 must be a whole number"),
        ("qwen2_vl", {}, {"mlp_ratio": 1000}, "mlp_ratio=1000 must be at most 256"),
        ("qwen2_vl", {}, {"mlp_ratio": 2.5}, "mlp_ratio=2.5 must be a whole number"),
        ("qwen2_5_vl", {}, {"window_size": 20}, "must hold a token of 2 patches a side"),
        ("exaone4_5", {}, {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide the 16 heads"),
        ("exaone4_5", {}, {"num_key_value_heads": 0}, "num_key_value_heads=0 must be a whole number"),
        ("glm4v", {}, {"out_hidden_size": 64}, "vision_config.out_hidden_size=64 is not the hidden size of the text"),
        ("glm4v", {}, {"image_size": 8}, "image_size=8 must hold a patch of 14 pixels"),
        ("glm4v", {}, {"attention_bias": 1}, "attention_bias=1 must be true or false"),
        ("glm_ocr", {}, {"out_hidden_size": 1024}, "out_hidden_size=1024 is not the hidden size of the text, 1536"),
        ("glm_ocr", {}, {"attention_bias": "no"}, "attention_bias='no' must be true or false"),
        ("glm_ocr", {}, {"rms_norm_eps": None, "num_heads": 7}, "num_heads=7 must divide hidden_size=1024"),
        ("paddleocr_vl", {}, {"num_attention_heads": 64}, "num_attention_heads=64 must divide hidden_size=1152"),
        ("paddleocr_vl", {}, {"spatial_merge_size": 0}, "spatial_merge_size=0 must be a whole number"),
        ("lighton_ocr", {}, {"image_size": 8}, "image_size=8 must hold a patch of 16 pixels"),
        ("lighton_ocr", {"spatial_merge_size": -2}, {}, "spatial_merge_size=-2 must be a whole number"),
        ("deepseek_vl", {}, {"num_attention_heads": 7}, "num_attention_heads=7 must divide hidden_size=768"),
        ("deepseek_vl", {"image_token_id": "no"}, {}, "image_token_id='no' must be a whole number"),
        ("paddleocr_vl", {}, {"image_size": 8}, "image_size=8 must hold a patch of 14 pixels"),
        ("kimi_k25", {}, {"pos_emb_width": 32}, "pos_emb_height=None must be that of pos_emb_width, at most 4096"),
        ("kimi_k25", {}, {"init_pos_emb_height": 9}, "init_pos_emb_height=9 must be that of pos_emb_width"),
        ("kimi_k25", {"projection_hidden_size": 64}, {}, "projection_hidden_size=64 is not supported, only 1152"),
        ("kimi_k25", {}, {"mm_hidden_size": 64}, "vision_config.mm_hidden_size=64 is not supported, only 1152"),
        ("kimi_k25", {}, {"vt_num_attention_heads": 7}, "vt_num_attention_heads=7 must divide hidden_size=1152 into"),
        ("kimi_k25", {}, {"projector_ln_eps": "no"}, "projector_ln_eps='no' must be a number"),
        ("kimi_k25", {}, {"merge_kernel_size": [2, 1]}, "merge_kernel_size=[2, 1] must be one length for both"),
        ("glm4v_moe", {}, {"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number"),
        ("gemma3", {"mm_tokens_per_image": 200}, {}, "must divide a square of 14 x 14 patches"),
        ("gemma3", {}, {"num_channels": 1}, "num_channels=1 is not supported"),
        ("gemma4", {}, {"head_dim": 18}, "head_dim=18 must be a multiple of 4"),
        ("gemma4", {}, {"head_dim": -8}, "head_dim=-8 must be a whole number"),
        ("gemma4", {}, {"num_key_value_heads": 4}, "num_key_value_heads=4 is not supported, only 12"),
        ("gemma4", {}, {"num_attention_heads": 6}, "num_key_value_heads=None is not supported, only 6"),
        ("gemma4", {}, {"hidden_activation": "mish"}, "hidden_activation='mish' is not supported"),
        ("gemma4", {}, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported, only axial or"),
        ("gemma4", {}, {"rope_parameters": {"rope_theta": "no"}}, "rope_theta='no' must be a number"),
        ("gemma4", {}, {"use_clipped_linears": 1}, "use_clipped_linears=1 must be true or false"),
        ("gemma4", {}, {"standardize": "yes"}, "standardize='yes' must be true or false"),
        ("gemma4", {}, {"position_embedding_size": 10**12}, "position_embedding_size=1000000000000 must be a whole"),
        ("gemma4", {}, {"pooling_kernel_size": 0}, "pooling_kernel_size=0 must be a whole number"),
        ("gemma4", {"text_config": {"pad_token_id": 262144}}, {}, "pad_token_id=262144 must be a whole number from 0"),
        ("gemma4", {"text_config": {"vocab_size": 9, "pad_token_id": 9}}, {}, "pad_token_id=9 must be a whole number"),
        ("gemma4_unified", {}, {"output_proj_dims": 64}, "output_proj_dims=64 is not supported, only 3840"),
        ("gemma4_unified", {}, {"mm_posemb_size": -1}, "mm_posemb_size=-1 must be a whole number"),
        ("gemma4", {"image_token_id": -1}, {}, "image_token_id=-1 must be a whole number"),
        ("llava", {"vision_feature_layer": -20}, {"model_type": "clip_vision_model"}, "from -13 to 12"),
        (
            "llava_next",
            {"vision_feature_select_strategy": "full"},
            {"image_size": 336},
            'must be "default" if the tower',
        ),
        ("llava_next", {"image_grid_pinpoints": [[336, 40]]}, {"image_size": 336}, "of squares of 336 pixels"),
        ("llava_next", {"image_grid_pinpoints": "x"}, {"image_size": 336}, "of squares of 336 pixels"),
        ("llava_next", {}, {}, "of squares of 224 pixels"),
        ("llava_onevision", {"vision_aspect_ratio": "anyres"}, {"model_type": "siglip_vision_model"}, "anyres_max_"),
        ("llava_onevision", {"image_grid_pinpoints": [[5, 5]]}, {"model_type": "siglip_vision_model"}, "of squares of"),
        (
            "llava_onevision",
            {"image_grid_pinpoints": [[-224, 224]]},
            {"model_type": "siglip_vision_model"},
            "squares of",
        ),
        ("llama4", {}, {"intermediate_size": 64}, "intermediate_size=64 must be 4 times hidden_size=768"),
        ("llama4", {}, {"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio=0.3 must be 1 over a number that divides"),
        ("llama4", {}, {"pixel_shuffle_ratio": 2}, "pixel_shuffle_ratio=2 must be 1 over a number that divides"),
        ("llama4", {}, {"intermediate_size": 3072}, "vision_output_dim=None must be projector_input_dim=4096"),
        ("smolvlm", {"scale_factor": 5}, {}, "must divide a square of 7 x 7 patches"),
        ("granite_docling", {}, {"out_hidden_size": 64}, "out_hidden_size=64 is not the hidden size of the text, 1024"),
        ("granite_docling", {}, {"deepstack_visual_indexes": [3, 3]}, "must list each layer once"),
        ("granite_docling", {}, {"deepstack_visual_indexes": [12]}, "must be a whole number from 0 to 11"),
        ("granite_docling", {}, {"scale_factor": 3}, "scale_factor=3 must divide a square of 32 x 32 patches, as must"),
        ("granite_docling", {}, {"scale_factor": 1}, "scale_factor=1 must divide a square of 32 x 32 patches, as must"),
        ("granite_docling", {}, {"use_fine_route": "no"}, "use_fine_route='no' must be true or false"),
        ("aya_vision", {}, {"image_size": 240}, "downsample_factor=None must divide a square of 15 x 15 patches"),
        ("aya_vision", {"adapter_layer_norm_eps": "no"}, {}, "adapter_layer_norm_eps='no' must be a number"),
        (
            "aya_vision",
            {"vision_feature_layer": 13},
            {},
            "vision_feature_layer=13 must be a whole number from -13 to",
        ),
        ("aya_vision", {"vision_feature_select_strategy": "default"}, {}, "select_strategy='default' is not supported"),
        ("minicpmv4_6", {"image_token_id": 5, "insert_layer_id": 12}, {}, "insert_layer_id=12 must be a whole number"),
        ("minicpmv4_6", {"image_token_id": None}, {}, "image_token_id=None must be a whole number"),
        ("minicpmv4_6", {"merge_kernel_size": [3, 3]}, {}, "merge_kernel_size=[3, 3] is not supported, only [2, 2]"),
        ("minicpmv4_6", {}, {"window_kernel_size": [2, 4]}, "window_kernel_size=[2, 4] must be one length"),
        ("minicpmv4_6", {"merger_times": 2}, {}, "merger_times=2 is not supported, only 1"),
        ("minicpmv4_6", {"image_token_id": 5, "downsample_mode": "2x"}, {}, "downsample_mode='2x' is not supported"),
        ("cohere2_vision", {"alignment_intermediate_size": 9}, {}, "alignment_intermediate_size=9 must be even"),
        ("cohere2_vision", {"downsample_factor": 0}, {}, "downsample_factor=0 must be a whole number"),
        ("cohere2_vision", {"image_token_id": "x"}, {}, "image_token_id='x' must be a whole number"),
        ("lfm2_vl", {}, {"num_patches": 200}, "num_patches=200 must be a square number"),
        ("lfm2_vl", {}, {"model_type": "siglip_vision_model"}, "model_type='siglip_vision_model' is not supported"),
        ("lfm2_vl", {"projector_hidden_size": 0}, {}, "projector_hidden_size=0 must be a whole number"),
        ("lfm2_vl", {"projector_use_layernorm": 1}, {}, "projector_use_layernorm=1 must be true or false"),
        ("lfm2_vl", {"downsample_factor": None}, {"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ("internvl", {"vision_feature_layer": -2}, {}, "vision_feature_layer=-2 is not supported"),
        ("mistral3", {}, {"head_dim": 32}, "head_dim=32 is not supported, only 64"),
        ("qwen3_vl", {"image_token_id": "x"}, {}, "image_token_id='x' must be a whole number"),
    ],
)
def test_bad_values_are_errors(row: str, whole: dict[str, Any], vision: dict[str, Any], words: str):
    with pytest.raises(ModelConfigError, match="config") as caught:
        read(row, {**whole, "vision_config": vision})
    assert words in str(caught.value)


def test_unknown_towers_run_with_text_alone(caplog: pytest.LogCaptureFixture):
    for config in ({"vision_config": {"model_type": "dinov2"}}, {"vision_feature_layer": [-2, -5]}):
        assert read_vision("llava", config, PATH, 4096, 1e-5) is None
    for config in ({}, {"vision_config": None}, {"vision_config": {"model_type": "dinov2"}}):
        assert read_vision("gemma4", config, PATH, 4096, 1e-5) is None
        assert read_vision("gemma4_unified", config, PATH, 4096, 1e-5) is None
    assert caplog.text.count("the model runs with text alone") == 8


def test_null_is_no_sight_in_gemma4_of_12b():
    """Missing it is that of the class."""
    for text, sees in (({}, True), ({"use_bidirectional_attention": None}, False)):
        vision, _ = read("gemma4_unified", {"vision_config": {}, "text_config": text})
        assert vision.sees_whole_image == sees


SIDES = {"height": 84, "width": 84}
SQUARE = {"size": {"shortest_edge": 84}, "crop_size": SIDES}
OLD = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.1, **SQUARE}
HALVES = (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("old", "newer", "expected"),
    [
        (OLD, {}, ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.1)),
        (OLD, {"image_processor": {"image_mean": 0.25, "image_std": 2, **SQUARE}}, ((0.25,) * 3, (2.0,) * 3, 1 / 255)),
        ({"image_processor_type": "SiglipImageProcessor", "size": SIDES}, {}, (HALVES, HALVES, 1 / 255)),
        (SQUARE, {}, (CLIP_MEAN, CLIP_STD, 1 / 255)),
    ],
    ids=["old file", "newer file, one number", "SigLIP's defaults", "defaults"],
)
def test_towers_normalise_as_their_image_processor(
    old: dict[str, Any], newer: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
):
    """Folders may have both files."""
    (tmp_path / "config.json").write_text((vision_folder("llava_of_siglip") / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    config = RunConfig(model=ModelOptions(path=str(tmp_path)), plan=True)
    resolved = resolve_run(config, "cpu")
    vision, processor = resolved.model_config.vision, resolved.image_processor
    assert vision is not None
    assert processor is not None
    assert (vision.image_mean, vision.image_std, vision.rescale_factor) == expected
    assert (processor.mean, processor.std, processor.scale) == expected


@pytest.mark.parametrize("row", ["gemma4", "glm4v", "glm_ocr", "llama4", "paddleocr_vl", "qwen2_vl"])
@pytest.mark.parametrize("config", [{}, {"vision_config": None}])
def test_files_without_a_tower_run_with_text_alone(row: str, config: dict[str, Any]):
    """Their class has none by default, or one that fits no text: texts that ran were refused."""
    assert read_vision(row, config, PATH, CLASSES[row][1], 1e-5) is None


def test_padding_id_counts_where_layers_have_inputs():
    """Those of 26B and 31B have none: a text whose padding id is -1 ran, and was refused."""
    text = {"pad_token_id": -1, "hidden_size_per_layer_input": 0}
    assert read("gemma4", {"vision_config": {}, "text_config": text})[0].input_token_id == 0
    with pytest.raises(ModelConfigError, match=r"pad_token_id=-1 must be a whole number .* runs the text alone"):
        read("gemma4", {"vision_config": {}, "text_config": {**text, "hidden_size_per_layer_input": 8}})


def test_keys_of_kimis_authors_are_read():
    """Which are other than transformers'; numbers of the projector are beside the tower's."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3}
    hub = {**{f"vt_{key}": size for key, size in sizes.items()}, "init_pos_emb_height": 9, "init_pos_emb_width": 9}
    theirs = {**hub, "mm_hidden_size": 64, "projector_ln_eps": 0.1, "merge_kernel_size": [2, 2], "patch_size": 7}
    ours = {**sizes, "pos_emb_height": 9, "pos_emb_width": 9, "merge_kernel_size": [2, 2], "patch_size": 7}
    projector = {"projection_hidden_size": 64, "projection_layer_norm_eps": 0.1}
    one = read("kimi_k25", {"vision_config": theirs, "media_placeholder_token_id": 5})
    assert one == read("kimi_k25", {"vision_config": ours, "image_token_id": 5, **projector})
    assert (one[1].num_positions, one[1].projector_eps, one[0].image_token_id) == (81, 0.1, 5)


def test_name_of_lightonocr_in_the_hubs_files_is_read():
    """Which is vLLM's."""
    text = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}}
    names = [f"LightOn{spelled}ForConditionalGeneration" for spelled in ("Ocr", "OCR")]
    one, other = (model_config_of({"architectures": [name], **given}, PATH, with_images=True) for name in names)
    assert one.vision is not None
    assert replace(other, architecture=one.architecture) == one
