"""What ends a row: the ids that config.json names, and the end-of-sequence token of the tokenizer."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from json_files import edit
from quantised_files import FORMATS
from reference_models import EOS_TOKEN_ID, open_reference, random_prompt, write_text_checkpoint

from spmd_worker import LLM, BeamSearchParams, SamplingParams
from spmd_worker.base.config.schema import ModelOptions, RunConfig, SamplingConfig
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.engine.startup import read_run
from spmd_worker.resolved import resolve_run
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.memory.plan import resolve_cache_need

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("model"))


def name_eos_token(folder: Path, token: str | None) -> None:
    edit(folder / "tokenizer_config.json", eos_token=token)


def ends(folder: Path, *, plan: bool = False) -> tuple[int, ...]:
    config = RunConfig(model=ModelOptions(path=str(folder)), device="cpu", plan=plan)
    return resolve_run(config, "cpu").model_config.eos_token_ids


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 256),
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_num_batched_tokens": 4096}, 256),
        ({"max_num_seqs": 3}, 3),
    ],
)
def test_unset_max_num_seqs_fits_a_step(folder: Path, given: dict[str, int], expected: int):
    resolved = resolve_run(run_config({"model": folder, "device": "cpu", **given}), "cpu")
    assert (resolved.max_num_seqs, resolved.config.scheduler.max_num_seqs) == (expected, given.get("max_num_seqs"))
    assert resolve_cache_need(resolved).max_num_seqs == expected


FLOAT16 = {
    ("gptq", "bfloat16"): {},
    ("awq", "bfloat16"): {},
    ("w4a16", "bfloat16"): {"dequantize_weights": True},
    ("gptq_v2_8bits", "float32"): {},
    ("w8a16_rows", "float32"): {},
    ("fp8_tensor", "bfloat16"): {},
    (None, "float32"): {},
    ("gptq", "float32"): {"dtype": "float32"},
    ("fp8_tensor", "float32"): {"dtype": "float32"},
}
"""Format of a checkpoint's weights, and the dtype on a CPU."""


