"""Every family with experts against transformers: logits, placements, stages, chunks, names, and each entry of its row.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import shutil
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import CASES, expert_folder, expert_reference, open_experts, thinned_expert_folder
from model_types import MODEL_TYPES
from our_model import load_model, prompt_logits
from reference_models import random_prompt, relative_error
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoConfig

from spmd_worker import LLM, SamplingParams
from spmd_worker.attention.sdpa import SdpaBackend
from spmd_worker.distributed.communicator import GroupHandle, single_group
from spmd_worker.distributed.expert_layout import ExpertLayout
from spmd_worker.distributed.topology import Stage
from spmd_worker.errors import CheckpointError, SpmdError
from spmd_worker.kernels.api import Kernels
from spmd_worker.kernels.cpu.native import cpu_kernels
from spmd_worker.kernels.reference import ReferenceKernels
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.experts import SparseFeedForward, choose
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.experts_table import EXPERT_FAMILIES
from spmd_worker.model_config.families.family import Family, Names
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.models.decoder import DecoderForCausalLM
from spmd_worker.models.registry import build_model
from spmd_worker.weights.checkpoint import Checkpoint
from spmd_worker.weights.loader import LoadReport, load_weights

TOLERANCE = 1e-4
# Beyond every window, around a block of 16.
PROMPTS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 6, 17, 40)]
NUM_EXPERTS = 8
LINEAR, ROUND_ROBIN = ((0, 0, 0, 0, 1, 1, 1, 1),), ((0, 1) * 4,)
# One list a layer; in the second a rank has nearly all, in the third all.
PLACED = ((0, 0, 0, 0, 1, 1, 1, 1), (1, 0, 0, 0, 0, 0, 0, 0), (0,) * 8, (1, 1, 0, 0, 1, 0, 1, 0))


SECOND = ("qwen3_moe_sparse_step", "gpt_oss_limit", "glm4_moe_plain", "granite_moe")
"""Cases of families of which there is another."""


def quick(*names: str, later: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """All cases, but for these in the tier of layouts, and those of `later` in the stress tier."""
    marks = {name: pytest.mark.stress if name in later else pytest.mark.matrix for name in CASES}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in names else mark) for name, mark in marks.items()]
    )


@torch.no_grad()
def their_logits(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts]


@cache
def expected(name: str) -> list[Tensor]:
    return their_logits(expert_reference(name), PROMPTS)


def worst_error(name: str, logits: list[Tensor]) -> float:
    return max(map(relative_error, logits, expected(name)))


def load(
    folder: Path,
    group: GroupHandle | None = None,
    stage: Stage | None = None,
    config: ModelConfig | None = None,
    layout: ExpertLayout | None = None,
    kernels: Kernels | None = None,
) -> tuple[DecoderForCausalLM, LoadReport]:
    """Packed by nobody."""
    config = config or read_model_files(folder).model_config
    context = LayerContext(
        group or single_group(),
        kernels or ReferenceKernels(),
        SdpaBackend(),
        torch.float32,
        torch.device("cpu"),
        layout,
    )
    model = build_model(context, config, stage)
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.rename(config.names.canonical)
        checkpoint.look_inside(model.places)
        report = load_weights(
            model, model.weight_slices(), model.padding_slices(), checkpoint, ignorable=model.is_ignorable
        )
    return model, report


def new_model(*arguments: Any, **named: Any) -> DecoderForCausalLM:
    return load(*arguments, **named)[0]


class Pipeline:
    """Two stages as one model."""

    def __init__(self, folder: Path) -> None:
        self.model_config = read_model_files(folder).model_config
        end = self.model_config.num_layers
        stages = (Stage(0, 1, is_first=True, is_last=False), Stage(1, end, is_first=False, is_last=True))
        self._stages = [new_model(folder, stage=stage) for stage in stages]
        self.model, self.lm_head = self._stages[0].model, self._stages[1].lm_head
        self.compute_logits = self._stages[1].compute_logits

    def __call__(self, *arguments: Any, is_fused: bool) -> Tensor:
        *tokens, cache, metadata = arguments
        incoming = self._stages[0](*tokens, cache[:1], metadata)
        return self._stages[1](*tokens, cache[1:], metadata, incoming)


@quick("qwen3_moe")
def test_logits_are_transformers_from_full_and_from_thin_files(name: str):
    model = load_model(expert_folder(name))
    whole = prompt_logits(model, PROMPTS)
    assert worst_error(name, whole) < TOLERANCE
    for chunk in (1, 7, 16):
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk), whole)), chunk
    assert all(torch.equal(prompt_logits(model, [prompt])[0], logits) for prompt, logits in zip(PROMPTS, whole)), (
        "alone"
    )
    prompt = PROMPTS[-1]
    (thin,) = their_logits(expert_reference(name, is_thinned=True), [prompt])
    assert relative_error(thin, expected(name)[-1]) < 1e-6, "the oracle's own"
    assert (
        read_model_files(thinned_expert_folder(name)).model_config == read_model_files(expert_folder(name)).model_config
    )
    assert relative_error(prompt_logits(load_model(thinned_expert_folder(name)), [prompt])[0], expected(name)[-1]) < (
        TOLERANCE
    )


@quick(later=SECOND)
def test_shards_and_placements_are_transformers_and_stages_bit_for_bit_one_rank(name: str):
    folder = expert_folder(name)
    layouts = {
        "columns": None,
        "linear": ExpertLayout(LINEAR),
        "round robin": ExpertLayout(ROUND_ROBIN),
        "placed": ExpertLayout(PLACED),
        "exact": ExpertLayout(PLACED, is_exact=True),
    }
    for what, layout in layouts.items():

        def run(group: GroupHandle, layout: ExpertLayout | None = layout) -> list[Tensor]:
            model = new_model(folder, group, layout=layout)
            return [logits[:, : model.lm_head.shard.num_owned] for logits in prompt_logits(model, PROMPTS)]

        whole = [torch.cat(shards, dim=1) for shards in zip(*on_ranks(2, run), strict=True)]
        assert worst_error(name, whole) < TOLERANCE, what
    one = prompt_logits(new_model(folder), PROMPTS, 7)
    staged = prompt_logits(Pipeline(folder), PROMPTS, 7)  # type: ignore[arg-type]  # as much of a model as is used
    assert all(map(torch.equal, staged, one))


def sparse_outputs(name: str, owners: tuple[tuple[int, ...], ...], size: int, *, is_exact: bool) -> list[Tensor]:
    """What the sparse layers give for the same tokens, summed over ranks, and checked to be the same on all."""
    kernels, _ = cpu_kernels(torch.float32)
    x = torch.randn((23, 64), generator=torch.Generator().manual_seed(5))

    def run(group: GroupHandle) -> list[Tensor]:
        layout = ExpertLayout(owners, is_exact)
        model = new_model(expert_folder(name), group, layout=layout, kernels=kernels)
        model.pack_weights()
        found = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, SparseFeedForward)]
        return [group.all_reduce(each(x)) for each in found]

    results = on_ranks(size, run) if size > 1 else [run(single_group())]
    assert all(torch.equal(one, other) for result in results[1:] for one, other in zip(results[0], result))
    return results[0]


@pytest.mark.parametrize(
    "name", ["qwen2_moe", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("glm4_moe", "gpt_oss"))]
)
def test_exact_experts_are_the_same_bits_on_one_two_and_four_ranks(name: str):
    one = sparse_outputs(name, ((0,) * 8,), 1, is_exact=True)
    assert all(map(torch.equal, one, sparse_outputs(name, ((0,) * 8,), 1, is_exact=False)))
    for owners, size in ((LINEAR, 2), (ROUND_ROBIN, 2), (PLACED, 2), (((0, 1, 2, 3) * 2,), 4), (((3, 0) * 4,), 4)):
        assert all(map(torch.equal, one, sparse_outputs(name, owners, size, is_exact=True))), (owners, size)
    # Negative control: sums of ranks' parts are others.
    summed = sparse_outputs(name, ROUND_ROBIN, 2, is_exact=False)
    assert not all(map(torch.equal, one, summed))
    assert all(relative_error(each, other) < 1e-5 for each, other in zip(summed, one, strict=True))


def few(**changes: Any) -> ExpertsConfig:
    return ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=1, **changes)


def test_equal_scores_are_taken_by_number_and_weights_follow_the_experts():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, -1.0], [3.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    for score in ("softmax", "softmax_chosen", "sigmoid"):
        ids, weights = choose(logits, None, few(score=score))
        assert ids.tolist() == [[1, 2], [0, 1], [4, 5]]
        assert torch.allclose(weights.sum(-1), torch.ones(3))
        assert torch.equal(weights[:2], torch.full((2, 2), 0.5))
        assert weights[2, 1] > weights[2, 0]
    ids, _ = choose(logits, torch.tensor([9.0, 0, 0, 9.0, 0, 0]), few(score="sigmoid", has_choice_bias=True))
    assert ids.tolist() == [[0, 3]] * 3
    in_groups = few(score="sigmoid", num_groups=3, num_chosen_groups=1)
    assert choose(logits, None, in_groups)[0].tolist() == [[2, 3], [0, 1], [4, 5]]


def test_a_score_that_is_no_number_makes_its_own_row_none():
    logits = torch.randn((5, 6), generator=torch.Generator().manual_seed(3))
    for score in ("softmax", "softmax_chosen", "sigmoid"):
        for renormalises in (True, False):
            experts = few(score=score, renormalises=renormalises, num_groups=2, num_chosen_groups=2)
            clean = choose(logits, None, experts)
            broken = logits.clone()
            broken[2, 4] = torch.nan
            ids, weights = choose(broken, None, experts)
            assert weights[2].isnan().all()
            assert ((ids >= 0) & (ids < 6)).all()
            others = [0, 1, 3, 4]
            assert torch.equal(ids[others], clean[0][others])
            assert torch.equal(weights[others], clean[1][others])


def test_what_is_chosen_for_a_row_does_not_depend_on_the_rows_beside_it():
    generator = torch.Generator().manual_seed(9)
    for num_experts in (6, 8, 61, 128):
        logits, bias = torch.randn((300, num_experts), generator=generator), torch.randn(num_experts)
        for score in ("softmax", "softmax_chosen", "sigmoid"):
            experts = replace(few(score=score), num_experts=num_experts, num_chosen=4)
            ids, weights = choose(logits, bias, experts)
            for size in (1, 2, 3, 7, 64):
                for start in (0, 5, 300 - size):
                    rows = slice(start, start + size)
                    some = choose(logits[rows].clone(), bias, experts)
                    assert torch.equal(some[0], ids[rows])
                    assert torch.equal(some[1], weights[rows]), (score, num_experts, size, start)


def changed(name: str, folder: Path, change: Any) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(expert_folder(name), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_experts_that_nobody_and_that_all_meet(tmp_path: Path):
    def crowd(tensors: dict[str, Tensor]) -> None:
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith("router.bias"):
                tensor[0], tensor[5] = 100.0, -100.0

    folder = changed("gpt_oss", tmp_path / "crowded", crowd)
    theirs = their_logits(open_experts(folder), PROMPTS)
    assert max(map(relative_error, prompt_logits(load_model(folder), PROMPTS), theirs)) < TOLERANCE


def test_a_planted_tie_goes_to_the_lower_number(tmp_path: Path):
    """Two rows of a router are the same, so the scores of their experts are; a token has one. Either gives NaN in turn:
    rows meet the first alone.
    """

    def plant(tensors: dict[str, Tensor], broken: int) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp"
            tensors[f"{prefix}.gate.weight"][3] = tensors[f"{prefix}.gate.weight"][2]
            tensors[f"{prefix}.experts.{broken}.down_proj.weight"].fill_(torch.nan)

    for broken in (3, 2):
        folder = changed("qwen3_moe", tmp_path / str(broken), partial(plant, broken=broken))
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"num_experts_per_tok": 3', '"num_experts_per_tok": 1'))
        with LLM(folder, num_blocks=60, max_model_len=64, allow_nonfinite=True) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert any(output.error_code == "non_finite_logits" for output in outputs) == (broken == 2)


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
ROWS = [random_prompt(length, seed=3, vocab_size=90) for length in (3, 16, 22, 40, 52)]
ROWS += [ROWS[-1][:40] + ROWS[0]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "swapped": {"num_blocks": 17, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01},
}


def outputs_of(llm: LLM, rows: list[list[int]]) -> list[Any]:
    return [
        (each.outputs[0].token_ids, [entry.logprob for step in each.outputs[0].logprobs for entry in step.values()])
        for each in llm.generate(rows, GREEDY, use_tqdm=False)
    ]


def each_type() -> list[Any]:
    layouts = [("gpt_oss", "float32"), ("qwen3_moe", "bfloat16"), ("glm4_moe", "bfloat16")]
    cases = [(name, dtype) for name in CASES for dtype in ("float32", "bfloat16")]
    return [pytest.param(*each, marks=pytest.mark.matrix if each in layouts else pytest.mark.stress) for each in cases]


@pytest.mark.parametrize(("name", "dtype"), each_type())
def test_a_row_is_the_same_bits_however_it_is_computed(name: str, dtype: str):
    given = {"num_blocks": 300, "max_model_len": 64, "dtype": dtype}
    with LLM(expert_folder(name), enable_prefix_caching=False, **given) as llm:
        cold = [outputs_of(llm, [row])[0] for row in ROWS]
        assert outputs_of(llm, ROWS) == cold, "alone and together"
    for way, settings in LAYOUTS.items():
        with LLM(expert_folder(name), **{**given, **settings}) as llm:
            assert outputs_of(llm, ROWS) == cold, way
            assert (llm.llm_engine.counters.num_preemptions > 0) == (way != "chunks")


def test_tokens_are_counted_by_layer_and_expert():
    """Of transformers' routers the same, each prompt once: only the last answered token is not computed."""
    chosen: dict[int, Tensor] = {}

    def count(layer: int, given: tuple[Tensor, ...]) -> None:
        chosen[layer] = chosen.get(layer, 0) + given[2].flatten().bincount(minlength=NUM_EXPERTS)

    model = expert_reference("qwen2_moe")
    routers = [(index, layer.mlp.gate) for index, layer in enumerate(model.model.layers) if index != 2]
    hooks = [gate.register_forward_hook(lambda _, __, given, at=index: count(at, given)) for index, gate in routers]
    their_logits(model, ROWS)
    for hook in hooks:
        hook.remove()
    with LLM(expert_folder("qwen2_moe"), num_blocks=300, max_model_len=64, enable_prefix_caching=False) as llm:
        llm.generate(ROWS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        (loads,) = llm.llm_engine.expert_loads()
    assert loads == {layer: counts.tolist() for layer, counts in chosen.items()}


def test_a_row_whose_scores_are_no_numbers_is_an_error_row_and_the_others_are_as_they_were(tmp_path: Path):
    given = {"num_blocks": 300, "max_model_len": 64}
    with LLM(expert_folder("qwen2_moe"), **given) as llm:
        clean = outputs_of(llm, ROWS)
    met = {token for row in ROWS for token in row} | {token for ids, _ in clean for token in ids}
    token = next(token for token in range(3, 96) if token not in met)

    def break_token(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][token] = torch.nan

    folder = changed("qwen2_moe", tmp_path / "broken", break_token)
    rows = [*ROWS[:2], [*ROWS[2][:9], token, *ROWS[2][9:]], *ROWS[2:]]
    with LLM(folder, allow_nonfinite=True, **given) as llm:
        outputs = llm.generate(rows, GREEDY, use_tqdm=False)
        assert [output.error_code for output in outputs] == [None, None, "non_finite_logits", None, None, None, None]
        assert outputs_of(llm, ROWS) == clean


@quick("gpt_oss", later=SECOND)
def test_the_whole_checkpoint_is_shown_and_taken_by_its_names(name: str):
    """Separate and stacked tensors as they are in the file; on two ranks together all of each."""
    folder = expert_folder(name)
    model = new_model(folder)
    files = load_file(folder / "model.safetensors")
    tensors = {each: tensor for each, tensor in files.items() if not model.is_ignorable(each)}
    with model.as_checkpoint() as view:
        shown = dict(view.named_parameters())
        assert all(torch.equal(shown[each].float(), tensors[each].float()) for each in tensors)
    assert set(shown) == set(tensors)
    loaded_from = {"files": files, "memory": expert_reference(name).state_dict()}
    for what, given in loaded_from.items():
        other = new_model(folder)
        for parameter in other.parameters():
            parameter.data.zero_()
        assert other.load_weights(list(given.items())) == set(tensors), what
        assert all(map(torch.equal, other.parameters(), model.parameters())), what

    for layout in (None, ExpertLayout(PLACED)):

        def run(group: GroupHandle, layout: ExpertLayout | None = layout) -> dict[str, Tensor]:
            shard = new_model(folder, group, layout=layout)
            assert set(shard.checkpoint_shapes) == set(tensors)
            with shard.as_checkpoint() as view:
                return {each: parameter.detach().clone() for each, parameter in view.named_parameters()}

        first, second = on_ranks(2, run)
        assert set(first) | set(second) == set(tensors)
        for each, tensor in tensors.items():
            held = [rank[each].numel() for rank in (first, second) if each in rank]
            assert sum(held) >= tensor.numel(), each
            is_of_expert = ".experts." in each or ("_linear" in each and "shared" not in each)
            if layout is not None and is_of_expert:
                assert sum(held) == tensor.numel(), each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.matrix),
        *(pytest.param(each, marks=pytest.mark.stress) for each in ("mixtral", "glm4_moe", "granite_moe")),
    ],
)
def test_a_folder_with_experts_as_transformers_has_them_in_memory_is_read(name: str, tmp_path: Path):
    """`save_pretrained` with `save_original_format=False`; on two ranks too, each its own experts."""
    expert_reference(name).save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(each.endswith("experts.gate_up_proj") for each in stored)
    model = new_model(expert_folder(name))
    assert all(map(torch.equal, new_model(tmp_path).parameters(), model.parameters()))

    def run(group: GroupHandle) -> list[list[Tensor]]:
        folders = (tmp_path, expert_folder(name))
        return [[*new_model(folder, group, layout=ExpertLayout(PLACED)).parameters()] for folder in folders]

    assert all(all(map(torch.equal, *both)) for both in on_ranks(2, run))
    broken = next(each for each in stored if each.endswith("experts.gate_up_proj"))
    stored[broken] = stored[broken][:7].contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"(has 8 experts|checkpoint \[7, )"):
        new_model(tmp_path)


