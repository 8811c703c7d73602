"""Broken config.json files of every family: read, or refused in one sentence with a key, in bounded work and memory.

What is read is used as a plan and a rank would use it before there are weights: sizes, memory, rotary frequencies.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hostile_configs import Broken, broken, real
from model_types import CLASSIFIER_TYPES, ENCODER_TYPES, MODEL_TYPES
from stress_seed import SEED

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import SpmdError
from spmd_worker.model.layers.rotary import RotaryEmbedding
from spmd_worker.model_config import config_reader
from spmd_worker.model_config.families.encoder_decoder_rows import classifying_of
from spmd_worker.model_config.model_config import ENCODERS, FAMILIES, family_of, model_config_of
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

MOST_BYTES = 2**30
MOST_CALLS = 1_000_000
"""Python's, of which a plan of the largest model makes some ten thousands."""
MOST_CHARACTERS = 600
"""Of an error, without the names of the known architectures."""
LARGE_HEAD = 65_536
"""A size above every model's, at which a table of frequencies is not yet large."""
NUM_STRESS = 1_000


def use(folder: Path) -> str | None:
    """What a plan and a rank do before there are weights. The refusal, or None."""
    run = RunConfig(model=ModelOptions(path=str(folder)), plan=True, device="cpu")
    try:
        resolved = resolve_run(run, "cpu")
        plan = make_plan(resolved)
        describe_plan(plan)
    except SpmdError as error:
        return str(error)
    config = resolved.model_config
    if plan.error_result is not None and config.head_size > LARGE_HEAD:
        # A rank looks at the memory before it makes anything.
        return None
    for rope in config.ropes:
        rotary = RotaryEmbedding(rope, config.max_position_embeddings, torch.device("cpu"))
        regime = config.rope_regime(config.max_position_embeddings + 1, config.max_position_embeddings + 2)
        angles = rotary.angles(torch.arange(2), torch.tensor([0, regime]), torch.float32)
        assert angles.cos.isfinite().all(), rope
    return None


