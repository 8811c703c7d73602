"""DeepSeek V4 against transformers: logits, steps, schedules, ranks, stages, weights, mistakes, config.json."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_checkpoints import (
    CASES,
    HEAVY,
    SPARSE,
    compressed_folder,
    compressed_reference,
    hub_folder,
    stored_folders,
)
from family_checks import check_schedules, check_tensors, ids_and_logprobs, joined_logits
from json_files import edit
from our_model import BLOCK_SIZE, load_model, prompt_logits
from plain_models import new_model
from reference_models import Oracle, greedy_without_cache, random_prompt, relative_error
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding
from two_stages import TwoStages

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import CheckpointError, ConfigError, ModelConfigError
from spmd_worker.model.layers import compressed_attention
from spmd_worker.model.layers.balanced_streams import StreamMatrix
from spmd_worker.model.layers.compressed_attention import EntryIndexer, GroupedProjection
from spmd_worker.model.layers.compressed_entries import Compressor, Groups
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ranks.topology import RankLayout, check_divides
from spmd_worker.worker.memory.estimate import cache_spec, weights_bytes

TOLERANCE = 1e-5
# Far beyond windows and groups of both kinds.
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 6, 17, 75)]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1)
ROWS = [random_prompt(length, seed=3, vocab_size=96) for length in (22, 40)]
ROWS += [ROWS[1][:36] + ROWS[0][:5]]
SLOW = pytest.mark.stress
each_case = pytest.mark.parametrize("name", ["deepseek_v4", pytest.param("deepseek_v4_wide", marks=SLOW)])
smaller_first = pytest.mark.parametrize("name", ["deepseek_v4_wide", pytest.param("deepseek_v4", marks=SLOW)])


def some(cases: Any, *quick: str) -> Any:
    """All cases, of which those that are not `quick` are stress tests."""
    return pytest.mark.parametrize("case", [pytest.param(each, marks=() if each in quick else SLOW) for each in cases])


oracle = Oracle(compressed_reference, PROMPTS)
expected, worst_error = oracle.expected, oracle.worst_error


@pytest.mark.guarantee("Models compute what transformers computes")
@each_case
def test_logits_equal_transformers_from_both_kinds_of_files(name: str):
    model = load_model(compressed_folder(name))
    logits = prompt_logits(model, PROMPTS)
    assert worst_error(name, logits) < TOLERANCE
    hub = load_model(hub_folder(name))
    assert hub.model_config.layers == model.model_config.layers
    assert hub.model_config.ropes == model.model_config.ropes
    assert all(map(torch.equal, prompt_logits(hub, PROMPTS), logits))


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize(
    ("name", "dtype", "chunks"),
    [
        ("deepseek_v4", "float32", (7,)),
        *[pytest.param(name, dtype, (1, 7, 13, 16), marks=SLOW) for name in CASES for dtype in ("float32", "bfloat16")],
    ],
)
def test_row_has_equal_bits_alone_batched_and_chunked(name: str, dtype: str, chunks: tuple[int, ...]):
    model = load_model(compressed_folder(name), dtype=dtype)
    whole = prompt_logits(model, PROMPTS)
    for chunk in chunks:
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk), whole)), chunk
    assert torch.equal(prompt_logits(model, [PROMPTS[2]])[0], whole[2])


@pytest.mark.control("A row's answer depends on the row alone")
def test_chunks_differ_with_groups_of_the_step(monkeypatch: pytest.MonkeyPatch):
    """Negative control: groups whose first tokens are of an earlier step are forgotten."""
    model = load_model(compressed_folder("deepseek_v4"))
    rows, completed = PROMPTS[2:3], compressed_attention.completed_groups
    whole = prompt_logits(model, rows)

    def of_the_step(metadata: AttentionMetadata, rate: int) -> Groups | None:
        found = completed(metadata, rate)
        if found is None:
            return None
        counts = [stop - start for start, stop in pairwise(metadata.query_starts)]
        starts = torch.tensor(metadata.context_lengths) - torch.tensor(counts)
        is_new = found.numbers * rate >= starts[found.sequences]
        return Groups(found.sequences[is_new], found.numbers[is_new])

    monkeypatch.setattr(compressed_attention, "completed_groups", of_the_step)
    assert all(map(torch.equal, prompt_logits(model, rows), whole))
    assert not all(map(torch.equal, prompt_logits(model, rows, 7), whole))


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("rate", [None, 0, 4, 12])
def test_tokens_need_no_more_than_their_reach(rate: int | None, monkeypatch: pytest.MonkeyPatch):
    """Keys and rows are lost that no token from a step's first one on reaches; negative control: one more of layers
    with entries of `rate` tokens, 0 for a window alone.
    """
    model, rows = load_model(compressed_folder("deepseek_v4")), [PROMPTS[-1][:30]]
    forward, whole = compressed_attention.CompressedAttention.forward, prompt_logits(model, rows)

    def without_unreached(self: Any, x: Tensor, step: LayerStep) -> Tensor:
        metadata = step.metadata
        start = metadata.context_lengths[0] - metadata.query_starts[1]
        lost = torch.arange(max(start - self._config.reach + 1 + (self._config.rate == rate), 0))
        blocks, places = metadata.block_tables[0, lost // BLOCK_SIZE].long(), lost % BLOCK_SIZE
        keys, of_tokens, of_index, *_ = self._parts_of(step.key_cache, None)
        of_tokens[blocks, places] = of_index[blocks, places] = torch.nan
        # A number of all keys of a block after the other, as `CpuBackend.read_keys` has it.
        keys.view(len(keys), self.head_size, BLOCK_SIZE)[blocks, :, places] = torch.nan
        return forward(self, x, step)

    monkeypatch.setattr(compressed_attention.CompressedAttention, "forward", without_unreached)
    found = prompt_logits(model, rows, 1)
    assert torch.equal(found[0], whole[0]) == (rate is None)


@smaller_first
def test_greedy_rows_are_transformers_in_any_schedule(name: str):
    """Alone without a prefix cache, in one batch with one, cold and warm, and preempted by swapping, in few blocks."""
    folder, given = compressed_folder(name), {"max_model_len": 64}
    with LLM(folder, num_blocks=60, enable_prefix_caching=False, **given) as llm:
        cold = [ids_and_logprobs(llm, [row], GREEDY)[0] for row in ROWS]
    reference = compressed_reference(name)
    assert [ids for ids, _ in cold] == [greedy_without_cache(reference, row, GREEDY.max_tokens) for row in ROWS]
    with LLM(folder, num_blocks=60, **given) as llm:
        assert ids_and_logprobs(llm, ROWS, GREEDY) == cold
        assert ids_and_logprobs(llm, ROWS, GREEDY) == cold
        assert llm.llm_engine.counters.num_cached_prompt_tokens
    few = {"num_blocks": 17, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01}
    with LLM(folder, **few, **given) as llm:
        assert ids_and_logprobs(llm, ROWS, GREEDY) == cold
        assert llm.llm_engine.counters.num_preemptions


@pytest.mark.stress
@each_case
def test_long_rows_are_equal_in_any_schedule(name: str):
    reference = compressed_reference(name)
    check_schedules(compressed_folder(name), lambda row, count: greedy_without_cache(reference, row, count))


@smaller_first
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    folder = compressed_folder(name)
    whole = joined_logits(2, partial(new_model, folder), lambda model: prompt_logits(model, PROMPTS))
    assert worst_error(name, whole) < TOLERANCE
    whole = prompt_logits(new_model(folder), PROMPTS, 7)
    staged = prompt_logits(TwoStages(folder, new_model), PROMPTS, 7)  # type: ignore[arg-type]  # as much as is used
    assert all(map(torch.equal, staged, whole))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("deepseek_v4_wide", "bfloat16"),
        *[pytest.param("deepseek_v4", each, marks=SLOW) for each in ("float32", "bfloat16")],
    ],
)
def test_stored_numbers_of_the_hub_are_what_they_mean(name: str, dtype: str, tmp_path: Path):
    """FP8 in blocks and experts in FP4, dequantised and, of bfloat16 on CPUs, experts as they are stored."""
    stored, plain = stored_folders(name, tmp_path)
    wanted = prompt_logits(load_model(plain, dtype=dtype), PROMPTS[1:3])
    model = load_model(stored, dtype=dtype)
    (held,) = {each.weight.dtype for each in model.model.layers[0].mlp.experts["0"].children()}
    assert held == (torch.uint8 if dtype == "bfloat16" else torch.float32)
    assert all(map(torch.equal, prompt_logits(model, PROMPTS[1:3]), wanted))
    edit(stored / "config.json", expert_dtype="fp8")
    with pytest.raises(CheckpointError, match=r"w1\.weight is int8, but must be float8_e4m3fn"):
        load_model(stored)


def test_weights_are_viewed_and_updated_by_name():
    check_tensors(hub_folder("deepseek_v4"), compressed_reference("deepseek_v4").state_dict())


@pytest.mark.stress
def test_saved_model_is_read_again(tmp_path: Path):
    with LLM(compressed_folder("deepseek_v4"), num_blocks=20, max_model_len=96) as llm:
        found = ids_and_logprobs(llm, ROWS[:1], GREEDY)
        llm.save_checkpoint(tmp_path / "saved")
    with LLM(tmp_path / "saved", num_blocks=20, max_model_len=96) as llm:
        assert ids_and_logprobs(llm, ROWS[:1], GREEDY) == found


def test_packed_projection_of_groups_is_replaced_in_part():
    """Rows that begin and end within groups."""
    projection = load_model(compressed_folder("deepseek_v4")).model.layers[0].self_attn.o_a_proj
    assert isinstance(projection, GroupedProjection)
    assert projection.is_packed
    rows, columns = projection.shape_of("weight")
    whole = projection.read_region("weight", ((0, rows), (0, columns))).clone()
    region, values = ((5, 40), (3, 20)), torch.randn(35, 17)
    projection.write_region("weight", region, values)
    whole[5:40, 3:20] = values
    assert torch.equal(projection.read_region("weight", ((0, rows), (0, columns))), whole)


def test_table_of_experts_must_have_numbers_of_experts():
    model = load_model(compressed_folder("deepseek_v4"))
    table = torch.zeros(96, 3, dtype=torch.int64)
    table[5, 1] = 8
    with pytest.raises(CheckpointError, match="has 8, but experts are numbered from 0 to 7"):
        model.load_weights([("layers.0.ffn.gate.tid2eid", table)])


@pytest.mark.guarantee("The plan's bytes are those of the run")
@each_case
def test_planned_memory_is_that_of_models(name: str):
    config = read_model_files(compressed_folder(name)).model_config
    for size in (1, 2):
        found = on_ranks(
            size, lambda group: sum(each.nbytes for each in new_model(compressed_folder(name), group).parameters())
        )
        planned = [weights_bytes(config, RankLayout(size), rank, "float32", "cuda") for rank in range(size)]
        assert found == planned


# ---- mistakes ------------------------------------------------------------------------------------------------------


def _same_angles(angles: Angles) -> Angles:
    return angles


def _first_numbers(self: Angles, kernels: Any, x: Tensor) -> Tensor:
    return self.rotate(kernels, x)


def _all_entries(self: EntryIndexer, *tokens: Any) -> list[Any]:
    del self, tokens
    return []


def _next_place(*arguments: Any) -> Any:
    tables, sequences, numbers, rate, block_size = arguments
    return entry_places(tables, sequences, (numbers - 1).clamp(min=0), rate, block_size)


entry_places = compressed_attention.entry_places
balanced = StreamMatrix._balanced
members = Compressor._members


def _without_gates(self: Compressor, *arguments: Any, **options: Any) -> Any:
    values, gates = members(self, *arguments, **options)
    return values, torch.zeros_like(gates)


def _own_halves(self: Compressor, *arguments: Any, is_before: bool) -> Any:
    return members(self, *arguments, is_before=False)


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "not rotated back": (Angles, "reverse", property(_same_angles)),
    "first numbers rotated": (Angles, "rotate_last", _first_numbers),
    "all entries seen": (EntryIndexer, "choose", _all_entries),
    "the entry before": (compressed_attention, "entry_places", _next_place),
    "a mean without gates": (Compressor, "_members", _without_gates),
    "one projection of two": (Compressor, "_members", _own_halves),
    "streams not balanced": (StreamMatrix, "_balanced", lambda self, matrix: matrix),
    "streams mixed backwards": (StreamMatrix, "_balanced", lambda self, matrix: balanced(self, matrix).mT),
}


@pytest.mark.control("Models compute what transformers computes")
@some(MISTAKES, "the entry before", "streams mixed backwards")
def test_mistake_in_a_layer_is_noticed(case: str, monkeypatch: pytest.MonkeyPatch):
    model = load_model(compressed_folder("deepseek_v4"))
    monkeypatch.setattr(*MISTAKES[case])
    found = prompt_logits(model, PROMPTS[-1:])[0]
    assert relative_error(found, expected("deepseek_v4")[-1]) > 1e-3


def _attending(layer: LayerConfig, **change: Any) -> LayerConfig:
    assert layer.compressed is not None, layer
    return replace(layer, compressed=replace(layer.compressed, **change))


def _bounded(layer: LayerConfig, bound: float) -> LayerConfig:
    assert layer.experts is not None, layer
    return replace(layer, bound=bound, experts=replace(layer.experts, bound=bound))


CHANGES: dict[str, Callable[[LayerConfig], LayerConfig]] = {
    "longer window": partial(_attending, window=8),
    "shorter window": partial(_attending, window=6),
    "larger bound": partial(_bounded, bound=-0.8),
    "bound of the activation": partial(_bounded, bound=0.7),
    "other rope": lambda layer: replace(layer, rope=1 - (layer.rope or 0)),
}


@pytest.mark.control("Models compute what transformers computes")
@some(CHANGES, "shorter window")
def test_wrong_size_of_a_layer_is_noticed(case: str):
    folder = compressed_folder("deepseek_v4")
    config = read_model_files(folder).model_config
    model = load_model(folder, replace(config, layers=tuple(map(CHANGES[case], config.layers))))
    assert relative_error(prompt_logits(model, PROMPTS[-1:])[0], expected("deepseek_v4")[-1]) > 1e-3


# ---- config.json ---------------------------------------------------------------------------------------------------

MINIMAL: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}


def test_defaults_of_omitted_keys_equal_transformers():
    theirs, ours = AutoConfig.for_model("deepseek_v4"), model_config_of(MINIMAL, Path("config.json"))
    sizes = (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.max_position_embeddings, ours.head_size)
    assert sizes == (
        *(theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers),
        *(theirs.max_position_embeddings, theirs.head_dim),
    )
    kinds = {(4, True): SPARSE, (128, False): HEAVY}
    found = [
        kinds[layer.compressed.rate, layer.compressed.indexer is not None] for layer in ours.layers if layer.compressed
    ]
    assert found == theirs.layer_types
    listed = ["hash_moe" if layer.experts and layer.experts.num_listed_tokens else "moe" for layer in ours.layers]
    assert listed == theirs.mlp_layer_types
    layer = ours.layers[-1]
    compressed, experts, streams = layer.compressed, layer.experts, layer.streams
    assert compressed is not None
    assert experts is not None
    assert streams is not None
    assert ours.layers[3].compressed is not None
    indexer = ours.layers[3].compressed.indexer
    assert indexer is not None
    assert (indexer.num_heads, indexer.head_size, indexer.num_chosen) == (64, 128, theirs.index_topk)
    assert (compressed.window, compressed.rope_size, compressed.query_rank) == (128, 64, theirs.q_lora_rank)
    assert (compressed.num_groups, compressed.output_rank) == (theirs.o_groups, theirs.o_lora_rank)
    assert (experts.num_experts, experts.num_chosen, experts.scaling) == (256, 6, theirs.routed_scaling_factor)
    assert (experts.intermediate_size, experts.shared_size, experts.bound) == (2048, 2048, -theirs.swiglu_limit)
    assert (streams.num_streams, streams.num_iterations, streams.eps) == (4, 20, theirs.hc_eps)
    assert [rope.rope_theta for rope in ours.ropes] == [theirs.rope_theta, theirs.compress_rope_theta]
    assert (ours.eos_token_ids, layer.norm.eps) == ((theirs.eos_token_id,), theirs.rms_norm_eps)


def nested_ropes(main: Any, compress: Any) -> dict[str, Any]:
    """The keys of a file that has an object for each kind of layer, as transformers writes it."""
    of_kind = {"main": (main, 10000.0), "compress": (compress, 160000.0)}
    return {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
            for kind, (factor, theta) in of_kind.items()
        }
    }


_PLAIN, _HALF = {"rope_type": "default", "rope_theta": 500.0}, {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"qk_rope_head_dim": 32},
        {"rope_parameters": {"main": _PLAIN, "compress": _PLAIN}},
        {"rope_parameters": {"main": _PLAIN, "compress": {**_PLAIN, **_HALF}}},
        {"rope_parameters": {"main": {**_PLAIN, **_HALF}, "compress": _PLAIN}, "partial_rotary_factor": 0.25},
        {"rope_parameters": {**_PLAIN, **_HALF}},
    ],
)
def test_rotated_numbers_of_both_ropes_equal_transformers(keys: dict[str, Any]):
    """A rope of its own object rotates the complete head where no factor is given."""
    keys = {**keys, "index_head_dim": 512}
    rotary = DeepseekV4RotaryEmbedding(AutoConfig.for_model("deepseek_v4", **deepcopy(keys)))
    ours = model_config_of({**MINIMAL, **keys}, Path("config.json"))
    theirs = [2 * len(getattr(rotary, f"{kind}_inv_freq")) for kind in ("main", "compress")]
    assert [rope.size for rope in ours.ropes] == theirs
    assert ours.layers[3].compressed is not None
    assert ours.layers[3].compressed.rope_size == theirs[1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"o_groups": 3}, "o_groups=3 must divide num_attention_heads=64"),
    ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported, only 'sqrtsoftplus'"),
    ({"layer_types": ["full_attention"] * 43}, "layer_types=['full_attention'"),
    ({"layer_types": [SPARSE]}, "must list 43 layers, num_hidden_layers, and lists 1"),
    ({"compress_ratios": [8] * 43}, "must list 0, 4 or 128"),
    ({"compress_ratios": [False, *[4] * 42]}, "compress_ratios=[False, 4"),
    ({"compress_rates": {SPARSE: 0}}, f"compress_rates.{SPARSE}=0 must be a whole number from 1"),
    ({"compress_rates": 4}, "compress_rates=4 must be an object"),
    ({"compress_rate_hca": 1.5}, "compress_rate_hca=1.5 must be a whole number from 1"),
    ({"index_head_dim": 32}, "index_head_dim=32 must be at least the 64 numbers that are rotated"),
    ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types=['dense'"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 rotates 7 of head_dim=512 numbers"),
    ({"partial_rotary_factor": 2}, "partial_rotary_factor=2 rotates 1024 of head_dim=512"),
    (nested_ropes(0.3, 0.3), "rope_parameters.main.partial_rotary_factor=0.3 rotates 153 of head_dim=512"),
    (nested_ropes(0.25, True), "rope_parameters.compress.partial_rotary_factor=True must be a number"),
    ({"rope_parameters": {"main": _PLAIN, "compress": _PLAIN}}, "index_head_dim=128 must be at least the 512"),
    ({"hc_mult": 0}, "hc_mult=0 must be a whole number from 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic is not supported: entries"),
    ({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "int4"}, "expert_dtype='int4' is not supported"),
]


@pytest.mark.parametrize(("keys", "message"), BAD, ids=[str([*each[0]]) + each[1][-12:] for each in BAD])
def test_invalid_keys_are_rejected_by_key(keys: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, **keys}))
    with pytest.raises(ModelConfigError) as caught:
        read_model_files(tmp_path)
    assert message in str(caught.value)


def test_cache_in_fp8_and_uneven_groups_are_rejected():
    with pytest.raises(ConfigError, match="dtype=fp8 is not supported for this model"):
        LLM(compressed_folder("deepseek_v4"), kv_cache_dtype="fp8", num_blocks=8)
    config = read_model_files(compressed_folder("deepseek_v4")).model_config
    check_divides(RankLayout(2), config)
    with pytest.raises(ConfigError, match="projected in 2 groups; sizes that do are 1 and 2"):
        check_divides(RankLayout(4), config)


def test_cache_counts_rows_and_entries():
    """A key of 32; two projections and their gates of 32 and of the indexer's 32; and an entry of both for 4 tokens."""
    config = read_model_files(compressed_folder("deepseek_v4")).model_config
    layers = cache_spec(config, RankLayout(2), 1, "float32", 16).layers
    sizes = [0 if each is None else each.token_size for each in layers]
    assert sizes == [32, 32 + 4 * 64 + 64 // 4, 32 + 2 * 32 + 2 * 32 // 16, 32 + 4 * 64 + 64 // 4]
