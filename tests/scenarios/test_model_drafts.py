"""Drafts by models change no bit of an answer, and the draft that is the target itself is always right."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import ranks
import torch
from cut_jobs import Ended, end_after
from draft_checkpoints import (
    EAGLE_TARGET,
    add_qwen_head,
    eagle_folder,
    mtp_folder,
    qwen_mtp_folder,
    small_draft_folder,
)
from image_models import image_folder
from jobs_of_rows import job_config, run_here, write_rows
from plain_outputs import without_times
from reference_models import checkpoint_folder, mixed_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.scheduler.counters import SchedulerCounters

METHODS = ("draft_model", "mtp", "qwen mtp", "eagle3")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KINDS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1, logprobs=1),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=2),
    replace(GREEDY, repetition_penalty=1.3, min_tokens=4, ignore_eos=False),
    replace(GREEDY, temperature=1.0, n=2, seed=3),
]
PROMPTS = [[token_id % 86 + 5 for token_id in prompt] for prompt in mixed_prompts(6, 40, seed=3)]
PARAMS = [KINDS[index % len(KINDS)] for index in range(len(PROMPTS))]
NUM_DRAFTS = 3
MTP_FOLDERS = {"mtp": mtp_folder, "qwen mtp": qwen_mtp_folder}
"""Targets by the kind of their head. Qwen's has recurrent states."""

Answers = list[dict[str, Any]]


def speculation(method: str) -> dict[str, Any]:
    models = {"draft_model": small_draft_folder, "eagle3": eagle_folder}
    given = {"model": str(models[method]())} if method in models else {}
    return {
        "method": method.removeprefix("qwen "),
        "num_speculative_tokens": NUM_DRAFTS,
        "max_step_tokens": 64,
        **given,
    }


def target_of(method: str) -> Path:
    return MTP_FOLDERS[method]() if method in MTP_FOLDERS else checkpoint_folder(EAGLE_TARGET)


def answers(
    folder: Path, speculative_config: dict[str, Any] | None = None, **settings: Any
) -> tuple[Answers, SchedulerCounters]:
    given = {} if speculative_config is None else {"speculative_config": speculative_config}
    settings = {"num_blocks": 200, **given, **settings}
    with LLM(str(folder), dtype="float32", max_model_len=128, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], PARAMS, use_tqdm=False)
        return [without_times(each) for each in outputs], llm.llm_engine.counters


@cache
def plain_answers(folder: Path) -> Answers:
    return answers(folder)[0]


@pytest.mark.gate("plenty-qwen mtp", "plenty-eagle3", "preempted in chunks-draft_model", "preempted in chunks-mtp")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 9, "max_num_batched_tokens": 48, "preemption_mode": "recompute"}],
    ids=["plenty", "preempted in chunks"],
)
def test_drafts_change_no_bit(method: str, settings: dict[str, Any]):
    folder = target_of(method)
    found, counters = answers(folder, speculation(method), **settings)
    assert found == plain_answers(folder)
    assert counters.num_drafted_tokens > 20, counters
    assert bool(counters.num_preemptions) == bool(settings), counters


@pytest.mark.stress
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_behind_prefix_hits_change_no_bit(method: str, dtype: str):
    """Prompts of the second turn are those of the first with their answers. They are long enough for a kept state."""
    prompts, found = [[*each, *each] for each in PROMPTS], []
    for given in ({}, {"speculative_config": speculation(method)}):
        with LLM(str(target_of(method)), dtype=dtype, max_model_len=128, num_blocks=200, **given) as llm:
            first = llm.generate([{"prompt_token_ids": each} for each in prompts], PARAMS, use_tqdm=False)
            turns = [[*prompts[index], *each.outputs[0].token_ids, 7, 8] for index, each in enumerate(first)]
            later = llm.generate([{"prompt_token_ids": each} for each in turns], PARAMS, use_tqdm=False)
            found.append([without_times(each) for each in (*first, *later)])
            counters = llm.llm_engine.counters
    assert found[0] == found[1]
    assert sum(each["num_cached_tokens"] for each in found[1][len(PROMPTS) :]) > 0
    assert counters.num_drafted_tokens > 40, counters