def test_stacks_that_are_turned_in_files_and_in_memory_are_known_by_their_shape(tmp_path: Path):
    """As the hub has Qwen3-VL's with experts; transformers writes them as it has them in memory, and reads both."""
    folder = expert_folder("qwen3_vl_moe")

    def turn(tensors: dict[str, Tensor]) -> None:
        for each in [each for each in tensors if ".experts." in each]:
            tensors[each] = tensors[each].transpose(1, 2).contiguous()

    turned, model = changed("qwen3_vl_moe", tmp_path / "turned", turn), new_model(folder)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert load_file(turned / "model.safetensors")[name].shape == (8, 64, 80)
    found = new_model(turned)
    assert all(map(torch.equal, found.parameters(), model.parameters()))
    (theirs,) = their_logits(open_experts(turned), PROMPTS[1:2])
    assert torch.equal(theirs, expected("qwen3_vl_moe")[1]), "the oracle's own"
    for parameter in found.parameters():
        parameter.data.zero_()
    found.load_weights(load_file(turned / "model.safetensors").items())
    assert all(map(torch.equal, found.parameters(), model.parameters()))


def test_a_stage_knows_the_tensors_of_layers_of_a_kind_that_it_has_not():
    folder = expert_folder("glm4_moe")
    whole = new_model(folder).checkpoint_shapes
    for stage in (Stage(0, 1, is_first=True, is_last=False), Stage(1, 4, is_first=False, is_last=True)):
        assert new_model(folder, stage=stage).checkpoint_shapes == whole


