"""Beam search over prompts: `LLM.beam_search`, a call of `generate` for each token."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from spmd_worker.compat.adapter_requests import LoRARequests, PromptAdapterRequests, set_adapters
from spmd_worker.compat.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from spmd_worker.compat.prompts import Encoded, Prompt
from spmd_worker.engine.calls.call_runner import CallRunner, check_options, without_error
from spmd_worker.engine.calls.progress_bar import CallBar, UseTqdm
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine


class BeamCalls:
    """`LLM.beam_search`."""

    def __init__(self, engine: Engine, encoder: PromptEncoder, runner: CallRunner, turns: PerRankCalls) -> None:
        self._engine, self._encoder, self._runner, self._turns = engine, encoder, runner, turns

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        *,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[BeamSearchOutput]:
        """Beam search: the `beam_width` best continuations of each prompt, best first.

        Each token is a call of `generate` for all beams of all prompts, which share their prefixes, and what an encoder
        has read, in the prefix cache. `lora_request` and `prompt_adapter_request` are as in `generate`; virtual tokens
        count in no beam's length. `concurrency_limit` is accepted for vLLM and has no effect. Raises ValueError for a
        prompt that cannot be answered, and the errors of `generate`.
        """
        with self._engine.calls.inside("beam_search", is_alone=True):
            engine = self._engine
            engine.life.check_open()
            first: list[Encoded] = []

            def prepare() -> dict[str, Any]:
                check_options(None, False, use_tqdm)
                engine.requests.check_idle()
                if not isinstance(params, BeamSearchParams):
                    raise TypeError(f"params is a {type(params).__name__}: give BeamSearchParams")
                encoded = self._encoder.encode(prompts)
                set_adapters(encoded, lora_request, prompt_adapter_request)
                first.extend(encoded)
                for each in encoded:
                    if each.error is not None:
                        raise ValueError(each.error)
                    if each.cache_salt is not None:
                        raise ValueError("cache_salt is not supported by beam_search: leave it out")
                    if each.rows is not None:
                        raise ValueError("prompt_embeds are not supported by beam_search: its beams are token ids")
                    if each.media and each.encoder is None:
                        raise ValueError("images and audio are not supported by beam_search: its beams are token ids")
                    engine.requests.check(each, params.step_params)
                inputs = ["" if each.encoder is None else each.encoder.media_id.hex() for each in encoded]
                ids = [each.token_ids for each in encoded]
                return {"prompts": ids, "multi_modal_data": inputs, "params": asdict(params)}

            # In `turns()` each rank has its own beams.
            given = prepare() if self._turns.is_open else agree_on_call(engine, "beam_search", prepare)
            eos_token_ids, plain = engine.resolved.model_config.eos_token_ids, params.step_params.frozen()
            own = params.token_rules
            searches = [
                BeamSearch(ids, params, eos_token_ids, each.lora_request, each.rules if own is None else own)
                for ids, each in zip(given["prompts"], first, strict=True)
            ]
            with contextlib.closing(CallBar(use_tqdm, params.max_tokens, is_shown=engine.is_first_rank)) as bar:
                for _ in range(params.max_tokens):
                    wanted = [
                        search.prompts(engine.max_model_len - each.num_virtual_tokens)
                        for search, each in zip(searches, first)
                    ]
                    flat = [prompt for each in wanted for prompt in each]
                    if not flat:
                        break
                    prompts_of_beams = [each for each, beams in zip(first, wanted) for _ in beams]
                    steps = [
                        each
                        for search, beams in zip(searches, wanted)
                        for each in [search.next_params(plain)] * len(beams)
                    ]
                    outputs = iter(self._runner.run("generate", partial(self._encode, flat, prompts_of_beams), steps))
                    for search, beams in zip(searches, wanted):
                        if beams:
                            search.advance([without_error(next(outputs)) for _ in beams])
                    bar.update()
            tokenizer = engine.tokenizer
            found = [search.best() for search in searches]
            if tokenizer is not None:
                for beam in itertools.chain.from_iterable(found):
                    beam.text = tokenizer.decode(beam.tokens, params.skip_special_tokens)
            return [BeamSearchOutput(beams) for beams in found]

    @staticmethod
    def _encode(beams: Sequence[Mapping[str, Any]], given: Sequence[Encoded]) -> list[Encoded]:
        """Encode beams, each with the adapters and the encoder's input of its prompt in `given`."""
        ids = [tuple(each["prompt_token_ids"]) for each in beams]
        return [
            replace(prompt, text=None, token_ids=own, rules=None, is_ids=True)
            for own, prompt in zip(ids, given, strict=True)
        ]
