"""Numbers and texts of every kind, in every field of the parameters: taken as Python's own, or refused in words."""

import dataclasses
import enum
import math
import typing
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from looped import looped
from ranks import REPOSITORY

from spmd_worker.base.config.compose import compose_run
from spmd_worker.base.config.plain_values import plain_bool, plain_float, plain_int, plain_text
from spmd_worker.base.config.schema import CacheConfig, RunConfig, SchedulerConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.beam_search import BeamSearchParams
from spmd_worker.compat.call_arguments import priorities_of
from spmd_worker.compat.chat import ChatOptions
from spmd_worker.engine.validation import as_request_ids
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.request import Request, RequestId, as_token_ids, whole_number
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sleep_tags import checked_level
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.finding(number="B4")


class Numbers(enum.IntEnum):
    MINUS, ZERO, ONE, SOME, LARGE, HUGE = -1, 0, 1, 7, 2**40, 10**5000


class Flags(enum.IntFlag):
    SOME = 4


class Texts(enum.StrEnum):
    STOP, EMBED = "x", "embed"


class NamedTexts(str, enum.Enum):  # noqa: UP042  # the older form, which prints otherwise
    STOP, EMBED = "x", "embed"


class OwnInt(int):
    pass


class OwnFloat(float):
    pass


class OwnText(str):
    pass


class Hostile:
    def __index__(self) -> int:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


WHOLE: list[Any] = [*Numbers, Flags.SOME, OwnInt(3), OwnInt(10**5000), 10**5000]
WHOLE += [numpy.dtype(kind).type(2) for kind in "bhilqBHILQ"]
WHOLE += [numpy.array(2), numpy.array(2, dtype="uint64"), torch.tensor(2), torch.tensor(2, dtype=torch.int8)]
REAL: list[Any] = [OwnFloat(0.5), Fraction(1, 2), *[numpy.dtype(kind).type(0.5) for kind in "efdg"]]
REAL += [numpy.array(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16)]
TRUTH: list[Any] = [numpy.bool_(True), numpy.array(True), torch.tensor(False)]
TEXTS: list[Any] = [*Texts, *NamedTexts, OwnText("x"), numpy.str_("x")]
OTHERS: list[Any] = [math.inf, -math.inf, math.nan, OwnFloat("nan"), numpy.float32("inf"), torch.tensor(math.nan)]
OTHERS += [True, 1j, numpy.complex64(1), Decimal(1), Decimal("NaN"), Decimal("0.5"), b"1", object(), Hostile()]
OTHERS += [
    numpy.array([2]),
    numpy.array([1, 2]),
    torch.tensor([2]),
    torch.tensor(2, device="meta"),
    numpy.datetime64(1, "s"),
]
EVERY = [*WHOLE, *REAL, *TRUTH, *TEXTS, *OTHERS]
PLAIN = (int, float, bool, str, type(None), tuple, dict)


def fields_of(kind: Any, **needed: Any) -> list[Any]:
    return [(kind, spec.name, needed) for spec in dataclasses.fields(kind)]


FIELDS = [
    *fields_of(SamplingParams),
    *fields_of(PoolingParams),
    *fields_of(BeamSearchParams, beam_width=2, max_tokens=4),
    *fields_of(StructuredOutputsParams, regex="x"),
    *fields_of(CacheConfig),
    *fields_of(SchedulerConfig),
    (RunConfig, "seed", {}),
]


def is_plain(value: Any) -> bool:
    inside = (
        [*value, *(value.values() if isinstance(value, dict) else ())] if type(value) in (tuple, dict, list) else []
    )
    return (type(value) in (*PLAIN, list) or dataclasses.is_dataclass(value)) and all(map(is_plain, inside))


@looped(("kind", "name", "needed"), FIELDS)
def test_field_takes_plain_values_or_explains_error(kind: Any, name: str, needed: dict[str, Any]):
    kept_as_given = ("extra_args", "output_kind", "disable_fallback", "backend", *NOT_READ)
    words: list[str] = []
    for value in EVERY:
        try:
            made = kind(**{**needed, name: value})
        except (ValueError, ConfigError) as error:
            said = str(error)
            words.append(said)
            continue
        kept = getattr(made, name)
        assert name in kept_as_given or is_plain(kept), (name, type(value), type(kept))
    assert all(0 < len(said.strip()) < 600 for said in words)


NOT_READ = [spec.name for spec in dataclasses.fields(SamplingParams) if spec.type == "Any" or spec.type is Any]


@pytest.mark.parametrize("name", [spec.name for spec in dataclasses.fields(SamplingParams) if "int" in str(spec.type)])
def test_integer_of_any_kind_equals_that_number(name: str):
    """`seed` of an IntEnum once was looked for in a range, number after number, for ever."""
    values: list[Any] = [Numbers.ONE, OwnInt(1), numpy.int64(1), numpy.uint8(1), numpy.array(1), torch.tensor(1)]
    for value in values:
        given: Any = [(value, 1.0)] if name == "logit_bias" else value
        given = [given] if name in ("stop_token_ids", "allowed_token_ids", "prompt_logprob_token_ids") else given
        given = [given] if name == "logprob_token_ids" else given
        given = [[value]] if name == "bad_words_ids" else given
        expected: Any = {
            "logit_bias": {1: 1.0},
            "stop_token_ids": [1],
            "allowed_token_ids": [1],
            "prompt_logprob_token_ids": [1],
            "logprob_token_ids": [1],
            "bad_words_ids": [[1]],
        }
        plain = SamplingParams(**{name: expected.get(name, 1)})
        assert SamplingParams(**{name: given}) == plain
        assert is_plain(getattr(SamplingParams(**{name: given}), name))