def test_a_rank_reads_its_own_experts_alone():
    folder = expert_folder("qwen3_moe")
    _, whole = load(folder)
    reports = on_ranks(2, lambda group: load(folder, group, layout=ExpertLayout(LINEAR))[1])
    tensors = load_file(folder / "model.safetensors")
    experts = sum(tensor.nbytes for each, tensor in tensors.items() if ".experts." in each)
    for report in reports:
        assert report.num_bytes_read <= whole.num_bytes_read - experts // 2


def test_a_missing_expert_is_named_and_one_too_many_is_refused(tmp_path: Path):
    lost, found = "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.2.mlp.experts.8.up_proj.weight"
    folder = changed("qwen3_moe", tmp_path / "lost", lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=rf"1 missing from the checkpoint:\n  {lost}"):
        load(folder)
    folder = changed("qwen3_moe", tmp_path / "found", lambda tensors: tensors.update({found: torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=rf"1 in the checkpoint but not in the model:\n  {found}"):
        load(folder)
    # GLM's files have a layer beyond the last, which speculates.
    beyond = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    load(changed("glm4_moe", tmp_path / "beyond", lambda tensors: tensors.update(beyond)))
    with pytest.raises(CheckpointError, match=r"eh_proj"):
        load(changed("qwen3_moe", tmp_path / "beyond_others", lambda tensors: tensors.update(beyond)))
    model = new_model(expert_folder("qwen3_moe"))
    with pytest.raises(ValueError, match=f"{found}: the model has no such weight"):
        model.load_weights([(found, torch.zeros(32, 64))])
    for shape in ((7, 64, 64), (8, 65, 64), (8, 64)):
        with pytest.raises(
            ValueError, match=rf"shape \[{', '.join(map(str, shape))}\], and this layer .* has 8 experts"
        ):
            model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(shape))])
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight: has the shape \[33, 64\], the model's has"):
        model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 66, 64))])
    with pytest.raises(ValueError, match="is on the meta device and has no data"):
        model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros((8, 64, 64), device="meta"))])
    assert not model.weight_update.is_open


