"""Models that are saved and loaded again: bytes, tokens, transformers' logits; refusals, full disks and kills.

Saving over ranks is in test_saving_on_ranks.py.
"""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from context_fixtures import fixture_of
from encoder_models import encoder_folder
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from file_limit import file_limit
from forked_child import in_child
from hub_cache import write_snapshot
from killed_writer import KILLED, FileCalls, calls_on_files
from leaf_models import leaf_folder
from quantised_files import quantise
from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint
from run_folder import made_once
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_weight_updates import MODEL, NORM, PROMPTS, answers, changed_model, new_tensors, open_llm, trainers_model
from transformers import AutoModelForCausalLM

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import CheckpointError, ConfigError, MissingWeightsError, ModelConfigError, SaveError
from spmd_worker.model.weights import sharded_state
from spmd_worker.model.weights.sharded_state import column_ranges, held_parameters
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.resolved import resolve_run
from spmd_worker.worker import file_formats
from spmd_worker.worker.worker import Worker

KINDS = ("sharded_state", "checkpoint", "streamed")
FORMATS = {"sharded_state": "sharded_state"}
Tree = dict[str, bytes]

llm = fixture_of(open_llm)


@pytest.fixture(scope="module")
def before(llm: LLM) -> list[Any]:
    return answers(llm)


def save(llm: Any, kind: str, folder: Path, **options: Any) -> Path:
    getattr(llm, f"save_{kind}")(folder, **options)
    return folder


def open_saved(folder: Path, kind: str, **options: Any) -> LLM:
    return open_llm(folder, load_format=FORMATS.get(kind, "auto"), **options)


def read(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.arange(40).view(2, 20)).logits


@pytest.mark.guarantee("A saved model answers as before")
@pytest.mark.parametrize("kind", KINDS)
def test_saved_model_answers_as_before(kind: str, llm: LLM, before: list[Any], tmp_path: Path):
    folder = save(llm, kind, tmp_path / "model")
    with open_saved(folder, kind) as loaded:
        assert answers(loaded) == before
    assert (
        read(folder).items()
        >= {name: (MODEL / name).read_bytes() for name in ("config.json", "tokenizer.json")}.items()
    )


