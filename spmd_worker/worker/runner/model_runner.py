"""Runs one step on one rank's device: batch, forward pass, logits of the sampled rows, token ids.

Forward pass and sampling are two calls; grammar masks are computed from the start of one to the start of the other.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.cache_engine import CacheEngine
from spmd_worker.base.metrics.stage_times import StageClock
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.native.threads import multi_threaded_torch
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack
from spmd_worker.ops.sampling.sampler import LaunchedSample, Sampler
from spmd_worker.ops.sampling.shard_scores import Scores
from spmd_worker.ops.sampling.token_masks import TokenMasks
from spmd_worker.ranks.communicator import GroupHandle, Transfer
from spmd_worker.replica.grammar.step_masks import GrammarMasks, StepMasks
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.worker.runner.batch import Batch, RowsToSample, build_batch, constrained_rows, wanted_tokens
from spmd_worker.worker.runner.batch_state import BatchState
from spmd_worker.worker.runner.chosen_tokens import ChosenTokens
from spmd_worker.worker.runner.drafter import Drafter
from spmd_worker.worker.runner.media_store import MediaStore
from spmd_worker.worker.runner.pooling import RowPooling, Vectors
from spmd_worker.worker.runner.prefix_store import PrefixStore
from spmd_worker.worker.runner.prompt_logprobs import (
    LaunchedPromptLogprobs,
    LaunchedPromptScores,
    prompt_logprobs,
    prompt_scores,
)
from spmd_worker.worker.runner.routed_experts import LaunchedRoutes, launch_routes, wants_routes
from spmd_worker.worker.runner.row_repeat import RowRepeater, StepInputs, StepOutputs
from spmd_worker.worker.runner.row_store import RowStore
from spmd_worker.worker.runner.stage_streams import StageStreams
from spmd_worker.worker.runner.step_graphs import StepGraphs
from spmd_worker.worker.runner.stream_keeper import StreamKeeper
from spmd_worker.worker.runner.verified import verified


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A forward pass before sampling, which uses `logits`, or `argmax` if there are none. `pooled` has digests and
    vectors of pooled rows, which are not sampled. `read_back` collects what is read alongside the tokens. `is_sent` if
    this stage sends its hidden states to the next, `wants_drafts` if drafts for the next step are to be made.
    """

    step: int
    scheduled: Sequence[ScheduledSequence]
    batch: Batch
    logits: Tensor | None = None
    argmax: tuple[Tensor, Tensor] | None = None
    prompt_logprobs: tuple[LaunchedPromptLogprobs, ...] = ()
    prompt_scores: tuple[LaunchedPromptScores, ...] = ()
    routes: LaunchedRoutes | None = None
    pooled: tuple[tuple[int, ...], Vectors] = ((), ())
    read_back: ReadBack = field(default_factory=ReadBack)
    is_sent: bool = False
    wants_drafts: bool = False


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose result the host can read; `masks` are the grammar masks of its rows, made by `grammars`. `drafter`
    then drafts for the next step.
    """

    forwarded: _Forwarded
    sample: LaunchedSample | None
    masks: StepMasks | None
    clock: StageClock
    chosen: ChosenTokens
    grammars: GrammarMasks | None = None
    drafter: Drafter | None = None

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Wait for the device, once."""
        forwarded, step = self.forwarded, self.forwarded.step
        forwarded.read_back.read()
        if not forwarded.is_sent:
            self.clock.end()
        digests, vectors = forwarded.pooled
        if vectors:
            return StepResult(step, digests, vectors=vectors)
        prompt_logprobs = tuple(each.collect() for each in forwarded.prompt_logprobs)
        prompt_scores = tuple(each.collect() for each in forwarded.prompt_scores)
        routed = () if forwarded.routes is None else forwarded.routes.collect()
        if self.sample is None:
            return StepResult(step, digests, (), prompt_logprobs, prompt_scores=prompt_scores, routed_experts=routed)
        sampled, masks, drafts = self.sample.collect(), self.masks, forwarded.batch.drafts
        self.chosen.note_read(step)
        ids, logprobs, kept_ids = SampledIds(sampled.token_ids), sampled.logprobs, sampled.kept_ids
        if masks is not None and masks.forced:
            ids = SampledIds.from_rows(masks.appended(sampled.token_ids))
            # Rows that want logprobs, or the ids of their masks, take one token per step.
            logprobs = tuple([entry for entry, row in zip(logprobs, ids.rows()) for _ in row])
            kept_ids = tuple([kept for kept, row in zip(kept_ids, ids.rows()) for _ in row])
        if drafts:
            confirm = None if masks is None or self.grammars is None else partial(self.grammars.confirm, masks)
            ids, (logprobs, kept_ids) = verified(drafts, ids, (logprobs, kept_ids), confirm)
        return StepResult(
            step,
            ids.token_ids,
            logprobs,
            prompt_logprobs,
            num_token_ids=ids.num_ids,
            mask_checksums=() if masks is None else (masks.checksum,),
            kept_ids=kept_ids,
            prompt_scores=prompt_scores,
            routed_experts=routed,
            drafts=self._proposed(ids),
        )

    def _proposed(self, ids: SampledIds) -> tuple[tuple[int, ...], ...]:
        """Drafts for the next step; none if none are wanted."""
        if self.drafter is None:
            return ()
        wants_drafts = self.forwarded.wants_drafts
        found = self.drafter.propose(self.forwarded.scheduled, ids, wants_drafts=wants_drafts)
        return found if wants_drafts else ()


