"""Rollouts for slime (`--rollout-function-path`) by an LLM in the process that calls it, without a server.

    PYTHONPATH=scripts/trainers ... --rollout-function-path slime_rollout.generate_rollout --debug-rollout-only

It has slime's signature, and fills what slime's training reads: tokens, response, log-probabilities, status and reward.
slime sends new weights to SGLang engines; this LLM gets them from `update`, with full tensors, after each step of your
own. The model is `args.hf_checkpoint`; rewards are slime's (`--rm-type`, `--custom-rm-path`).
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.rm_hub import async_rm

from spmd_worker import LLM, SamplingParams

engines: dict[str, LLM] = {}


def engine_of(args: Any) -> LLM:
    if args.hf_checkpoint not in engines:
        engines[args.hf_checkpoint] = LLM(args.hf_checkpoint, logprobs_mode="tempered_logprobs")
    return engines[args.hf_checkpoint]


def update(args: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Replace the weights by the trainer's."""
    engine_of(args).load_weights(weights)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    if evaluation:
        raise NotImplementedError("give slime another function for evaluation: --eval-function-path")
    llm, groups = engine_of(args), data_source.get_samples(args.rollout_batch_size)
    params = SamplingParams(
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=max(args.rollout_top_k, 0),
        max_tokens=args.rollout_max_response_len,
        logprobs=0,
    )
    samples = [sample for group in groups for sample in group]
    for sample, output in zip(samples, llm.generate([each.prompt for each in samples], params), strict=True):
        (made,) = output.outputs
        assert made.logprobs is not None, "asked for above"
        sample.tokens = [*output.prompt_token_ids, *made.token_ids]
        sample.response, sample.response_length = made.text, len(made.token_ids)
        entries = zip(made.token_ids, made.logprobs, strict=True)
        sample.rollout_log_probs = [logprobs[token].logprob for token, logprobs in entries]
        sample.status = sample.Status.TRUNCATED if made.finish_reason == "length" else sample.Status.COMPLETED
        sample.reward = asyncio.run(async_rm(args, sample))
    return RolloutFnTrainOutput(samples=groups)
