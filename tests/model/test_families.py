"""Every row of the table of families against transformers: logits, shards, stages, chunks, and each entry.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_checkpoints import CAME_LAST, DENSE_CASES, LIKE_OTHERS, LIKE_OTHERS_IN_FILES, SIMILAR, VARIANTS
from family_checkpoints import (
    ALL_CASES,
    OLDER_ROPES,
    WITH_IMAGES,
    family_folder,
    family_reference,
    stir,
    thinned_folder,
)
from family_checks import check_views_of_ranks, ids_and_logprobs, joined_logits, readings_of, without_each
from family_mutants import entries
from image_checkpoints import AS_IN_MEMORY, NESTED
from logit_scales import scale_logits
from model_configs import spelled, windows_of
from model_types import MODEL_TYPES
from newer_checkpoints import NEWER
from our_model import is_noticed, load_model, prompt_logits
from plain_models import in_tiers, new_model
from reference_models import Oracle, random_prompt, reference_greedy, relative_error, stateless, their_logits
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, OPTForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from two_stages import TwoStages

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import CheckpointError, ModelConfigError, SpmdError
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.older_rows import OLDER_ROWS
from spmd_worker.model_config.families.omni_rows import OMNI_ROWS
from spmd_worker.model_config.families.table import FAMILIES, UNSUPPORTED
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import Stage

TOLERANCE = 1e-4
# Beyond every window, around a block of 16; the last is beyond the 32 positions of the short factors of LongRoPE.
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 6, 17, 40)]


SECOND_CASES = (
    *("gemma2_head_size", "gemma_older_word", "gpt2_inner", "smollm3_layers", "olmo3_stretched", "gpt_neox_serial"),
    *("falcon_newer_one_norm", "phi_norms", "stablelm_parallel", "exaone4_full", "mistral3_ministral"),
    *("llava_next", "llava_onevision", "internvl"),
)
"""Cases whose layers are those of another case, of the same family or of a text part: their logits are in the stress
tier.
"""

WEIGHTS = "model.safetensors"

quick = partial(in_tiers, among=ALL_CASES, rest=pytest.mark.matrix)

oracle = Oracle(family_reference, PROMPTS)
expected, worst_error = oracle.expected, oracle.worst_error


def logits_of_ranks(name: str, size: int) -> list[Tensor]:
    new = partial(new_model, family_folder(name))
    return joined_logits(size, new, lambda model: prompt_logits(model, PROMPTS))


@pytest.mark.guarantee("Models compute what transformers computes")
@quick(*(name for name in ALL_CASES if name not in (*CAME_LAST, *SECOND_CASES)), slow=(*VARIANTS, *SECOND_CASES))
def test_logits_equal_transformers_with_full_and_thin_files(name: str):
    model = load_model(family_folder(name))
    assert worst_error(name, prompt_logits(model, PROMPTS)) < TOLERANCE
    assert worst_error(name, prompt_logits(model, PROMPTS, 7)) < TOLERANCE
    full, thin = family_folder(name), thinned_folder(name)
    assert read_model_files(thin).model_config == read_model_files(full).model_config
    if (thin / WEIGHTS).read_bytes() != (full / WEIGHTS).read_bytes():
        # Other names of tensors.
        assert worst_error(name, prompt_logits(load_model(thin), PROMPTS)) < TOLERANCE


@pytest.mark.stress
@pytest.mark.parametrize("name", ALL_CASES)
def test_oracle_reads_thin_files_as_full_ones(name: str):
    """None of our code is asked: what it is compared with says the same of both files."""
    (thin,) = their_logits(family_reference(name, is_thinned=True), PROMPTS[-1:])
    assert relative_error(thin, expected(name)[-1]) < 1e-6


def test_new_weights_are_loaded_without_optional_prefix():
    folder = family_folder("gpt2")
    tensors = {
        name.removeprefix("transformer."): each for name, each in load_file(folder / "model.safetensors").items()
    }
    kept, model = new_model(folder), new_model(folder)
    loaded = model.load_weights({name: each * 2 for name, each in tensors.items()}.items())
    assert loaded == set(model.weights.shapes)
    for one, other in zip(kept.parameters(), model.parameters(), strict=True):
        assert torch.equal(one * 2, other)
    with pytest.raises(ValueError, match=r"^h\.0\.other: .*no such weight"):
        model.load_weights([("h.0.other", torch.zeros(1))])


def test_some_thin_files_have_older_keys():
    texts = [(thinned_folder(name) / "config.json").read_text() for name in OLDER_ROPES]
    assert all('"rope_theta"' in text or '"rotary_emb_base"' in text for text in texts)
    assert '"rope_parameters"' in (family_folder("gemma2") / "config.json").read_text()


def each_with_sizes() -> pytest.MarkDecorator:
    """Two and four ranks with some; with those of other tensors one of both, in turns; in the stress tier both."""
    both = ("gemma3", "gpt2", "olmo2", "phi3")
    some = [pytest.param(name, (2, 4), id=name) for name in both]
    others = [name for name in ALL_CASES if name not in both]
    for number, name in enumerate(each for each in others if each not in LIKE_OTHERS_IN_FILES):
        some.append(pytest.param(name, ((2, 4)[number % 2],), marks=pytest.mark.matrix, id=name))
    some += [pytest.param(name, (2, 4), marks=pytest.mark.stress, id=f"{name}-both") for name in others]
    return pytest.mark.parametrize(("name", "sizes"), some)


@pytest.mark.gate(
    "gemma3",
    "gpt2",
    "olmo2",
    "phi3",
    "glm4",
    "phi3_long",
    "gpt_bigcode",
    "granite_swa",
    "falcon_newer",
    "opt_350m",
    "qwen3_vl",
    "phi",
    "nanochat",
    "gpt_neox",
    "stablelm",
    "opt",
    "falcon",
    "cohere2",
    "cohere_plus",
)
@each_with_sizes()
def test_shard_logits_equal_transformers_and_stages_one_rank(name: str, sizes: tuple[int, ...]):
    folder = family_folder(name)
    for size in sizes:
        assert worst_error(name, logits_of_ranks(name, size)) < TOLERANCE, size
    whole = prompt_logits(new_model(folder), PROMPTS, 7)
    staged = prompt_logits(TwoStages(folder, new_model), PROMPTS, 7)  # type: ignore[arg-type]  # as much of a model as is used
    assert all(map(torch.equal, staged, whole))


def test_comparison_detects_flat_norm_of_one_rank(monkeypatch: pytest.MonkeyPatch):
    """Negative control: each rank repeats its own heads instead of gathering the others'."""
    monkeypatch.setattr(Attention, "_all_ranks", lambda self, part, num_copies: torch.cat((part, part), dim=1))
    assert worst_error("olmo2", logits_of_ranks("olmo2", 2)) > 10 * TOLERANCE