@pytest.mark.stress
@pytest.mark.parametrize("drafts_first", [True, False], ids=["drafts first", "drafts last"])
@pytest.mark.parametrize("method", METHODS)
def test_job_resumes_with_and_without_drafts_of_models(method: str, drafts_first: bool, tmp_path: Path):
    """The bytes of an unbroken job without drafts."""
    rows = [
        {"prompt_token_ids": each, "max_tokens": 10 + index, "temperature": index % 2, "ignore_eos": True}
        for index, each in enumerate(PROMPTS)
    ]
    write_rows(tmp_path, rows)

    def run(name: str, *, has_drafts: bool) -> bytes:
        drafts = SpeculativeConfig(**speculation(method)) if has_drafts else None
        options, job = {"dtype": "float32", "max_model_len": 128}, {"output": str(tmp_path / name), "commit_rows": 1}
        run_here(job_config(tmp_path, target_of(method), options=options, speculation=drafts, **job))
        return (tmp_path / name).read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        end_after(patch, 2)
        with pytest.raises(Ended):
            run("resumed.jsonl", has_drafts=drafts_first)
    assert run("resumed.jsonl", has_drafts=not drafts_first) == run("whole.jsonl", has_drafts=False)
    metrics = json.loads((tmp_path / "resumed.jsonl.run" / "metrics.json").read_text())
    assert metrics["resumed_rows"] == 2
    assert drafts_first or metrics["speculation"]["drafted_tokens"] > 10


def test_draft_equal_to_its_target_is_always_accepted():
    folder = checkpoint_folder(EAGLE_TARGET)
    config = {**speculation("draft_model"), "model": str(folder)}
    with LLM(str(folder), dtype="float32", max_model_len=128, speculative_config=config) as llm:
        prompts = [{"prompt_token_ids": each} for each in PROMPTS[:3]]
        for _ in range(2):
            # The second time the prompts are found in the cache, but not the keys of the draft.
            llm.generate(prompts, GREEDY, use_tqdm=False)
        counters, executor = llm.llm_engine.counters, llm.llm_engine.executor
        taken = executor.take_draft_token_ids()
        assert taken is not None
        assert set(taken.req_ids) <= {"3", "4", "5"}
        assert all(len(each) <= NUM_DRAFTS for each in taken.draft_token_ids)
        assert executor.take_draft_token_ids() is None, "they are given once"
    assert counters.num_drafted_tokens == counters.num_accepted_tokens > 60, counters


def test_equal_draft_of_preempted_rows_is_accepted():
    """Rows had drafts from before they were recomputed, and were given blocks again whose keys others had replaced."""
    chance, folder = Random(1), checkpoint_folder(EAGLE_TARGET)
    prompts = [{"prompt_token_ids": [chance.randrange(5, 90) for _ in range(count)]} for count in (34, 53, 27)]
    params = [replace(GREEDY, max_tokens=count) for count in (51, 55, 16)]
    config = {**speculation("draft_model"), "model": str(folder)}
    given: dict[str, Any] = {"num_blocks": 34, "block_size": 4, "preemption_mode": "recompute", "max_model_len": 128}
    with LLM(str(folder), dtype="float32", speculative_config=config, **given) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        counters = llm.llm_engine.counters
    assert counters.num_preemptions == 2
    assert counters.num_drafted_tokens == counters.num_accepted_tokens > 40, counters


def write_echo(folder: Path, source: Path) -> None:
    """A model of Qwen whose layers add little, so that a token follows from the one before; its head knows that, by the
    embeddings, which are the first half of what it joins.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    last = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    tensors = {name: each * (0.01 if name.endswith(last) else 1) for name, each in tensors.items()}
    size = len(tensors["model.norm.weight"])
    tensors["mtp.fc.weight"] = torch.eye(size, 2 * size)
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(size)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_qwen_head_that_knows_is_accepted(tmp_path: Path):
    write_echo(tmp_path / "model", qwen_mtp_folder("qwen3_5"))
    config, settings = speculation("qwen mtp"), {"dtype": "float32", "max_model_len": 128}
    prompts = [{"prompt_token_ids": each} for each in PROMPTS[:3]]
    found = []
    for given in ({}, {"speculative_config": config}):
        with LLM(str(tmp_path / "model"), **settings, **given) as llm:
            outputs = llm.generate(prompts, replace(GREEDY, logprobs=1), use_tqdm=False)
            found.append([without_times(each) for each in outputs])
            counters = llm.llm_engine.counters
    # Log-probabilities depend on the states, which follow the drafts.
    assert found[0] == found[1]
    assert counters.num_drafted_tokens == counters.num_accepted_tokens > 30, counters


IMAGES = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from image_models import PICTURES, prompt_of
from plain_outputs import without_times
from spmd_worker import LLM, SamplingParams
folder, config, layout = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
prompts = [prompt_of("qwen3_5", PICTURES), {"prompt": "Text and no picture."}, prompt_of("qwen3_5", PICTURES[:1])]
params = [replace(greedy, max_tokens=24), greedy, replace(greedy, temperature=1, seed=3, n=3, max_tokens=40)]
found = []
for given in ({}, {"speculative_config": config}):
    settings = {"dtype": "float32", "block_size": 16, "num_blocks": 96, "max_model_len": 192}
    with LLM(folder, **settings, **layout, **given) as llm:
        found.append([without_times(each) for each in llm.generate(prompts, params, use_tqdm=False)])
        num_drafted = llm.llm_engine.counters.num_drafted_tokens
Path(sys.argv[4], os.environ["RANK"]).write_text(json.dumps([*found, num_drafted]))
"""


