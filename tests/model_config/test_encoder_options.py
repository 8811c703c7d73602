"""Lengths of encoder-decoder models, and settings that they do not support."""

from pathlib import Path
from typing import Any

import pytest
from cross_rows import CASES
from reference_models import checkpoint_folder

from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.model_config import ModelFiles, model_config_of, read_model_files
from spmd_worker.resolved import ResolvedRun, resolve
from spmd_worker.worker.memory.media_memory import media_row_limits
from spmd_worker.worker.memory.plan import check_cache_setting
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

SIZES = {"dtype": "float32", "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def run(name: str, model: dict[str, Any] | None = None, cache: Any = None, **scheduler: Any) -> ResolvedRun:
    family, config = CASES[name]
    given = {**SIZES, "architectures": [f"{family}ForConditionalGeneration"], **config}
    options = SchedulerConfig(max_num_seqs=2, **scheduler)
    run_config = RunConfig(model=ModelOptions(**model or {}), scheduler=options, cache=CacheConfig(**cache or {}))
    return resolve(run_config, ModelFiles(model_config_of(given, Path("config.json")), {}, ""), "cpu")


def test_lengths_are_those_of_both_parts():
    bart, whisper, t5 = run("bart"), run("whisper"), run("t5")
    assert (bart.max_encoder_len, bart.max_model_len, bart.max_sequence_len) == (96, 96, 192)
    assert (whisper.max_encoder_len, whisper.max_model_len) == (32, 64)
    assert (t5.max_encoder_len, t5.max_model_len, t5.max_sequence_len) == (512, 512, 1024)
    # The encoder's positions are whole blocks.
    assert run("bart", max_encoder_len=17).max_sequence_len == 32 + 96
    longer = run("t5", {"max_model_len": 2000}, max_encoder_len=900)
    assert (longer.max_encoder_len, longer.max_sequence_len) == (900, 912 + 2000)


def test_kept_rows_hold_the_longest_input():
    assert media_row_limits(run("bart", max_num_batched_tokens=20)).num_rows == 96
    assert media_row_limits(run("bart", max_num_batched_tokens=90)).num_rows == 180


@pytest.mark.parametrize(
    ("model", "scheduler", "words"),
    [
        (
            {},
            {"max_encoder_len": 97},
            "scheduler.max_encoder_len=97 is more than the 96 positions of the model's encoder",
        ),
        ({"max_model_len": 97}, {}, "model.max_model_len=97 is more than the model's 96 tokens"),
        (
            {},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 150},
            "max_model_len=96 behind 96 positions of the encoder's input .* raise it to 192",
        ),
        ({"runner": "pooling"}, {}, "model.runner=pooling is not supported for BartForConditionalGeneration"),
        ({"enable_lora": True}, {}, "model.enable_lora=true is not supported"),
        ({"prompt_adapters": {"a": "b"}}, {}, "model.prompt_adapters is not supported"),
        ({"quantization": "int8"}, {}, "model.quantization=int8 is not supported"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model: dict[str, Any], scheduler: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        run("bart", model, **scheduler)


def test_inputs_that_are_never_read_are_refused_at_start():
    """Too few kept rows, or too short for any audio: every row would be refused."""
    words = r"keeps 95 rows and an encoder's input has up to 96 \(scheduler.max_encoder_len\): raise it to at least"
    gib = 95.5 * 64 * 4 / 2**30
    with pytest.raises(ConfigError, match=words):
        check_cache_setting(run("bart", cache={"media_rows_gib": gib}))
    check_cache_setting(run("bart", cache={"media_rows_gib": gib}, max_encoder_len=95))
    with pytest.raises(ConfigError, match=r"scheduler\.max_encoder_len=31 is less than the 32 rows that audio"):
        run("whisper", max_encoder_len=31)


def test_decoders_alone_have_no_encoder_length():
    config = RunConfig(scheduler=SchedulerConfig(max_encoder_len=9))
    with pytest.raises(ConfigError, match=r"scheduler\.max_encoder_len=31 is less than the 32 rows that audio"):
        run("whisper", max_encoder_len=31)
    with pytest.raises(ConfigError, match=r"scheduler\.max_encoder_len=9 is for encoder-decoder models, and LlamaFor"):
        resolve(config, read_model_files(checkpoint_folder("llama3")), "cpu")


def test_cache_holds_both_parts_of_a_row():
    words = (
        "model.max_model_len is 96 behind 96 positions of an encoder's input .* raise cache.num_blocks to at least 12"
    )
    check_cache_setting(run("bart", cache={"num_blocks": 12}))
    with pytest.raises(ConfigError, match=words):
        check_cache_setting(run("bart", cache={"num_blocks": 11}))


def test_plan_says_what_inputs_take():
    resolved = run("bart")
    lines = describe_plan(make_plan(resolved)).splitlines()
    assert "inputs     of the encoder, text: rows of 4,096 tokens are kept (cache.media_rows_gib), 1.0 MiB of a" in (
        "\n".join(lines)
    )
    assert any("of 96 tokens (model.max_model_len) behind an encoder's input of 96" in line for line in lines)