@pytest.mark.control("A saved model answers as before")
def test_comparison_detects_one_other_weight(llm: LLM, before: list[Any], tmp_path: Path):
    path = save(llm, "checkpoint", tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    tensors[NORM][3] *= 1.01
    save_file(tensors, path, metadata={"format": "pt"})
    with open_llm(path.parent) as loaded:
        assert answers(loaded) != before


def loaded_worker(folder: Path, kind: str = "checkpoint") -> Worker:
    options = ModelOptions(path=str(folder), dtype="float32", load_format=FORMATS.get(kind, "auto"))
    worker = Worker(resolve_run(RunConfig(model=options, device="cpu"), "cpu"), RankEnvironment())
    worker.init_device()
    worker.load_model()
    return worker


@pytest.mark.parametrize("name", ["phi", "gpt2", "gpt_neox", "gpt_oss"])
def test_families_keep_every_tensor_and_parameter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A padded head with a bias, transposed matrices, heads of a fused tensor, stacked experts; read in many blocks."""
    monkeypatch.setattr(file_formats, "CHUNK_BYTES", 3000)
    folder = (expert_folder if name == "gpt_oss" else family_folder)(name)
    worker, source = loaded_worker(folder), load_file(folder / "model.safetensors")
    expected = {each.name: each.read() for each in held_parameters(worker.loaded.model)}
    for kind in KINDS:
        save(worker, kind, tmp_path / kind)
        found = {each.name: each.read() for each in held_parameters(loaded_worker(tmp_path / kind, kind).loaded.model)}
        assert found.keys() == expected.keys()
        assert [each for each in expected if not torch.equal(found[each], expected[each])] == [], kind
        saved = source if kind in FORMATS else load_file(tmp_path / kind / "model.safetensors")
        assert saved.keys() == source.keys()
        assert [each for each in source if not torch.equal(saved[each], source[each].float())] == [], kind


@pytest.mark.parametrize(("kind", "options"), [("checkpoint", {"max_size": "512KiB"}), ("streamed", {})])
def test_transformers_opens_the_checkpoint(kind: str, options: dict[str, Any], llm: LLM, tmp_path: Path):
    folder = save(llm, kind, tmp_path / "model", **options)
    assert torch.equal(logits_of(folder), logits_of(MODEL))
    files, source = sorted(folder.glob("*.safetensors")), load_file(MODEL / "model.safetensors")
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)
    if options:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert len(files) > 2
        assert all(file.stat().st_size < 2**19 + 4096 for file in files)
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in source.values())


def test_streamed_data_begins_at_a_page(llm: LLM, tmp_path: Path):
    path = save(llm, "streamed", tmp_path / "model") / "model.safetensors"
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8:start])
    assert start % 4096 == 0
    assert header.pop("__metadata__")["layout"] == "streamed"
    large = [each["data_offsets"] for each in header.values() if math.prod(each["shape"]) * 4 % 4096 == 0]
    assert len(large) > 20
    assert all(begin % 4096 == 0 for begin, _ in large)


def test_saved_weights_are_those_of_now(tmp_path: Path):
    wanted = new_tensors()
    with open_llm() as llm:
        with llm.weight_update() as load:
            for name, tensor in wanted.items():
                load(name, tensor)
        folders = {kind: save(llm, kind, tmp_path / kind) for kind in KINDS}
        now = answers(llm)
        version = llm.llm_engine.scheduler.weight_version
    with open_llm(changed_model()) as other:
        assert answers(other) == now
    saved = load_file(folders["checkpoint"] / "model.safetensors")
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    assert version != 0
    assert json.loads((folders["sharded_state"] / "sharded_state.json").read_text())["weight_version"] == version
    for kind, folder in folders.items():
        with open_saved(folder, kind) as loaded:
            assert answers(loaded) == now, kind


def test_save_is_refused_while_weights_change_or_sleep(tmp_path: Path):
    folder = tmp_path / "model"
    with open_llm() as llm:
        executor = llm.llm_engine.model_executor
        llm.start_weight_update(partial=True)
        with pytest.raises(RuntimeError, match="call finish_weight_update before"):
            llm.save_checkpoint(folder)
        llm.update_weights([(NORM, new_tensors()[NORM])])
        with pytest.raises(RuntimeError, match=r"not committed: call llm\.finish_weight_update"):
            executor.save_checkpoint(folder)
        llm.finish_weight_update()
        llm.save_checkpoint(folder)
        trainers_model(llm).load_weights([(NORM, new_tensors()[NORM])])
        with pytest.raises(MissingWeightsError):
            llm.save_checkpoint(folder)
        llm.load_weights(load_file(MODEL / "model.safetensors").items())
        llm.sleep()
        for each in (llm.save_streamed, executor.save_sharded_state):
            with pytest.raises(RuntimeError, match=r"asleep"):
                each(folder)
        llm.wake_up(["weights"])
        llm.save_sharded_state(folder)
        llm.wake_up()
        llm.sleep(2)
        llm.wake_up()
        with pytest.raises(MissingWeightsError):
            llm.save_checkpoint(folder)
    with open_saved(folder, "sharded_state") as loaded, open_llm() as old:
        assert answers(loaded) == answers(old)


def test_requests_in_flight_continue_after_a_save(llm: LLM, tmp_path: Path):
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    engine.step()
    llm.save_checkpoint(tmp_path / "model")
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {each.request_id: each.outputs[0].token_ids for each in engine.step()}
    assert [ended[str(number)] for number in range(len(PROMPTS))] == expected
    assert torch.equal(
        load_file(tmp_path / "model" / "model.safetensors")[NORM], load_file(MODEL / "model.safetensors")[NORM]
    )


def test_folder_of_others_is_not_replaced(llm: LLM, tmp_path: Path):
    own = shutil.copytree(MODEL, tmp_path / "own")
    with pytest.raises(SaveError, match="holds files that this program has not saved"):
        llm.save_checkpoint(own)
    assert read(own) == read(MODEL)
    saved = save(llm, "sharded_state", tmp_path / "saved")
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(SaveError, match=r"notes\.txt would be removed"):
        llm.save_checkpoint(saved)
    (saved / "notes.txt").unlink()
    for name in ("head.safetensors", "lora/adapter_model.safetensors"):
        (saved / name).parent.mkdir(exist_ok=True)
        save_file({"mine": torch.ones(2)}, saved / name)
        with pytest.raises(SaveError, match=f"{name} would be removed"):
            llm.save_checkpoint(saved)
        (saved / name).unlink()
    save(llm, "checkpoint", saved, max_size=300_000)
    save(llm, "streamed", saved)
    assert sorted(path.suffix for path in saved.iterdir()) == [".json"] * 4 + [".safetensors"]
    (tmp_path / "empty").mkdir()
    assert (save(llm, "checkpoint", tmp_path / "empty") / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_is_said_and_leaves_nothing(kind: str, llm: LLM, tmp_path: Path):
    with file_limit(200_000), pytest.raises(SaveError, match=r"nothing was saved to .*, and what was there is unchang"):
        save(llm, kind, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    old = read(save(llm, kind, tmp_path / "model"))
    with file_limit(200_000), pytest.raises(SaveError, match="File too large"):
        save(llm, kind, tmp_path / "model")
    assert read(tmp_path / "model") == old
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture(scope="module")
def tiny() -> Path:
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return made_once("one layer to save", lambda folder: write_checkpoint(folder, CheckpointSpec(LlamaConfig, sizes)))


def states_after_kills(worker: Any, kind: str, target: Path, step: int) -> list[Tree]:
    """The folder's files after kills at every `step`-th call that changes files, the last ones included."""
    old = read(target)
    with calls_on_files(FileCalls()) as calls:
        save(worker, kind, target)
    new = read(target)
    assert new != old
    found, reserve = [], target.with_name("reserve")
    for number in reversed(range(len(calls.names) - 1, 0, -step)):
        for path in (target, reserve):
            shutil.rmtree(path, ignore_errors=True)
        target.mkdir()
        for name, content in old.items():
            (target / name).write_bytes(content)

        def run(number: int = number) -> None:
            with calls_on_files(FileCalls(number)):
                save(worker, kind, target)

        assert in_child(run) == KILLED, calls.names[number]
        assert read(target) in (old, new), (number, calls.names[number])
        found.append(read(target))
    save(worker, kind, target)
    assert read(target) == new
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    return found


def check_kills(kind: str, llm: LLM, tmp_path: Path, step: int) -> None:
    target, worker = tmp_path / "model", llm.llm_engine.model_executor
    save(worker, "streamed" if kind == "sharded_state" else "sharded_state", target)
    old = read(target)
    found = states_after_kills(worker, kind, target, step)
    assert any(each == old for each in found)
    assert any(each != old for each in found)


@pytest.mark.gate("checkpoint", "sharded_state")
@pytest.mark.parametrize("kind", KINDS)
def test_kill_during_a_save_leaves_old_or_new(kind: str, tiny: Path, tmp_path: Path):
    with open_llm(tiny) as llm:
        check_kills(kind, llm, tmp_path, step=14)


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_kill_at_every_write_leaves_old_or_new(kind: str, tiny: Path, tmp_path: Path):
    with open_llm(tiny) as llm:
        check_kills(kind, llm, tmp_path, step=1)


def test_quantised_files_are_saved_dequantised(tmp_path: Path):
    write_checkpoint(tmp_path / "plain", CheckpointSpec(LlamaConfig, {"intermediate_size": 96, "num_hidden_layers": 2}))
    quantised, _ = quantise(tmp_path / "plain", tmp_path / "files", "awq")
    with open_llm(quantised) as llm:
        expected = llm.generate([{"prompt_token_ids": [3, 5, 7]}], SamplingParams(temperature=0, logprobs=1))
        folders = {kind: save(llm, kind, tmp_path / kind) for kind in KINDS}
    for kind, folder in folders.items():
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        with open_saved(folder, kind) as loaded:
            again = loaded.generate([{"prompt_token_ids": [3, 5, 7]}], SamplingParams(temperature=0, logprobs=1))
        assert again[0].outputs[0].logprobs == expected[0].outputs[0].logprobs
    with (
        open_llm(MODEL, quantization="int8") as llm,
        pytest.raises(SaveError, match="quantization=int8 holds rounded weights"),
    ):
        llm.save_checkpoint(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_dtype_of_the_run_is_saved(tmp_path: Path):
    with open_llm(dtype="bfloat16") as llm:
        folders = {kind: save(llm, kind, tmp_path / kind) for kind in KINDS}
        expected = answers(llm)
    for kind, folder in folders.items():
        with open_saved(folder, kind, dtype="auto") as loaded:
            assert loaded.llm_engine.resolved.dtype == "bfloat16"
            assert answers(loaded) == expected
    with pytest.raises(CheckpointError, match=r"state is bfloat16, and this run computes in float32: set dtype=bf"):
        open_saved(folders["sharded_state"], "sharded_state")


def test_unused_tensors_of_the_files_are_kept(tmp_path: Path):
    """A pooling run has no token head, and names without the prefix stay."""
    with LLM(MODEL, runner="pooling", device="cpu", num_blocks=64) as llm:
        llm.save_checkpoint(tmp_path / "pooled")
    assert torch.equal(logits_of(tmp_path / "pooled"), logits_of(MODEL))
    for name in ("xlm", "deberta_masked", "debertav1"):
        source, to = encoder_folder(name), tmp_path / name
        with LLM(source, device="cpu", dtype="float32") as llm:
            llm.save_streamed(to)
        saved, own = (load_file(folder / "model.safetensors") for folder in (to, source))
        assert saved.keys() == own.keys()
        assert all(torch.equal(saved[name], own[name]) for name in own)


BAD_STATES: dict[str, tuple[Callable[[Path, dict[str, Any]], object], str]] = {
    "other config": (lambda folder, _: append(folder / "config.json"), "config.json is not the one with which"),
    "other layout": (
        lambda _, state: state["layout"].update(tensor_parallel_size=2),
        "is not a sharded state of format",
    ),
    "other stages": (lambda _, state: state["layout"].update(stages=[[0, 3]]), "was saved for stages of the layers"),
    "other experts": (lambda _, state: state["layout"].update(experts="ab"), "other ranks for its experts"),
    "other columns": (lambda _, state: state["layout"].update(columns="ab"), "other columns of feed-forwards"),
    "other version": (lambda _, state: state.update(format_version=2), "is not a sharded state of format 1"),
    "unsafe name": (lambda _, state: state["files"][0][0].update(name="../x"), "is not a sharded state of format 1"),
    "cut file": (lambda folder, _: os.truncate(part(folder), 5000), "truncated"),
    "longer file": (lambda folder, _: append(part(folder)), "belong to no tensor"),
    "changed bit": (lambda folder, _: flip(part(folder)), "its digest is not the one in sharded_state.json"),
    "other tensors": (lambda folder, state: rename(folder, state), "missing from the checkpoint"),
    "no state": (lambda folder, _: (folder / "sharded_state.json").unlink(), "has no sharded_state.json"),
}


def test_states_name_columns_of_unequal_leaves():
    """Others have none, as states of older versions."""
    config = read_model_files(leaf_folder("unequal_leaves")).model_config
    assert column_ranges(RankLayout(2, num_leaves=8), config) == '{"1408": [[0, 768], [768, 1408]]}'
    assert column_ranges(RankLayout(2), config) == column_ranges(RankLayout(1, num_leaves=8), config) == ""
    assert column_ranges(RankLayout(2, num_leaves=8), read_model_files(leaf_folder("llama")).model_config) == ""


def part(folder: Path) -> Path:
    return folder / "model-rank-0-part-0.safetensors"


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def rename(folder: Path, state: dict[str, Any]) -> None:
    content = part(folder).read_bytes().replace(b"model.norm.weight", b"model.norm.wEight")
    part(folder).write_bytes(content)


@pytest.mark.parametrize("name", BAD_STATES)
def test_sharded_state_that_does_not_fit_is_refused(name: str, llm: LLM, tmp_path: Path):
    folder, (change, words) = tmp_path / "model", BAD_STATES[name]
    shutil.copytree(made_once("a sharded state", lambda made: save(llm, "sharded_state", made)), folder)
    path = folder / "sharded_state.json"
    state = json.loads(path.read_text())
    change(folder, state)
    if path.exists():
        path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=words):
        open_saved(folder, "sharded_state")


def test_formats_are_told_apart_in_words(llm: LLM, tmp_path: Path):
    folder = save(llm, "sharded_state", tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"holds a sharded state.*set load_format=sharded_state"):
        open_llm(folder)
    with pytest.raises(CheckpointError, match="is not a checkpoint of save_streamed"):
        open_llm(MODEL, load_format="tensorizer")
    with pytest.raises(CheckpointError, match=r"has no sharded_state\.json"):
        open_llm(MODEL, load_format="runai_streamer_sharded")
    with open_llm(folder, load_format="sharded_state") as loaded:
        loaded.collective_rpc("reload_weights", args=(str(MODEL),))
    with pytest.raises(ConfigError, match=r"model\.load_format=gguf: GGUF is found by model.path"):
        ModelOptions(path=str(MODEL), load_format="gguf")


def changed_state() -> Path:
    """A sharded state of other weights."""

    def make(folder: Path) -> None:
        with open_llm(changed_model()) as llm:
            llm.save_sharded_state(folder)

    return made_once("a changed sharded state", make)


@pytest.mark.parametrize("load_format", ["sharded_state", "auto"])
def test_reload_reads_a_sharded_state(load_format: str, llm: LLM, before: list[Any], tmp_path: Path):
    """It was refused, also by a run that had begun with one: after sleep(level=2) no way back was left."""
    state = made_once("a sharded state", lambda made: save(llm, "sharded_state", made))
    with open_llm(changed_model()) as changed:
        expected = answers(changed)
    with open_llm(MODEL if load_format == "auto" else state, load_format=load_format) as loaded:
        assert answers(loaded) == before
        loaded.collective_rpc("reload_weights", args=(str(changed_state()),))
        assert answers(loaded) == expected, "blocks of the old weights are not found"
        # The embedding's digest is unknown: a tied head is not compared with a state's.
        loaded.update_weights(load_file(MODEL / "model.safetensors").items())
        assert answers(loaded) == before
        loaded.sleep(level=2)
        loaded.wake_up()
        loaded.collective_rpc("reload_weights", args=(str(changed_state()),))
        assert answers(loaded) == expected
        if load_format == "sharded_state":
            loaded.sleep(level=2)
            loaded.wake_up()
            loaded.collective_rpc("reload_weights")
            assert answers(loaded) == before


def test_reload_leaves_weights_when_a_state_is_refused(llm: LLM, before: list[Any], tmp_path: Path):
    folder = tmp_path / "state"
    shutil.copytree(changed_state(), folder)
    flip(part(folder))
    with pytest.raises(CheckpointError, match=r"its digest is not the one in sharded_state\.json"):
        llm.collective_rpc("reload_weights", args=(str(folder),))
    with pytest.raises(CheckpointError, match=r"org/none: is not a folder, and .* no complete snapshot"):
        llm.collective_rpc("reload_weights", args=("org/none",))
    with pytest.raises(CheckpointError, match=r"nowhere: is not a folder"):
        llm.collective_rpc("reload_weights", args=(Path("/nowhere"),))
    assert answers(llm) == before
    with (
        open_llm(quantization="int8") as rounded,
        pytest.raises(CheckpointError, match=r"holds a sharded state.*quantization=int8: give a checkpoint"),
    ):
        rounded.collective_rpc("reload_weights", args=(str(changed_state()),))


def test_interrupted_reload_of_a_state_leaves_weights_missing(before: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Weights that a trainer had loaded before counted as there, and some of them were the state's."""
    contents, num_calls = sharded_state._contents, itertools.count()

    def until_the_second_reading(*given: Any) -> Iterator[Any]:
        for number, pair in enumerate(contents(*given)):
            if number == 3 and next(num_calls) == 1:
                raise OSError("the disk is gone")
            yield pair

    monkeypatch.setattr(sharded_state, "_contents", until_the_second_reading)
    state = changed_state()
    with open_llm() as llm:
        llm.start_weight_update()
        llm.update_weights(load_file(MODEL / "model.safetensors").items())
        with pytest.raises(OSError, match="the disk is gone"):
            llm.collective_rpc("reload_weights", args=(str(state),))
        with pytest.raises(MissingWeightsError):
            llm.finish_weight_update()
        llm.collective_rpc("reload_weights")
        assert answers(llm) == before


def test_state_in_the_hubs_cache_is_found(llm: LLM, before: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its snapshot has neither model.safetensors nor an index, and counted as an interrupted download."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    state = made_once("a sharded state", lambda made: save(llm, "sharded_state", made))
    snapshot = write_snapshot(tmp_path, "org/state", state)
    with open_llm("org/state", load_format="sharded_state") as loaded:
        assert answers(loaded) == before
        loaded.collective_rpc("reload_weights")
        loaded.collective_rpc("reload_weights", args=("org/state",))
        assert answers(loaded) == before
    os.unlink(part(snapshot))
    with pytest.raises(ModelConfigError, match=r"lacks model-rank-0-part-0\.safetensors"):
        open_llm("org/state", load_format="sharded_state")


def test_sharded_state_has_parts_named_by_a_pattern(llm: LLM, before: list[Any], tmp_path: Path):
    folder = tmp_path / "model"
    executor = llm.llm_engine.model_executor
    # vLLM's way.
    executor.save_sharded_state(path=str(folder), pattern="w-{rank}-{part}.safetensors", max_size=1_000_000)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"w-0-{number}.safetensors" for number in range(len(names))]
    assert len(names) > 2
    with open_saved(folder, "sharded_state") as loaded:
        assert answers(loaded) == before
    for pattern in (
        "w-{part}.safetensors",
        "w-{rank}.safetensors",
        "{x}-{rank}-{part}.safetensors",
        "../{rank}{part}.safetensors",
    ):
        with pytest.raises(ValueError, match=r"must be the name of a \.safetensors file with"):
            llm.save_sharded_state(tmp_path / "other", pattern=pattern)


def test_tensorizers_call_saves_streamed(llm: LLM, tmp_path: Path):
    config = {"tensorizer_uri": str(tmp_path / "model" / "model.tensors"), "num_readers": None}
    llm.collective_rpc("save_tensorized_model", kwargs={"tensorizer_config": config})
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata()["layout"] == "streamed"
    open_llm(tmp_path / "model", load_format="tensorizer").close()