@contextmanager
def bounded(most_calls: int = MOST_CALLS) -> Iterator[None]:
    """No more address space than there is and MOST_BYTES, no more calls. Raises MemoryError or AssertionError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        del frame, argument
        num_calls += event.endswith("call")
        if num_calls > most_calls:
            sys.setprofile(None)
            raise AssertionError(f"more than {most_calls:,} calls")

    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check(case: Broken, folder: Path) -> str | None:
    """The refusal, or None where it is read."""
    (folder / "config.json").write_text(case.text)
    message = use(folder)
    if message is None:
        return None
    words = message.partition(": `spmd-worker families`")[0]
    assert message.isprintable(), words[:2000]
    assert len(words) < MOST_CHARACTERS, words[:2000]
    assert any(key in words for key in keys_of(case)), words
    return message


def keys_of(case: Broken) -> set[str]:
    """Keys that an error may be about: any of the file, since what was changed may contradict what was not, or one that
    was there before.
    """

    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner)

    changed = {str(key) for path in case.changed for key in path if isinstance(key, str)}
    config = json.loads(case.text)
    (architecture,) = config["architectures"]
    architecture = classifying_of(architecture) or architecture
    before = {*family_of(architecture).defaults, *keys(real(architecture, Random(0)))}
    return {key for key in {*changed, *before, *keys(config)} if len(key) > 1}


def drawn(seed: int, number: int) -> Broken:
    return broken(list(MODEL_TYPES), Random(f"{seed} {number}"))


def test_real_configs_cover_every_family():
    assert set(MODEL_TYPES) == set(FAMILIES)
    assert set(ENCODER_TYPES) == set(ENCODERS)


@pytest.mark.stress
def test_real_configs_are_read(tmp_path: Path):
    for architecture in FAMILIES:
        config = real(architecture, Random(0))
        config.pop("quantization_config", None)
        assert model_config_of(config, tmp_path / "config.json").num_parameters > 10_000_000, architecture


@pytest.mark.guarantee("Broken config.json: one sentence")
def test_broken_config_error_is_one_sentence(tmp_path: Path):
    """A config is read or raises it, in bounded work."""
    use_once(tmp_path)
    refusals = check_all(24, tmp_path)
    # Negative control: what is drawn is broken.
    assert sum(each is not None for each in refusals) > 8


def test_dynamic_rope_of_one_pair_is_finite(tmp_path: Path):
    sizes = {"num_attention_heads": 2048, "num_key_value_heads": 2048, "rope_scaling": {"type": "dynamic", "factor": 2}}
    (tmp_path / "config.json").write_text(json.dumps({**real("LlamaForCausalLM", Random(2)), **sizes}))
    assert use(tmp_path) is None


@pytest.mark.parametrize(
    ("architecture", "changes", "error"),
    [
        ("DistilBertModel", {"n_heads": 5}, "n_heads=5 must divide dim="),
        ("BertModel", {"num_attention_heads": 7}, "num_attention_heads=7 must divide hidden_size="),
        ("NomicBertModel", {"rotary_emb_base": 0, "rope_parameters": None}, "rotary_emb_base=0 must be a number"),
        ("LlamaForCausalLM", {"rope_theta": 0, "rope_parameters": None}, "rope_theta=0 must be a number"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 must be a number"),
        ("GPTNeoXForCausalLM", {"rope_parameters": {"rope_theta": "1e4"}}, "rope rope_theta='1e4' must be a number"),
        ("GPTNeoXForCausalLM", {"rotary_emb_base": 0, "rope_parameters": None}, "rotary_emb_base=0 must be a number"),
        ("DbrxForCausalLM", {"ffn_config": {"ffn_act_fn": {"name": 1}}}, "ffn_config.ffn_act_fn.name=1 is not"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": 0, "rope_parameters": None}, "rope_local_base_freq=0 must be"),
    ],
)
def test_error_names_the_key_of_the_file(architecture: str, changes: dict[str, Any], error: str, tmp_path: Path):
    """Regression: heads without a rope had one, keys had names of other families or objects, and a base of 0
    was the default's.
    """
    config = {**real(architecture, Random(0)), **changes, "quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != {}}))
    found = use(tmp_path) or ""
    assert error in found, found


def test_states_alone_bound_no_rows(tmp_path: Path):
    """Regression: a row of a million tokens was more than the model's."""
    (tmp_path / "config.json").write_text(json.dumps(real("Mamba2ForCausalLM", Random(1))))
    options = ModelOptions(path=str(tmp_path), max_model_len=2**21)
    assert resolve_run(RunConfig(model=options, plan=True, device="cpu"), "cpu").max_model_len == 2**21


def check_all(num_cases: int, folder: Path) -> list[str | None]:
    refusals = []
    for number in range(num_cases):
        case = drawn(1, number)
        with bounded():
            refusals.append(check(case, folder))
    return refusals


@pytest.mark.stress
@pytest.mark.parametrize("types", [ENCODER_TYPES, CLASSIFIER_TYPES], ids=["encoders", "decoders that classify"])
def test_broken_encoder_config_error_is_one_sentence(types: dict[str, str], tmp_path: Path):
    """A config is read or raises it, in bounded work."""
    use_once(tmp_path)
    num_refused = 0
    for number in range(300):
        case = broken(list(types), Random(f"{SEED} encoder {number}"))
        with bounded():
            num_refused += check(case, tmp_path) is not None
    assert num_refused > 100


@pytest.mark.stress
def test_thousand_broken_configs_take_two_seconds_each(tmp_path: Path):
    """Seconds of the processor, which other processes do not lengthen."""
    use_once(tmp_path)
    num_refused = 0
    for number in range(NUM_STRESS):
        case, start = drawn(SEED, number), time.process_time()
        with bounded(sys.maxsize):
            num_refused += check(case, tmp_path) is not None
        assert time.process_time() - start < 2, case
    assert num_refused > NUM_STRESS // 3


def use_once(folder: Path) -> None:
    """What is imported and allocated once is no broken file's doing."""
    (folder / "config.json").write_text(json.dumps(real("LlamaForCausalLM", Random(1))))
    use(folder)


def as_it_is(value: Any, *_: Any) -> Any:
    return value


@pytest.mark.control("Broken config.json: one sentence")
def test_broken_config_check_detects_unchecked_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: without the rule for whole numbers some file ends in a traceback, or takes too much."""
    use_once(tmp_path)
    monkeypatch.setattr(config_reader, "checked_integer", as_it_is)
    with pytest.raises((TypeError, MemoryError, ArithmeticError, AssertionError)):
        check_all(200, tmp_path)