@quick("gemma3_images", "gpt2", "phi3", slow=LIKE_OTHERS_IN_FILES)
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """Fused and transposed tensors as they are in the file; on two ranks together all of each."""
    folder = family_folder(name)
    with Checkpoint.open(folder) as checkpoint:
        tensors = {
            each: checkpoint.read(each, tuple((0, size) for size in shape))
            for each, shape in checkpoint.shapes().items()
        }
    model = new_model(folder)
    tensors = {each: tensor for each, tensor in tensors.items() if not model.weights.names.is_derived(each)}
    assert (len(tensors) == len(checkpoint.names())) == (name not in WITH_IMAGES)
    with model.as_checkpoint() as view:
        shown = dict(view.named_parameters())
        assert all(torch.equal(shown[each], tensors[each]) for each in tensors)
    other = new_model(folder)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert other.load_weights(tensors.items()) == set(tensors)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    check_views_of_ranks(folder, tensors)


def test_tensor_by_heads_is_written_at_once(monkeypatch: pytest.MonkeyPatch):
    """Each head's queries, keys and values packed the tensor again."""
    folder, calls = family_folder("gpt_neox"), []
    model, name = new_model(folder), "gpt_neox.layers.1.attention.query_key_value.weight"
    tensor, write_region = load_file(folder / "model.safetensors")[name].flip(0), PackedLayer.write_region

    def counted(layer: PackedLayer, *given: Any) -> None:
        calls.append(layer)
        write_region(layer, *given)

    monkeypatch.setattr(PackedLayer, "write_region", counted)
    model.load_weights([(name, tensor)])
    assert len(calls) == 1
    with model.as_checkpoint() as view:
        assert torch.equal(dict(view.named_parameters())[name], tensor)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.stress if each in SIMILAR else [])
        for each in WITH_IMAGES
        if each not in ("qwen3_vl", "idefics3", "smolvlm", *AS_IN_MEMORY)
    ],
)
def test_names_of_newer_transformers_are_read_and_loaded(name: str, tmp_path: Path):
    folder, model = family_folder(name), new_model(family_folder(name))
    aliases = model.model_config.names.aliases
    shutil.copytree(folder, tmp_path / "newer")

    def newer(tensor: str) -> str:
        for theirs, ours in sorted(aliases.items(), key=lambda pair: -len(pair[1])):
            if tensor.startswith(ours):
                return theirs + tensor.removeprefix(ours)
        return tensor

    tensors = {newer(each): tensor for each, tensor in load_file(folder / "model.safetensors").items()}
    assert not any(each.startswith(("model.layers", "language_model.")) for each in tensors)
    save_file(tensors, tmp_path / "newer" / "model.safetensors", metadata={"format": "pt"})
    found = new_model(tmp_path / "newer")
    assert all(map(torch.equal, found.parameters(), model.parameters()))
    for parameter in found.parameters():
        parameter.data.zero_()
    found.load_weights(tensors.items())
    assert all(map(torch.equal, found.parameters(), model.parameters()))
    with pytest.raises(ValueError, match=r"layers\.99\.mlp\.up_proj\.weight: .*no such weight"):
        found.load_weights([("model.language_model.layers.99.mlp.up_proj.weight", torch.zeros(1))])


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
answers = partial(ids_and_logprobs, params=GREEDY)
# With its answer the third begins before the 32 positions of the short factors of LongRoPE, and ends beyond.
ROWS = [random_prompt(length, seed=3, vocab_size=96) for length in (3, 16, 26, 40, 52)]
ROWS += [ROWS[-1][:40] + ROWS[0]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "recomputed": {"num_blocks": 17, "preemption_mode": "recompute", "block_size": 4},
    "swapped": {"num_blocks": 17, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01},
}


@pytest.mark.gate("gemma2", "apertus", "cohere2", "glm4", "phi3_long", "gpt2", "olmo2")
@quick("glm4", slow=LIKE_OTHERS)
def test_greedy_ids_are_transformers(name: str):
    """LongRoPE: those rows that stay on one side of the original length."""
    rows = ROWS[1::2] if name in DENSE_CASES else ROWS
    rows = [row for row in rows if name != "phi3_long" or not 32 - GREEDY.max_tokens < len(row) <= 32]
    with LLM(family_folder(name), num_blocks=200, max_model_len=96) as llm:
        ours = [ids for ids, _ in answers(llm, rows)]
    assert ours == [reference_greedy(stateless(family_reference(name)), row, GREEDY.max_tokens) for row in rows]


