"""A resolved run: model config, rank layout, dtype, maximum length and default sampling parameters, made once per
process.

They are derived from the configuration and the model's files. Needs no torch, so that a plan needs none. Memory is
resolved later, where it is measured (`worker/memory/plan.py`).
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kv_cache.connectors.factory import check_connector
from kv_cache.state_slots import check_state_block_size
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, PlanConfig, RunConfig
from spmd_worker.base.config.speculation import REPLICA_METHODS
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.media.audio_settings import has_audio_processor
from spmd_worker.media.image_processor import KINDS, ImageProcessor, normalised_by, read_image_processor
from spmd_worker.media.largest_image import most_frame_tokens, most_image_tokens
from spmd_worker.media.processor_settings import has_image_processor
from spmd_worker.media.video_processor import VideoProcessor, read_video_processor
from spmd_worker.model_config.adapter_folder import fetch_adapters
from spmd_worker.model_config.byte_rows import fits_bytes
from spmd_worker.model_config.decoder_generation import DecoderGeneration
from spmd_worker.model_config.encoder_options import max_encoder_len, num_encoder_positions
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.hub_cache import ModelLocation
from spmd_worker.model_config.int8_format import MAX_INPUTS
from spmd_worker.model_config.model_config import ModelConfig, ModelFiles, read_model_files
from spmd_worker.model_config.pooling import (
    TOKEN_TASKS,
    VECTORS,
    PoolingConfig,
    check_sees_earlier,
    last_token_pooling,
)
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ranks.expert_layout import expert_layout_of
from spmd_worker.ranks.gpu_leaves import PLAIN_TORCH, check_gpu_leaves
from spmd_worker.ranks.leaves import num_leaves
from spmd_worker.ranks.row_sums import log_same_sizes, row_sums_name
from spmd_worker.ranks.topology import RankLayout, check_divides, layout_of, shard_range
from spmd_worker.replica.sequence.defaults import default_sampling
from spmd_worker.replica.sequence.record_checks import NOT_SENT
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.resolved_draft import HEAD_METHODS, MODEL_METHODS, DraftRun, Target, read_draft
from spmd_worker.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DEFAULT_MAX_NUM_SEQS: Final = 256
_DEFAULT_MAX_IMAGE_TOKENS: Final = 4096

CHECK_VARIABLE: Final = "SPMD_WORKER_CHECK"
"""Environment variable: 1 checks queues, tables, pools and index against each other after every step, and before it on
every rank that rows read blocks of their own. Slow.
"""


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """Made by `resolve_run`. `device_type` is "cpu" or "cuda", `max_model_len` counts tokens, of an
    encoder-decoder model the decoder's; `max_encoder_len` those of its encoder's input, 0 without an encoder.
    `files_digest` covers the bytes of config.json, generation_config.json and the pooling files, `location` is that of
    the files. `largest_image` is at least the tokens of any image as it is prepared; 0 if that is unknown. `tokenizer`
    is the folder's, in the process that has read the run; None in other processes, in a plan and without
    tokenizer.json; `decoder` is of encoder-decoder models, in that process too. `image_processor` has the numbers by
    which images are prepared, and `video_processor` those of videos, in that process; None if the model takes none.
    `draft` is the model or head that drafts, if one does.
    """

    config: RunConfig
    model_config: ModelConfig
    layout: RankLayout
    device_type: str
    dtype: str
    max_model_len: int
    default_sampling: SamplingParams
    files_digest: str
    location: ModelLocation
    max_encoder_len: int = 0
    largest_image: int = 0
    draft: DraftRun | None = None
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False, metadata=NOT_SENT)
    decoder: DecoderGeneration | None = field(default=None, metadata=NOT_SENT)
    image_processor: ImageProcessor | None = field(default=None, compare=False, repr=False, metadata=NOT_SENT)
    video_processor: VideoProcessor | None = field(default=None, compare=False, repr=False, metadata=NOT_SENT)

    @property
    def row_sums(self) -> str:
        """Order of row-parallel sums, and the tensor-parallel sizes that add so: a part of the arithmetic."""
        return row_sums_name(
            self.layout,
            has_experts=any(layer.experts is not None for layer in self.model_config.layers),
            is_exact=self.config.model.quantization == "int8",
            has_adapters=self.config.model.adapter_limits is not None,
        )

    @property
    def cache_dtype(self) -> str:
        """`cache.dtype`; `auto` of an encoder, which keeps nothing from step to step."""
        return "auto" if self.model_config.is_encoder else self.config.cache.dtype

    @property
    def block_dtype_bytes(self) -> int:
        """Bytes of a cached number; 0: those of the model's dtype."""
        return 1 if self.cache_dtype == "fp8" else 0

    @property
    def max_num_seqs(self) -> int:
        """Number of sequences that may be in a step."""
        return highest_num_seqs(self.config)

    @property
    def most_drafts(self) -> int:
        """Most drafts of a row in a step; 0 without speculative decoding."""
        speculation = self.config.speculative_config
        return speculation.most_drafts if speculation.is_on else 0

    @property
    def num_steps_ahead(self) -> int:
        """Number of steps decided before the ids of the oldest of them are read, beyond one for each stage."""
        return int(_uses_async_scheduling(self.config, self.model_config, self.device_type))

    @property
    def num_in_flight(self) -> int:
        """Maximum number of steps in flight: one per pipeline stage, and those scheduled ahead."""
        return self.layout.pipeline_parallel_size + self.num_steps_ahead

    @property
    def max_encoder_positions(self) -> int:
        """Positions of the longest input of an encoder, which takes whole blocks before the decoder's tokens."""
        return num_encoder_positions(self.config, self.model_config, self.max_model_len)

    @property
    def max_sequence_len(self) -> int:
        """Positions of the longest sequence."""
        return self.max_encoder_positions + self.max_model_len

    @property
    def max_tower_rows(self) -> int:
        """The most rows that a tower makes at once: tokens of an image or a recording, or an encoder's input."""
        return self.max_encoder_len or max(self.most_tower_rows, default=0)

    @property
    def most_tower_rows(self) -> tuple[int, ...]:
        """The most rows of each tower, by `VisionConfig.parts`; those of an encoder's input."""
        if self.max_encoder_len:
            return (self.max_encoder_len,)
        parts = () if self.model_config.vision is None else self.model_config.vision.parts
        largest = min(self.max_image_tokens, self.largest_image or self.max_image_tokens)
        return tuple([largest if each.sees else self.max_audio_tokens for each in parts])

    @property
    def max_image_tokens(self) -> int:
        """The most tokens of an image; 0 if the model takes none."""
        vision = self.model_config.vision
        most = getattr(self.config.limits, "max_image_tokens", _DEFAULT_MAX_IMAGE_TOKENS)
        return 0 if vision is None or not vision.sees else int(most)

    @property
    def max_audio_tokens(self) -> int:
        """The most tokens of a recording in a prompt; 0 if the model takes none."""
        hearing = None if self.model_config.vision is None else self.model_config.vision.hearing
        return 0 if hearing is None else hearing.most_audio_tokens(self.config.limits.max_audio_s)

    @property
    def model_folder(self) -> Path:
        return self.location.folder

    @property
    def of_draft(self) -> "ResolvedRun":
        """The run of `draft` alone, on one pipeline stage."""
        draft, model = self.draft, self.config.model
        assert draft is not None, "no model drafts in this run"
        load_format = "dummy" if model.load_format == "dummy" else "auto"
        options = replace(model, path=draft.location.path, load_format=load_format, lora_merge=None)
        options = replace(options, enable_lora=False, adapters=None)
        config = replace(self.config, model=options, parallel=_draft_parallel(self.config.parallel))
        found = replace(self, config=config, model_config=draft.model_config, layout=draft.layout, draft=None)
        return replace(found, location=draft.location, max_model_len=draft.max_len)


