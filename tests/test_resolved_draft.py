"""Drafts that do not fit their target are refused by name, and a plan counts those that do."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_checkpoints import delta_folder
from draft_checkpoints import (
    EAGLE_TARGET,
    eagle_folder,
    eagle_tensors,
    mtp_folder,
    qwen_mtp_folder,
    small_draft_folder,
)
from json_files import edit
from qwen4_checkpoints import qwen4_folder
from reference_models import checkpoint_folder, edit_config
from safetensors.torch import load_file, save_file

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, PlanConfig, RunConfig, SchedulerConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import CheckpointError, ConfigError, ModelConfigError
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.model.drafts.head_files import read_distances
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.resolved import ResolvedRun, resolve_again, resolve_run
from spmd_worker.worker.memory.draft_memory import stream_bytes
from spmd_worker.worker.memory.plan import cache_spec_of
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan
from spmd_worker.worker.worker import Worker

TARGET = checkpoint_folder


def resolved(
    folder: Path, method: str, model: Path | None = None, parallel: ParallelConfig | None = None, **keys: Any
) -> ResolvedRun:
    own = None if model is None else str(model)
    config = RunConfig(
        model=ModelOptions(path=str(folder), dtype="float32", max_model_len=128),
        speculative_config=SpeculativeConfig(method=method, model=own, num_speculative_tokens=3),
        parallel=parallel or ParallelConfig(),
        cache=CacheConfig(block_size=16, num_blocks=50),
        device="cpu",
        **keys,
    )
    return resolve_run(config, "cpu")


def refusal(folder: Path, method: str, model: Path | None = None, **keys: Any) -> str:
    with pytest.raises((ConfigError, ModelConfigError)) as caught:
        resolved(folder, method, model, **keys)
    return str(caught.value)


def test_draft_model_of_other_tokens_is_refused(tmp_path: Path):
    target = TARGET(EAGLE_TARGET)
    assert "has 96 token ids and the target 211" in refusal(target, "draft_model", small_draft_folder(96))
    with_tokenizer = tmp_path / "target"
    shutil.copytree(target, with_tokenizer)
    (with_tokenizer / "tokenizer.json").write_text("{}")
    run = RunConfig(
        model=ModelOptions(path=str(with_tokenizer)),
        speculative_config=SpeculativeConfig(method="draft_model", model=str(small_draft_folder())),
    )
    with pytest.raises(ConfigError, match=r"it has no tokenizer\.json, and the target has one.*method=suffix"):
        resolve_run(RunConfig(**{**vars(run), "plan": _plan(run)}), "cpu")
    own = tmp_path / "draft"
    shutil.copytree(small_draft_folder(), own)
    (own / "tokenizer.json").write_text('{"other": 1}')
    other = SpeculativeConfig(method="draft_model", model=str(own))
    with pytest.raises(ConfigError, match=r"its tokenizer\.json is not the target's"):
        resolve_run(RunConfig(**{**vars(run), "plan": _plan(run), "speculative_config": other}), "cpu")
    # A tokenizer that is made of another file.
    (own / "tokenizer.json").rename(own / "tiktoken.model")
    with pytest.raises(ConfigError, match=r"its tiktoken\.model is not the target's"):
        resolve_run(RunConfig(**{**vars(run), "plan": _plan(run), "speculative_config": other}), "cpu")


def _plan(run: RunConfig) -> Any:
    """A plan opens no tokenizer."""
    return type(run.plan)(enabled=True)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_missing_files_of_a_draft_are_named(method: str, tmp_path: Path):
    with pytest.raises(ModelConfigError, match=r"^speculative_config\.model=\S+none is not a folder: give"):
        resolved(TARGET(EAGLE_TARGET), method, tmp_path / "none")
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist: a model folder needs it$"):
        resolved(TARGET(EAGLE_TARGET), method, tmp_path)
    # Before the target's weights are read.
    folder = shutil.copytree(small_draft_folder() if method == "draft_model" else eagle_folder(), tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    words = f"speculative_config.model={folder} has no weights: copy its *.safetensors there too"
    assert refusal(TARGET(EAGLE_TARGET), method, folder) == words
    # A damaged file is there, and is named when it is loaded: before the target's, as its own fault shows.
    (folder / "model.safetensors").write_text("not the header of weights\n")
    target = shutil.copytree(TARGET(EAGLE_TARGET), tmp_path / "target")
    run = resolved(target, method, folder)
    (target / "model.safetensors").write_text("not the header of weights\n")
    worker = Worker(run, RankEnvironment())
    worker.init_device()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(folder))}/model\.safetensors: header length"):
        worker.load_model()


def test_other_tensors_of_a_draft_model_are_named_with_folder(tmp_path: Path):
    """The error had names and shapes of tensors, and no folder."""
    folder = shutil.copytree(small_draft_folder(), tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    save_file({key: each for key, each in tensors.items() if "q_proj" not in key}, folder / "model.safetensors")
    worker = Worker(resolved(TARGET(EAGLE_TARGET), "draft_model", folder), RankEnvironment())
    worker.init_device()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(folder))}: checkpoint and model do not match"):
        worker.load_model()


def _linked(folder: Path, links: Path, names: tuple[str, ...] = ("",)) -> Path:
    """A folder of links to those files of `folder` whose names end so, as the hub's snapshots are."""
    links.mkdir()
    for each in folder.iterdir():
        if each.name.endswith(names):
            (links / each.name).symlink_to(each)
    return links