# One of each kind of layer: bounded scores and windows, rotated parts and fused tensors, LongRoPE, norms of whole
# projections.
IN_BFLOAT16 = ("gemma2", "gemma3_images", "glm4", "phi3_long", "olmo2")
BY_ROW = ("apertus", "cohere_plus", "hunyuan", "olmo", "opt_350m")
"""Cases that differ from others in operations that see one token alone: their schedules are in the stress tier."""


def each_type() -> list[Any]:
    """GPT-2 quickly; one of each kind of layer, in one of the dtypes, in the tier of layouts; the others in the stress
    tier.
    """
    marks = {(name, "float32"): pytest.mark.matrix for name in ALL_CASES}
    marks |= {(name, "float32"): pytest.mark.stress for name in (*LIKE_OTHERS, *IN_BFLOAT16, *BY_ROW)}
    marks |= {("gpt2", "float32"): []}
    marks |= {
        (name, "bfloat16"): pytest.mark.matrix if name in IN_BFLOAT16 else pytest.mark.stress for name in ALL_CASES
    }
    return [pytest.param(*each, marks=mark) for each, mark in marks.items()]


@pytest.mark.gate("gpt2-*", "gemma2-*", "phi3_long-*")
@pytest.mark.parametrize(("name", "dtype"), each_type())
def test_row_has_equal_bits_in_any_schedule(name: str, dtype: str):
    given = {"num_blocks": 300, "max_model_len": 64, "dtype": dtype}
    with LLM(family_folder(name), enable_prefix_caching=False, **given) as llm:
        cold = [answers(llm, [row])[0] for row in ROWS]
        assert answers(llm, ROWS) == cold, "alone and together"
    with LLM(family_folder(name), **given) as llm:
        assert answers(llm, ROWS) == cold, "to be cached"
        warm = slice(2, 5)
        assert [answers(llm, [row])[0] for row in ROWS[warm]] == cold[warm], "warm"
        # Whole blocks of 16, but for each row's last token.
        assert llm.llm_engine.counters.num_cached_prompt_tokens >= sum((len(row) - 1) // 16 * 16 for row in ROWS[warm])
    for way, settings in LAYOUTS.items():
        with LLM(family_folder(name), **{**given, **settings}) as llm:
            assert answers(llm, ROWS) == cold, way
            assert (llm.llm_engine.counters.num_preemptions > 0) == (way != "chunks")


@pytest.mark.stress
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL_CASES)
def test_chunks_give_equal_bits_to_full_prompts(name: str, dtype: str):
    model = load_model(family_folder(name), dtype=dtype)
    whole = prompt_logits(model, PROMPTS)
    for chunk in (1, 7, 16):
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk), whole)), chunk


NESTED_FAMILIES = [name for name, kind in MODEL_TYPES.items() if kind in NESTED]
DENSE_FAMILIES = [
    name
    for name, family in FAMILIES.items()
    if family.experts is None and (family.layers is None or name in OLDER_ROWS) and family.encoder_part is None
    if name not in OMNI_ROWS and name not in NEWER
]
"""Those with experts are in test_expert_rows.py, those with encoders in test_encoder_decoder_rows.py, those that mix
tokens in other ways, and thinkers, in files of their own.
"""
FIRST_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Their entries are broken one by one in test_against_transformers.py."""
NOTICED: dict[str, Any] = {"Gemma3ForCausalLM": [], "GPT2LMHeadModel": []}
NOTICED |= dict.fromkeys(("OPTForCausalLM", "GPTNeoXForCausalLM"), pytest.mark.stress)
"""Families whose entries are broken one by one in the first tier, and the longest. Others in the tier of layouts, if
they have an entry that no other there has.
"""

SIZES = {
    "vocab_size": 160_000,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
}
HAVE_SIZES = (
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "GPT2LMHeadModel"),
    *("VaultGemmaForCausalLM", "FalconForCausalLM", "GPTBigCodeForCausalLM", "OPTForCausalLM"),
    *("MllamaForConditionalGeneration", "BloomForCausalLM", "MptForCausalLM"),
    *OLDER_ROWS,
)
OWN_SIZES = {
    "HeliumForCausalLM": {"hidden_size": 5120, "num_attention_heads": 40},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 64},
    "CohereForCausalLM": {"vocab_size": 256_000},
    "Cohere2ForCausalLM": {"vocab_size": 256_000},
    "AyaVisionForConditionalGeneration": {"model_type": "cohere2"},
    "Cohere2VisionForConditionalGeneration": {"model_type": "cohere2"},
    "StableLmForCausalLM": {"hidden_size": 512},
    "GPTNeoXForCausalLM": {"hidden_size": 512},
    "MinistralForCausalLM": {"head_dim": 8},
    "Exaone4_5_ForConditionalGeneration": {"model_type": "exaone4"},
    "GraniteDoclingForConditionalGeneration": {"hidden_size": 1024},
    "Qwen4ExpForConditionalGeneration": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}
"""What goes with the class's other defaults, and what it cannot do without."""
HAVE_OWN_HEADS = ("Mistral3ForConditionalGeneration", "InternVLForConditionalGeneration")
WITHOUT_HEAD_SIZES = ("HeliumForCausalLM", "FalconForCausalLM")
"""Classes that cannot be given another size of heads."""
LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""BLOOM's class has none, and only older files of it."""
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps")


