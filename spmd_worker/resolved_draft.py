"""The draft of a run whose drafts are made by a model: a second model, or a head of the target, with its sizes.

Needs no torch, so that a plan counts its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.base.files import read_regular_file
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.gguf.files import linked_files
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.hub_cache import ModelLocation
from spmd_worker.model_config.model_config import (
    ModelConfig,
    config_path,
    model_config_of,
    read_config,
    read_model_files,
)
from spmd_worker.model_config.tensor_names import INDEX_FILE, SINGLE_FILE, tensor_names, tensor_shapes
from spmd_worker.ranks.topology import RankLayout

DRAFT_MODEL, MTP, EAGLE3 = "draft_model", "mtp", "eagle3"
HEAD_METHODS: Final = (MTP, EAGLE3)
MODEL_METHODS: Final = (DRAFT_MODEL, *HEAD_METHODS)
"""Values of `speculative_config.method` whose drafts workers make; of the first by a head of the target."""

_INSTEAD: Final = "use speculative_config.method=suffix, or draft_model with a smaller model"
_NUM_AUX_LAYERS: Final = 3
_MAX_TOKENIZER_BYTES: Final = 2**28
_MTP_NAMES: Final = (
    *("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
)
QWEN_MTP_NAMES: Final = (
    "Qwen3NextForCausalLM",
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
)
"""Architectures whose layer for multi-token prediction is beside the model's (`mtp.`), not behind its last one."""
_EAGLE_IDS: Final = "d2t"
"""Tensor of the distances from an EAGLE-3 head's ids to the target's."""
_EAGLE_NAMES: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


@dataclass(frozen=True, slots=True)
class DraftRun:
    """A draft, all of whose layers are on the last pipeline stage. `model_config` and `layout` are of these layers;
    `location` has the files. Drafts stop at `max_len` tokens. An EAGLE-3 head reads the stream before the target's
    `aux_layers`, has `vocab_size` logits, its own embedding if it `has_embedding`, and continues the stream behind its
    norm if it `norms_stream`.
    """

    method: str
    model_config: ModelConfig
    layout: RankLayout
    location: ModelLocation
    num_drafts: int
    max_len: int
    aux_layers: tuple[int, ...] = ()
    vocab_size: int = 0
    has_embedding: bool = False
    norms_stream: bool = False

    @property
    def is_head(self) -> bool:
        """Whether it computes from the target's hidden states."""
        return self.method in HEAD_METHODS


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a draft must fit, its files and the run's longest row. `new_layout` gives a model's layout with
    the run's tensor-parallel size on one pipeline stage; raises ConfigError for a model that does not divide.
    """

    model_config: ModelConfig
    location: ModelLocation
    max_model_len: int
    needs_weights: bool
    new_layout: Callable[[ModelConfig], RankLayout]


def read_draft(method: str, model: str | None, num_drafts: int, target: Target) -> DraftRun:
    """Read the draft's files. Raises ConfigError or ModelConfigError, naming the key, for one that does not fit."""
    if method == MTP:
        return _read_mtp(model, num_drafts, target)
    if model is None:
        raise ConfigError(
            f"speculative_config.method={method} needs speculative_config.model, the folder of the "
            f"{'head' if method == EAGLE3 else 'draft model'}: give it, or use method=suffix, which needs no files"
        )
    try:
        location = locate_model(model, None, needs_weights=target.needs_weights)
        read = _read_eagle if method == EAGLE3 else _read_model
        draft = read(model, location, num_drafts, target)
    except ModelConfigError as error:
        # The target's key is `model.path`.
        raise ModelConfigError(str(error).replace("model.path", "speculative_config.model")) from None
    # Faults of a file are the loader's to name.
    has_files = any((location.folder / each).is_file() for each in (SINGLE_FILE, INDEX_FILE))
    if target.needs_weights and not (has_files or linked_files(location.folder)):
        raise ConfigError(f"speculative_config.model={model} has no weights: copy its *.safetensors there too")
    return draft


def _read_model(model: str, location: ModelLocation, num_drafts: int, target: Target) -> DraftRun:
    path = config_path(location.folder)
    if _is_eagle(ConfigReader(read_config(path), path)):
        raise ConfigError(
            f"speculative_config.model={model} is a head of EAGLE-3: give speculative_config.method=eagle3"
        )
    found = read_model_files(location.folder).model_config
    problem = _mismatch(found, location.folder, target)
    if problem:
        raise ConfigError(
            f"speculative_config.model={model} cannot draft for {target.location.name}: {problem}; give a "
            f"smaller model of the same family and tokenizer, or use speculative_config.method=suffix"
        )
    max_len = min(found.max_model_len, target.max_model_len)
    return DraftRun(DRAFT_MODEL, found, target.new_layout(found), location, num_drafts, max_len)


