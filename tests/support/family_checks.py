"""Comparisons that models of every family pass: steps, schedules, shards, stages, tensors, bytes, adapters, rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_runs import run_rows
from our_model import is_noticed, load_model
from peft import PeftModel
from peft_adapters import peft_logits, write_adapter
from plain_models import new_model
from reference_models import Oracle, greedy_without_cache, random_prompt, relative_error
from safetensors.torch import load_file
from state_segments import CHUNKS
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import ModelConfigError, SpmdError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.topology import RankLayout, Stage
from spmd_worker.worker.memory.estimate import weights_bytes

SCHEDULED_ROWS = [random_prompt(length, seed=3, vocab_size=96) for length in (3, 22, 40, 52, 130)]
SCHEDULED_ROWS.append(SCHEDULED_ROWS[-1][:128] + SCHEDULED_ROWS[0])
SCHEDULES: dict[str, dict[str, Any]] = {
    "cached": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "recomputed": {"num_blocks": 37, "preemption_mode": "recompute", "block_size": 4},
    "swapped": {"num_blocks": 37, "preemption_mode": "swap", "block_size": 4, "swap_space": 0.01},
}


def folder_logits(rows: list[list[int]], folder: Path) -> list[Tensor]:
    """Logits of rows by a model of the folder with kernels of plain torch."""
    return run_rows([new_model(folder)], rows)[0]


def are_same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Whether the states of all rows have the same bits."""
    return all(torch.equal(*pair) for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True))


def check_steps(model: DecoderForCausalLM, rows: list[list[int]]) -> list[Tensor]:
    """Logits of rows, whose bits, and those of states, are the same with prompts cut anywhere, together and alone."""
    logits, states = run_rows([model], rows)
    assert not any(bool(each.isnan().any()) for row in (logits, *states) for each in row)
    for chunk in CHUNKS:
        found, found_states = run_rows([model], rows, chunk, is_fused=chunk != 7)
        assert all(map(torch.equal, found, logits)), chunk
        assert are_same(found_states, states), chunk
    for row, alone in enumerate(rows):
        found, found_states = run_rows([model], [alone])
        assert torch.equal(found[0], logits[row])
        assert are_same(found_states, [states[row]])
    return logits


def check_int8(oracle: Oracle, name: str, model: DecoderForCausalLM, most: float = 0.3) -> None:
    """Logits of a model in int8 are near transformers', and in chunks their bits and those of states are the same."""
    logits, states = run_rows([model], oracle.rows)
    assert 1e-3 < oracle.worst_error(name, logits) < most
    found, found_states = run_rows([model], oracle.rows, 16)
    assert all(map(torch.equal, found, logits))
    assert are_same(found_states, states)


def check_engine(folder: Path, reference: Any, rows: list[list[int]], num_tokens: int) -> None:
    """Ids of transformers in small steps, with fewer slots than rows, and of the same prompts again from snapshots."""
    rows = [*rows, [*rows[0], *rows[1]]]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    right = [greedy_without_cache(reference, row, num_tokens) for row in rows]
    with LLM(folder, num_blocks=40, max_num_batched_tokens=17, max_num_seqs=2) as llm:
        for _ in range(2):
            outputs = llm.generate(rows, greedy, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in outputs] == right


def ids_and_logprobs(llm: LLM, rows: list[list[int]], params: SamplingParams) -> list[Any]:
    return [
        (each.outputs[0].token_ids, [entry.logprob for step in each.outputs[0].logprobs for entry in step.values()])
        for each in llm.generate(rows, params, use_tqdm=False)
    ]