def minimal_files(architecture: str) -> list[dict[str, Any]]:
    """Configs that leave out nearly all, those of classes that have sizes these too; with keys that some classes know
    and others do not.
    """
    sized = spelled(architecture, {**SIZES, **OWN_SIZES.get(architecture, {})})
    foreign = [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}, {"sliding_window_pattern": 3}]
    foreign = [each for each in foreign if architecture not in WITHOUT_HEAD_SIZES or "head_dim" not in each]
    foreign.append(spelled(architecture, {"max_position_embeddings": 8192}))
    # A class whose epsilon is a constant, whatever a file has.
    foreign += [] if FAMILIES[architecture].norms.eps_key else [{"rms_norm_eps": 0.5}]
    bare = [{"architectures": [architecture]}] if architecture in HAVE_SIZES else []
    in_forms = [{}, {"rms_norm_eps": 0.5}] if architecture == "OPTForCausalLM" else [{}, {"num_kv_heads": 1}]
    of_forms = [
        {**each, **form.keys, **more}
        for form in FAMILIES[architecture].variants
        for each in (sized, *bare)
        for more in in_forms
    ]
    files = [*({**sized, **more} for more in foreign), *bare, *of_forms]
    text = FAMILIES[architecture].text
    files += [{"model_type": kind} for kind in text.families if text.defaults] if text is not None else []
    model_type = MODEL_TYPES[architecture]
    if FAMILIES[architecture].text is not None:
        files.append({**sized, "tie_word_embeddings": True})
        return [{"architectures": [architecture], "model_type": model_type, "text_config": each} for each in files]
    return [{**each, "model_type": model_type} for each in files]


def row_of(config: ModelConfig) -> Family:
    """Of its form, where it has one, and of its text, where that is another family's."""
    row = FAMILIES[config.architecture]
    row = FAMILIES[next(iter(row.text.families.values()))] if row.text is not None and row.text.families else row
    return row.variants[config.variant - 1].family if config.variant else row


@pytest.mark.gate(
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma2ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Phi3ForCausalLM",
    "Olmo3ForCausalLM",
    "Ministral3ForCausalLM",
    "GraniteForCausalLM",
    "GlmForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "NanoChatForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Exaone4ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "GPTBigCodeForCausalLM",
    "NemotronForCausalLM",
)
@pytest.mark.matrix
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=pytest.mark.stress if each in NESTED_FAMILIES else []) for each in DENSE_FAMILIES],
)
def test_defaults_of_omitted_keys_equal_transformers(architecture: str, tmp_path: Path):
    for config in minimal_files(architecture):
        # A copy, because the class of EXAONE 4.5 gives the text another model_type.
        whole = AutoConfig.for_model(**deepcopy(config))
        theirs = whole.get_text_config()
        ours = model_config_of(config, tmp_path / "config.json")
        row, heads = row_of(ours), getattr(theirs, "num_kv_heads", theirs.num_attention_heads)
        if not getattr(theirs, "multi_query", True) and not theirs.new_decoder_architecture:
            heads = theirs.num_attention_heads
        assert ours.num_kv_heads == (row.attention.num_kv_heads or getattr(theirs, "num_key_value_heads", heads))
        most = [getattr(theirs, key) for key in LENGTHS if hasattr(theirs, key)]
        assert ours.max_position_embeddings == [*most, 2048][0]
        passed = [each for each in getattr(theirs, "cross_attention_layers", []) if each < theirs.num_hidden_layers]
        num_layers = theirs.num_hidden_layers - len(passed)
        sizes = (theirs.vocab_size, theirs.hidden_size, num_layers, theirs.num_attention_heads)
        assert (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.num_heads) == sizes
        assert ours.image_layers == tuple(passed)
        if "intermediate_size" not in config.get("text_config", {"intermediate_size": 0}):
            assert {layer.intermediate_size for layer in ours.layers} == {theirs.intermediate_size}
        # Of these transformers ties the head unless the files have another; the hub's have one and do not say so.
        says_tied = "tie_word_embeddings" in config.get("text_config", {}) or architecture not in HAVE_OWN_HEADS
        can_be_tied = row.file_keys.get("tie_word_embeddings") != "" and getattr(whole, "tie_word_embeddings", False)
        assert ours.has_tied_embeddings == (can_be_tied and says_tied)
        eps = [getattr(theirs, key) for key in EPSILONS if hasattr(theirs, key)]
        assert [ours.norm.eps] == (eps if row.norms.eps_key else [row.norms.eps])
        eos = getattr(theirs, "eos_token_id", None)
        eos = eos if isinstance(eos, list) else [eos]
        assert ours.eos_token_ids == tuple(each for each in eos if each is not None and each < ours.vocab_size)
        window, kinds = getattr(theirs, "sliding_window", None) or 0, getattr(theirs, "layer_types", None)
        if architecture == "GPTNeoForCausalLM":
            window, of_words = theirs.window_size, {"global": "full_attention", "local": "sliding_attention"}
            kinds = [of_words[each] for each in theirs.attention_layers]
        kinds = kinds or ["sliding_attention"] * ours.num_layers
        assert windows_of(ours) == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
        ropes = getattr(theirs, "rope_parameters", None) or {}
        ropes = {} if getattr(theirs, "alibi", False) else ropes
        if architecture == "GPTJForCausalLM":
            ropes = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": theirs.rotary_dim / ours.head_size,
            }
        ropes = [ropes] if "rope_type" in ropes else [ropes[kind] for kind in sorted(ropes)]
        assert [rope.rope_theta for rope in ours.ropes] == [rope["rope_theta"] for rope in ropes]
        growths = [rope.get("llama_4_scaling_beta", 0.0) for rope in ropes]
        assert [rope.query_growth for rope in ours.ropes] == growths
        partial = [rope.get("partial_rotary_factor", 1.0) for rope in ropes]
        assert [rope.partial_factor for rope in ours.ropes] == partial
        flags = getattr(theirs, "no_rope_layers", None) or [int(bool(ropes))] * ours.num_layers
        if row.rope is not None and row.rope.layers in ("sliding", "sliding_or_all"):
            flags = [int(kind == "sliding_attention") for kind in kinds]
        assert [layer.rope is not None for layer in ours.layers] == [flag == 1 for flag in flags]
        scale = getattr(theirs, "query_pre_attn_scalar", ours.head_size) ** -0.5
        assert ours.layers[0].scale == getattr(theirs, "attention_multiplier", row.attention.scale or scale)
        caps = (getattr(theirs, "attn_logit_softcapping", None), getattr(theirs, "final_logit_softcapping", None))
        assert (ours.layers[0].score_cap, ours.logit_cap) == (caps[0] or 0.0, caps[1] or 0.0)
        if theirs is whole:
            shapes = {ours.names.canonical(name): shape for name, shape in their_tensors(theirs).items()}
            assert tensors_of(ours) == shapes