def _mismatch(draft: ModelConfig, folder: Path, target: Target) -> str:
    """The reason for which a model cannot draft for the target; empty if it can."""
    if draft.is_encoder or draft.pooling is not None or draft.encoder_part is not None:
        return "it does not generate text from text alone"
    if draft.has_states:
        return f"{draft.architecture} has recurrent states, which do not follow drafts"
    if any(layer.kv_layer is not None for layer in draft.layers):
        return f"layers of {draft.architecture} read the keys of others"
    if draft.vocab_size != target.model_config.vocab_size:
        return f"it has {draft.vocab_size} token ids and the target {target.model_config.vocab_size}"
    own, others = (_tokenizer_digest(each) for each in (folder, target.location.folder))
    if own != others:
        return "its tokenizer.json is not the target's" if own else "it has no tokenizer.json, and the target has one"
    return ""


def _tokenizer_digest(folder: Path) -> str:
    """Digest of the folder's tokenizer.json; empty without one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ""
    return blake2b(read_regular_file(path, _MAX_TOKENIZER_BYTES), digest_size=16).hexdigest()


def _read_mtp(model: str | None, num_drafts: int, target: Target) -> DraftRun:
    """The first layer for multi-token prediction (https://arxiv.org/abs/2412.19437) of the target's own files."""
    if model is not None and Path(model) != target.location.folder and model != target.location.name:
        raise ConfigError(
            f"speculative_config.model={model}: method=mtp takes the head from the target's own files: leave it out"
        )
    read = _qwen_mtp if target.model_config.architecture in QWEN_MTP_NAMES else _deepseek_mtp
    own = read(target)
    return DraftRun(MTP, own, target.new_layout(own), target.location, num_drafts, target.max_model_len)


def _deepseek_mtp(target: Target) -> ModelConfig:
    """The model of the layer behind the target's last one. Raises ConfigError without one."""
    config, folder = target.model_config, target.location.folder
    number = len(config.layers) + len(config.image_layers)
    names = tensor_names(folder)
    has_head = f"{config.names.layers}.{number}.eh_proj.weight" in names
    if not names:
        # A plan, or dummy weights: the config says so.
        has_head = bool(read_config(folder / "config.json").get("num_nextn_predict_layers"))
    if config.architecture not in _MTP_NAMES or not has_head:
        raise ConfigError(
            f"speculative_config.method=mtp: {target.location.name} ({config.architecture}) has no layer for "
            f"multi-token prediction that runs here (those of DeepSeek V3, GLM, Qwen3-Next and Qwen3.5 do): {_INSTEAD}"
        )
    if config.layers[-1].takes_choice:
        raise ConfigError(
            f"speculative_config.method=mtp: the last layer of {target.location.name} takes its choice of keys from "
            f"another, which a layer for multi-token prediction does not have here: {_INSTEAD}"
        )
    # The layer's number in the checkpoint; the others are not this model's.
    return replace(config, layers=config.layers[-1:], image_layers=tuple(range(number)), vision=None)


def _qwen_mtp(target: Target) -> ModelConfig:
    """The model of the layer in `mtp.`, which is like the target's last one with full attention. Raises ConfigError or
    ModelConfigError without one, and for heads of another kind.
    """
    config, folder, key = target.model_config, target.location.folder, f"speculative_config.method={MTP}"
    path = config_path(folder)
    found = read_config(path)
    reader = ConfigReader(found.get("text_config") or found, path)
    if reader.flag("mtp_use_dedicated_embeddings", False):
        raise ConfigError(
            f"{key}: {path} sets mtp_use_dedicated_embeddings=true, and only heads with the model's own embedding "
            f"run: {_INSTEAD}"
        )
    names = tensor_names(folder)
    # Files say it where config.json does not (Qwen3-Next), or says it of files that have lost the head.
    most = checked_integer(reader.get("mtp_num_hidden_layers", 1), reader.where("mtp_num_hidden_layers"), 0, MAX_INT)
    if not most or (names and not any(name.startswith("mtp.") for name in names)):
        reason = "" if most else "mtp_num_hidden_layers=0: "
        raise ConfigError(
            f"{key}: {reason}the files of {target.location.name} have no layer for multi-token prediction (mtp.*), "
            f"which quantised and fine-tuned releases may leave out: {_INSTEAD}"
        )
    if most > 1:
        raise ConfigError(f"{key}: {path} has mtp_num_hidden_layers={most}, and a head of one layer runs: {_INSTEAD}")
    layers = [layer for layer in config.layers if layer.mixer == "attention"]
    if not layers:
        raise ConfigError(f"{key}: {path} has no layer with full attention, of which the head has one: {_INSTEAD}")
    return replace(config, layers=(layers[-1],), vision=None)


def _read_eagle(model: str, location: ModelLocation, num_drafts: int, target: Target) -> DraftRun:
    """A head of EAGLE-3 (https://arxiv.org/abs/2503.01840) in the files of its authors."""
    path, config = config_path(location.folder), target.model_config
    found = ConfigReader(read_config(path), path)
    key = f"speculative_config.model={model}"
    if not _is_eagle(found):
        raise ConfigError(
            f"{key}: architectures={shown(found.get('architectures'))} is no EAGLE-3 head ({_EAGLE_NAMES[0]})"
        )
    own = model_config_of({**found.config, "architectures": ["LlamaForCausalLM"]}, path)
    eagle, vocab_size = found.object("eagle_config"), found.count("draft_vocab_size", own.vocab_size)
    problem = _eagle_problem(found, eagle, own, vocab_size, target)
    if problem:
        raise ConfigError(f"{key} cannot draft for {target.location.name}: {problem}")
    _check_eagle_ids(key, location.folder, vocab_size, own.vocab_size)
    num_layers = config.num_layers
    aux = eagle.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    if (
        not isinstance(aux, list)
        or len(aux) != _NUM_AUX_LAYERS
        or not all(type(each) is int and 0 <= each < num_layers for each in aux)
    ):
        raise ConfigError(f"{key}: layers {shown(aux)} of the target's {num_layers} cannot be read: a head reads three")
    names = tensor_names(location.folder)
    return DraftRun(
        EAGLE3,
        own,
        target.new_layout(own),
        location,
        num_drafts,
        # Positions beyond the ones of its training cost acceptance at most.
        target.max_model_len,
        aux_layers=tuple(aux),
        vocab_size=vocab_size,
        has_embedding=any(name.removeprefix("model.") == "embed_tokens.weight" for name in names),
        norms_stream=found.flag("norm_before_residual", False),
    )


def _check_eagle_ids(key: str, folder: Path, draft_vocab_size: int, vocab_size: int) -> None:
    """Raise ConfigError for tensors with another number of a head's ids than config.json says."""
    shapes = {name.removeprefix("model."): shape for name, shape in tensor_shapes(folder).items()}
    way_out = "copy config.json and *.safetensors of the same head"
    for name in (_EAGLE_IDS, "lm_head.weight"):
        shape = shapes.get(name, (draft_vocab_size,))
        if shape[:1] != (draft_vocab_size,):
            raise ConfigError(
                f"{key}: draft_vocab_size={draft_vocab_size} in {folder / 'config.json'}, and {name} of its files has "
                f"the shape {list(shape)}: {way_out}"
            )
    if shapes and _EAGLE_IDS not in shapes and draft_vocab_size != vocab_size:
        raise ConfigError(
            f"{key}: draft_vocab_size={draft_vocab_size} in {folder / 'config.json'} is not the target's {vocab_size}, "
            f"and its files have no {_EAGLE_IDS}, which says what the head's ids mean: {way_out}"
        )


def _is_eagle(found: ConfigReader) -> bool:
    names = found.get("architectures")
    return isinstance(names, list) and any(name in _EAGLE_NAMES for name in names)


def _eagle_problem(
    found: ConfigReader, eagle: ConfigReader, own: ModelConfig, draft_vocab_size: int, target: Target
) -> str:
    """The reason for which a head of EAGLE-3 is not for the target; empty if it is."""
    hidden_size = found.get("target_hidden_size") or own.hidden_size
    if own.num_layers != 1:
        return f"it has {own.num_layers} layers, and a head of one is supported"
    if hidden_size != target.model_config.hidden_size:
        return f"its target has the hidden size {hidden_size}, and this one {target.model_config.hidden_size}"
    if target.model_config.stream_size != target.model_config.hidden_size:
        return "it reads one residual stream, and its target has several"
    if own.hidden_size != target.model_config.embedding_size or own.vocab_size != target.model_config.vocab_size:
        return (
            f"its embedding is [{own.vocab_size}, {own.hidden_size}], and the target's "
            f"[{target.model_config.vocab_size}, {target.model_config.embedding_size}]"
        )
    if draft_vocab_size > own.vocab_size:
        return f"draft_vocab_size={draft_vocab_size} of {own.vocab_size} token ids"
    for key, value in (("norm_before_fc", found.get("norm_before_fc")), ("fc_norm", found.get("fc_norm"))):
        if value:
            return f"{key}={value} is not supported"
    if eagle.get("use_aux_hidden_state") is False:
        return "eagle_config.use_aux_hidden_state=false is not supported"
    return ""
