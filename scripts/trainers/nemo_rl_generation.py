"""NeMo-RL's generation interface by an LLM in the process of its driver, without a server and without Ray actors.

    PYTHONPATH=scripts/trainers:NEMO_RL python your_script.py   # policy_generation = SpmdGeneration(generation_config)

`SpmdGeneration` is what NeMo-RL's synchronous rollouts call (`run_multi_turn_rollout`, `generate_responses`):
`generate`, `prepare_for_generation`, `finish_generation`, `shutdown`. The configuration is NeMo-RL's
`policy.generation`; its `spmd_kwargs` are further keywords of `LLM`, such as tensor_parallel_size.

NeMo-RL's policies send new weights to Ray actors of its own engines, over IPC or a collective, and await those: this
class refuses that, and takes full tensors in `update`, in a training loop of your own.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface, verify_right_padding

from spmd_worker import LLM, SamplingParams


class SpmdGeneration(GenerationInterface):
    """Generation of a configuration with `model_name` and `_pad_token_id`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        # The log-probabilities that NeMo-RL's policies compute: of logits divided by the temperature.
        options = {"logprobs_mode": "tempered_logprobs", **config.get("spmd_kwargs", {})}
        self.llm = LLM(config["model_name"], **options)

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Prompts and completions, both padded on the right, in one tensor; log-probabilities are 0 for prompts."""
        pad_id = self.config["_pad_token_id"]
        verify_right_padding(data, pad_value=pad_id)
        ids, lengths = data["input_ids"], data["input_lengths"].tolist()
        prompts = [{"prompt_token_ids": row[:length].tolist()} for row, length in zip(ids, lengths, strict=True)]
        stops = data.get("stop_strings") or [None] * len(lengths)
        params = [self.params(stop, greedy) for stop in stops]
        outputs = [each.outputs[0] for each in self.llm.generate(prompts, params, use_tqdm=False)] if prompts else []
        made = torch.tensor([len(each.token_ids) for each in outputs], dtype=torch.long)
        totals = torch.tensor(lengths, dtype=torch.long) + made
        width = max(totals.tolist(), default=0)
        all_ids = torch.full((len(lengths), width), pad_id, dtype=torch.long)
        logprobs = torch.zeros(len(lengths), width)
        for row, (length, total, output) in enumerate(zip(lengths, totals.tolist(), outputs, strict=True)):
            all_ids[row, :length] = ids[row, :length]
            all_ids[row, length:total] = torch.tensor(output.token_ids)
            entries = zip(output.token_ids, output.logprobs, strict=True)
            logprobs[row, length:total] = torch.tensor([entry[token].logprob for token, entry in entries])
        return BatchedDataDict(
            {
                "output_ids": all_ids,
                "logprobs": logprobs,
                "generation_lengths": made,
                "unpadded_sequence_lengths": totals,
                "truncated": torch.tensor([each.finish_reason == "length" for each in outputs], dtype=torch.bool),
            }
        )

    def params(self, stop: list[str] | str | None, greedy: bool) -> SamplingParams:
        """Parameters of a row: the configuration's, and its own stop strings."""
        own = [stop] if isinstance(stop, str) else list(stop or ())
        return SamplingParams(
            temperature=0.0 if greedy else self.config["temperature"],
            top_p=self.config["top_p"],
            top_k=max(self.config["top_k"] or 0, 0),
            max_tokens=self.config["max_new_tokens"],
            stop_token_ids=tuple(self.config["stop_token_ids"] or ()),
            stop=(*(self.config["stop_strings"] or ()), *own),
            include_stop_str_in_output=True,
            logprobs=0,
        )

    def update(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights by the trainer's. Cached blocks of earlier weights are never used again."""
        self.llm.load_weights(weights)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        if self.llm.is_sleeping:
            self.llm.wake_up()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give back the cache's memory, where generation shares devices with training."""
        if self.config.get("colocated", {}).get("enabled", False) and not self.llm.is_sleeping:
            self.llm.sleep(level=1)
        return True

    def blocks_training(self) -> bool:
        return bool(self.config.get("colocated", {}).get("enabled", False))

    def shutdown(self) -> bool:
        self.llm.close()
        return True

    def init_collective(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("NeMo-RL's policies send weights to Ray actors: give full tensors to update()")