def highest_num_seqs(config: RunConfig) -> int:
    """`scheduler.max_num_seqs`; where it is unset, the default, for which each sequence needs a token of a step."""
    scheduler = config.scheduler
    if scheduler.max_num_seqs is not None:
        return scheduler.max_num_seqs
    return min(_DEFAULT_MAX_NUM_SEQS, scheduler.max_num_batched_tokens)


def resolve_run(config: RunConfig, device_type: str) -> ResolvedRun:
    """Locate the model, read its files, the tokenizer's unless it is a plan, and resolve. The tokenizer's
    end-of-sequence token ends rows, too, like those of config.json and generation_config.json.

    Raises ConfigError, ModelConfigError or TokenizerError.
    """
    if not config.model.path:
        raise ConfigError(
            "model.path is not set: give a Hugging Face model folder, such as scripts/demo/model (for plan=true its "
            "config.json is enough)"
        )
    if not config.plan.enabled:
        # A plan is made where folders and packages of the ranks may be missing.
        _check_connector(config.cache)
    location = find_model(config)
    with_images = takes_images(config) and (config.plan.enabled or has_image_processor(location.folder))
    with_audio = config.limits.max_audios > 0 and (config.plan.enabled or has_audio_processor(location.folder))
    files = read_model_files(location.folder, with_images=with_images, with_audio=with_audio)
    _warn_of_missing_processor(config, files.model_config, location.folder)
    processor = _image_processor(config, files.model_config.vision, location.folder)
    videos: VideoProcessor | None = None
    if processor is not None and files.model_config.vision is not None:
        videos = _video_processor(config, files.model_config.vision, processor, location.folder)
        levels = None if videos is None else videos.own_levels
        vision = normalised_by(files.model_config.vision, processor, levels)
        files = replace(files, model_config=replace(files.model_config, vision=vision))
    resolved = resolve(config, files, device_type, location)
    if processor is not None:
        largest = max(most_image_tokens(processor), 0 if videos is None else most_frame_tokens(videos))
        resolved = replace(resolved, image_processor=processor, video_processor=videos, largest_image=largest)
    speculation = config.speculative_config
    if speculation.method in MODEL_METHODS:
        resolved = with_draft(resolved, speculation.method, speculation.model, speculation.most_drafts)
    if config.plan:
        return resolved
    tokenizer = _tokenizer(config.model, location.folder)
    return replace(resolved, tokenizer=tokenizer, model_config=_with_tokenizer_eos(resolved.model_config, tokenizer))


