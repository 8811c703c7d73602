"""verl's rollout on this runtime: the engine that samples is in the ranks of the trainer, without a server.

    actor_rollout_ref.model.external_lib=spmd_worker.integrations.verl actor_rollout_ref.rollout.name=spmd_worker

Importing this module registers `SpmdRollout` as verl's rollout class of that name (`get_rollout_class`), for verl's own
workers, and for loops that make it themselves. Another release of verl than RELEASE is an error before anything is
registered. verl's agent loops ask servers, which are Ray actors of other engines: they do not use a rollout class's
`generate_sequences`.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Final

import torch

from spmd_worker.integrations.vllm_modules import check_release, installed
from spmd_worker.llm import LLM
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams

RELEASE: Final = "0.9"
"""Supported release of verl."""
NAME: Final = "spmd_worker"
"""`actor_rollout_ref.rollout.name`, and the key of further keywords of `LLM` in `rollout.engine_kwargs`."""


def _imported() -> list[Any]:
    """The modules `verl` and `verl.workers.rollout.base`. Raises ImportError, also for another release."""
    try:
        verl: Any = import_module("verl")
        check_release("verl", str(getattr(verl, "__version__", "of no version")), RELEASE)
        return [verl, import_module("verl.workers.rollout.base")]
    except ModuleNotFoundError as error:
        if error.name == "verl":
            raise ImportError(f"verl is not installed: pip install --no-deps 'verl=={RELEASE}.*'") from None
        raise ImportError(
            f"verl cannot be imported ({error}): install that package too, as pip install --no-deps leaves out what "
            f"verl needs"
        ) from error


_modules: Any = installed(_imported, __name__)
_verl: Any = _modules[0]
_base: Any = _modules[1]
_COPIED: Final = (
    *("dtype", "gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "max_num_seqs", "seed"),
    *("enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy"),
)
"""Keys of verl's `RolloutConfig` that are keywords of `LLM`."""


