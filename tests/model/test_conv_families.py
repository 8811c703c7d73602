"""Hybrids with short convolutions against transformers: logits, steps, shards, stages, tensors, each entry of a row.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_checkpoints import CASES, conv_folder, conv_reference, thinned_conv_folder
from family_mutants import entries
from hybrid_runs import greedy_ids, run_rows
from our_model import is_noticed, load_model
from peft import PeftModel
from peft_adapters import peft_logits, write_adapter
from plain_models import in_tiers, new_model
from reference_models import open_reference, random_prompt, reference_greedy, relative_error
from safetensors.torch import load_file, save_file
from state_segments import CHUNKS
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import CheckpointError, ConfigError, ModelConfigError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import select_experts
from spmd_worker.model.layers.short_conv import ShortConv
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.families.conv_rows import CONV_ROWS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels, silu
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import RankLayout, Stage, check_divides
from spmd_worker.worker.memory.estimate import weights_bytes

TOLERANCE = 1e-4
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 70)]
FEW = ("lfm2_biases", "lfm2_moe", "lfm3")
"""One case of each family."""


quick = partial(in_tiers, among=FEW)


@cache
def expected(name: str) -> list[Tensor]:
    return their_logits(conv_reference(name))


@torch.no_grad()
def their_logits(model: Any) -> list[Tensor]:
    return [model(torch.tensor([row]), use_cache=False).logits[0].float() for row in ROWS]


def worst_error(name: str, logits: list[Tensor]) -> float:
    return max(map(relative_error, logits, expected(name)))


@pytest.mark.guarantee("Models compute what transformers computes")
@quick(*FEW, among=CASES, rest=pytest.mark.matrix)
def test_logits_and_ids_equal_transformers(name: str):
    model = load_model(conv_folder(name))
    assert worst_error(name, run_rows([model], ROWS)[0]) < TOLERANCE
    assert worst_error(name, run_rows([load_model(thinned_conv_folder(name))], ROWS)[0]) < TOLERANCE
    configs = [read_model_files(each).model_config for each in (conv_folder(name), thinned_conv_folder(name))]
    assert configs[0] == configs[1]
    thinned = their_logits(conv_reference(name, is_thinned=True))
    assert all(map(torch.equal, thinned, expected(name))), "the oracle's own"
    assert greedy_ids([model], ROWS[1], 4) == reference_greedy(_stateless(conv_reference(name)), ROWS[1], 4)


def _stateless(model: Any) -> Any:
    """Without ropes that remember, which `reference_greedy` would reset."""

    class Shown:
        def __init__(self) -> None:
            self.model = type("Inner", (), {"rotary_emb": type("Rope", (), {"__init__": lambda *_, **__: None})()})()
            self.config = None

        def generate(self, *arguments: Any, **settings: Any) -> Any:
            return model.generate(*arguments, **settings)

    return Shown()


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
@quick("lfm3")
def test_steps_do_not_change_bits_or_states(name: str, dtype: str):
    """Prompts cut anywhere, rows together and alone; slots and blocks hold NaN before."""
    model = load_model(conv_folder(name), dtype=dtype)
    logits, states = run_rows([model], ROWS)
    assert all(not each.isnan().any() for row in states for each in row)
    if dtype == "bfloat16":
        # Rounded scores choose other experts for some tokens.
        assert 1e-4 < worst_error(name, logits) < (0.5 if name == "lfm2_moe" else 0.2)
    for chunk in CHUNKS:
        found, found_states = run_rows([model], ROWS, chunk, is_fused=chunk != 7)
        assert all(map(torch.equal, found, logits)), chunk
        assert all(torch.equal(*pair) for both in zip(found_states, states) for pair in zip(*both)), chunk
    for row, alone in enumerate(ROWS):
        found, found_states = run_rows([model], [alone])
        assert torch.equal(found[0], logits[row])
        assert all(map(torch.equal, found_states[0], states[row]))


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SCHEDULES: dict[str, dict[str, Any]] = {
    "cached": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "recomputed": {"num_blocks": 37, "preemption_mode": "recompute", "block_size": 4},
    "swapped": {"num_blocks": 37, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01},
}


def outputs(llm: LLM, rows: list[list[int]]) -> list[Any]:
    return [
        (each.outputs[0].token_ids, [entry.logprob for step in each.outputs[0].logprobs for entry in step.values()])
        for each in llm.generate(rows, GREEDY, use_tqdm=False)
    ]


@pytest.mark.parametrize("name", ["lfm3", *(pytest.param(each, marks=pytest.mark.stress) for each in FEW[:2])])
def test_row_has_equal_bits_in_any_schedule(name: str):
    """By the engine: rows together, from cached prompts with their states, in chunks, and after preemption."""
    rows = [random_prompt(length, seed=3, vocab_size=96) for length in (3, 22, 40, 52, 130)]
    rows.append(rows[-1][:128] + rows[0])
    given = {"num_blocks": 200, "max_model_len": 144, "enable_prefix_caching": False}
    with LLM(conv_folder(name), **given) as llm:
        cold = [outputs(llm, [row])[0] for row in rows]
        assert outputs(llm, rows) == cold, "alone and together"
    assert cold[1][0] == reference_greedy(_stateless(conv_reference(name)), rows[1], GREEDY.max_tokens)
    for way, settings in SCHEDULES.items():
        with LLM(conv_folder(name), **{**given, **settings}) as llm:
            assert outputs(llm, rows) == cold, way
            counters = llm.llm_engine.counters
            assert (counters.num_preemptions > 0) == (way in ("recomputed", "swapped")), way
            if way == "cached":
                assert [outputs(llm, [row])[0] for row in rows] == cold
                assert counters.num_cached_prompt_tokens >= 2 * 128


def test_comparison_detects_steps_that_forget(monkeypatch: pytest.MonkeyPatch):
    """Negative control: a convolution that begins anew in each step."""
    forgets = ReferenceRecurrentKernels.short_conv

    def short_conv(self: Any, x: Tensor, *others: Any, **options: Any) -> Tensor:
        *before, segments = others
        return forgets(self, x, *before, replace(segments, firsts=torch.zeros_like(segments.firsts)), **options)

    model = new_model(conv_folder("lfm2"))
    whole = run_rows([model], ROWS)[0]
    assert all(map(torch.equal, run_rows([model], ROWS, 63)[0][:2], whole[:2]))
    monkeypatch.setattr(ReferenceRecurrentKernels, "short_conv", short_conv)
    assert all(map(torch.equal, run_rows([model], ROWS)[0], whole))
    assert not torch.equal(run_rows([model], ROWS, 63)[0][2], whole[2])


@quick("lfm3")
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    folder = conv_folder(name)

    def run(group: GroupHandle) -> list[Tensor]:
        model = new_model(folder, group)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in run_rows([model], ROWS, 33)[0]]

    whole = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
    assert worst_error(name, whole) < TOLERANCE
    end = read_model_files(folder).model_config.num_layers
    cuts = (Stage(0, 3, is_first=True, is_last=False), Stage(3, end, is_first=False, is_last=True))
    staged, states = run_rows([new_model(folder, stage=stage) for stage in cuts], ROWS, 33)
    alone, states_of_one = run_rows([new_model(folder)], ROWS, 33)
    assert all(map(torch.equal, staged, alone))
    assert all(torch.equal(*pair) for both in zip(states, states_of_one, strict=True) for pair in zip(*both))


@quick("lfm3")
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """By the names of files and of transformers' memory; on two ranks together all of each."""
    folder = conv_folder(name)
    model, tensors = new_model(folder), load_file(folder / "model.safetensors")
    tensors = {each: tensor for each, tensor in tensors.items() if not model.weights.names.is_derived(each)}
    with model.as_checkpoint() as view:
        shown = dict(view.named_parameters())
        assert all(torch.equal(shown[each].float(), tensors[each].float()) for each in tensors)
    assert set(shown) == set(tensors)
    for given in (tensors, conv_reference(name).state_dict()):
        other = new_model(folder)
        for parameter in other.parameters():
            parameter.data.zero_()
        assert other.load_weights(list(given.items())) == set(tensors)
        assert all(map(torch.equal, other.parameters(), model.parameters()))

    def run(group: GroupHandle) -> dict[str, int]:
        with new_model(folder, group).as_checkpoint() as view:
            return {each: parameter.numel() for each, parameter in view.named_parameters()}

    first, second = on_ranks(2, run)
    assert all(first.get(each, 0) + second.get(each, 0) >= tensors[each].numel() for each in tensors)


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", ["lfm2_biases", "lfm2_moe", "lfm3_plain", "lfm3"])
def test_planned_bytes_equal_parameters(name: str):
    config = read_model_files(conv_folder(name)).model_config
    for size, dtype in ((1, "float32"), (2, "bfloat16"), (4, "float32")):
        for rank in range(size):
            group = GroupHandle(ranks=tuple(range(size)), rank=rank, group=None)
            options = (ReferenceKernels(), SdpaBackend(), getattr(torch, dtype), torch.device("meta"))
            parameters = build_model(LayerContext(group, *options), config).parameters()
            planned = weights_bytes(config, RankLayout(size), rank, dtype, "cuda")
            assert planned == sum(each.nbytes for each in parameters), (size, rank)