def test_files_of_a_draft_may_be_links(tmp_path: Path):
    target = TARGET(EAGLE_TARGET)
    for method, folder in (("draft_model", small_draft_folder()), ("eagle3", eagle_folder())):
        assert resolved(target, method, _linked(folder, tmp_path / method)).draft is not None
    assert resolved(_linked(qwen_mtp_folder(), tmp_path / "qwen"), "mtp").draft is not None
    # Without weights its config.json is read for the head.
    plan = PlanConfig(enabled=True)
    assert resolved(_linked(mtp_folder(), tmp_path / "mtp", (".json",)), "mtp", plan=plan).draft is not None


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_damaged_config_of_a_draft_is_named(method: str, tmp_path: Path):
    folder = shutil.copytree(small_draft_folder() if method == "draft_model" else eagle_folder(), tmp_path / "draft")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=rf"^{re.escape(str(folder))}/config\.json is not JSON"):
        resolved(TARGET(EAGLE_TARGET), method, folder)


def test_head_as_a_draft_model_names_its_method():
    words = f"speculative_config.model={eagle_folder()} is a head of EAGLE-3: give speculative_config.method=eagle3"
    assert refusal(TARGET(EAGLE_TARGET), "draft_model", eagle_folder()) == words


def test_model_without_mtp_layer_is_refused():
    assert "llama_four_layers (LlamaForCausalLM) has no layer" in refusal(TARGET(EAGLE_TARGET), "mtp")
    problem = refusal(mtp_folder(), "mtp", small_draft_folder())
    assert "method=mtp takes the head from the target's own files" in problem