@pytest.mark.parametrize(("case", "given"), FLOAT16.items())
def test_float16_as_stored_is_bfloat16_on_cpus(
    case: tuple[str | None, str], given: dict[str, Any], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It was float32, in which weights of 4 bits and FP8 are dequantised."""
    name, expected = case
    keys: dict[str, Any] = {} if name is None else {"quantization_config": dict(FORMATS[name].config)}
    config = json.loads((folder / "config.json").read_text()) | keys
    found, ways = {}, ("model.dtype=auto is bfloat16", "model.dtype=float32")
    for dtype in ("float16", "float32"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        for device in ("cpu", "cuda"):
            with caplog.at_level("INFO", logger="spmd_worker"):
                run = resolve_run(run_config({"model": tmp_path, "device": device, **given}), device)
            found[dtype, device] = run.dtype
    own = given.get("dtype")
    expected_of_all = {("float16", "cpu"): expected, ("float16", "cuda"): own or "float16"}
    assert found == expected_of_all | {("float32", device): own or "float32" for device in ("cpu", "cuda")}
    is_chosen = (expected, own) == ("bfloat16", None)
    assert sum(all(way in each for way in ways) for each in caplog.messages) == is_chosen


def test_model_file_is_rejected_as_no_folder(tmp_path: Path):
    """A file of weights was: cannot read model.bin/processor_config.json, not a directory."""
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelConfigError, match=r"^model.path=.*/model.bin is not a folder: give a Hugging Face model"):
        resolve_run(run_config({"model": tmp_path / "model.bin", "device": "cpu"}), "cpu")


NO_EFFECT = {
    "swap_space_gib=2 has no effect with scheduler.pre": {"preemption_mode": "recompute", "swap_space": 2},
    "=swap has no effect with cache.swap_space_gib=0": {"preemption_mode": "swap", "swap_space": 0},
    "=swap has no effect with a cache that takes": {"preemption_mode": "swap"},
    "gpu_memory_utilization=0.5 has no effect": {"num_blocks": 40, "gpu_memory_utilization": 0.5},
}
EFFECT = [{"preemption_mode": "swap", "num_blocks": 40}, {"preemption_mode": "recompute", "num_blocks": 40}, {}]


@pytest.mark.finding(number="D16")
@pytest.mark.parametrize(("words", "given"), [*NO_EFFECT.items(), *(("", each) for each in EFFECT)])
def test_settings_without_effect_are_logged(
    words: str, given: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("WARNING", logger="spmd_worker"):
        resolve_run(run_config({"model": folder, "device": "cpu", **given}), "cpu")
    assert [words in each for each in caplog.messages if "no effect" in each] == [True] * bool(words)


@pytest.mark.finding(number="D16")
@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_of_all_ranks_are_printed_by_one(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Of a script under torchrun that sets up no logging: Python's handler of last resort prints them."""
    last_resort = logging.StreamHandler()
    monkeypatch.setattr(logging, "lastResort", last_resort)
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    with caplog.at_level("WARNING", logger="spmd_worker"):
        read_run(run_config({"model": folder, "device": "cpu", "preemption_mode": "recompute", "swap_space": 2}))
        logging.getLogger("spmd_worker.worker.runner").warning("one rank's own")
    printed = [bool(last_resort.filter(each)) for each in caplog.records]
    assert [each.getMessage()[:24] for each in caplog.records] == ["cache.swap_space_gib=2 h", "one rank's own"]
    assert printed == [rank == 0, True]


@pytest.mark.finding(number="D16")
def test_settings_of_tokens_have_no_effect_on_vectors(folder: Path, caplog: pytest.LogCaptureFixture):
    model = ModelOptions(path=str(folder), runner="pooling", reasoning_format="think")
    with caplog.at_level("WARNING", logger="spmd_worker"):
        resolve_run(RunConfig(model=model, sampling=SamplingConfig(temperature=0.5), device="cpu"), "cpu")
    said = [each.partition(" has no effect: this run pools")[0] for each in caplog.messages if "no effect" in each]
    assert said == ["sampling.temperature", "model.reasoning_format"]


def test_tokenizer_eos_token_ends_rows(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert ends(tmp_path) == (EOS_TOKEN_ID, 1), "the folder's </s>"
    name_eos_token(tmp_path, "<|im_end|>")
    assert ends(tmp_path) == (EOS_TOKEN_ID, 3)
    assert ends(tmp_path, plan=True) == (EOS_TOKEN_ID,), "a plan opens no tokenizer"
    name_eos_token(tmp_path, None)
    assert ends(tmp_path) == (EOS_TOKEN_ID,)
    # Not in tokenizer.json: it gets the id behind the last, which the model has no logit for.
    name_eos_token(tmp_path, "<|nowhere|>")
    assert Tokenizer.open(tmp_path).eos_token_id == 320
    assert ends(tmp_path) == (EOS_TOKEN_ID,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    name_eos_token(tmp_path, "<|im_end|>")
    assert ends(tmp_path) == (3, 4), "named once"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert ends(tmp_path) == (3, 4), "no tokenizer: as config.json says"


def with_template(folder: Path, template: str) -> Tokenizer:
    model = ModelOptions(path=str(folder), chat_template=template)
    tokenizer = resolve_run(RunConfig(model=model, device="cpu"), "cpu").tokenizer
    assert tokenizer is not None
    return tokenizer


def test_given_chat_template_replaces_the_folders(folder: Path, tmp_path: Path):
    """Folders with tekken.json alone have none, and those of the hub's cache are not to be changed."""
    shutil.copytree(folder, tmp_path / "model")
    templates = tmp_path / "model" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}{{ eos_token }}")
    plain = Tokenizer.open(tmp_path / "model")
    fingerprints = {plain.fingerprint()}
    for given, expected in (
        (str(tmp_path / "own.jinja"), "own hi</s>"),
        ("tool_use", "tools hi"),
        ("{{ messages[0].role }}", "user"),
    ):
        tokenizer = with_template(tmp_path / "model", given)
        for variables in ({}, {"tools": [{}]}):
            assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], True, variables) == expected
        assert tokenizer.files_fingerprint() == plain.fingerprint()
        fingerprints.add(tokenizer.fingerprint())
    assert len(fingerprints) == 4
    with pytest.raises(
        ConfigError, match=r"^model.chat_template='none.jinja' is neither .* \(tool_use\): No such file"
    ):
        with_template(tmp_path / "model", "none.jinja")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"^model.chat_template needs a tokenizer, .* has none"):
        with_template(tmp_path / "model", "{{ a }}")


@pytest.mark.guarantee("A row ends at the tokenizer's end of sequence, too", is_control_inside=True)
def test_tokenizer_eos_token_ends_rows_like_transformers(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    model, prompt = open_reference(folder), random_prompt(9, seed=4, vocab_size=320)

    def theirs(*ends: int) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
        )
        return made[0, len(prompt) :].tolist()

    free = theirs()
    place = next(at for at in range(2, NUM_TOKENS - 1) if free[at] not in free[:at])
    token = Tokenizer.open(tmp_path).token(free[place])
    assert token is not None
    name_eos_token(tmp_path, token)
    greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    with LLM(tmp_path, num_blocks=64, device="cpu") as llm:

        def run(**given: object) -> tuple[list[int], str | None, object]:
            sampling = SamplingParams(**(greedy | given))
            [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            return output.outputs[0].token_ids, output.outputs[0].finish_reason, output.outputs[0].stop_reason

        assert run() == (theirs(EOS_TOKEN_ID, free[place]), "stop", None)
        assert len(run()[0]) == place + 1
        assert run(ignore_eos=True)[:2] == (free, "length")
        later, _, _ = run(min_tokens=place + 1)
        assert len(later) > place
        assert free[place] not in later[: place + 1], "it is masked until then"
        [beams] = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=NUM_TOKENS))
        assert beams.sequences[0].finish_reason == "stop"
    # Negative control: by config.json alone the row goes on.
    name_eos_token(tmp_path, None)
    with LLM(tmp_path, num_blocks=64, device="cpu") as llm:
        [output] = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**greedy), use_tqdm=False)
        assert output.outputs[0].token_ids == theirs(EOS_TOKEN_ID)
        assert len(output.outputs[0].token_ids) > place + 1
