"""A draft on a rank of the last stage: a second model, or a head of the target, with its weights and kernels."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kv_cache.cache_engine import CacheEngine
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.drafts.deepseek_mtp import DeepseekStack
from spmd_worker.model.drafts.draft_head import DraftHead
from spmd_worker.model.drafts.eagle3 import EagleHead
from spmd_worker.model.drafts.head_files import read_distances
from spmd_worker.model.drafts.mtp import MtpHead
from spmd_worker.model.drafts.qwen_mtp import QwenStack
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.weights.staging import staging_for
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.resolved import ResolvedRun
from spmd_worker.resolved_draft import EAGLE3, QWEN_MTP_NAMES, DraftRun
from spmd_worker.worker.drafts.drafting_rows import DraftLimits
from spmd_worker.worker.drafts.head_drafter import HeadDrafter
from spmd_worker.worker.drafts.model_drafter import ModelDrafter
from spmd_worker.worker.opened_device import OpenedDevice
from spmd_worker.worker.runner.drafter import Drafter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The draft's module; its kernels and attention are its own, because its sizes and steps are. `vision`: how the
    target takes images, if it does.
    """

    draft: DraftRun
    opened: OpenedDevice
    module: DecoderForCausalLM | DraftHead
    kernels: Kernels
    attention: AttentionBackend
    vision: VisionConfig | None = None

    def pack_weights(self) -> None:
        """Pack the weights, after they are filled."""
        if isinstance(self.module, DecoderForCausalLM):
            self.module.pack_weights()
        else:
            self.module.weights.pack()

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, without what it shares with the target."""
        return sum(each.nbytes for each in (*self.module.parameters(), *self.module.buffers()))

    def new_drafter(self, engine: CacheEngine) -> Drafter:
        """A drafter with keys and values in the target's cache."""
        config, group = self.opened.resolved.config, self.opened.groups.tensor
        num_groups = engine.spec.groups.num_groups
        limits = DraftLimits(
            *(self.draft.num_drafts, self.draft.max_len, config.cache.block_size, num_groups),
            model_config=self.draft.model_config,
        )
        if isinstance(self.module, DraftHead):
            return HeadDrafter(self.module, engine, group, limits, self.vision)
        return ModelDrafter(self.module, engine, group, limits, config.scheduler.max_num_batched_tokens)


def load_draft(
    opened: OpenedDevice, target: DecoderForCausalLM, fill_model: Callable[[OpenedDevice], DecoderForCausalLM]
) -> LoadedDraft | None:
    """Fill the draft of the run, not packed yet; None on other stages than the last, or if there is none. `fill_model`
    makes a complete model of another run. Raises ConfigError or CheckpointError.
    """
    draft = opened.resolved.draft
    if draft is None or not target.stage.is_last:
        return None
    resolved = opened.resolved.of_draft
    of_target = opened.resolved
    opened = replace(opened, resolved=resolved, backend=type(opened.backend)(resolved, opened.device))
    operations = opened.backend.operations()
    if not draft.is_head:
        module: DecoderForCausalLM | DraftHead = fill_model(opened)
        return LoadedDraft(draft, opened, module, operations.kernels, operations.attention)
    context = LayerContext(
        tensor_group=opened.groups.tensor,
        kernels=operations.kernels,
        attention=operations.attention,
        dtype=getattr(torch, resolved.dtype),
        device=opened.device,
        expert_layout=draft.layout.experts,
        quantised=operations.quantised,
        num_leaves=draft.layout.num_leaves,
    )
    head = _new_head(context, draft, target, allows_nonfinite=resolved.config.model.allow_nonfinite)
    _fill(head.weights, resolved, opened.device)
    if isinstance(head, EagleHead):
        if head.embedding_weights is not None:
            _fill(head.embedding_weights, of_target, opened.device)
        if resolved.config.model.load_format != "dummy":
            vocab_size = resolved.model_config.vocab_size
            head.d2t = read_distances(resolved.model_folder, head.vocab_size, vocab_size).to(opened.device)
    vision = target.model_config.vision
    return LoadedDraft(draft, opened, head, operations.kernels, operations.attention, vision)


def _new_head(
    context: LayerContext, draft: DraftRun, target: DecoderForCausalLM, *, allows_nonfinite: bool
) -> DraftHead:
    embedding = target.model.embed_tokens if target.stage.is_first else None
    if draft.method == EAGLE3:
        return EagleHead(context, draft, embedding, target.model_config, allows_nonfinite=allows_nonfinite)
    config = draft.model_config
    stack_class = QwenStack if config.architecture in QWEN_MTP_NAMES else DeepseekStack
    return MtpHead(stack_class, context, config, embedding, target.lm_head, allows_nonfinite=allows_nonfinite)


def _fill(weights: WeightStore, resolved: ResolvedRun, device: torch.device) -> None:
    """Fill a head, or its copy of an embedding, from the run's files or with dummy weights. Raises CheckpointError."""
    staging = staging_for(device)
    # The names of the head are known with its tensors.
    names = weights.tensors
    if resolved.config.model.load_format == "dummy":
        weights.fill(weights.dummy(staging=staging))
        return
    with weights.open(resolved.model_folder, resolved.model_config.quantization, staging) as source:
        report = weights.fill(source)
    logger.info("draft head: loaded %d of %d tensors in %.2f s", report.num_tensors, len(names), report.seconds)