def test_int8_projections_stay_near_transformers():
    model = load_model(conv_folder("lfm3"), quantization="int8")
    conv = model.model.layers[0].conv
    assert conv.in_proj.weight.dtype == conv.out_proj.weight.dtype == torch.int8
    assert conv.conv.weight.dtype == torch.float32
    logits, states = run_rows([model], ROWS)
    assert 1e-3 < worst_error("lfm3", logits) < 0.3
    found, found_states = run_rows([model], ROWS, 16)
    assert all(map(torch.equal, found, logits))
    assert all(torch.equal(*pair) for both in zip(found_states, states) for pair in zip(*both))


def test_adapters_of_convolutions_are_those_of_peft(tmp_path: Path):
    folder, targets = conv_folder("lfm2_biases"), ("in_proj", "out_proj", "q_proj", "w2")
    write_adapter(open_reference(folder), tmp_path, (("target_modules", targets),))
    model, source = load_model(folder), read_adapter(tmp_path)
    loaded = LoadedAdapters(model, AdapterLimits(max_loras=2, max_lora_rank=8, max_cpu_loras=2))
    loaded.commit(loaded.prepare(source))
    reference = PeftModel.from_pretrained(open_reference(folder), tmp_path).eval()
    logits, _ = run_rows([model], ROWS, 33, loaded=loaded, digests=[source.digest] * len(ROWS))
    theirs = [peft_logits(reference, row) for row in ROWS]
    assert max(map(relative_error, logits, theirs)) < TOLERANCE
    # Control: it matters.
    assert worst_error("lfm2_biases", logits) > 100 * TOLERANCE