@pytest.mark.stress
@pytest.mark.parametrize("layout", ["", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_qwen_drafts_change_no_row_with_images(layout: str, tmp_path: Path):
    folder, size = tmp_path / "model", 2 if layout else 1
    shutil.copytree(image_folder("qwen3_5"), folder)
    add_qwen_head(folder, "qwen3_5_images", AutoConfig.from_pretrained(folder).get_text_config())
    given = [json.dumps(each) for each in (speculation("qwen mtp"), {layout: 2} if layout else {})]
    ranks.run_ranks(IMAGES, size, 240, [folder, *given, tmp_path]).checked()
    for rank in range(size):
        plain, drafted, num_drafted = json.loads((tmp_path / str(rank)).read_text())
        assert drafted == plain
        assert num_drafted > 20


SCRIPT = """
import json, os, sys
from pathlib import Path
from plain_outputs import without_times
from spmd_worker import LLM, SamplingParams
{before}
job = json.loads(Path(sys.argv[1]).read_text())
found = {{}}
for method, (folder, config) in job["methods"].items():
    settings = {{"dtype": "float32", "max_model_len": 128, "num_blocks": 200, **job["layout"]}}
    with LLM(folder, speculative_config=config, **settings) as llm:
        params = [SamplingParams(**each) for each in job["params"]]
        prompts = [{{"prompt_token_ids": each}} for each in job["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found[method] = [[without_times(each) for each in outputs], llm.llm_engine.counters.num_drafted_tokens]
    if job["has_plain"]:
        with LLM(folder, **settings) as llm:
            found[method].append([without_times(each) for each in llm.generate(prompts, params, use_tqdm=False)])
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps(found))
"""

OTHER_DRAFTS = """
from spmd_worker.worker.drafts.model_drafter import ModelDrafter
propose = ModelDrafter.propose
def others(self, *given, **options):
    drafts = propose(self, *given, **options)
    return tuple(own and (own[0] % 200 + 5, *own[1:]) for own in drafts) if os.environ["RANK"] == "1" else drafts
ModelDrafter.propose = others
"""


def run_on_ranks(tmp_path: Path, layout: dict[str, int], methods: list[str], before: str = "") -> Any:
    job = {
        "layout": layout,
        "params": [sampling_values(each) for each in PARAMS],
        "prompts": PROMPTS,
        # The bits of one rank are those of two if the model's columns divide.
        "has_plain": "tensor_parallel_size" in layout and not before,
        "methods": {method: (str(target_of(method)), speculation(method)) for method in methods},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    return ranks.run_ranks(SCRIPT.format(before=before), 2, 240, [tmp_path / "job.json", tmp_path])


def sampling_values(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "max_tokens", "ignore_eos", "seed", "logprobs", "top_p", "repetition_penalty", "n")
    return {name: getattr(params, name) for name in (*names, "min_tokens")}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "methods"),
    [
        pytest.param({"tensor_parallel_size": 2}, ["draft_model"], id="tensor"),
        pytest.param({"pipeline_parallel_size": 2}, ["eagle3"], id="pipeline"),
        pytest.param(
            {"tensor_parallel_size": 2}, ["mtp", "qwen mtp", "eagle3"], id="tensor-heads", marks=pytest.mark.stress
        ),
        pytest.param(
            {"pipeline_parallel_size": 2},
            ["draft_model", "mtp", "qwen mtp"],
            id="pipeline-others",
            marks=pytest.mark.stress,
        ),
        pytest.param({"data_parallel_size": 2}, list(METHODS), id="data", marks=pytest.mark.stress),
    ],
)
def test_drafts_change_no_bit_on_ranks(layout: dict[str, int], methods: list[str], tmp_path: Path):
    completed = run_on_ranks(tmp_path, layout, methods)
    assert completed.returncode == 0, completed
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for method in methods:
        for answered, _, *plain in (own[method] for own in found):
            expected = plain[0] if plain else json.loads(json.dumps(plain_answers(target_of(method))))
            assert answered == expected, method
        # A replica may be so late that the other one takes all rows.
        assert sum(own[method][1] for own in found) > 40


DRAFTS_SCRIPT = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, SamplingParams
from spmd_worker.worker.drafts.head_drafter import HeadDrafter
{before}
propose, proposed = HeadDrafter.propose, []
def kept(self, *given, **options):
    proposed.append(propose(self, *given, **options))
    return proposed[-1]
HeadDrafter.propose = kept
folder, config, layout, prompts = json.loads(Path(sys.argv[1]).read_text())
with LLM(folder, speculative_config=config, dtype="float32", max_model_len=128, num_blocks=200, **layout) as llm:
    for prompt in prompts:
        llm.generate([{{"prompt_token_ids": prompt}}], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps(proposed))
"""
OTHER_LAYERS = """
from spmd_worker.worker.runner.stage_streams import StageStreams
joined = StageStreams.joined
StageStreams.joined = lambda self, hidden, streams: joined(self, hidden, dict.fromkeys(streams, hidden))
"""


def eagle_drafts(folder: Path, head: Path, num_stages: int, before: str = "") -> list[list[list[int]]]:
    """Drafts of each step and row. Rows are alone, so that a pipeline has the steps of one stage."""
    folder.mkdir()
    config = {**speculation("eagle3"), "model": str(head)}
    job = [str(target_of("eagle3")), config, {"pipeline_parallel_size": num_stages}, PROMPTS[:2]]
    (folder / "job.json").write_text(json.dumps(job))
    done = ranks.run_ranks(DRAFTS_SCRIPT.format(before=before), num_stages, 240, [folder / "job.json", folder])
    assert done.returncode == 0, done
    found: list[list[list[int]]] = json.loads((folder / str(num_stages - 1)).read_text())
    return found


@pytest.mark.stress
@pytest.mark.matrix
@pytest.mark.parametrize("has_embedding", [False, True])
def test_eagle_head_drafts_behind_stages_as_behind_one(has_embedding: bool, tmp_path: Path):
    """Both kinds: a copy of the target's embedding, or one of its own; streams of another layer give other drafts."""
    head = shutil.copytree(eagle_folder(), tmp_path / "head")
    if has_embedding:
        tensors = load_file(head / "model.safetensors")
        tensors["embed_tokens.weight"] = torch.randn(211, tensors["norm.weight"].shape[0])
        save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    drafts = eagle_drafts(tmp_path / "one", head, 1)
    assert sum(len(own) for step in drafts for own in step) > 40
    assert eagle_drafts(tmp_path / "two", head, 2) == drafts
    if not has_embedding:
        assert eagle_drafts(tmp_path / "planted", head, 2, OTHER_LAYERS) != drafts


@pytest.mark.stress
@pytest.mark.matrix
def test_other_drafts_of_a_rank_are_found(tmp_path: Path):
    completed = run_on_ranks(tmp_path, {"tensor_parallel_size": 2}, ["draft_model"], OTHER_DRAFTS)
    assert completed.returncode != 0
    assert "draft" in completed.stderr, completed


def test_draft_sleeps_and_stays_as_it_is():
    """Weights of the target change, and the draft's do not: its drafts are wrong then, and answers are right."""
    folder = checkpoint_folder(EAGLE_TARGET)
    config = {**speculation("draft_model"), "model": str(folder)}
    prompts, settings = [{"prompt_token_ids": each} for each in PROMPTS[:3]], {"dtype": "float32", "max_model_len": 128}
    found, shares = [], []
    for given in ({}, {"speculative_config": config}):
        with LLM(str(folder), **settings, **given) as llm:

            def step(llm: LLM = llm) -> None:
                before = replace(llm.llm_engine.counters)
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                found.append([each.outputs[0].token_ids for each in outputs])
                after = llm.llm_engine.counters
                num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
                shares.append((after.num_accepted_tokens - before.num_accepted_tokens) / max(num_drafted, 1))

            llm.sleep(level=2)
            llm.wake_up()
            llm.collective_rpc("reload_weights")
            step()
            other = load_file(folder / "model.safetensors")
            llm.update_weights((name, -each if "layers.1.mlp.up" in name else each) for name, each in other.items())
            step()
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert shares[2] == 1.0
    assert shares[3] < 1.0
