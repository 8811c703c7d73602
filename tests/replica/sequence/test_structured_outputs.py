"""The record of a form: what may be given, how it is kept, and what is refused in which words."""

import json
from types import SimpleNamespace

import pytest

from spmd_worker import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import codec_of
from spmd_worker.replica.sequence.structured_outputs import MAX_GRAMMAR_BYTES

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": "é"}}, "required": ["z"]}


def test_schema_is_kept_as_compact_ordered_text():
    kept = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"const":"é"}},"required":["z"]}'
    for given in (SCHEMA, json.dumps(SCHEMA, indent=2), SimpleNamespace(model_json_schema=lambda: SCHEMA)):
        assert StructuredOutputsParams(json=given).json == kept
    assert StructuredOutputsParams(json=kept).json == kept
    assert StructuredOutputsParams(json={}).kind == "json"


def test_closed_objects_reject_other_properties_unless_schema_says():
    inner = {"type": "object", "properties": {"additionalProperties": {"properties": {}}}}
    schema = {
        "properties": {"a": inner, "b": {"properties": {}, "additionalProperties": True}},
        "default": {"properties": {}},
    }
    closed = json.loads(StructuredOutputsParams(json=schema, disable_additional_properties=True).json)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["a"]["properties"]["additionalProperties"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert closed["default"] == {"properties": {}}


@pytest.mark.parametrize("key", ["$defs", "definitions", "patternProperties", "dependentSchemas", "properties"])
@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "properties", "plain"])
def test_names_of_schema_parts_never_keep_them_open(key: str, name: str):
    schema = {key: {name: {"properties": {"a": {"type": "string"}}}}}
    closed = json.loads(StructuredOutputsParams(json=schema, disable_additional_properties=True).json)
    assert closed[key] == {name: {"properties": {"a": {"type": "string"}}, "additionalProperties": False}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a", "json": "{}"}, "json and regex are given"),
        ({"regex": None}, "none is given"),
        ({"json_object": False}, "none is given"),
        ({"json": "[1]"}, "json must be a JSON object, not a list"),
        ({"json": '{"a":1,"a":2}'}, "the key 'a' appears twice"),
        ({"json": {"a": float("nan")}}, "json is not a JSON Schema"),
        ({"json": 3}, "json=3 must be a JSON Schema"),
        ({"regex": ""}, "regex='' must be text that is not empty"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex is 65537 bytes, more than the limit"),
        ({"choice": []}, "must be a list of texts"),
        ({"choice": "ab"}, "must be a list of texts"),
        ({"choice": ["a", 3]}, "choice=3 must be text"),
        ({"json_object": 1}, "json_object=1 must be true or false"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "are both given"),
        ({"structural_tag": "{}"}, "structural_tag='{}' is not supported: "),
        ({"regexp": "a"}, "unknown key 'regexp'. Known keys: json, regex"),
    ],
    ids=str,
)
def test_errors_name_the_structured_outputs_parameter(given, words):
    with pytest.raises(ValueError) as error_result:
        SamplingParams(structured_outputs=given)
    assert str(error_result.value).startswith("structured_outputs: ")
    assert words in str(error_result.value)


def test_parameters_accept_records_mappings_and_other_libraries_objects():
    form = StructuredOutputsParams(choice=("yes", "no"))
    theirs = SimpleNamespace(choice=["yes", "no", "yes"], json=None, regex=None, backend="auto", _more=1)
    for given in (form, {"choice": ["yes", "no"]}, theirs, GuidedDecodingParams.from_optional(choice=["yes", "no"])):
        assert SamplingParams(structured_outputs=given).structured_outputs == form
        older = SamplingParams(guided_decoding=given)
        assert (older.structured_outputs, older.guided_decoding) == (form, None)
        assert older == SamplingParams(structured_outputs=form)
    with pytest.raises(ValueError, match=r"^structured_outputs=3 must .*of json"):
        SamplingParams(structured_outputs=3)


def test_assigned_guided_decoding_counts_when_request_is_made():
    params = SamplingParams()
    params.guided_decoding = {"regex": "a"}
    assert params.frozen().structured_outputs == StructuredOutputsParams(regex="a")
    params.guided_decoding = {"regex": "b"}
    with pytest.raises(ValueError, match=r"^structured_outputs and guided_decoding, .*differ"):
        params.frozen()


@pytest.mark.parametrize("nothing", [None, False, {}])
def test_empty_value_asks_for_nothing(nothing):
    assert SamplingParams(structured_outputs=nothing, guided_decoding=nothing) == SamplingParams()
    assert StructuredOutputsParams.from_optional(json=None, regex=None, json_object=False) is None


@pytest.mark.parametrize("empty", [{}, [], "", False, 0], ids=str)
def test_empty_structural_tag_asks_for_nothing(empty: object):
    """Kept as it came, an empty mapping or list cannot be hashed: one such row ended its job where its form was looked
    up among those that are compiled.
    """
    form = SamplingParams(structured_outputs={"regex": "a+", "structural_tag": empty}).structured_outputs
    plain = StructuredOutputsParams(regex="a+")
    assert form == plain
    assert hash(form) == hash(plain)
    # What is kept of the fields that nobody reads is not looked at.
    assert hash(StructuredOutputsParams(regex="a+", backend={}, disable_fallback=[])) == hash(plain)


def test_ignore_eos_is_rejected_with_structured_outputs():
    with pytest.raises(ValueError, match="ignore_eos=True with structured_outputs"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})


def test_structured_output_is_encoded_with_its_text():
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True, backend="auto")
    ).frozen()
    codec, writer = codec_of(SamplingParams), ByteWriter()
    codec.write(writer, [params])
    assert codec.read(ByteReader(bytes(writer.data), len(writer.data)), 1) == [params]