TEXT_PARTS = [name for name, family in FAMILIES.items() if family.text is not None]
TIED_BY_DEFAULT = {
    "Gemma3ForConditionalGeneration": "gemma3_images",
    "Mistral3ForConditionalGeneration": "mistral3",
    "InternVLForConditionalGeneration": "internvl",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "GotOcr2ForConditionalGeneration": "got_ocr2",
    "GraniteDoclingForConditionalGeneration": "granite_docling",
    "AyaVisionForConditionalGeneration": "aya_vision",
    "Cohere2VisionForConditionalGeneration": "cohere2_vision",
    "JanusForConditionalGeneration": "janus",
    "DeepseekVLForConditionalGeneration": "deepseek_vl",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "GlmAsrForConditionalGeneration": "glmasr",
}
"""A case of each architecture whose class ties by default."""
KIMI = ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration")
"""Whose class does so too, and whose cases are in latent_checkpoints.py."""
OTHER_NAMES = ("LightOnOCRForConditionalGeneration",)
"""Second names of a row, whose cases have the first."""


def text_part_config(architecture: str, of_whole: bool | None, of_text: bool | None) -> dict[str, Any]:
    """A config.json whose parts say of `tie_word_embeddings` what is given, None for nothing."""
    said = [{} if tie is None else {"tie_word_embeddings": tie} for tie in (of_whole, of_text)]
    text = {**SIZES, **OWN_SIZES.get(architecture, {}), **said[1]}
    return {"architectures": [architecture], "model_type": MODEL_TYPES[architecture], **said[0], "text_config": text}


def is_tied_to_transformers(config: dict[str, Any]) -> bool:
    """Mllama's class never ties."""
    if config["model_type"] == "mllama":
        return False
    return getattr(AutoConfig.for_model(**deepcopy(config)), "tie_word_embeddings", False)