SIZES = {
    "vocab_size": 300_000,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
}
BAD = [
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts that"),
    ("Glm4Moe", {"n_routed_experts": 9, "n_group": 2}, "n_routed_experts=9 cannot be cut into n_group=2 equal groups"),
    ("Glm4Moe", {"n_routed_experts": 8, "n_group": 8}, "cannot be cut into n_group=8 equal groups of two or more"),
    ("Glm4Moe", {"n_group": 2, "topk_group": 3}, "topk_group=3 is more than n_group=2"),
    (
        "Glm4Moe",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
        "num_experts_per_tok=3 is more than the 2 experts of topk_group=1 groups that a token can choose from",
    ),
    ("Glm4Moe", {"topk_method": "greedy"}, "topk_method='greedy' is not supported; only 'noaux_tc' is"),
    ("Qwen3Moe", {"num_experts": 0}, "num_experts=0 must be a whole number from 1 to 4096"),
    ("Qwen3Moe", {"num_local_experts": 10**9}, "num_local_experts=1000000000 must be a whole number from 1 to 4096"),
    ("Dots1", {}, "n_routed_experts=None must be a whole number"),
    ("Qwen2Moe", {"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers, from 0 on"),
    ("Qwen2Moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported; only False is"),
    ("Phimoe", {}, "its layers have experts of a form that does not run"),
]


@pytest.mark.parametrize(("family", "keys", "message"), BAD, ids=[f"{each[0]} {list(each[1])}" for each in BAD])
def test_what_is_wrong_with_experts_is_one_sentence(family: str, keys: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "architectures": [f"{family}ForCausalLM"], **keys}))
    with pytest.raises(SpmdError, match=r"config\.json") as caught:
        read_model_files(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def minimal_file(architecture: str) -> dict[str, Any]:
    counts = {"n_routed_experts": 16, "num_experts_per_tok": 2} if architecture == "Dots1ForCausalLM" else {}
    sizes, names = {**SIZES, **counts}, {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    return {"text_config": sizes, **names} if FAMILIES[architecture].is_text_part else {**sizes, **names}


@pytest.mark.parametrize("architecture", EXPERT_FAMILIES)
def test_what_files_leave_out_means_what_it_means_to_transformers(architecture: str):
    config = minimal_file(architecture)
    whole, ours = AutoConfig.for_model(**config), model_config_of(config, Path("config.json"))
    theirs = whole.get_text_config()
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_size == (getattr(theirs, "head_dim", None) or 4)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.has_tied_embeddings == whole.tie_word_embeddings
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    (rope,) = ours.ropes
    for key in ("rope_type", "rope_theta", "factor", "truncate", "beta_fast", "original_max_position_embeddings"):
        if key in theirs.rope_parameters:
            assert getattr(rope, key) == theirs.rope_parameters[key], key
    assert rope.partial_factor == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 4
    window = getattr(theirs, "sliding_window", None) or 0
    if architecture != "MixtralForCausalLM":
        assert [layer.window for layer in ours.layers] == [
            window if kind == "sliding_attention" else 0 for kind in kinds
        ]
    experts = next(layer.experts for layer in ours.layers if layer.experts is not None)
    counts = [
        getattr(theirs, key) for key in ("n_routed_experts", "num_experts", "num_local_experts") if hasattr(theirs, key)
    ]
    assert [experts.num_experts] * len(counts) == counts
    assert experts.num_chosen == theirs.num_experts_per_tok
    assert experts.intermediate_size == getattr(theirs, "moe_intermediate_size", 96)
    assert experts.renormalises == getattr(theirs, "norm_topk_prob", experts.renormalises)
    assert experts.scaling == getattr(theirs, "routed_scaling_factor", 1.0)
    assert experts.limit == getattr(theirs, "swiglu_limit", 0.0)
    assert sum(layer.experts is None for layer in ours.layers) == getattr(theirs, "first_k_dense_replace", 0)


def entries(kind: Any, row: Any, plain: Any, *skipped: str) -> list[tuple[str, Any]]:
    return [
        (spec.name, replace(row, **{spec.name: getattr(plain, spec.name)}))
        for spec in fields(kind)
        if getattr(row, spec.name) != getattr(plain, spec.name) and spec.name not in skipped
    ]


def mutants(architecture: str) -> list[tuple[str, Family]]:
    """The row with one entry as Llama has it, or one entry of its experts as Qwen3-MoE's plain ones."""
    row = FAMILIES[architecture]
    assert row.experts is not None
    # What transformers has in memory, and layers that speculate, are compared by tests of their own.
    names = entries(Names, row.names, Names(), "layer_aliases", "ignores_later_layers")
    plain = ExpertsFamily()
    routing = entries(ExpertsFamily, row.experts, plain)
    tables = [
        (f"{table}.{key}", replace(row, **{table: {each: given[each] for each in given if each != key}}))
        for table in ("defaults", "required")
        for given in [getattr(row, table)]
        for key in given
    ]
    return [
        *entries(Family, row, Family(), "models", "names", "defaults", "required", "experts"),
        ("experts", replace(row, experts=None)),
        *((f"names.{what}", replace(row, names=each)) for what, each in names),
        *((f"experts.{what}", replace(row, experts=each)) for what, each in routing),
        *tables,
    ]


def readings(architecture: str, required: tuple[str, ...]) -> list[Any]:
    """What a minimal file says, files with another value of what must have one, and one with every key of experts."""
    whole = minimal_file(architecture)
    minimal = {"architectures": whole["architectures"], **whole.get("text_config", whole)}
    files = [
        whole,
        minimal,
        *({**minimal, key: 16} for key in ("num_local_experts", "n_routed_experts", "num_experts")),
    ]
    files += [{**minimal, "attention_bias": True, "mlp_bias": True}, {**minimal, "decoder_sparse_step": 2}]
    files += [{**minimal, "num_hidden_layers": 70}]
    files += [{**minimal, "mlp_only_layers": [1]}, *({**minimal, key: "other"} for key in required)]
    files += [{**minimal, "use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 70}]
    found: list[Any] = []
    for config in files:
        try:
            found.append(model_config_of(config, Path("config.json")))
        except SpmdError as error:
            found.append(str(error))
    return found


def is_noticed(name: str) -> bool:
    for folder in (expert_folder(name), thinned_expert_folder(name)):
        try:
            config = read_model_files(folder).model_config
            logits = prompt_logits(new_model(folder, config=config), PROMPTS[2:3])
        except (SpmdError, AssertionError, KeyError, RuntimeError, IndexError):
            return True
        if not relative_error(logits[0], expected(name)[2]) < TOLERANCE:
            return True
    return False


SAME_FUNCTION = {
    # Stacks that are as in memory are read without it too; the test of those that are turned needs it.
    ("Qwen3VLMoeForConditionalGeneration", "names.stacked"),
    # Weights that have the sum 1 divided by it: other bits, not another number.
    ("GraniteMoeForCausalLM", "experts.renormalises"),
    ("GraniteMoeSharedForCausalLM", "experts.renormalises"),
    ("GptOssForCausalLM", "experts.renormalises"),
}


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=[] if each == "OlmoeForCausalLM" else pytest.mark.matrix) for each in EXPERT_FAMILIES],
)
def test_each_entry_of_a_row_is_noticed_when_it_is_the_plain_one(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name in CASES if read_model_files(expert_folder(name)).model_config.architecture == architecture]
    assert cases
    required = tuple(FAMILIES[architecture].required)
    right, silent = readings(architecture, required), []
    for what, mutant in mutants(architecture):
        monkeypatch.setitem(FAMILIES, architecture, mutant)
        if readings(architecture, required) == right and not any(is_noticed(name) for name in cases):
            silent.append(what)
    assert [what for what in silent if (architecture, what) not in SAME_FUNCTION] == []