# ---- each entry of a row, and mistakes that no entry makes ---------------------------------------------------------

UNSEEN = ("models", "defaults", "newer", "layers", "experts.sum_eps", "rope.rounding", "names.layer_aliases")
"""Entries without an effect on these logits: the rounding is of bfloat16; the others have tests of their own."""
BARE = (
    {},
    {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.5, "hidden_act": "gelu"},
    {"num_experts": None, "num_local_experts": 4, "hidden_size": 1024},
)
"""Files that leave out nearly all, with keys that the classes do not know."""


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, with one renamed part, and with one norm fewer."""
    found = entries(row, Family(), *UNSEEN, "names.parts", "file_keys")
    for key in row.names.parts:
        parts = {other: name for other, name in row.names.parts.items() if other != key}
        found.append((f"names.parts {key}", replace(row, names=replace(row.names, parts=parts))))
    return found


def readings(architecture: str) -> list[Any]:
    """Of the bare files; None for one that is rejected."""
    found: list[Any] = []
    for keys in BARE:
        kinds = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
        try:
            found.append(model_config_of({"architectures": [architecture], **kinds, **keys}, Path("config.json")))
        except ModelConfigError:
            found.append(None)
    return found


def our_logits(folder: Path) -> list[Tensor]:
    return run_rows([new_model(folder)], ROWS)[0]


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=[] if each == "Lfm3ForCausalLM" else pytest.mark.stress) for each in CONV_ROWS],
)
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (family, _) in CASES.items() if f"{family}ForCausalLM" == architecture]
    folders = {name: (conv_folder(name), thinned_conv_folder(name)) for name in cases}
    silent, right = [], readings(architecture)
    assert None not in right
    for what, mutant in mutants(FAMILIES[architecture]):
        monkeypatch.setitem(FAMILIES, architecture, mutant)
        if readings(architecture) != right:
            continue
        rights = [(folders[name], lambda logits, name=name: worst_error(name, logits) < TOLERANCE) for name in cases]
        if not any(is_noticed(each, our_logits, is_right) for each, is_right in rights):
            silent.append(what)
    assert not silent, silent


def _other_order(name: str) -> list[Tensor]:
    """Of the projections B, C and v."""
    model = new_model(conv_folder(name))
    for layer in model.model.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            before, after, value = layer.conv.in_proj.weight.chunk(3)
            layer.conv.in_proj.weight.data = torch.cat((after, before, value))
    return run_rows([model], ROWS)[0]


def _newest_first(name: str) -> list[Tensor]:
    model = new_model(conv_folder(name))
    for layer in model.model.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            layer.conv.conv.weight.data = layer.conv.conv.weight.flip(-1)
    return run_rows([model], ROWS)[0]


def _with_silu(name: str) -> list[Tensor]:
    model, plain = new_model(conv_folder(name)), ReferenceRecurrentKernels()

    class Other(ReferenceRecurrentKernels):
        def short_conv(self, *arguments: Any, has_silu: bool) -> Tensor:
            return silu(plain.short_conv(*arguments, has_silu=has_silu))

    for layer in model.model.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            layer.conv._kernels = Other()
    return run_rows([model], ROWS)[0]


def _changed(name: str, **fields: Any) -> list[Tensor]:
    config = read_model_files(conv_folder(name)).model_config
    layers = tuple(each if each.conv is not None else replace(each, **fields) for each in config.layers)
    return run_rows([new_model(conv_folder(name), config=replace(config, layers=layers))], ROWS)[0]


def _partial_rope(name: str) -> list[Tensor]:
    """The proportional rope as one over a part of a head."""
    config = read_model_files(conv_folder(name)).model_config
    ropes = tuple(replace(each, rope_type="default") for each in config.ropes)
    return run_rows([new_model(conv_folder(name), config=replace(config, ropes=ropes))], ROWS)[0]


MISTAKES: dict[str, tuple[str, Callable[[str], list[Tensor]]]] = {
    "projections in another order": ("lfm2", _other_order),
    "silu after the convolution": ("lfm2", _with_silu),
    "newest tap first": ("lfm2", _newest_first),
    "proportional as partial": ("lfm3", _partial_rope),
    "no window": ("lfm3", lambda name: _changed(name, window=0)),
    "one rope": ("lfm3", lambda name: _changed(name, rope=1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_known_mistakes(mistake: str):
    name, logits_of = MISTAKES[mistake]
    assert worst_error(name, logits_of(name)) > 100 * TOLERANCE


def test_gates_multiply_heads_before_their_projection():
    """By hand, for the gates of one layer."""
    model = new_model(conv_folder("lfm3"))
    attention = next(each.self_attn for each in model.model.layers if hasattr(each, "self_attn"))
    assert isinstance(attention, Attention)
    x, attended = torch.randn(3, 64), torch.randn(3, 64)
    assert attention.g_proj is not None
    gates = torch.sigmoid(F.linear(x, attention.g_proj.weight))
    expected_heads = (attended.view(3, 4, 16) * gates[..., None]).flatten(1)
    torch.testing.assert_close(attention._gated(attended, attention.g_proj(x).unsqueeze(2)), expected_heads)


def test_small_scores_are_divided_as_by_transformers():
    """1e-6 in the sum shows where all scores are small."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) - 14
    experts = ExpertsConfig(8, 2, 16, score="sigmoid", renormalises=True, scaling=1.7, sum_eps=1e-6)
    ids, weights = select_experts(logits, None, experts)
    config = AutoConfig.for_model("lfm2_moe", num_experts=8, num_experts_per_tok=2, hidden_size=8)
    config.use_expert_bias, config.routed_scaling_factor = False, 1.7
    router = Lfm2MoeTopKRouter(config)
    router.weight.data.copy_(torch.eye(8))
    _, theirs, chosen = router(logits)
    order = chosen.argsort(dim=-1)
    assert torch.equal(ids, chosen.gather(1, order))
    torch.testing.assert_close(weights, theirs.gather(1, order))
    plain = select_experts(logits, None, replace(experts, sum_eps=1e-20))[1]
    assert not torch.allclose(plain, weights, rtol=1e-2)
    row = read_model_files(conv_folder("lfm2_moe")).model_config.layers[-1].experts
    assert row is not None
    assert row.sum_eps == 1e-6