class ModelRunner:
    """Call `forward`, then `sample`, once each per step.

    `pipeline` is the group of the pipeline stages: hidden states come from the previous one and go to the next; only
    the last stage has a sampler or a pooler. `clock` measures when this stage computes. `model` may take new weights
    between steps. `grammars` has the states of rows with structured outputs, on a stage that samples. `graphs` launch
    the steps that fit them; other steps are launched kernel by kernel. `keeps_state`: the device keeps what successive
    steps have in common (`batch_state.py`). `adapters` are those that rows may have; None: they have none. `rows` are
    the given embeddings, on the first stage; `prefixes` the given keys and values; `media` the rows of images, on the
    first stage of a model that takes images. `rank` is for error messages. `drafter` drafts on the last stage,
    and may read streams before `aux_layers`, of all stages. `keeper` keeps the streams of prompts that were asked for.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        cache_engine: CacheEngine,
        sampler: Sampler | None,
        block_size: int,
        pipeline: GroupHandle,
        clock: StageClock | None = None,
        grammars: GrammarMasks | None = None,
        graphs: StepGraphs | None = None,
        *,
        keeps_state: bool = False,
        adapters: LoadedAdapters | None = None,
        rows: RowStore | None = None,
        prefixes: PrefixStore | None = None,
        media: MediaStore | None = None,
        rank: int = 0,
        drafter: Drafter | None = None,
        keeper: StreamKeeper | None = None,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self.keeper = keeper
        self._streams = StageStreams(model.stage, aux_layers, model.model_config.stream_size)
        self._grammars, self._drafter = grammars, drafter
        self.rows, self.prefixes, self.media = rows, prefixes, media
        self._clock = clock or StageClock(pipeline.rank)
        self._model, self.sampler, self.graphs, self._cache_engine = model, sampler, graphs, cache_engine
        scores_of = None if adapters is None else adapters.scores_of
        self._pooling = RowPooling(model.pooler, scores_of) if model.pooler is not None else None
        self._block_size, self._pipeline = block_size, pipeline
        self._device = next(model.parameters()).device
        self._has_encoder = model.model_config.encoder_part is not None
        has_state = keeps_state and not (model.model_config.is_encoder or self._has_encoder)
        self.adapters, self._slot_of = adapters, None if adapters is None else adapters.slot_of
        self._step_adapters: StepAdapters | None = None
        self._has_states, self._most_drafts = model.model_config.has_states, cache_engine.spec.most_drafts
        self._repeater = RowRepeater(model, cache_engine, adapters, rank)
        self._state = None
        if has_state:
            self._state = BatchState(
                *(block_size, self._device, self._slot_of),
                has_states=self._has_states,
                most_drafts=self._most_drafts,
                vision=model.model_config.vision,
                num_groups=self.num_groups,
                group_of=cache_engine.spec.group_of,
            )
        needs_all = drafter is not None and drafter.needs_hidden
        self._leaves_out = self._state is None and self._pooling is None and not needs_all and model.supports_wanted
        self._rows = RowsToSample()
        self._unconstrained: tuple[SampleRow, ...] = ()
        self._chosen = ChosenTokens(self._device)
        self._pending: _Forwarded | None = None
        self._none = torch.empty(0, device=self._device)
        self._sending: Transfer | None = None
        self._expected: deque[Transfer] = deque()

    @property
    def model(self) -> DecoderForCausalLM:
        """The model, for a caller who may hold and change it between steps (`DecoderForCausalLM.hold`)."""
        self._model.hold()
        if self.graphs is not None:
            self.graphs.request_address_check()
        return self._model

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`DecoderForCausalLM.compute_logits`."""
        return self._model.compute_logits(hidden)

    @property
    def num_groups(self) -> int:
        """Groups of layers with block tables of their own."""
        return self._cache_engine.spec.groups.num_groups

    @property
    def num_lookahead_tokens(self) -> int:
        """Those of the drafter; 0 without one."""
        return 0 if self._drafter is None else self._drafter.num_lookahead_tokens

    @property
    def _read_layers(self) -> tuple[int, ...]:
        """Layers before which the stream is read, by the drafter or to be kept."""
        is_read = self._drafter is not None or not self._model.stage.is_last
        drafting = self._streams.own if is_read else ()
        return drafting if self.keeper is None else (*drafting, *self.keeper.layers)

    def expect(self, num_tokens: int) -> None:
        """Start to receive the previous stage's hidden states of the next unexpected step, of `num_tokens`."""
        self._expected.append(self._receiving(num_tokens))

    @torch.inference_mode()
    def forward(
        self,
        step: int,
        scheduled: Sequence[ScheduledSequence],
        num_ahead: int = 0,
        *,
        is_fused: bool = True,
        repeated_rows: Sequence[int] = (),
        wants_drafts: bool = False,
    ) -> None:
        """Compute the step's tokens into the cache, then send the hidden states on or keep the logits of sampled rows.
        Each of `repeated_rows` is then computed again by itself; raises StepMismatchError if its bits are others.

        The first `num_ahead` rows compute the ids that the last step sampled for them. `is_fused` is an option of
        `DecoderStack.forward`, the same on every rank. `wants_drafts` as in `StepPlan`.
        """
        assert self._pending is None, f"step {step}: the tokens of step {self._pending.step} were never sampled"
        self._clock.begin(step)
        is_encoder = self._model.model_config.is_encoder
        if self._state is not None:
            has_ids = not self._chosen.are_all(scheduled, num_ahead)
            batch = self._state.build(scheduled, has_ids=has_ids)
        else:
            batch = self._build(scheduled, self._rows.of(scheduled))
        batch = self._chosen.filled(batch, scheduled, num_ahead)
        if self._grammars is not None and batch.rows and batch.rows is not self._unconstrained:
            constrained = constrained_rows(scheduled)
            self._unconstrained = () if constrained else batch.rows
            self._grammars.begin(constrained)
        cache = self._cache_engine.layer_caches
        if is_encoder:
            # Only the layer itself reads what it writes, within the step: all layers share the memory.
            (tensor,) = self._cache_engine.model_tensors
            cache = tensor.expand(self._model.stage.num_layers, *tensor.shape[1:])
        if self.prefixes is not None:
            self.prefixes.write(scheduled, cache, self.num_groups, self._cache_engine.spec.group_of)
        incoming, earlier = None, dict[int, Tensor]()
        if not self._model.stage.is_first:
            incoming, earlier = self._streams.split(self._receive(len(batch.token_ids)))
        before = [
            self._repeater.begin(scheduled, row, batch, self._build(scheduled[row : row + 1]), incoming)
            for row in repeated_rows
        ]
        given = None if self.rows is None else self.rows.of_step(scheduled)
        media = None if self.media is None else self.media.of_step(scheduled)
        routes: list[Tensor] | None = [] if wants_routes(scheduled) else None
        streams = dict.fromkeys(self._read_layers, self._none)
        is_plain = is_fused and given is None and media is None and routes is None and not (batch.drafts or streams)
        graphs = self.graphs if self.graphs is not None and is_plain and self.graphs.takes(batch) else None
        states = () if self._cache_engine.states is None else self._cache_engine.states.layers
        if graphs is not None:
            hidden = graphs.forward(batch, cache, incoming, states)
        else:
            adapters = self._adapters_of(batch)
            tokens = (batch.token_ids, batch.positions, batch.rope_regimes)
            types, wanted = batch.token_types, None
            more: dict[str, Any] = {} if media is None else {"media": media}
            if routes is not None:
                more["routes"] = routes
            if streams:
                more["streams"] = streams
            if self._leaves_out and is_fused and not streams and (found := wanted_tokens(scheduled, batch)) is not None:
                wanted, sample_rows = found
                batch = replace(batch, sample_rows=sample_rows)
                if adapters is not None and self.adapters is not None:
                    wanted = replace(wanted, adapters=self.adapters.step(adapters.slots[wanted.rows]))
            hidden = self._model(
                *(*tokens, cache, batch.attention, incoming),
                is_fused=is_fused,
                token_types=types,
                wanted=wanted,
                adapters=adapters,
                given=given,
                states=states,
                rope_positions=batch.rope_positions,
                **more,
            )
        if self.keeper is not None and self.keeper.layers:
            self.keeper.keep(scheduled, streams)
        if self._pooling is not None:
            pooled = self._pooling.pool(scheduled, batch.attention.query_starts, hidden)
            self._pending = _Forwarded(step, scheduled, batch, pooled=pooled)
            return
        read_back, launched = ReadBack(), None
        if routes is not None:
            starts, config = batch.attention.query_starts, self._model.model_config
            launched = launch_routes(scheduled, starts, routes, config, read_back)
        verify = partial(self._verify, step, scheduled, batch, repeated_rows, before, is_fused=is_fused)
        if self.sampler is None:
            if before:
                hidden = verify(StepOutputs(hidden)).hidden
            sent = self._streams.joined(hidden, {**earlier, **streams})
            # A graph's output buffer belongs to the next step too, which may start before the tensor is sent.
            self._send(sent.clone() if graphs is not None and sent is hidden else sent)
            self._clock.end()
            self._pending = _Forwarded(step, scheduled, batch, routes=launched, read_back=read_back, is_sent=True)
            return
        if self._drafter is not None:
            read = {**earlier, **streams}
            aux = tuple([read[layer] for layer in self._drafter.aux_layers])
            # A graph's output buffer belongs to the next step too, which may be launched before this one is read.
            kept = hidden.clone() if graphs is not None and self._drafter.needs_hidden else hidden
            rows = self.media if self._drafter.takes_media else None
            behind = None if rows is None else rows.behind_step(scheduled)
            self._drafter.begin(scheduled, batch, kept, aux, behind)
        logits = argmax = None
        if batch.rows:
            logits = self._model.compute_logits(hidden[batch.sample_rows])
        elif graphs is not None:
            argmax = graphs.argmax(hidden, batch.sample_rows)
        else:
            argmax = self._model.argmax_logits(hidden[batch.sample_rows])
        if before:
            outputs = verify(StepOutputs(hidden, logits, argmax))
            hidden, logits, argmax = outputs.hidden, outputs.logits, outputs.argmax
        with multi_threaded_torch():
            report = partial(self._report, read_back)
            reported = prompt_logprobs(scheduled, batch.attention.query_starts, hidden, report)
            scored = prompt_scores(scheduled, batch.attention.query_starts, hidden, partial(self._score, read_back))
        results = (logits, argmax, reported, scored, launched)
        self._pending = _Forwarded(step, scheduled, batch, *results, read_back=read_back, wants_drafts=wants_drafts)

    def sample(self) -> StepResult:
        return self.launch().collect()

    @torch.inference_mode()
    def launch(self) -> "LaunchedStep":
        """Sample the tokens of the last forward pass. The next step may be launched before they are read: a sequence in
        it with `NOT_READ` as its last token computes the id sampled now.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "launch follows forward"
        sample, masks = None, None
        if self.sampler is not None and self._pooling is None and len(pending.batch.sample_rows):
            if pending.argmax is not None:
                sample = self.sampler.launch_argmax(*pending.argmax, pending.read_back)
            else:
                assert pending.logits is not None, pending.step
                masks = self._grammars.end() if self._grammars is not None else None
                token_masks = TokenMasks.of_step(masks, self._device)
                sample = self.sampler.launch(pending.logits, pending.batch.rows, token_masks, pending.read_back)
            self._chosen.keep(pending.step, pending.scheduled, sample.chosen)
        pending.read_back.launch()
        return LaunchedStep(pending, sample, masks, self._clock, self._chosen, self._grammars, self._drafter)

    def forget(self, plan: StepPlan) -> None:
        """Drop the sequences and requests that the plan lists as finished."""
        if self._state is not None:
            self._state.forget(plan.finished_sequences, plan.finished_request_ids)
        if self._grammars is not None:
            self._grammars.forget(plan.finished_sequences, plan.finished_request_ids)
        if self._pooling is not None:
            self._pooling.forget(plan.finished_request_ids)
        if self.rows is not None:
            self.rows.forget(plan.finished_request_ids)
        if self.media is not None:
            self.media.forget(plan.finished_request_ids)
        if self._drafter is not None:
            self._drafter.forget(plan.finished_sequences, plan.finished_request_ids)

    def _build(self, scheduled: Sequence[ScheduledSequence], rows: tuple[SampleRow, ...] | None = None) -> Batch:
        return build_batch(
            *(scheduled, self._block_size, self._device, rows),
            is_encoder=self._model.model_config.is_encoder,
            slot_of=self._slot_of,
            has_states=self._has_states,
            most_drafts=self._most_drafts,
            vision=self._model.model_config.vision,
            num_groups=self.num_groups,
            group_of=self._cache_engine.spec.group_of,
            has_encoder=self._has_encoder,
        )

    def _verify(
        self,
        step: int,
        scheduled: Sequence[ScheduledSequence],
        batch: Batch,
        rows: Sequence[int],
        before: Sequence[StepInputs],
        outputs: StepOutputs,
        *,
        is_fused: bool,
    ) -> StepOutputs:
        """The step's outputs, compared with what its `rows` give by themselves."""
        outputs = outputs.copied()
        for row, inputs in zip(rows, before, strict=True):
            self._repeater.compare(step, scheduled, row, batch, inputs, outputs, is_fused=is_fused)
        return outputs

    def _adapters_of(self, batch: Batch) -> StepAdapters | None:
        """The adapters of the step's tokens; rows that continue keep those of the last step."""
        slots, last = batch.adapter_slots, self._step_adapters
        if slots is None or self.adapters is None:
            self._step_adapters = None
        elif last is None or last.slots is not slots:
            self._step_adapters = self.adapters.step(slots)
        return self._step_adapters

    def _send(self, hidden: Tensor) -> None:
        """Send to the next stage, which may still compute the previous step; that step's tensor must be sent."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._pipeline.send_next(hidden)

    def _receive(self, num_tokens: int) -> Tensor:
        """Tensor of the previous stage, [T, `StageStreams.received_size`]."""
        self._clock.end()
        incoming = self._expected.popleft() if self._expected else self._receiving(num_tokens)
        incoming.wait()
        self._clock.begin()
        assert len(incoming.tensor) == num_tokens, (incoming.tensor.shape, num_tokens)
        return incoming.tensor

    def _receiving(self, num_tokens: int) -> Transfer:
        shape = (num_tokens, self._streams.received_size)
        empty = torch.empty(shape, dtype=self._model.model.dtype, device=self._device)
        return self._pipeline.receive_previous(empty)

    def _report(
        self, read_back: ReadBack, hidden: Tensor, token_ids: list[int], num_logprobs: int
    ) -> list[Awaited[list[TokenLogprobs]]]:
        assert self.sampler is not None, "only the last stage computes logprobs"
        logits = self._model.compute_logits(hidden)
        return self.sampler.launch_report(logits, token_ids, num_logprobs, read_back)

    def _score(
        self, read_back: ReadBack, hidden: Tensor, token_ids: NDArray[np.int64], num_top: int
    ) -> Awaited[Scores]:
        assert self.sampler is not None, "only the last stage computes logprobs"
        return self.sampler.launch_scores(self._model.compute_logits(hidden), token_ids, num_top, read_back)