def test_seed_beyond_64_bits_is_rejected_at_once():
    for seed in (Numbers.HUGE, OwnInt(2**64), OwnInt(-(2**63) - 1), 10**5000):
        with pytest.raises(ValueError, match="must fit 64 bits"):
            SamplingParams(seed=seed)
    assert SamplingParams(seed=OwnInt(2**64 - 1)).seed == 2**64 - 1


def test_assigned_number_is_plain_too():
    params = SamplingParams()
    params.seed, params.top_k, params.temperature = Numbers.LARGE, numpy.int32(3), numpy.float32(0.5)  # type: ignore[assignment]  # meant
    assert [type(each) for each in (params.seed, params.top_k, params.temperature)] == [int, int, float]
    assert (params.frozen().seed, params.frozen().top_k) == (2**40, 3)


@pytest.mark.parametrize("value", [*Texts, *NamedTexts, OwnText("x"), numpy.str_("x")], ids=repr)
def test_text_of_any_kind_equals_plain_text(value: str):
    plain = str.__str__(value)
    assert SamplingParams(stop=value).stop == (plain,)
    assert [type(each) for each in SamplingParams(stop=[value], bad_words=[value]).stop] == [str]
    assert StructuredOutputsParams(choice=[value]).choice == (plain,)
    assert f"{SamplingParams(stop=value).stop[0]}" == plain


def test_configured_number_fits_64_bits():
    """One of thousands of digits was Python's own error, without a key."""
    for number in (10**5000, 2**64, -(2**63) - 1, Numbers.HUGE):
        with pytest.raises(ConfigError, match=r"^seed=.* must .*64 bits"):
            RunConfig(seed=number)
    assert RunConfig(seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(ConfigError, match=r"^seed: .*5000 digits"):
        compose_run(REPOSITORY / "conf", [f"seed={'9' * 5000}"])


def test_token_ids_of_any_kind_become_plain_integers():
    ids = as_token_ids([Numbers.SOME, numpy.int64(2), torch.tensor(3), OwnInt(4), numpy.uint16(5)])
    assert ids == (7, 2, 3, 4, 5)
    assert [type(each) for each in ids] == [int] * 5
    for wrong in (
        True,
        numpy.bool_(True),
        torch.tensor(True),
        1.0,
        Decimal(1),
        "1",
        None,
        torch.tensor(2, device="meta"),
    ):
        with pytest.raises(TypeError, match=r"prompt_token_ids\[0\]=.* give a whole number"):
            as_token_ids([wrong])
    for wrong in (Numbers.HUGE, OwnInt(2**63), numpy.uint64(2**64 - 1)):
        with pytest.raises(ValueError, match="must fit 64 bits"):
            as_token_ids([wrong])


def test_call_arguments_of_any_kind_become_plain_integers():
    assert whole_number("version", Numbers.SOME) == 7
    assert as_request_ids([Numbers.SOME, numpy.int64(2), Numbers.LARGE]) == [7, 2, 2**40]
    assert checked_level(OwnInt(2)) == 2
    for priority in (Numbers.SOME, numpy.int64(7), [7, numpy.int8(7)], [Numbers.SOME, 7]):
        assert list(map(type, priorities_of(2, priority))) == [int, int]
        assert priorities_of(2, priority) == [7, 7]
    for wrong in (True, 0.5, "00", [0, None], [0], math.nan, numpy.array([0, 0]), 2**63):
        with pytest.raises(ValueError, match="priority="):
            priorities_of(2, wrong)
    flags = {"add_generation_prompt": numpy.bool_(False), "continue_final_message": numpy.bool_(True)}
    assert dataclasses.asdict(ChatOptions(**flags)).items() >= {k: bool(v) for k, v in flags.items()}.items()
    assert type(ChatOptions(**flags).add_generation_prompt) is bool
    request = Request(RequestId(0), (1,), SamplingParams(seed=Numbers.LARGE), 5)
    assert type(request.sampling.seed) is int


@looped("value", EVERY)
def test_every_value_is_of_at_most_one_kind(value: Any):
    """Negative control of the helpers: what one takes, an unrelated one refuses, and nothing raises."""
    found = [plain(value) for plain in (plain_int, plain_bool, plain_text)]
    assert sum(each is not None for each in found) <= 1
    real = plain_float(value)
    assert real is None or type(real) is float
    assert real is None or (found[1], found[2]) == (None, None)


def test_every_annotation_of_sampling_params_is_tried():
    """Negative control: a field with numbers that has no rule here would show."""
    hints = typing.get_type_hints(SamplingParams)
    assert {"seed", "top_k", "stop_token_ids"} < {name for name, hint in hints.items() if "int" in str(hint)}
