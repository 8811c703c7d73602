"""Records of a run's steps: the step log while it runs, and each rank's last records when ranks diverge.

Both have the format of `frontends/replay/step_log.py`, so `spmd-worker-replay` reads both.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from spmd_worker.base.remote_names import absolute_name, file_path
from spmd_worker.base.version import code_fingerprint
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.replay.step_log import STEP_LOG_NAME, StepLogHeader, StepLogWriter
from spmd_worker.model.weights.sampled_digest import sampled_digests
from spmd_worker.replica.lockstep.wire.codec import Encoder

logger = logging.getLogger(__name__)


def open_step_log(engine: Engine, run_dir: Path) -> StepLogWriter:
    """Write every later step message to `steps.log`, which the caller closes. Rank 0, before the first step."""
    writer = StepLogWriter(run_dir / STEP_LOG_NAME, step_log_header(engine, sampled_digests(engine.resolved)))
    engine.lockstep.on_message = writer.write
    return writer


def write_last_records(engine: Engine, run_dir: Path) -> None:
    """Write this rank's last records as `records.rank<N>.log`, if there is a run directory; an OSError is logged."""
    if not run_dir.is_dir():
        return
    encoder = Encoder(engine.config.parallel.pipeline_parallel_size)
    try:
        with StepLogWriter(
            run_dir / f"records.rank{engine.engine_channel.rank}.log", step_log_header(engine)
        ) as writer:
            for message in engine.lockstep.records:
                writer.write(encoder.encode(message))
    except OSError as error:
        logger.warning("the records of the last steps could not be written: %s", error)


def step_log_header(engine: Engine, weights: Mapping[str, str] = MappingProxyType({})) -> StepLogHeader:
    """Header of a step log: everything that a replay needs besides the messages. `weights` are the digests of weight
    files, by name.
    """
    resolved, config, cache = engine.resolved, engine.config, engine.scheduler.cache
    slots, limits = engine.scheduler.state_slots, engine.scheduler.limits
    model, scheduler, parallel = config.model, config.scheduler, config.parallel
    tokens, adapters = model.classifier_from_token, model.adapter_limits
    loaded = list(engine.scheduler.adapters.entries.values())[: len(model.adapters or ())]
    prompts = list(engine.scheduler.prompt_adapters.entries.values())[: len(model.prompt_adapters or ())]
    return StepLogHeader(
        code=code_fingerprint(),
        model_path=str(resolved.model_folder.resolve()),
        load_format=model.load_format,
        device=resolved.device_type,
        dtype=resolved.dtype,
        quantization=model.quantization,
        tokenizer=engine.tokenizer.files_fingerprint() if engine.tokenizer is not None else None,
        vocab_size=resolved.model_config.vocab_size,
        eos_token_ids=resolved.model_config.eos_token_ids,
        max_model_len=resolved.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        cache_dtype=resolved.cache_dtype,
        watermark_blocks_per_sequence=limits.watermark_blocks_per_sequence,
        num_host_blocks=cache.num_host_blocks,
        num_tier_blocks=cache.num_tier_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        preemption_mode=scheduler.preemption_mode,
        block_copy_tokens=limits.preemption.block_copy_tokens,
        seed=config.seed,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        runner=model.runner,
        pooling_type=model.pooling_type,
        classifier_from_token=None if tokens is None else (tokens[0], tokens[1]),
        num_steps_ahead=resolved.num_steps_ahead,
        keeps_histories=limits.keeps_histories,
        max_prompt_adapters=model.max_prompt_adapters,
        lora_merge=None if model.merged_adapter is None else absolute_name(file_path(model.merged_adapter)),
        max_loras=0 if adapters is None else adapters.max_loras,
        max_lora_rank=0 if adapters is None else adapters.max_lora_rank,
        max_cpu_loras=0 if adapters is None else adapters.max_cpu_loras,
        adapter_names=tuple(each.name for each in loaded),
        adapter_paths=tuple(absolute_name(file_path(each.path)) for each in loaded),
        adapter_digests=tuple(each.digest for each in loaded),
        prompt_adapter_names=tuple(each.name for each in prompts),
        prompt_adapter_paths=tuple(absolute_name(file_path(each.path)) for each in prompts),
        prompt_adapter_digests=tuple(each.digest for each in prompts),
        prompt_adapter_num_tokens=tuple(each.num_tokens for each in prompts),
        connector_saves=None if engine.outside is None else engine.outside.saves,
        num_state_slots=0 if slots is None else slots.num_slots,
        num_host_state_slots=0 if slots is None else slots.num_host_slots,
        slot_copy_tokens=limits.preemption.slot_copy_tokens,
        snapshot_interval=limits.snapshot_interval,
        num_media_rows=limits.media.num_rows,
        max_encode_patches=limits.media.max_encode_patches,
        sees_whole_image=limits.media.sees_whole_image,
        max_encoder_len=resolved.max_encoder_len,
        verify_hits=limits.verify_hits,
        verify_steps=limits.verify_steps,
        num_full_groups=cache.groups.num_full,
        num_window_groups=cache.groups.num_windows,
        windows=cache.groups.windows,
        num_leaves=resolved.layout.num_leaves,
        row_sums=resolved.row_sums,
        speculation=None if limits.speculation is None else json.dumps(asdict(limits.speculation)),
        num_lookahead_tokens=limits.num_lookahead_tokens,
        weight_files=tuple(weights),
        weight_digests=tuple(weights.values()),
    )