class SpmdRollout(_base.BaseRollout):  # type: ignore[misc]  # verl has no types
    """verl's rollout of `config`, a `RolloutConfig`, with the engine in the ranks of `device_mesh`.

    The mesh's axes are `dp`, `infer_tp` and, if there is one, `infer_pp`, as verl's workers make it; ranks of one
    replica get the same prompts. Every rank makes the same calls.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        self.sleep_level = 2
        """Level of `release`: verl passes all weights after each."""
        self.llm = LLM(self.model_config.local_path, **llm_keywords(self.config))
        self._groups = [device_mesh.get_group(name) for name in axes_of_replica(device_mesh)]

    async def resume(self, tags: list[str]) -> None:
        """Allocate parts that `release` gave back: `weights` or `kv_cache`."""
        asleep = [tag for tag in tags if tag in self.llm.sleeping_tags]
        if asleep:
            self.llm.wake_up(asleep)

    async def release(self) -> None:
        """Give back the memory of weights and cache, if `free_cache_engine` is set."""
        if self.config.free_cache_engine and not self.llm.is_sleeping:
            self.llm.sleep(level=self.sleep_level)

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Replace all weights by full tensors, which every rank has. Raises ValueError for other formats, and for
        LoRA adapters apart from their weights; the errors of `LLM.load_weights`.
        """
        if wire_format != "named_tensors":
            raise ValueError(
                f"wire_format={wire_format!r} is not supported: leave rollout.checkpoint_engine.backend=naive"
            )
        if kwargs.get("peft_config") is not None:
            raise ValueError(
                "the policy is a LoRA adapter apart from its weights: set actor_rollout_ref.model.lora.merge"
            )
        self.llm.load_weights(weights)

    def generate_sequences(self, prompts: Any) -> Any:
        """Complete the prompts of a DataProto: `input_ids`, padded left, with `attention_mask` and `position_ids`; a
        row has one completion, as verl repeats the rows of `rollout.n`.

        The result has verl's keys: `prompts`, `responses` [rows, response_length], padded right, `response_mask`,
        `input_ids`, `attention_mask` and `position_ids` of both; with `calculate_log_probs` also `rollout_log_probs`,
        0 where padded.
        """
        batch, meta = prompts.batch, prompts.meta_info
        if "multi_modal_data" in prompts.non_tensor_batch:
            raise ValueError("multi_modal_data is not supported by this rollout: give prompts of text")
        length = int(meta.get("response_length", self.config.response_length))
        params = sampling_params(self.config, meta, length)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        own = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)] if self._is_leader else []
        outputs = self.llm.generate(own, params, use_tqdm=False, gather=True)
        pad_id = meta.get("pad_token_id")
        pad_id = self.model_config.tokenizer.pad_token_id if pad_id is None else pad_id
        sampled = self._on_all_ranks(padded(outputs, len(ids), length, int(pad_id)), ids.device)
        return _verl.DataProto.from_dict(
            tensors=with_responses(batch, *sampled, keeps_logprobs=self.config.calculate_log_probs),
            non_tensors=dict(prompts.non_tensor_batch),
            meta_info=dict(meta),
        )

    @property
    def _is_leader(self) -> bool:
        return all(torch.distributed.get_rank(group) == 0 for group in self._groups)

    def _on_all_ranks(self, tensors: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
        """The leader's tensors, on all ranks of its replica."""
        moved = tuple([each.to(device) for each in tensors])
        for group in self._groups:
            for each in moved:
                torch.distributed.broadcast(each, torch.distributed.get_global_rank(group, 0), group)
        return moved


def axes_of_replica(device_mesh: Any) -> list[str]:
    """Names of the mesh's axes along which ranks have the same prompts."""
    names = () if device_mesh is None else device_mesh.mesh_dim_names or ()
    return [name for name in ("infer_tp", "infer_pp") if name in names]


def llm_keywords(config: Any) -> dict[str, Any]:
    """Keywords of `LLM` for verl's `RolloutConfig`.

    `processed_logprobs`, verl's default, becomes `tempered_logprobs`: those of the logits divided by the temperature
    are what verl's actor computes, also where sampling was truncated by `top_k` or `top_p`.
    """
    mode = config.logprobs_mode
    length = config.max_model_len or config.prompt_length + config.response_length
    return {
        **{key: config.get(key) for key in _COPIED},
        "load_format": "dummy" if "dummy" in config.load_format else "auto",
        "max_model_len": length,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "tempered_logprobs" if mode in (None, "processed_logprobs") else mode,
        **(config.engine_kwargs.get(NAME) or {}),
    }


def sampling_params(config: Any, meta: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Parameters of a batch: the validation's if its meta_info says `validate`, else the rollout's; meta_info may have
    others.
    """
    source = config.val_kwargs if meta.get("validate", False) else config
    given = {key: meta.get(key, getattr(source, key)) for key in ("do_sample", "temperature", "top_p", "top_k")}
    ends = meta.get("eos_token_id")
    stops = () if ends is None or config.ignore_eos else (ends,) if isinstance(ends, int) else tuple(ends)
    return SamplingParams(
        temperature=given["temperature"] if given["do_sample"] else 0.0,
        top_p=given["top_p"],
        top_k=max(given["top_k"], 0),
        repetition_penalty=config.repetition_penalty,
        max_tokens=max_tokens,
        ignore_eos=config.ignore_eos,
        stop_token_ids=stops,
        logprobs=0,
        detokenize=False,
    )


def padded(outputs: list[RequestOutput], num_rows: int, length: int, pad_id: int) -> tuple[torch.Tensor, ...]:
    """Responses [num_rows, length] of int64, their numbers of tokens [num_rows], and log-probabilities [num_rows,
    length]; without outputs, room for another rank's.
    """
    responses = torch.full((num_rows, length), pad_id, dtype=torch.int64)
    lengths = torch.zeros(num_rows, dtype=torch.int64)
    logprobs = torch.zeros(num_rows, length)
    for row, output in enumerate(outputs):
        (sampled,) = output.outputs
        ids, entries = sampled.token_ids, sampled.logprobs or []
        lengths[row] = len(ids)
        responses[row, : len(ids)] = torch.tensor(ids)
        logprobs[row, : len(ids)] = torch.tensor(
            [entry[token].logprob for entry, token in zip(entries, ids, strict=True)]
        )
    return responses, lengths, logprobs


def with_responses(
    batch: Any, responses: torch.Tensor, lengths: torch.Tensor, logprobs: torch.Tensor, *, keeps_logprobs: bool
) -> dict[str, torch.Tensor]:
    """verl's batch of prompts and responses."""
    ids, mask, positions = batch["input_ids"], batch["attention_mask"], batch["position_ids"]
    steps = torch.arange(responses.shape[1], device=ids.device)
    response_mask = (steps < lengths[:, None]).to(mask.dtype)
    tensors = {
        "prompts": ids,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([ids, responses], dim=1),
        "attention_mask": torch.cat([mask, response_mask], dim=1),
        "position_ids": torch.cat([positions, positions[:, -1:] + 1 + steps], dim=1),
    }
    return tensors | ({"rollout_log_probs": logprobs} if keeps_logprobs else {})


def register() -> None:
    """Register the class under NAME in verl's table of rollout classes. Raises ImportError if there is none."""
    table = getattr(_base, "_ROLLOUT_REGISTRY", None)
    if not isinstance(table, dict):
        raise ImportError(f"verl.workers.rollout.base of verl {_verl.__version__} has no _ROLLOUT_REGISTRY")
    table[(NAME, "async")] = f"{__name__}.{SpmdRollout.__qualname__}"


register()

if __name__ == "__main__":
    raise SystemExit(
        "error: this module is not a program, verl imports it: give verl's own program "
        "actor_rollout_ref.model.external_lib=spmd_worker.integrations.verl"
    )
