"""Values between processes: what may cross keeps its type, what may not is refused, and nothing names code."""

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest
from cache_specs import uniform_spec
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from ranks import REPOSITORY

from kv_cache.cache_spec import CacheSpec
from spmd_worker.base.config import schema as config
from spmd_worker.executor import rpc_coding
from spmd_worker.executor.rpc_coding import decode_value, encode_call, encode_value
from spmd_worker.model_config.hub_cache import ModelLocation
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.rope import RopeParameters
from spmd_worker.model_config.weight_format import FormatGroup, Quantization, WeightFormat
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.prompt_scores import ScoredRows
from spmd_worker.replica.sequence.record_checks import sent_fields
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.routed_experts import RoutedTokens
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepResult
from spmd_worker.resolved import ResolvedRun, resolve_run

MODEL = REPOSITORY / "scripts" / "demo" / "model"
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)

RECORDS = [
    uniform_spec(1, 2, 3, 4, 5),
    RankEnvironment(1, 2, 1, 2, True, "127.0.0.1"),
    RankLayout(2, 3),
    StepResult(
        4,
        (1, 2),
        ({3: Logprob(-0.25, 1, "a"), 4: Logprob(-math.inf, 2)}, None),
        ((RequestId(9), 0, (None, {1: Logprob(-1.5, 1)})),),
        (7,),
        kept_ids=(None, b"\0\1"),
        prompt_scores=(ScoredRows(RequestId(9), 3, b"scores", b"ids"),),
        routed_experts=(RoutedTokens(RequestId(9), 0, 3, 1, 2, 1, b"\1\2"),),
    ),
    config.RunConfig(sampling=config.SamplingConfig(stop=["x"]), job=config.JobConfig(input="rows.jsonl")),
    SamplingParams(stop=("x",), logit_bias=((3, 0.5),), seed=7, max_tokens=None),
    resolve_run(config.RunConfig(model=config.ModelOptions(path=str(MODEL))), "cpu"),
]


def is_same(one: object, other: object) -> bool:
    """Equal, and of equal types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return is_same(list(one.items()), list(other.items()))
    return one == other


@examples()
@given(VALUES)
def test_values_round_trip_with_their_types(value: object):
    assert is_same(decode_value(encode_value(value)), value)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back_equal(record: object):
    assert decode_value(encode_value(record)) == record


def test_every_group_of_the_configuration_can_be_sent():
    groups = [value for value in vars(config.RunConfig()).values() if dataclasses.is_dataclass(value)]
    assert len(groups) >= 7
    assert [decode_value(encode_value(group)) for group in groups] == groups


def test_not_a_number_stays_one():
    assert math.isnan(decode_value(encode_value(math.nan)))


def test_a_call_is_a_name_and_arguments():
    assert decode_value(encode_call("echo", [1, (2,)], {"key": b"x"})) == ("echo", (1, (2,)), {"key": b"x"})


@dataclasses.dataclass
class Unknown:
    field: int = 0


class CacheSpecOfSomebodyElse(CacheSpec):
    """Not ours, whatever it is called."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            frozenset({1, 2}),
            "a value of type frozenset cannot cross processes, because nothing is unpickled: use numbers, ",
        ),
        (Unknown(), "a value of type test_rpc_coding.Unknown cannot cross processes"),
        (CacheSpecOfSomebodyElse((None,), 1, 1), "a value of type test_rpc_coding.CacheSpecOfSomebodyElse cannot"),
        (lambda: None, "a value of type function cannot cross .*: call a worker's method by name; add your own"),
        ([{"deep": (object(),)}], "a value of type object cannot"),
    ],
)
def test_unknown_values_are_rejected_by_the_sender(value: object, text: str):
    with pytest.raises(TypeError, match=f"^{text}"):
        encode_value(value)
    with pytest.raises(TypeError, match=f"^give: {text}"):
        encode_call("give", (), {"key": value})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"os.system": ["true"]}', "unknown record 'os.system'"),
        (b'{"tuple": [], "dict": []}', "must have one key"),
        (b"{}", "must have one key"),
        (b'{"RankLayout": [1]}', r"zip\(\) argument 2 is shorter"),
        (b'{"bytes": "%%%%"}', "base64"),
        (b"\x80\x04N.", "codec can't decode"),
    ],
)
def test_bytes_that_are_no_value_are_refused(data: bytes, text: str):
    with pytest.raises(ValueError, match=text):
        decode_value(data)


def test_resolved_run_of_quantised_files_round_trips():
    formats = (WeightFormat("gptq", "int", 4, 1, 128, has_zeros=True), WeightFormat("scaled", "e4m3", 8, None, None))
    groups = tuple(FormatGroup((name,), format_) for name, format_ in zip(("re:.*down", "Linear"), formats))
    location = ModelLocation("/cache/snapshots/0", "org/tiny", "0" * 40)
    for value in (Quantization("compressed-tensors", groups, ("lm_head",)), location):
        assert decode_value(encode_value(value)) == value


def records_of(hint: object, found: dict[type, None]) -> None:
    """Every record that a value of this type may hold."""
    for each in (hint, *get_args(hint)):
        if each is not hint:
            records_of(each, found)
        elif isinstance(each, type) and dataclasses.is_dataclass(each) and each not in found:
            found[each] = None
            hints = get_type_hints(each)
            for spec in sent_fields(each):
                records_of(hints[spec.name], found)


def test_a_workers_run_crosses_whatever_its_model_has():
    """A model with experts once could not be started by `executor.backend=multiproc`."""
    found: dict[type, None] = {}
    records_of(ResolvedRun, found)
    assert {ExpertsConfig, ExpertLayout, Quantization, RopeParameters} <= set(found)
    assert set(found) <= set(rpc_coding._RECORDS.values())
