"""JSON encoding of arguments and results of calls between processes.

Numbers, strings, lists and null are encoded as such; an object has one key, its type: `tuple`, `set`, `bytes` (base64),
`dict` (pairs, so keys keep their types), or the name of one of our own records. The sender rejects any other type, and
nothing in the encoding names code.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

from kv_cache.cache_spec import BlockLayer, CacheSpec, StateLayer
from kv_cache.layer_groups import LayerGroups
from spmd_worker.base import config
from spmd_worker.base.config import schema
from spmd_worker.media.sent_audio import SentAudio
from spmd_worker.media.sent_image import SentImage
from spmd_worker.model_config.encoder_part import AudioInput, EncoderPart
from spmd_worker.model_config.hub_cache import ModelLocation
from spmd_worker.model_config.late_interaction import LateInteraction, QueryExpansion, TextRole
from spmd_worker.model_config.layer_config import (
    CompressedConfig,
    ConvConfig,
    DeltaConfig,
    DistanceConfig,
    ExpertsConfig,
    IndexerConfig,
    LatentConfig,
    LayerConfig,
    Mamba1Config,
    MambaConfig,
    NormConfig,
    RelativeBias,
)
from spmd_worker.model_config.model_config import ModelConfig, RopeParameters
from spmd_worker.model_config.pooling import DenseConfig, HeadConfig, PoolingConfig, ShiftedRow, TextTransform
from spmd_worker.model_config.stream_config import (
    BalancedStreamsConfig,
    GatedStreamsConfig,
    NgramConfig,
    PredictedStreamsConfig,
)
from spmd_worker.model_config.vision_config import Levels, TowerConfig, TowerNames, VisionConfig
from spmd_worker.model_config.weight_format import FormatGroup, Quantization, WeightFormat
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.draft_token_ids import DraftTokenIds
from spmd_worker.replica.sequence.late_chunking import LateChunkingParams
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.prompt_scores import ScoredRows
from spmd_worker.replica.sequence.record_checks import sent_fields
from spmd_worker.replica.sequence.repetition import RepetitionDetectionParams
from spmd_worker.replica.sequence.routed_experts import RoutedTokens
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepResult
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.replica.sequence.token_rules import ThinkingRules, TimestampRules, TokenRules
from spmd_worker.resolved import ResolvedRun
from spmd_worker.resolved_draft import DraftRun
from spmd_worker.worker.worker_base import WorkerReport

_PLAIN: Final = (type(None), bool, int, float, str)

_CONFIG_RECORDS: Final[list[type]] = [
    each
    for each in vars(schema).values()
    if isinstance(each, type) and is_dataclass(each) and each.__module__.startswith(config.__name__)
]
_RECORDS: Final[dict[str, type]] = {
    record.__name__: record
    for record in (
        *_CONFIG_RECORDS,
        AdapterChange,
        AudioInput,
        BalancedStreamsConfig,
        BlockLayer,
        CacheSpec,
        CompressedConfig,
        ConvConfig,
        DeltaConfig,
        DenseConfig,
        DistanceConfig,
        DraftRun,
        DraftTokenIds,
        EncoderPart,
        HeadConfig,
        LateInteraction,
        QueryExpansion,
        TextRole,
        ExpertLayout,
        ExpertsConfig,
        FormatGroup,
        IndexerConfig,
        LateChunkingParams,
        LatentConfig,
        LayerGroups,
        Logprob,
        Mamba1Config,
        MambaConfig,
        ModelConfig,
        ModelLocation,
        LayerConfig,
        Levels,
        NgramConfig,
        NormConfig,
        PoolingConfig,
        PredictedStreamsConfig,
        Quantization,
        RankEnvironment,
        RankLayout,
        RelativeBias,
        ResolvedRun,
        ScoredRows,
        SentAudio,
        SentImage,
        RopeParameters,
        RepetitionDetectionParams,
        RoutedTokens,
        SamplingParams,
        ShiftedRow,
        StateLayer,
        StepResult,
        GatedStreamsConfig,
        StructuredOutputsParams,
        TimestampRules,
        TokenRules,
        TextTransform,
        ThinkingRules,
        TowerConfig,
        TowerNames,
        VisionConfig,
        WeightFormat,
        WorkerReport,
    )
}


def encode_value(value: Any) -> bytes:
    """Raises TypeError for a value that cannot cross processes, naming the types that can."""
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode_value(data: bytes) -> Any:
    """Inverse of `encode_value`. Raises ValueError for invalid bytes."""
    return _from_json(json.loads(data))


def encode_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The encoded tuple (method, args, kwargs). Raises TypeError naming the method."""
    try:
        return encode_value((method, tuple(args), dict(kwargs)))
    except TypeError as error:
        raise TypeError(f"{method}: {error}") from None


def _to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_to_json(each) for each in value]
    if kind is tuple:
        return {"tuple": [_to_json(each) for each in value]}
    if kind is dict:
        return {"dict": [[_to_json(key), _to_json(each)] for key, each in value.items()]}
    if kind is set:
        return {"set": [_to_json(each) for each in sorted(value)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if _RECORDS.get(kind.__name__) is kind:
        return {kind.__name__: [_to_json(getattr(value, name)) for name in _field_names(kind)]}
    way_out = "use numbers, strings, bytes, lists, tuples, sets or dicts"
    if callable(value) and not isinstance(value, type):
        way_out = "call a worker's method by name; add your own with executor.worker_extension_cls"
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise TypeError(f"a value of type {name} cannot cross processes, because nothing is unpickled: {way_out}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"an encoded value must have one key, its type, not {sorted(value)}")
    ((name, content),) = value.items()
    if name in _READERS:
        return _READERS[name](content)
    if name not in _RECORDS:
        raise ValueError(f"unknown record {name!r}")
    names = _field_names(_RECORDS[name])
    return _RECORDS[name](**dict(zip(names, map(_from_json, content), strict=True)))


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": lambda content: tuple([_from_json(each) for each in content]),
    "set": lambda content: {_from_json(each) for each in content},
    "dict": lambda content: {_from_json(key): _from_json(each) for key, each in content},
    "bytes": lambda content: base64.b64decode(content, validate=True),
}


def _field_names(record: type) -> tuple[str, ...]:
    if is_dataclass(record):
        return tuple(spec.name for spec in sent_fields(record))
    names: tuple[str, ...] = record._fields  # type: ignore[attr-defined]  # a NamedTuple's
    return names
