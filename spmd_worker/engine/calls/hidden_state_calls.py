"""Calls about the inside of the model: hidden states of prompts, which a draft head is trained on."""

from collections.abc import Sequence
from typing import Any

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.prompts import Prompt
from spmd_worker.engine.calls.call_runner import without_error
from spmd_worker.engine.calls.prompt_calls import PromptCalls
from spmd_worker.engine.calls.worker_calls import WorkerCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.request import whole_number
from spmd_worker.replica.sequence.sampling_params import SamplingParams


class HiddenStateCalls:
    """Methods of `LLM` that return hidden states."""

    def __init__(self, engine: Engine, prompts: PromptCalls, workers: WorkerCalls) -> None:
        self._engine, self._prompts, self._workers = engine, prompts, workers

    def extract_hidden_states(self, prompts: Prompt | Sequence[Prompt], layer_ids: Sequence[int]) -> list[Any]:
        """The residual stream of every token of each prompt before layers of these numbers, from 0: a tensor [tokens,
        layers, hidden size] a prompt, in the model's dtype, on the host. The number of layers is that of the stream
        behind the last one, before the final norm. It is what an EAGLE-3 head reads, with its `eagle_aux_hidden_state_
        layer_ids`, bit for bit: give it prompts with their answers to train one.

        Every rank calls this; the first of a tensor-parallel group gets the tensors, and the others none. Prompts use
        nothing from the prefix cache. All tensors are in memory together: give a few prompts a call. Raises ConfigError
        with several pipeline stages or replicas, or workers in other processes, TypeError for anything but a list
        of whole numbers, and ValueError for a number without a layer, or a prompt that `generate` rejects.
        """
        config = self._engine.resolved.config
        parallel, is_own = config.parallel, hasattr(self._engine.executor, "driver_worker")
        if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1 or not is_own:
            raise ConfigError(
                f"extract_hidden_states needs all layers in the caller's process, and this run has "
                f"parallel.pipeline_parallel_size={parallel.pipeline_parallel_size}, parallel.data_parallel_size="
                f"{parallel.data_parallel_size} and workers in {'this process' if is_own else 'other processes'}: "
                f"use one stage and one replica, and start several ranks with torchrun"
            )
        num_layers = self._engine.resolved.model_config.num_layers
        if not isinstance(layer_ids, Sequence) or isinstance(layer_ids, str | bytes):
            raise TypeError(f"layer_ids={shown(layer_ids)} is a {type(layer_ids).__name__}: give a list of layers")
        layers = [whole_number(f"layer_ids[{index}]", each) for index, each in enumerate(layer_ids)]
        if not layers or not 0 <= min(layers) <= max(layers) <= num_layers:
            raise ValueError(
                f"layer_ids={shown(layers)} must be numbers from 0 to {num_layers}, which is the stream behind the "
                f"last layer"
            )
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=True)
        self._workers.worker_event("start_hidden_states", layers)
        try:
            outputs = [without_error(each) for each in self._prompts.generate(prompts, params, use_tqdm=False)]
        finally:
            (kept,) = self._workers.worker_event("stop_hidden_states")
        if not kept:
            return []
        assert len(kept) == len(outputs), (len(kept), len(outputs))
        # Requests of a call are numbered in the order of its prompts.
        return [kept[request_id] for request_id in sorted(kept)]