def test_draft_model_with_states_is_refused():
    problem = refusal(qwen_mtp_folder(), "draft_model", delta_folder("qwen3_5"))
    assert "Qwen3_5ForCausalLM has recurrent states, which do not follow drafts" in problem


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers=0: the files"),
        ({"mtp_num_hidden_layers": 2}, "has mtp_num_hidden_layers=2, and a head of one layer runs: use"),
        ({"mtp_use_dedicated_embeddings": True}, "sets mtp_use_dedicated_embeddings=true"),
        ({"layer_types": ["linear_attention"] * 3}, "no layer of this model has attention"),
    ],
)
def test_qwen_head_of_another_kind_is_refused(keys: dict[str, Any], words: str, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(qwen_mtp_folder("qwen3_5_images"), folder)
    edit_config(folder, lambda config: config["text_config"].update(keys))
    assert words in refusal(folder, "mtp")


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_qwen_files_without_a_head_are_refused(name: str, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(qwen_mtp_folder(name), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({key: each for key, each in tensors.items() if not key.startswith("mtp.")}, folder / "model.safetensors")
    assert "have no layer for multi-token prediction (mtp.*)" in refusal(folder, "mtp")
    # Without weights, config.json says it; one that says nothing has a head.
    (folder / "model.safetensors").unlink()
    assert resolved(folder, "mtp", plan=PlanConfig(enabled=True)).draft is not None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mtp.norm.weight", None, "mtp.norm.weight"),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", None, "mtp.layers.0.mlp.experts.3.up_proj.weight"),
        ("mtp.fc.weight", torch.zeros(32, 32), "mtp.fc.weight"),
    ],
)
def test_faults_of_a_qwen_head_are_named(name: str, change: torch.Tensor | None, words: str, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(qwen_mtp_folder("qwen3_next"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file({**tensors, **({} if change is None else {name: change})}, folder / "model.safetensors")
    worker = Worker(resolved(folder, "mtp"), RankEnvironment())
    worker.init_device()
    with pytest.raises(CheckpointError, match=re.escape(words)):
        worker.load_model()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32, "target_hidden_size": 32}, "its target has the hidden size 32, and this one 64"),
        ({"vocab_size": 300}, r"its embedding is [300, 64], and the target's [211, 64]"),
        ({"draft_vocab_size": 400}, "draft_vocab_size=400 of 211"),
        ({"num_hidden_layers": 2}, "it has 2 layers"),
        ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        ({"architectures": ("EagleLlamaForCausalLM",)}, "is no EAGLE-3 head (LlamaForCausalLMEagle3)"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "layers [1, 2, 9] of the target's 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "layers 3 of the target's 4"),
        ({"eagle_config": [1]}, "config.json: eagle_config=[1] must be an object"),
        ({"architectures": 5}, "architectures=5 is no EAGLE-3 head"),
        ({"draft_vocab_size": "64"}, "config.json: draft_vocab_size='64' must be a whole number"),
        ({"norm_before_residual": "no"}, "config.json: norm_before_residual='no' must be true or false"),
    ],
)
def test_eagle_head_of_another_base_is_refused(changes: dict[str, Any], words: str, tmp_path: Path):
    folder = tmp_path / "head"
    shutil.copytree(eagle_folder(), folder)
    edit(folder / "config.json", **changes)
    assert words in refusal(TARGET(EAGLE_TARGET), "eagle3", folder)


def test_heads_for_several_streams_are_refused(tmp_path: Path):
    assert "(Qwen4ExpForCausalLM) has no layer for multi-token prediction that runs here" in refusal(
        qwen4_folder("qwen4"), "mtp"
    )
    folder = shutil.copytree(eagle_folder(), tmp_path / "head")
    edit(folder / "config.json", hidden_size=32, target_hidden_size=32, vocab_size=96, draft_vocab_size=64)
    problem = refusal(qwen4_folder("qwen4"), "eagle3", folder)
    assert "it reads one residual stream, and its target has several" in problem


@pytest.mark.parametrize(
    ("size", "lost", "words"),
    [
        (32, "", "and d2t of its files has the shape [64]: copy config.json and *.safetensors of the same head"),
        (32, "d2t", "and lm_head.weight of its files has the shape [64, 64]: copy"),
        (211, "", "and d2t of its files has the shape [64]: copy"),
        (64, "d2t", "is not the target's 211, and its files have no d2t, which says what the head's ids mean: copy"),
    ],
)
@pytest.mark.parametrize("has_index", [False, True])
def test_eagle_ids_agree_with_the_tensors(size: int, lost: str, words: str, tmp_path: Path, has_index: bool):
    """Before, the head's loading found it, behind the weights of the target."""
    folder = shutil.copytree(eagle_folder(), tmp_path / "head")
    edit_config(folder, lambda config: config.update(draft_vocab_size=size))
    tensors = {name: each for name, each in eagle_tensors().items() if name != lost}
    save_file(tensors, folder / "model.safetensors")
    if has_index:
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "one.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = refusal(TARGET(EAGLE_TARGET), "eagle3", folder)
    key = f"speculative_config.model={folder}: draft_vocab_size={size} in {folder}/config.json"
    assert problem.startswith(key)
    assert words in problem