def _tokenizer(model: ModelOptions, folder: Path) -> Tokenizer | None:
    """The folder's, with the chat template that was given. Raises TokenizerError and ConfigError."""
    tokenizer, key = Tokenizer.open_if_present(folder), "model.chat_template"
    if model.chat_template is None:
        return tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{key} needs a tokenizer, which renders it, and {folder} has none that can be used: leave it out"
        )
    return tokenizer.with_chat_template(key, model.chat_template)


def _check_connector(cache: CacheConfig) -> None:
    """Raise ConfigError for a connector that does not exist, or options that it rejects: before weights are loaded."""
    if cache.connector is None:
        return
    try:
        check_connector(cache.connector, cache.connector_options or {})
    except ValueError as error:
        raise ConfigError(f"cache.connector={cache.connector}: {error}") from error
    except OSError as error:
        way_out = "give cache.connector_options that can be used here"
        raise ConfigError(f"cache.connector={cache.connector}: {error}: {way_out}") from error


def takes_images(config: RunConfig) -> bool:
    """Whether rows may have images: only then the tower of a model is loaded."""
    return config.limits.max_images > 0


def _warn_of_missing_processor(config: RunConfig, model_config: ModelConfig, folder: Path) -> None:
    """Log that a run takes no images or audio because its folder does not say how they are prepared."""
    for medium in () if config.plan.enabled else model_config.media:
        hears = medium == "audio"
        is_wanted = config.limits.max_audios > 0 if hears else takes_images(config)
        if not is_wanted or (has_audio_processor if hears else has_image_processor)(folder):
            continue
        logger.warning(
            "%s has neither preprocessor_config.json nor processor_config.json, which say how %s prepared: the run "
            "takes no %s; add the file of the model, or set limits.%s=0",
            folder,
            *(("audio is", "audio", "max_audios") if hears else ("images are", "images", "max_images")),
            extra=SAME_ON_EVERY_RANK,
        )


def _image_processor(config: RunConfig, vision: VisionConfig | None, folder: Path) -> ImageProcessor | None:
    """The numbers by which the images of a run are prepared. None for a model without images, and in a plan without the
    file that has them. Raises ModelConfigError.
    """
    if vision is None or vision.kind not in KINDS or (config.plan.enabled and not has_image_processor(folder)):
        return None
    return read_image_processor(folder, vision, _image_overrides(config.model))


def _video_processor(
    config: RunConfig, vision: VisionConfig | None, images: ImageProcessor, folder: Path
) -> VideoProcessor | None:
    """The numbers by which the videos of a run are prepared; None without videos. Raises ModelConfigError."""
    if not config.limits.max_videos or vision is None or vision.video_token_id is None:
        return None
    given = {name: json.loads(text) for name, text in (config.model.video_processor or {}).items()}
    return read_video_processor(folder, images, given)


def _image_overrides(model: ModelOptions) -> dict[str, Any]:
    """Values in place of those of the image processor's file."""
    pixels = {"min_pixels": model.image_min_pixels, "max_pixels": model.image_max_pixels}
    others = {name: json.loads(text) for name, text in (model.image_processor or {}).items()}
    return {name: value for name, value in pixels.items() if value is not None} | others