def files_of_names(folder: Path, config: dict[str, Any], *heads: str) -> Path:
    """A model folder whose files have an embedding and these heads, by the index alone."""
    names = FAMILIES[config["architectures"][0]].names
    tensors = dict.fromkeys([f"{name}.weight" for name in (names.embedding, *heads)], "model-1-of-1.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    return folder


@pytest.mark.gate("True-False", "None-True")
@pytest.mark.parametrize("of_text", [True, False, None])
@pytest.mark.parametrize("of_whole", [True, False, None])
def test_text_part_ties_its_head_as_transformers(of_whole: bool | None, of_text: bool | None, tmp_path: Path):
    for architecture in TEXT_PARTS:
        config = text_part_config(architecture, of_whole, of_text)
        theirs = is_tied_to_transformers(config)
        folder = files_of_names(tmp_path, config)
        assert read_model_files(folder).model_config.has_tied_embeddings == theirs, architecture
        if None not in (of_whole, of_text):
            assert model_config_of(config, Path("config.json")).has_tied_embeddings == theirs, architecture


@pytest.mark.parametrize("of_text", [True, False, None])
def test_stored_head_overrides_default_tie(of_text: bool | None, tmp_path: Path):
    ties_by_default = []
    for architecture in TEXT_PARTS:
        family = FAMILIES[architecture]
        is_default = is_tied_to_transformers(text_part_config(architecture, None, None))
        ties_by_default += [architecture] if is_default else []
        for head in {family.names.head, "lm_head"}:
            folder = files_of_names(tmp_path, text_part_config(architecture, None, of_text), head)
            is_said = not is_default and family.text.tie == "also" and of_text is True
            assert read_model_files(folder).model_config.has_tied_embeddings == is_said, (architecture, head)
            # Negative control: what a file does say stands, whatever the others have.
            if architecture != "MllamaForConditionalGeneration":
                files_of_names(folder, text_part_config(architecture, True, of_text), head)
                assert read_model_files(folder).model_config.has_tied_embeddings, (architecture, head)
    # Cases of Gemma 3n and 4 are in test_recent_families.py, that of LFM2-VL in test_conv_families.py.
    elsewhere = {f"{name}ForConditionalGeneration" for name in ("Gemma3n", "Gemma4", "Gemma4Unified", "Lfm2Vl")}
    assert set(ties_by_default) == {*TIED_BY_DEFAULT, *KIMI, *OTHER_NAMES, *elsewhere}


def test_both_parts_of_paddleocr_tie_by_default(tmp_path: Path):
    """A false beside the text, whose class ties too, says nothing; in flat files there is no text to say it."""
    for of_whole, of_text, is_tied in ((False, None, (True, False)), (False, False, (False, False))):
        config = text_part_config("PaddleOCRVLForConditionalGeneration", of_whole, of_text)
        flat = {**config, **config["text_config"], "tie_word_embeddings": of_whole}
        del flat["text_config"]
        for each in (config, flat) if of_text is None else (config,):
            assert is_tied_to_transformers(each) == is_tied[0]
            found = [
                read_model_files(files_of_names(tmp_path, each, *heads)).model_config.has_tied_embeddings
                for heads in ((), ("lm_head",))
            ]
            assert found == list(is_tied), (of_whole, of_text)


@pytest.mark.gate("janus", "internvl", "paddleocr_vl")
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "janus" else pytest.mark.matrix) for each in TIED_BY_DEFAULT.values()],
)
def test_head_is_tied_by_default_without_stored_head(name: str, tmp_path: Path):
    folder = tmp_path / name
    shutil.copytree(family_folder(name), folder)
    whole = json.loads((folder / "config.json").read_text())
    whole.pop("tie_word_embeddings", None)
    whole["text_config"].pop("tie_word_embeddings", None)
    tensors = load_file(folder / "model.safetensors")
    assert not any("lm_head" in each for each in tensors)
    (embedding,) = (each for key, each in tensors.items() if key.endswith("embed_tokens.weight"))
    model_class = type(family_reference(name))
    prompts = PROMPTS[:2]
    for of_text in (None, False, True):
        config = {**whole, "text_config": {**whole["text_config"]}}
        if of_text is not None:
            config["text_config"]["tie_word_embeddings"] = of_text
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        tied = prompt_logits(load_model(folder), prompts)
        assert max(map(relative_error, tied, expected(name))) < TOLERANCE
        for head in {FAMILIES[config["architectures"][0]].names.head, "lm_head"}:
            other = {**tensors, f"{head}.weight": embedding.flip(0).contiguous()}
            save_file(other, folder / "model.safetensors", {"format": "pt"})
            ours = prompt_logits(load_model(folder), prompts)
            theirs = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            theirs = scale_logits(theirs)
            for prompt, logits, with_embedding in zip(prompts, ours, tied, strict=True):
                with torch.no_grad():
                    right = theirs(torch.tensor([prompt]), use_cache=False).logits[0].float()
                assert relative_error(logits, right) < TOLERANCE
                # Negative control: the embedding as head gives others.
                assert relative_error(with_embedding, right) > 10 * TOLERANCE


def test_tie_follows_text_config_without_files(tmp_path: Path):
    """As of a plan. The hub's InternVL and Mistral 3 have a head of their own."""
    for architecture in TIED_BY_DEFAULT:
        for of_text in (None, False, True):
            config = text_part_config(architecture, None, of_text)
            expected = architecture not in HAVE_OWN_HEADS if of_text is None else of_text
            (tmp_path / "config.json").write_text(json.dumps(config))
            assert read_model_files(tmp_path).model_config.has_tied_embeddings == expected, architecture
            # An index that says nothing is none.
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
            assert read_model_files(tmp_path).model_config.has_tied_embeddings == expected, architecture
            (tmp_path / "model.safetensors.index.json").unlink()


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint."""
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    return {piece.checkpoint_name: piece.checkpoint_shape for piece in build_model(context, config).weights.slices}


def their_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Of Apertus some numbers are buffers.
    buffers = {name: each for name, each in model.named_buffers() if "act_fn" in name}
    return {name: tuple(each.shape) for name, each in {**dict(model.named_parameters()), **buffers}.items()}


_TABLES = ("models", "defaults", "file_keys", "required")


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama has it, in one of its forms too."""
    found = mutants_of_row(row)
    for number, form in enumerate(row.variants):
        families = [(what, replace(form, family=family)) for what, family in mutants_of_row(form.family)]
        wheres = [
            (f"where.{key}", replace(form, keys={each: form.keys[each] for each in form.keys if each != key}))
            for key in form.keys
        ]
        for what, mutant in (*families, *wheres):
            forms = (*row.variants[:number], mutant, *row.variants[number + 1 :])
            found.append((f"forms.{number}.{what}", replace(row, variants=forms)))
    return found


def mutants_of_row(row: Family) -> list[tuple[str, Family]]:
    # Aliases are no checkpoint's of transformers here: the test of them, above, says what they are. So are heads that
    # no file speaks of. Layers that speculate have a test of their own, below; sections differ in images alone, whose
    # logits test_image_rows compares, and names of scores of tokens in these, which test_token_pooling compares.
    unseen = (
        *("text.ties_by_default", "names.aliases", "names.ignores_later_layers", "rope.sections"),
        "names.token_classifier",
    )
    return entries(row, Family(), *_TABLES, *unseen) + without_each(row, "defaults", "file_keys", "required")