def check_schedules(folder: Path, greedy_of: Callable[[list[int], int], list[int]]) -> None:
    """By the engine: rows together, from cached prompts with their states, in chunks, and after preemption; one of them
    has the ids of `greedy_of`, which takes a prompt and a number of tokens.
    """
    rows, params = SCHEDULED_ROWS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    given = {"num_blocks": 200, "max_model_len": 144, "enable_prefix_caching": False}
    with LLM(folder, **given) as llm:
        cold = [ids_and_logprobs(llm, [row], params)[0] for row in rows]
        assert ids_and_logprobs(llm, rows, params) == cold, "alone and together"
    assert list(cold[1][0]) == greedy_of(rows[1], 12)
    for way, settings in SCHEDULES.items():
        with LLM(folder, **{**given, **settings}) as llm:
            assert ids_and_logprobs(llm, rows, params) == cold, way
            counters = llm.llm_engine.counters
            assert (counters.num_preemptions > 0) == (way in ("recomputed", "swapped")), way
            if way == "cached":
                assert [ids_and_logprobs(llm, [row], params)[0] for row in rows] == cold
                assert counters.num_cached_prompt_tokens >= 2 * 128


def joined_logits(
    size: int,
    new: Callable[[GroupHandle], DecoderForCausalLM],
    logits_of: Callable[[DecoderForCausalLM], list[Tensor]],
) -> list[Tensor]:
    """Logits of rows by `size` tensor-parallel ranks, each its part of the vocabulary."""

    def run(group: GroupHandle) -> list[Tensor]:
        model = new(group)
        return [logits[:, : model.lm_head.shard.num_owned] for logits in logits_of(model)]

    return [torch.cat(shards, dim=1) for shards in zip(*on_ranks(size, run), strict=True)]


def logits_of_ranks(folder: Path, size: int, rows: list[list[int]], chunk: int | None = None) -> list[Tensor]:
    """`joined_logits` of `run_rows`."""
    return joined_logits(size, partial(new_model, folder), lambda model: run_rows([model], rows, chunk)[0])


def check_stages(folder: Path, cut: int, rows: list[list[int]], chunk: int) -> None:
    """Two stages, the second from layer `cut` on, have the bits of one, and its states."""
    end = read_model_files(folder).model_config.num_layers
    cuts = (Stage(0, cut, is_first=True, is_last=False), Stage(cut, end, is_first=False, is_last=True))
    staged, states = run_rows([new_model(folder, stage=stage) for stage in cuts], rows, chunk)
    alone, states_of_one = run_rows([new_model(folder)], rows, chunk)
    assert all(map(torch.equal, staged, alone))
    assert are_same(states, states_of_one)


def check_tensors(folder: Path, *others: Mapping[str, Tensor]) -> None:
    """The checkpoint's tensors are those of the view, and are loaded by their names or those of `others`; on two ranks
    together all of each.
    """
    model, tensors = new_model(folder), load_file(folder / "model.safetensors")
    tensors = {each: tensor for each, tensor in tensors.items() if not model.weights.names.is_derived(each)}
    with model.as_checkpoint() as view:
        shown = dict(view.named_parameters()) | dict(view.named_buffers())
        assert {each: torch.equal(shown[each], tensors[each]) for each in shown} == dict.fromkeys(tensors, True)
    for given in (tensors, *others):
        other = new_model(folder)
        for parameter in other.parameters():
            parameter.data.zero_()
        assert other.load_weights(list(given.items())) == set(tensors)
        assert all(map(torch.equal, other.parameters(), model.parameters()))

    check_views_of_ranks(folder, tensors)