def _with_tokenizer_eos(model_config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Add the tokenizer's `eos_token`, which a chat model's config.json may lack, to the ids that end a row."""
    token_id = None if tokenizer is None else tokenizer.eos_token_id
    # An id that the model has no logit for cannot be sampled.
    if token_id is None or token_id >= model_config.vocab_size or token_id in model_config.eos_token_ids:
        return model_config
    if model_config.pooling is None:
        logger.info(
            "the tokenizer's eos_token, id %d, ends rows, too: config.json and generation_config.json do not name it",
            token_id,
            extra=SAME_ON_EVERY_RANK,
        )
    return replace(model_config, eos_token_ids=(*model_config.eos_token_ids, token_id))


def find_model(config: RunConfig) -> ModelLocation:
    """Locate the model's files; download a missing model of the hub, and remote models and adapters. Raises
    ConfigError.
    """
    if not config.plan:
        fetch_adapters(config.model)
    needs_weights = not config.plan and config.model.load_format != "dummy"
    return locate_model(config.model.path or "", config.model.revision, needs_weights=needs_weights)


def read_pooling(config: RunConfig) -> PoolingConfig | None:
    """The pooling of a run, of its configuration and model files: nothing is checked that its ranks alone need to have,
    as devices and connectors, and no weights are downloaded. None for generation. Raises ConfigError, ModelConfigError.
    """
    location = find_model(replace(config, plan=PlanConfig(enabled=True)))
    return _pooling(config, read_model_files(location.folder), location)


def resolve(
    config: RunConfig, files: ModelFiles, device_type: str, location: ModelLocation | None = None
) -> ResolvedRun:
    """`resolve_run` for files that were read before. Raises ConfigError."""
    location = location or ModelLocation(config.model.path or "", config.model.path or "")
    if files.model_config.is_encoder:
        config = _encoder_config(config, _max_model_len(config, files.model_config))
    if files.model_config.is_attention_free:
        config = _without_blocks(config)
    model_config = replace(files.model_config, pooling=_pooling(config, files, location))
    part = model_config.encoder_part
    if model_config.vision is not None or (part is not None and part.audio is not None):
        config = replace(config, limits=config.limits.for_media())
    _check_quantization(config, model_config, device_type)
    _check_entries(config, model_config)
    _check_states(config, model_config)
    _check_speculation(config, model_config)
    if config.model.prompt_adapters and model_config.pooling is not None:
        raise ConfigError("model.prompt_adapters are for models that generate, but this run pools: leave it out")
    _uses_async_scheduling(config, model_config, device_type)
    unused = "" if files.decoder is None else files.decoder.warning
    max_model_len = _max_model_len(config, model_config)
    for text in [*_settings_without_effect(config, model_config, device_type), *([unused] if unused else [])]:
        logger.warning("%s", text, extra=SAME_ON_EVERY_RANK)
    return ResolvedRun(
        config=config,
        model_config=model_config,
        layout=_layout(config, model_config, device_type),
        device_type=device_type,
        dtype=_dtype(config, model_config, device_type),
        max_model_len=max_model_len,
        default_sampling=default_sampling(
            *(config.sampling, files.generation_config, config.limits.max_tokens),
            None if files.decoder is None else files.decoder.max_tokens,
        ),
        files_digest=files.digest,
        location=location,
        max_encoder_len=max_encoder_len(config, model_config, max_model_len),
        decoder=files.decoder,
    )


def resolve_again(resolved: ResolvedRun, parallel: ParallelConfig) -> ResolvedRun:
    """The same run with another layout; no file is read. Raises ConfigError."""
    config = replace(resolved.config, parallel=parallel)
    layout = _layout(config, resolved.model_config, resolved.device_type)
    _check_quantization(config, resolved.model_config, resolved.device_type)
    _uses_async_scheduling(config, resolved.model_config, resolved.device_type)
    draft = resolved.draft
    if draft is not None:
        _check_embedding(config, draft)
        draft = replace(draft, layout=_draft_layout(config, draft.model_config, resolved.device_type))
    found = replace(resolved, config=config, layout=layout, draft=draft)
    _check_draft_quantization(found)
    return found


def with_draft(resolved: ResolvedRun, method: str, model: str | None, num_drafts: int) -> ResolvedRun:
    """The run with a model or head that drafts so many tokens; its files are read. Raises ConfigError or
    ModelConfigError.
    """
    config = resolved.config
    target = Target(
        resolved.model_config,
        resolved.location,
        resolved.max_model_len,
        needs_weights=not config.plan and config.model.load_format != "dummy",
        new_layout=partial(_draft_layout, config, device_type=resolved.device_type),
    )
    found = replace(resolved, draft=(draft := read_draft(method, model, num_drafts, target)))
    _check_embedding(config, draft)
    _check_draft_quantization(found)
    return found


def _check_embedding(config: RunConfig, draft: DraftRun) -> None:
    """Raise ConfigError for a head whose copy of the target's embedding cannot be read."""
    needs_copy = bool(draft.aux_layers) and not draft.has_embedding and config.parallel.pipeline_parallel_size > 1
    if needs_copy and config.model.load_format == "sharded_state":
        raise ConfigError(
            f"speculative_config.model={draft.location.name} has no embedding of its own, and files of "
            "model.load_format=sharded_state have the target's for the first stage alone: load a checkpoint, or set "
            "parallel.pipeline_parallel_size=1"
        )


def _draft_layout(config: RunConfig, model_config: ModelConfig, device_type: str) -> RankLayout:
    """Layout of a draft. Raises ConfigError."""
    try:
        config = replace(config, parallel=_draft_parallel(config.parallel))
        return _layout(config, model_config, device_type, is_target=False)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: the draft cannot run on the ranks of the model: {error}") from None


def _draft_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """A draft has all of its layers on one stage, and parts of each expert on every rank of it."""
    parallel = replace(parallel, enable_expert_parallel=False, expert_placement="linear", invariant_experts=False)
    return replace(parallel, pipeline_parallel_size=1, pipeline_layers=None)


def _encoder_config(config: RunConfig, max_model_len: int) -> RunConfig:
    """The configuration for an encoder, which computes a row in one step, without a cache. The token budget of a step
    is raised to that of one row: whether a row is answered must not depend on it.
    """
    scheduler, cache = config.scheduler, config.cache
    tokens = max(scheduler.max_num_batched_tokens, max_model_len)
    if tokens > scheduler.max_num_batched_tokens:
        logger.info(
            "scheduler.max_num_batched_tokens=%d is raised to model.max_model_len=%d: an encoder computes a row in one "
            "step; lower model.max_model_len if steps take too much memory",
            scheduler.max_num_batched_tokens,
            tokens,
        )
    if cache.num_blocks is not None:
        logger.info("cache.num_blocks=%d is ignored: an encoder has no cache", cache.num_blocks)
    return replace(
        config,
        scheduler=replace(scheduler, max_num_batched_tokens=tokens, enable_chunked_prefill=False),
        cache=replace(
            cache,
            num_blocks=None,
            swap_space_gib=0.0,
            host_tier_gib=0.0,
            connector=None,
            connector_options=None,
            enable_prefix_caching=False,
            verify_hits=0,
        ),
    )


def _without_blocks(config: RunConfig) -> RunConfig:
    """The configuration for a model without attention, whose sequences have no blocks. Raises ConfigError for what
    moves or compares blocks.
    """
    cache, reason = config.cache, "no layer of this model has attention, so there are no blocks of keys and values"
    given = {
        "connector": cache.connector is not None,
        "host_tier_gib": cache.host_tier_gib > 0,
        "verify_hits": cache.verify_hits > 0,
    }
    for key, is_given in given.items():
        if is_given:
            raise ConfigError(f"cache.{key}={getattr(cache, key)} is of blocks, and {reason}: leave it out")
    for key in ("num_blocks", "swap_space_gib"):
        if getattr(cache, key):
            text, value = "cache.%s=%g has no effect: %s; leave it out", getattr(cache, key)
            logger.warning(text, key, value, reason, extra=SAME_ON_EVERY_RANK)
    return replace(config, cache=replace(cache, num_blocks=None, swap_space_gib=0.0))


def _pooling(config: RunConfig, files: ModelFiles, location: ModelLocation) -> PoolingConfig | None:
    """Pooling of the run; None for generation. Raises ConfigError, or ModelConfigError without a causal mask."""
    options, pooling = config.model, files.model_config.pooling
    wants_pooling = options.runner == "pooling" or options.classifier_from_token is not None
    if options.runner == "generate" and not files.generates:
        raise ConfigError("model.runner=generate: the model of config.json has no language-model head: leave it auto")
    if options.runner == "generate" or (pooling is None and not wants_pooling):
        for key in ("pooling_type", "classifier_from_token", "default_prompt_name", "allow_any_dimensions"):
            if getattr(options, key):
                raise ConfigError(f"model.{key}={getattr(options, key)} needs model.runner=pooling: this run generates")
        return None
    check_sees_earlier(location.folder, files.sees_later)
    if pooling is None and options.pooling_type is None and options.classifier_from_token is None:
        logger.warning(
            "%s does not define a pooling: a row's vector is the last token's, normalised; see model.pooling_type",
            location.folder,
            extra=SAME_ON_EVERY_RANK,
        )
    pooling = pooling or last_token_pooling(files.model_config.output_size)
    if options.classifier_from_token is not None:
        classifier = _classifier_from_tokens(options.classifier_from_token, files, location)
        pooling = replace(classifier, max_tokens=pooling.max_tokens)
    elif pooling.label_token_ids:
        _check_label_tokens(pooling.label_token_ids, files, location)
    if options.default_prompt_name is not None:
        name, known = options.default_prompt_name, [name for name, _ in pooling.text.prompts]
        if name and name not in known:
            raise ConfigError(
                f"model.default_prompt_name={name} is not one of the folder's prompts "
                f"({', '.join(known) or 'config_sentence_transformers.json has none'}): name one, or '' for none"
            )
        pooling = replace(pooling, text=replace(pooling.text, default_prompt=name))
    if options.pooling_type is not None:
        if pooling.task in TOKEN_TASKS:
            raise ConfigError(
                f"model.pooling_type={options.pooling_type}: the model of config.json has numbers for each token, and "
                f"pools none: leave it out"
            )
        pooling = replace(pooling, pooling_type=options.pooling_type)
    return replace(pooling, is_matryoshka=True) if options.allow_any_dimensions else pooling


def _check_plain_logits(key: str, config: ModelConfig) -> None:
    """Raise ConfigError unless the model's logits are a plain GEMM with the head's weight."""
    if config.has_head_bias or config.logit_cap or config.logit_divisor != 1.0:
        raise ConfigError(
            f"{key} is not supported for {config.architecture}, whose logits are more than a GEMM with the "
            f"head's weight: leave it out"
        )


def _check_label_tokens(token_ids: Sequence[int], files: ModelFiles, location: ModelLocation) -> None:
    """Raise ConfigError for a folder with an unsupported LogitScore."""
    config, key = files.model_config, f"{location.folder}: LogitScore of modules.json"
    _check_plain_logits(key, config)
    beyond = next((each for each in token_ids if each >= config.vocab_size), None)
    if beyond is not None:
        raise ConfigError(
            f"{key} uses the logit of token {beyond}, but the model has those below vocab_size={config.vocab_size} of "
            f"config.json: name another token in its config.json"
        )


def _classifier_from_tokens(tokens: list[str], files: ModelFiles, location: ModelLocation) -> PoolingConfig:
    if not files.generates:
        raise ConfigError(f"model.classifier_from_token={tokens}: the model of config.json has no language-model head")
    config = files.model_config
    _check_plain_logits(f"model.classifier_from_token={tokens}", config)
    tokenizer = Tokenizer.open_if_present(location.folder)
    ids = [None if tokenizer is None else tokenizer.token_id(token) for token in tokens]
    found = [token_id for token_id in ids if token_id is not None]
    if len(found) != len(tokens):
        raise ConfigError(f"model.classifier_from_token={tokens} must be two tokens of the model's tokenizer.json")
    beyond = next((each for each in zip(tokens, found) if each[1] >= config.vocab_size), None)
    if beyond is not None:
        raise ConfigError(
            f"model.classifier_from_token={tokens}: {beyond[0]!r} is token {beyond[1]} of tokenizer.json, but the "
            f"model has logits of those below vocab_size={config.vocab_size} of config.json: give another token"
        )
    size, label_ids = config.output_size, tuple(found)
    return PoolingConfig("classify", "last", size, num_labels=1, activation="sigmoid", label_token_ids=label_ids)


def _check_quantization(
    config: RunConfig, model_config: ModelConfig, device_type: str, *, is_target: bool = True
) -> None:
    """Raise ConfigError for a run whose weights cannot be quantised at load time."""
    key = f"model.quantization={config.model.quantization}"
    if config.model.quantization is None:
        return
    if (
        config.model.quantization == "fp8"
        and device_type == "cpu"
        and config.executor.device_backend in ("auto", "cpu")
    ):
        raise ConfigError(f"{key} computes on GPUs, which multiply FP8: use model.quantization=int8, or leave it out")
    if config.model.quantization == "int8" and config.model.head_dtype is not None:
        raise ConfigError(
            f"model.head_dtype={config.model.head_dtype} with {key}, which is of the head too: leave one out"
        )
    _check_quantised_experts(config, model_config, device_type, is_target=is_target)
    if model_config.pooling is not None:
        raise ConfigError(f"{key} is for models that generate, but this run pools: leave it out")
    if config.model.quantization == "fp8":
        return
    _check_row_shares(config, model_config, device_type)
    widths = [max(layer.intermediate_size, layer.num_heads * layer.value_head_size) for layer in model_config.layers]
    experts = [layer.experts for layer in model_config.layers if layer.experts is not None]
    widths += [max(each.intermediate_size, each.shared_size, each.latent_size) for each in experts]
    if max(*widths, model_config.hidden_size) > MAX_INPUTS:
        raise ConfigError(
            f"{key} sums at most {MAX_INPUTS:,} inputs exactly, but config.json has layers of "
            f"{max(*widths, model_config.hidden_size):,}: leave it out"
        )


def _check_quantised_experts(
    config: RunConfig, model_config: ModelConfig, device_type: str, *, is_target: bool
) -> None:
    """Raise ConfigError for experts whose weights cannot be quantised at load time."""
    if all(layer.experts is None for layer in model_config.layers):
        return
    key = f"model.quantization={config.model.quantization}"
    if config.model.quantization != "int8":
        raise ConfigError(
            f"{key} is not supported for {model_config.architecture}, which has experts: use model.quantization=int8, "
            f"or leave it out"
        )
    size = config.parallel.tensor_parallel_size
    if size > 1 and not config.parallel.enable_expert_parallel:
        way_out = "set parallel.enable_expert_parallel=true" if is_target else "leave speculative_config out"
        raise ConfigError(
            f"{key} needs complete experts on each rank of parallel.tensor_parallel_size={size}, because a part of a "
            f"row would have a scale of its own{'' if is_target else ', and a draft has parts of them'}: {way_out}, or "
            f"use one rank"
        )


def _check_draft_quantization(resolved: ResolvedRun) -> None:
    """`_check_quantization` of the draft, if there is one."""
    if resolved.draft is not None:
        draft = resolved.of_draft
        _check_quantization(draft.config, draft.model_config, resolved.device_type, is_target=False)


def _check_row_shares(config: RunConfig, model_config: ModelConfig, device_type: str) -> None:
    """Raise ConfigError if ranks of GPUs would share rows of int8 weights that do not fit their kernels."""
    size = config.parallel.tensor_parallel_size
    if device_type == "cpu" or size == 1:
        return
    inputs = {layer.num_heads * layer.value_head_size // size for layer in model_config.layers}
    for width in {layer.intermediate_size for layer in model_config.layers}:
        inputs |= {stop - start for start, stop in (shard_range(width, size, rank) for rank in range(size))}
    unfit = sorted(each for each in inputs if not fits_bytes(each))
    if unfit:
        raise ConfigError(
            f"model.quantization=int8 on GPUs needs shares of rows that are multiples of 16 inputs, but with "
            f"parallel.tensor_parallel_size={size} a rank has {unfit[0]}: choose another size, or leave it out"
        )


def _check_entries(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError for a cache that rounds what compressed entries are made of."""
    if config.cache.dtype == "fp8" and any(layer.compressed is not None for layer in model_config.layers):
        raise ConfigError(
            "cache.dtype=fp8 is not supported for this model, whose cache has gates and sums that FP8 would lose: "
            "leave it out"
        )


def _check_states(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError for blocks that do not end where states are kept; say once what states limit."""
    if not model_config.has_states:
        return
    cache = config.cache
    try:
        check_state_block_size(cache.block_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if cache.verify_hits and not config.scheduler.enable_chunked_prefill:
        raise ConfigError(
            f"cache.verify_hits={cache.verify_hits} compares a recurrent state where a chunk of a prompt ends, and "
            f"scheduler.enable_chunked_prefill=false has no chunks: enable it, or leave cache.verify_hits at 0"
        )
    if cache.enable_prefix_caching and not config.scheduler.enable_chunked_prefill:
        logger.warning(
            "scheduler.enable_chunked_prefill=false computes a prompt in one piece, so it keeps no state inside: with "
            "recurrent states a prompt finds no prefix of another; leave it out to reuse prefixes",
            extra=SAME_ON_EVERY_RANK,
        )
    key = f"cache.connector={cache.connector}" if cache.connector else f"cache.host_tier_gib={cache.host_tier_gib:g}"
    if cache.connector or cache.host_tier_gib:
        logger.warning(
            "%s keeps blocks and no recurrent states: blocks are loaded where the device has a snapshot of the state "
            "behind them (cache.num_state_snapshots)",
            key,
            extra=SAME_ON_EVERY_RANK,
        )


def _check_speculation(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError for speculative decoding of a model that does not support it."""
    speculation = config.speculative_config
    if not speculation.is_on:
        return
    key = f"speculative_config.method={speculation.method}"
    if model_config.pooling is not None:
        raise ConfigError(f"{key} drafts tokens, and this run pools: leave it out")
    if model_config.encoder_part is not None:
        raise ConfigError(f"{key} is not supported for encoder-decoder models: leave it out")
    if model_config.is_attention_free and speculation.method not in REPLICA_METHODS:
        raise ConfigError(
            f"{key} keeps keys of its drafts in blocks, and no layer of this model has attention, so it has none: "
            f"use speculative_config.method=ngram or suffix, or leave it out"
        )
    size = speculation.draft_tensor_parallel_size
    if size not in (None, config.parallel.tensor_parallel_size):
        raise ConfigError(
            f"speculative_config.draft_tensor_parallel_size={size} must be parallel.tensor_parallel_size="
            f"{config.parallel.tensor_parallel_size}: drafts are computed on the same ranks; leave it out"
        )


def _settings_without_effect(config: RunConfig, model_config: ModelConfig, device_type: str) -> list[str]:
    """Texts about settings that have no effect with the others: key, value, reason and way out."""
    cache, mode, found = config.cache, config.scheduler.preemption_mode, []
    if mode == "recompute" and cache.swap_space_gib:
        found.append(
            f"cache.swap_space_gib={cache.swap_space_gib:g} has no effect with scheduler.preemption_mode=recompute: "
            f"nothing is swapped; leave one of them out"
        )
    # As in `worker/memory/plan.py`: such a cache uses all of the host's memory.
    takes_all = cache.swap_space_gib is None and device_type == "cpu" and cache.num_blocks is None
    if (
        mode == "swap"
        and (takes_all or cache.swap_space_gib == 0)
        and not (model_config.is_encoder or model_config.is_attention_free)
    ):
        space = "a cache that takes all host memory" if takes_all else "cache.swap_space_gib=0"
        found.append(
            f"scheduler.preemption_mode=swap has no effect with {space}: preempted sequences are recomputed; set "
            f"cache.swap_space_gib to some host memory, or leave it out"
        )
    if cache.num_blocks is not None and cache.gpu_memory_utilization != CacheConfig().gpu_memory_utilization:
        found.append(
            f"cache.gpu_memory_utilization={cache.gpu_memory_utilization:g} has no effect with "
            f"cache.num_blocks={cache.num_blocks}: the cache has that size; leave one of them out"
        )
    if cache.num_state_snapshots and not (model_config.has_states and cache.enable_prefix_caching):
        reason = "this model has no recurrent states" if not model_config.has_states else "prefix caching is off"
        found.append(f"cache.num_state_snapshots={cache.num_state_snapshots} has no effect: {reason}; leave it out")
    if model_config.pooling is None:
        return found
    given = [f"sampling.{key}" for key in config.sampling.given()]
    formats = ("tool_call_format", "reasoning_format")
    given += [f"model.{key}" for key in formats if getattr(config.model, key) != "auto"]
    found += [f"{key} has no effect: this run pools, and rows get no tokens; leave it out" for key in given]
    if config.model.allow_any_dimensions and model_config.pooling.task not in VECTORS:
        found.append("model.allow_any_dimensions=true has no effect: this model gives scores, no vectors; leave it out")
    return found


def _uses_async_scheduling(config: RunConfig, model_config: ModelConfig, device_type: str) -> bool:
    """Whether steps are scheduled ahead (`SchedulerConfig`). Raises ConfigError for a conflicting setting."""
    wanted, num_stages = config.scheduler.async_scheduling, config.parallel.pipeline_parallel_size
    if wanted and num_stages > 1:
        raise ConfigError(
            f"scheduler.async_scheduling=true needs the sampled ids on the first stage, which has none with "
            f"parallel.pipeline_parallel_size={num_stages}; a pipeline has one step per stage in flight in any case: "
            f"leave scheduler.async_scheduling out"
        )
    has_head = config.speculative_config.method in HEAD_METHODS
    if wanted and has_head:
        raise ConfigError(
            f"scheduler.async_scheduling=true needs steps that are launched before ids are read, and the head of "
            f"speculative_config.method={config.speculative_config.method} computes every step from its ids: leave "
            f"scheduler.async_scheduling out"
        )
    is_wanted = device_type == "cuda" if wanted is None else wanted
    return is_wanted and num_stages == 1 and model_config.pooling is None and not has_head


def _layout(config: RunConfig, model_config: ModelConfig, device_type: str, *, is_target: bool = True) -> RankLayout:
    """Layout with the owners of experts and the number of leaves. Raises ConfigError."""
    parallel, quantization = config.parallel, config.model.quantization
    is_invariant = parallel.invariant_tensor_parallel
    is_plain = config.executor.device_backend == "torch"
    if is_invariant is None:
        # A class of the user's own may wrap the CPU's.
        is_invariant = device_type == "cpu" and not is_plain and config.executor.device_backend != "triton"
    if is_invariant and is_plain:
        raise ConfigError(PLAIN_TORCH)
    if is_invariant and (device_type == "cuda" or config.executor.device_backend == "triton"):
        check_gpu_leaves(config, model_config)
    layout = replace(layout_of(parallel), experts=expert_layout_of(parallel, model_config))
    if layout.experts is not None and (is_invariant or device_type == "cpu" or quantization is not None):
        # A tree over ranks, which CPUs always have, adds complete experts, and so are those with scales of their rows.
        layout = replace(layout, experts=replace(layout.experts, is_exact=True))
    # Sums of int8 are exact; what adapters add to them is summed in leaves.
    if is_invariant and quantization in (None, "int8"):
        layout = replace(layout, num_leaves=num_leaves(model_config, parallel.max_leaves))
    check_divides(layout, model_config)
    has_leaves = quantization is None or (quantization == "int8" and config.model.adapter_limits is not None)
    if is_target and is_invariant and has_leaves and parallel.tensor_parallel_size > 1:
        log_same_sizes(parallel, model_config, layout)
    return layout


def _dtype(config: RunConfig, model_config: ModelConfig, device_type: str) -> str:
    """Dtype of the model: of config.json and the kind of device alone, so that all ranks and a resume agree. Raises
    ConfigError for one that the device does not support.
    """
    if device_type == "cpu" and config.model.dtype == "float16":
        raise ConfigError("model.dtype=float16 is not supported on the CPU: use bfloat16 (as small) or float32 (exact)")
    if config.model.dtype != "auto":
        return config.model.dtype
    if device_type != "cpu" or model_config.dtype != "float16":
        return model_config.dtype
    if model_config.quantization is None or not model_config.quantization.can_stay_as_stored:
        return "float32"
    logger.info(
        "model.dtype=auto is bfloat16: CPUs do not compute in the float16 of config.json, and weights of 4 bits or "
        "FP8 can stay so in bfloat16 alone; model.dtype=float32 is more exact, and dequantises them",
        extra=SAME_ON_EVERY_RANK,
    )
    return "bfloat16"


def _max_model_len(config: RunConfig, model_config: ModelConfig) -> int:
    """Maximum length of a sequence, tokens. Raises ConfigError for more than the model supports."""
    wanted = config.model.max_model_len
    if model_config.bounds_rows and wanted is not None and wanted > model_config.max_model_len:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the model's {model_config.max_model_len} tokens: "
            f"lower it or leave it null"
        )
    own = model_config.pooling.max_tokens if model_config.pooling is not None else 0
    most = model_config.max_model_len if model_config.bounds_rows else own or model_config.max_model_len
    max_model_len = wanted or min(own or most, most)
    late = model_config.pooling.late if model_config.pooling is not None else None
    if late is not None and late.expansion is not None and late.expansion.length > max_model_len:
        raise ConfigError(
            f"model.max_model_len={max_model_len} is less than the {late.expansion.length} tokens to which the folder "
            f"expands queries (query_length or query_maxlen): raise it, or set model.max_model_len to null"
        )
    tokens = config.scheduler.max_num_batched_tokens
    if model_config.is_encoder:
        return max_model_len
    num_before = num_encoder_positions(config, model_config, max_model_len)
    if not config.scheduler.enable_chunked_prefill and tokens < num_before + max_model_len:
        before = f" behind {num_before} positions of the encoder's input" if num_before else ""
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={tokens} cannot hold a prompt of model.max_model_len={max_model_len}"
            f"{before} with scheduler.enable_chunked_prefill=false: raise it to {num_before + max_model_len} or enable "
            f"chunked prefill"
        )
    return max_model_len