def readings(architecture: str) -> list[ModelConfig | str]:
    """What minimal files say, and files with another value of what must have one; the test above has compared those."""
    row = FAMILIES[architecture]
    minimal = minimal_files(architecture)
    refused = [{**minimal[0], key: "other"} for key in row.required]
    for form in row.variants:
        refused += [{**minimal[0], **form.keys, key: "other"} for key in form.family.required]
        refused += [{**minimal[0], key: value} for key, value in form.keys.items()]
    sized = spelled(architecture, {**SIZES, **OWN_SIZES.get(architecture, {})})
    named = {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 7.0}
    deep = {"num_hidden_layers": 90, "use_sliding_window": True, "sliding_window": 9}
    named = [{**sized, **named, "num_key_value_heads": 2, "head_dim": 48}, {**sized, **deep}]
    named += [{**named[0], **form.keys} for form in row.variants]
    named += [{**sized, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}]
    named += [{**sized, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}]
    lengths = ({"n_positions": 64}, {"seq_length": 64}, {"max_seq_len": 64})
    named += [{**sized, **each} for each in ({"partial_rotary_factor": 0.5}, {"pad_token_id": 2}, *lengths)]
    tied = [(minimal[0], True), (minimal[-1], False)] if row.text is not None else []
    named += [{**config, "tie_word_embeddings": is_tied} for config, is_tied in tied]
    found: list[ModelConfig | str] = []
    try:
        config = model_config_of(minimal[0], Path("config.json"))
        found += tensors_of(replace(config, has_tied_embeddings=False))
    except (SpmdError, AssertionError) as error:
        found.append(str(error))
    return found + readings_of((*minimal, *refused, *named), with_reasons=True)


def is_case_noticed(name: str) -> bool:
    """A difference to transformers' logits, with either of its files."""

    def logits_of(folder: Path) -> list[Tensor]:
        return prompt_logits(new_model(folder, config=read_model_files(folder).model_config), PROMPTS)

    def is_right(logits: list[Tensor]) -> bool:
        return worst_error(name, logits) < TOLERANCE

    return is_noticed((family_folder(name), thinned_folder(name)), logits_of, is_right)


def each_with_new_entries() -> list[Any]:
    """Families outside the stress tier have an entry that no family before them there has."""
    found, seen = [], set()
    for each in sorted(DENSE_FAMILIES, key=lambda name: NOTICED.get(name) != []):
        names = {what for what, _ in mutants(FAMILIES[each])}
        is_repeated = each in NESTED_FAMILIES or each in NOTICED or names <= seen
        mark = NOTICED.get(each, pytest.mark.stress if is_repeated else pytest.mark.matrix)
        seen |= names if mark != pytest.mark.stress else set()
        found += [] if each in (*FIRST_FAMILIES, *OTHER_NAMES) else [pytest.param(each, marks=mark)]
    return found


@pytest.mark.gate("Gemma3ForCausalLM", "GPT2LMHeadModel")
@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("architecture", each_with_new_entries())
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    """By logits, or in what a file says that leaves it out. A key of ours where transformers has another is none."""
    cases = [
        name for name in ALL_CASES if read_model_files(family_folder(name)).model_config.architecture == architecture
    ]
    assert cases
    right = readings(architecture)
    silent = []
    for what, mutant in mutants(FAMILIES[architecture]):
        if architecture == "Mistral3ForConditionalGeneration" and what in ("names.parts", "names.stacked"):
            # Of its text with experts, whose logits test_latent_rows compares.
            continue
        monkeypatch.setitem(FAMILIES, architecture, mutant)
        if readings(architecture) == right and not any(is_case_noticed(name) for name in cases):
            silent.append(what)
    assert not silent, silent


@pytest.mark.parametrize(("architecture", "name"), [("OlmoForCausalLM", "olmo"), ("OPTForCausalLM", "opt")])
def test_comparison_detects_changed_constant_epsilon(architecture: str, name: str, monkeypatch: pytest.MonkeyPatch):
    row = FAMILIES[architecture]
    monkeypatch.setitem(FAMILIES, architecture, replace(row, norms=replace(row.norms, eps=1e-6)))
    assert is_case_noticed(name)


BAD_OLDER = [
    ("GPTNeo", {"attention_types": [["global", 24]]}, "attention_types=[['global', 24]] must list pairs"),
    ("GPTNeo", {"attention_types": [[["global"], 10**9]]}, "must list pairs: a list of global and local, and a number"),
    ("GPTNeo", {"attention_types": [[["global"], 3]]}, "has 3 layers: num_layers is 24"),
    ("XGLM", {"pad_token_id": 2}, "pad_token_id=2 must be 0 or 1: transformers has zeros for the position"),
    ("XGLM", {"add_cross_attention": True}, "add_cross_attention=True is not supported, only False"),
    ("GPTJ", {"rotary": False}, "rotary=False is not supported, only True"),
    ("GPTJ", {"rotary_dim": 7}, "rotates 7 elements: they must be an even number"),
    ("Doge", {}, "its attention leaves out keys by what they hold"),
    ("JetMoe", {}, "its attention has experts"),
    ("BitNet", {}, "its weights are ternary"),
]


@pytest.mark.parametrize(("family", "keys", "message"), BAD_OLDER)
def test_invalid_keys_of_older_families_are_rejected(family: str, keys: dict[str, Any], message: str):
    with pytest.raises(ModelConfigError) as caught:
        model_config_of({"architectures": [f"{family}ForCausalLM"], **keys}, Path("config.json"))
    assert message in str(caught.value)


@pytest.mark.stress
def test_wrappers_of_table_texts_run_or_are_rejected():
    refused = {name for names in UNSUPPORTED.values() for name in names}
    texts = {*MODEL_TYPES.values(), "glm4v_text", "qwen3_vl_text", "mllama_text_model"}
    wrapped = {}
    for model_type, architecture in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items():
        parts = getattr(CONFIG_MAPPING[model_type], "sub_configs_defaults", {})
        if getattr(parts.get("text_config"), "model_type", None) in texts:
            wrapped[architecture] = architecture in FAMILIES or architecture in refused
    assert len(wrapped) > 30
    assert [architecture for architecture, is_known in wrapped.items() if not is_known] == []