def check_views_of_ranks(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Two ranks together view all of each tensor."""

    def run(group: GroupHandle) -> dict[str, int]:
        with new_model(folder, group).as_checkpoint() as view:
            return {each: tensor.numel() for each, tensor in (*view.named_parameters(), *view.named_buffers())}

    first, second = on_ranks(2, run)
    assert all(first.get(each, 0) + second.get(each, 0) >= tensors[each].numel() for each in tensors)


def planned_models(config: ModelConfig) -> Iterator[tuple[RankLayout, int, str, DecoderForCausalLM]]:
    """(layout, rank, dtype, model) of one, two and four ranks, on the meta device; each has the bytes of the plan."""
    for size, dtype in ((1, "float32"), (2, "bfloat16"), (4, "float32")):
        for rank in range(size):
            group = GroupHandle(ranks=tuple(range(size)), rank=rank, group=None)
            options = (ReferenceKernels(), SdpaBackend(), getattr(torch, dtype), torch.device("meta"))
            model = build_model(LayerContext(group, *options), config)
            planned = weights_bytes(config, RankLayout(size), rank, dtype, "cuda")
            assert planned == sum(each.nbytes for each in model.parameters()), (size, rank)
            yield RankLayout(size), rank, dtype, model


def shapes_of_both(theirs: Any, ours: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of transformers' tensors by our names, and of ours, of models without memory; without experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    found = build_model(context, ours)
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items() if ".experts." not in name}
    if theirs.tie_word_embeddings:
        del shapes["lm_head.weight"]
    named = {ours.names.canonical(name): shape for name, shape in shapes.items()}
    own = {name: tuple(shape) for name, shape in found.weights.shapes.items() if ".experts." not in name}
    return named, own


def adapter_logits(
    folder: Path, new_reference: Callable[[], Any], targets: Sequence[str], path: Path, rows: list[list[int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Our logits of rows with an adapter of `targets`, which is written to `path`, and PEFT's."""
    write_adapter(new_reference(), path, (("target_modules", targets),))
    model, source = load_model(folder), read_adapter(path)
    loaded = LoadedAdapters(model, AdapterLimits(max_loras=2, max_lora_rank=8, max_cpu_loras=2))
    loaded.commit(loaded.prepare(source))
    reference = PeftModel.from_pretrained(new_reference(), path).eval()
    logits, _ = run_rows([model], rows, 33, loaded=loaded, digests=[source.digest] * len(rows))
    return logits, [peft_logits(reference, row) for row in rows]


def check_adapters(oracle: Oracle, name: str, logits: list[Tensor], theirs: list[Tensor]) -> None:
    """Logits with an adapter (`adapter_logits`) are PEFT's, and far from those without."""
    assert max(map(relative_error, logits, theirs)) < oracle.tolerance
    assert oracle.worst_error(name, logits) > 100 * oracle.tolerance, "it matters"


# ---- entries of a row of the table of families ---------------------------------------------------------------------


def without_each(row: Family, *tables: str) -> list[tuple[str, Family]]:
    """The row without one entry of one of its tables ("defaults"), or of its names ("names.parts")."""
    found = []
    for table in tables:
        part, _, field = table.rpartition(".")
        owner = getattr(row, part) if part else row
        for key in getattr(owner, field):
            kept = {other: value for other, value in getattr(owner, field).items() if other != key}
            changed = replace(owner, **{field: kept})
            found.append((f"{table}.{key}", replace(row, **{part: changed}) if part else changed))
    return found


def readings_of(files: Iterable[Mapping[str, Any]], *, with_reasons: bool = False) -> list[Any]:
    """Model configs of files; for one that is rejected None, or the reason."""
    found: list[Any] = []
    for config in files:
        try:
            found.append(model_config_of(dict(config), Path("config.json")))
        except SpmdError as error:
            found.append(str(error) if with_reasons else None)
    return found


def silent_mutants(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    mutants: Iterable[tuple[str, Family]],
    read: Callable[[], list[Any]],
    is_noticed: Callable[[], bool],
) -> list[str]:
    """Names of the rows in place of the architecture's that `read` reads as its own and that are not noticed."""
    silent, right = [], read()
    for what, mutant in mutants:
        monkeypatch.setitem(FAMILIES, architecture, mutant)
        if read() == right and not is_noticed():
            silent.append(what)
    return silent


def check_entries(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    mutants: Iterable[tuple[str, Family]],
    read: Callable[[], list[Any]],
    folders: Mapping[str, Iterable[Path]],
    logits_of: Callable[[Path], list[Tensor]],
    is_right: Callable[[str, list[Tensor]], bool],
) -> None:
    """Each mutant is read otherwise, or noticed in a case's folders; `is_right` takes its name and logits."""

    def is_seen() -> bool:
        return any(is_noticed(paths, logits_of, partial(is_right, name)) for name, paths in folders.items())

    assert silent_mutants(monkeypatch, architecture, mutants, read, is_seen) == []


def check_rejected(config: Mapping[str, Any], message: str) -> None:
    """A config.json is rejected with an error that has the message."""
    with pytest.raises(ModelConfigError) as caught:
        model_config_of(dict(config), Path("config.json"))
    assert message in str(caught.value)