def test_distances_beyond_the_vocabulary_are_refused(tmp_path: Path):
    tensors = eagle_tensors()
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][5] = 300
    save_file({"d2t": tensors["d2t"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"d2t\[5\] names the id 305, and the target has 211"):
        read_distances(tmp_path, 64, 211)
    with pytest.raises(CheckpointError, match=r"config.json says int64 \[32\]"):
        read_distances(tmp_path, 32, 211)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no d2t"):
        read_distances(tmp_path, 64, 211)
    assert not read_distances(tmp_path, 211, 211).any()


@pytest.mark.parametrize("method", ["draft_model", "mtp", "qwen mtp", "eagle3"])
def test_blocks_cost_target_and_draft(method: str):
    models = {"draft_model": small_draft_folder, "eagle3": eagle_folder}
    folders = {"mtp": mtp_folder, "qwen mtp": qwen_mtp_folder}
    folder, kind = folders[method]() if method in folders else TARGET(EAGLE_TARGET), method.removeprefix("qwen ")
    run = resolved(folder, kind, models[method]() if method in models else None)
    spec = cache_spec_of(run, 0)
    # Of one layer: keys and values of 1 or 2 heads of 16 or 32, or a latent of 48.
    assert spec.draft_block_bytes == 16 * 4 * {"draft_model": 32, "mtp": 48, "qwen mtp": 128, "eagle3": 64}[method]
    assert spec.block_bytes == spec.model_block_bytes + spec.draft_block_bytes
    plain = cache_spec_of(
        resolve_run(RunConfig(model=run.config.model, cache=run.config.cache, device="cpu"), "cpu"), 0
    )
    assert plain.block_bytes == spec.model_block_bytes
    text = describe_plan(make_plan(run))
    assert f"(speculative_config.method={kind}), up to 3 tokens a row" in text
    assert decode_value(encode_value(run)).draft == run.draft, "processes get it"


def test_draft_is_on_the_last_stage():
    two = ParallelConfig(pipeline_parallel_size=2)
    run = resolved(TARGET(EAGLE_TARGET), "draft_model", small_draft_folder(), parallel=two)
    assert [bool(cache_spec_of(run, rank).draft_layers) for rank in range(2)] == [False, True]
    assert run.draft is not None
    again = resolve_again(run, ParallelConfig(tensor_parallel_size=2))
    assert again.draft is not None
    assert (run.draft.layout.tensor_parallel_size, again.draft.layout.tensor_parallel_size) == (1, 2)


def test_heads_do_not_run_ahead_of_ids():
    ahead = {"scheduler": SchedulerConfig(async_scheduling=True)}
    assert "leave scheduler.async_scheduling out" in refusal(mtp_folder(), "mtp", **ahead)
    run = resolved(TARGET(EAGLE_TARGET), "draft_model", small_draft_folder(), **ahead)
    assert run.num_steps_ahead == 1


def test_copy_of_an_embedding_needs_a_checkpoint():
    run = resolved(TARGET(EAGLE_TARGET), "eagle3", eagle_folder())
    two = ParallelConfig(pipeline_parallel_size=2)
    assert stream_bytes(run) == 0
    assert stream_bytes(resolve_again(run, two)) == 2 * 4 * run.config.scheduler.max_num_batched_tokens * 64 * 4
    sharded = replace(run.config, model=replace(run.config.model, load_format="sharded_state"))
    with pytest.raises(ConfigError, match=r"no embedding of its own.*sharded_state.*set parallel\.pipeline_parallel_s"):
        resolve_again(replace(run, config=sharded), two)


def test_int8_experts_of_a_draft_need_one_rank():
    """A restart on another layout checked the target alone, and ended the engine in an assertion."""
    config = RunConfig(
        model=ModelOptions(path=str(mtp_folder()), quantization="int8"),
        speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=1),
        device="cpu",
    )
    found, parallel = resolve_run(config, "cpu"), ParallelConfig(2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="a draft has parts of them: leave speculative_config out"):
        resolve_again(found, parallel)
    with pytest.raises(ConfigError, match="a draft has parts of them"):
        resolve_run(replace(config, parallel=parallel), "cpu")
    # Control: the target alone takes the layout.
    assert resolve_again(replace(found, draft=None), parallel).layout.tensor_parallel_size == 2