@pytest.mark.stress
def test_layer_beyond_the_last_is_skipped_if_allowed(tmp_path: Path):
    for name in ("glm_ocr", "glm4v"):
        shutil.copytree(family_folder(name), tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        tensors["model.language_model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    both = (new_model(folder).parameters() for folder in (tmp_path / "glm_ocr", family_folder("glm_ocr")))
    assert all(map(torch.equal, *both))
    with pytest.raises(CheckpointError, match="eh_proj"):
        new_model(tmp_path / "glm4v")


@pytest.mark.matrix
def test_text_skips_image_layers(tmp_path: Path):
    """Equal to transformers without an image: the contents of those layers have no effect, but their indices count."""
    folder = family_folder("mllama")
    config = read_model_files(folder).model_config
    assert (config.num_layers, config.image_layers, config.layer_numbers) == (3, (0, 3), (1, 2, 4))
    names = new_model(folder).weights.shapes
    assert {name.split(".")[3] for name in names if ".layers." in name} == {"1", "2", "4"}
    shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    passed = [name for name in tensors if ".layers.0." in name or ".layers.3." in name]
    assert any("cross_attn" in name for name in passed)
    tensors |= {name: tensors[name] + 1 for name in passed}
    # Rows of tokens that no text has.
    tensors["language_model.model.embed_tokens.weight"][96:] += 1
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    assert worst_error("mllama", prompt_logits(new_model(tmp_path / "other"), PROMPTS)) < TOLERANCE
    # Negative control: a layer of text and a row of a token of text are looked at.
    for name, first in (("layers.1.mlp.up_proj", 0), ("embed_tokens", PROMPTS[0][0])):
        looked_at = f"language_model.model.{name}.weight"
        changed = tensors[looked_at].clone()
        changed[first] += 1
        save_file({**tensors, looked_at: changed}, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        assert worst_error("mllama", prompt_logits(new_model(tmp_path / "other"), PROMPTS)) > 10 * TOLERANCE, name


@pytest.mark.matrix
@pytest.mark.parametrize(("listed", "missing"), [((0, 3, 4), ""), ((1, 3), "layers.0.self_attn"), ((0,), "layers.3.")])
def test_comparison_detects_wrong_list_of_image_layers(listed: tuple[int, ...], missing: str, tmp_path: Path):
    """Negative control: a layer of text that is taken for one of images, and one the other way round."""
    shutil.copytree(family_folder("mllama"), tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["cross_attention_layers"] = list(listed)
    path.write_text(json.dumps(config))
    if missing:
        with pytest.raises(CheckpointError, match=re.escape(missing)):
            new_model(tmp_path / "other")
    else:
        assert worst_error("mllama", prompt_logits(new_model(tmp_path / "other"), PROMPTS)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("all", "cross_attention_layers='all' must be a list of layers, from 0 on"),
        ([-1], "cross_attention_layers=-1 must be a whole number from 0"),
        ([True], "cross_attention_layers=True must be a whole number from 0"),
        (list(range(9)), "leaves none of num_hidden_layers=8 for text"),
    ],
)
def test_invalid_image_layers_are_rejected_by_key(layers: Any, message: str):
    text = {**SIZES, "num_key_value_heads": 8, "cross_attention_layers": layers}
    config = {"architectures": ["MllamaForConditionalGeneration"], "text_config": text}
    with pytest.raises(ModelConfigError) as caught:
        model_config_of(config, Path("config.json"))
    assert message in str(caught.value)
    # Beyond the last layer there is nothing to pass by.
    text["cross_attention_layers"] = [1, 8, 1]
    assert model_config_of(config, Path("config.json")).image_layers == (1,)


@pytest.mark.stress
def test_image_token_makes_an_error_row():
    with LLM(family_folder("mllama"), num_blocks=60) as llm:
        fine, image = llm.generate([[5, 6, 7], [5, 96, 7]], GREEDY, use_tqdm=False, on_error="row")
    assert fine.error is None
    assert image.error == "token id 96 is outside the vocabulary of 96 tokens"


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["opt_350m", "stablelm_12b", "mllama"])
def test_stage_knows_tensors_of_other_stage(name: str):
    folder = family_folder(name)
    whole = new_model(folder).weights.shapes
    for stage in (Stage(0, 1, is_first=True, is_last=False), Stage(1, 2, is_first=False, is_last=True)):
        assert new_model(folder, stage=stage).weights.shapes == whole


@pytest.mark.stress
@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_classifier_of_projected_embeddings_equals_transformers(pooling_type: str, tmp_path: Path):
    """Its scores and its vectors are as wide as an embedding, not as a layer."""
    config = AutoConfig.from_pretrained(family_folder("opt_350m"), num_labels=3)
    model = OPTForSequenceClassification(config).float().eval()
    stir(model)
    model.save_pretrained(tmp_path)
    rows = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    if pooling_type == "mean":
        with LLM(family_folder("opt_350m"), runner="pooling", pooling_type="mean", num_blocks=60) as llm:
            outputs = llm.embed(rows, use_tqdm=False)
        assert [len(output.outputs.embedding) for output in outputs] == [32] * len(rows)
        return
    with LLM(tmp_path, num_blocks=60) as llm:
        outputs = llm.classify(rows, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].softmax(0)
        assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-5)