# ---- config.json ---------------------------------------------------------------------------------------------------

FILES: list[tuple[str, dict[str, Any]]] = [
    ("lfm2", {}),
    ("lfm2", {"full_attn_idxs": [2, 5], "num_hidden_layers": 6, "tie_embedding": False}),
    ("lfm2", {"block_ff_dim": 1000, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2", {"block_ff_dim": 10240, "intermediate_size": 6656, "block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "tie_embedding": False}),
    ("lfm3", {}),
    ("lfm3", {"num_hidden_layers": 7, "use_sandwich_norm": False, "conv_L_cache": 5}),
]


@pytest.mark.parametrize(("model_type", "keys"), FILES)
def test_omitted_keys_have_the_defaults_of_transformers(model_type: str, keys: dict[str, Any]):
    sizes = {"hidden_size": 128, "num_attention_heads": 32 if model_type != "lfm3" else 16, "vocab_size": 128000}
    theirs = AutoConfig.for_model(model_type, **sizes, **keys)
    architecture = {"lfm2": "Lfm2", "lfm2_moe": "Lfm2Moe", "lfm3": "Lfm3"}[model_type]
    ours = model_config_of({"architectures": [f"{architecture}ForCausalLM"], **sizes, **keys}, Path("config.json"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    found = build_model(context, ours)
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items() if ".experts." not in name}
    if theirs.tie_word_embeddings:
        del shapes["lm_head.weight"]
    named = {ours.names.canonical(name): shape for name, shape in shapes.items()}
    own = {name: tuple(shape) for name, shape in found.weights.shapes.items() if ".experts." not in name}
    assert named == own
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    kinds = [
        "conv" if each.mixer == "conv" else "sliding_attention" if each.window else "full_attention"
        for each in ours.layers
    ]
    assert kinds == theirs.layer_types
    assert ours.norm.eps == theirs.norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    ropes = theirs.rope_parameters
    ropes = [ropes] if "rope_type" in ropes else [ropes["full_attention"], ropes["sliding_attention"]]
    assert [each.rope_theta for each in ours.ropes] == [each["rope_theta"] for each in ropes]
    assert [each.rope_type for each in ours.ropes] == [each["rope_type"] for each in ropes]


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"layer_types": ["conv"] * 3}, r"layer_types=\[.*must list 4 of full_attention, conv"),
    ("lfm2", {"layer_types": ["conv"] * 3 + ["sliding_attention"]}, "layer_types="),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs=3 must be a list of layers"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [-1]}, "full_attn_idxs=-1 must be a whole number"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 must be a whole number from 2"),
    ("lfm2", {"conv_bias": "no"}, "conv_bias='no' must be true or false"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of=0"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e12, "block_ff_dim": 2**31 - 1}, "block_ff_dim=2147483647, adjusted"),
    ("lfm2_moe", {"layer_types": None}, "layer_types=None must list 4"),
    ("lfm2_moe", {"use_expert_bias": 1}, "use_expert_bias=1 must be true or false"),
    ("lfm3", {"layer_types": ["conv", "attention"] * 2 + ["conv"]}, "layer_types must list 5 of"),
    ("lfm3", {"sliding_window": None}, "leaves sliding_attention in layer_types without a window"),
    ("lfm3", {"use_attention_gate": "yes"}, "use_attention_gate='yes'"),
]


@pytest.mark.parametrize(("name", "keys", "message"), BROKEN)
def test_broken_config_error_names_key_and_rule(name: str, keys: dict[str, Any], message: str, tmp_path: Path):
    config = json.loads((conv_folder(name) / "config.json").read_text())
    with pytest.raises(ModelConfigError, match=message):
        model_config_of({**config, **keys}, tmp_path / "config.json")


def test_three_ranks_do_not_divide_channels():
    config = read_model_files(conv_folder("lfm2")).model_config
    layers = tuple(replace(each, num_heads=6, num_kv_heads=6) for each in config.layers)
    with pytest.raises(ConfigError, match="its convolutions have 64 channels; sizes that do are 1 and 2"):
        check_divides(RankLayout(3), replace(config, layers=layers))


def test_missing_convolution_weights_are_reported(tmp_path: Path):
    folder = tmp_path / "without"
    shutil.copytree(conv_folder("lfm2"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.conv.conv.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.conv\.conv\.weight"):
        new_model(folder)
