"""New weights while requests run and many more wait: no rank waits for another for ever, each token names the weights
that made it, and the weights are those of a fresh load.

As a script it is one of several ranks.
"""

import json
import os
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file
from stress_seed import SEED
from test_weight_updates import DP, MODEL, PP, TP, changed_model, new_tensors, open_llm

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceStatus

MODES = ("keep", "abort", "wait")


@pytest.mark.gate("{'tensor_parallel_size': 2}-*")
@pytest.mark.guarantee("Tokens name the weights that made them")
@pytest.mark.parametrize(
    ("layout", "num_rounds", "num_running", "num_waiting"),
    [
        (TP, 3, 8, 16),
        pytest.param(PP, 3, 8, 16, marks=pytest.mark.matrix),
        pytest.param(TP, 100, 64, 500, marks=pytest.mark.stress),
        pytest.param(PP, 30, 64, 500, marks=pytest.mark.stress),
        pytest.param(DP, 12, 64, 500, marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_weights_change_under_load(
    layout: dict[str, int], num_rounds: int, num_running: int, num_waiting: int, tmp_path: Path
):
    numbers = [str(each) for each in (num_rounds, num_running, num_waiting)]
    ranks.run_forked([__file__, json.dumps(layout), *numbers, tmp_path], nproc=2, timeout_s=1150).checked()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second if layout != DP else first["outputs"] == second["outputs"]
    assert first["num_preemptions"] > 0 or num_rounds == 3
    assert first["reasons"].keys() == {"abort", "length"}
    assert min(first["num_spans"].values()) > 0


# As one of several ranks.


@dataclass
class Watch:
    """What is known of each request at each change of the weights, and what it said at its end."""

    llm: LLM
    marks: dict[str, list[list[tuple[int, int]]]] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    """Those that this rank's replica computes."""

    @property
    def open(self) -> list[str]:
        return [name for name in self.marks if name not in self.outputs]

    def add(self, names: Iterable[str], params: list[SamplingParams]) -> None:
        for name, each in zip(names, params, strict=True):
            self.marks[name] = [[(0, self.llm.weight_version)] for _ in range(each.n)]
            if self.llm.llm_engine.named_requests.has(name):
                self.own.append(name)

    def note(self, version: int) -> None:
        """The tokens that there are now were made by earlier weights."""
        engine = self.llm.llm_engine
        for name, marks in self.marks.items():
            numbers = engine.named_requests.ids_of(name) if engine.named_requests.has(name) else []
            group = engine.scheduler.queues.groups.get(numbers[0]) if numbers else None
            if group is None:
                continue
            lengths = {each.sample_index: each for each in group.sequences}
            for index, spans in enumerate(marks):
                sequence = lengths.get(index)
                if sequence is None or sequence.status is not SequenceStatus.FINISHED:
                    spans.append((0 if sequence is None else len(sequence.output_token_ids), version))

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.outputs
            assert output.finished
            self.outputs[output.request_id] = output

    def check(self) -> None:
        """Each token's version is the last that was noted at or before it."""
        for name in self.own:
            for marks, completion in zip(self.marks[name], self.outputs[name].outputs):
                stops = [start for start, _ in completion.weight_versions[1:]] + [len(completion.token_ids)]
                said = [
                    version
                    for (start, version), stop in zip(completion.weight_versions, stops)
                    for _ in range(start, stop)
                ]
                made = [
                    [version for start, version in marks if start <= number][-1]
                    for number in range(len(completion.token_ids))
                ]
                assert said == made, (name, marks, completion.weight_versions)


def prompt_of(chosen: random.Random) -> dict[str, list[int]]:
    return {"prompt_token_ids": [chosen.randrange(200, 288) for _ in range(chosen.randint(3, 18))]}


def params_of(chosen: random.Random) -> SamplingParams:
    num_samples, max_tokens, temperature = chosen.choice([1, 1, 1, 2]), chosen.randint(4, 14), chosen.choice([0, 1])
    return SamplingParams(n=num_samples, max_tokens=max_tokens, ignore_eos=True, temperature=temperature)


def load(llm: LLM, way: int, tensors: dict[str, Any]) -> None:
    rank = llm.llm_engine.engine_channel.rank
    if way == 0:
        llm.load_weights(tensors.items())
    elif way == 1:
        llm.start_weight_update()
        llm.update_weights(tensors.items() if rank == 1 else None, source=1)
        llm.finish_weight_update()
    else:
        llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(tensors.items())
        llm.reset_prefix_cache()


def main(layout: dict[str, int], num_rounds: int, num_running: int, num_waiting: int, folder: Path) -> None:
    chosen, digests = random.Random(SEED), []
    weights = [load_file(MODEL / "model.safetensors"), new_tensors()]
    settings = {**layout, "max_num_seqs": num_running, "max_model_len": 64, "block_size": 4}
    settings |= {"num_blocks": 5 * num_running, "swap_space": 0.01}
    for fresh in (MODEL, changed_model()):
        with open_llm(fresh, **layout) as llm:
            digests.append(llm.weights_digest())
    with open_llm(**settings) as llm:
        engine, watch = llm.llm_engine, Watch(llm)
        rank, num_replicas = engine.engine_channel.rank, layout.get("data_parallel_size", 1)
        for number in range(1, num_rounds + 1):
            num_missing = (num_running + num_waiting) * num_replicas - len(watch.open)
            params = [params_of(chosen) for _ in range(num_missing)]
            watch.add(llm.enqueue([prompt_of(chosen) for _ in params], params, use_tqdm=False), params)
            if num_replicas == 1:
                for _ in range(chosen.randint(2, 7)):
                    watch.take(engine.step())
            else:
                watch.take(llm.wait_for_completion(watch.open[:num_running], use_tqdm=False))
            # Each mode with and without, with both weights, in 12 rounds: only cleared caches are sure to preempt rows.
            mode, clear_cache = MODES[number % 3], number // 6 % 2 == 0
            # Replicas have answered more than was asked for.
            least = num_waiting // 2 if num_replicas == 1 else 0
            assert len(engine.scheduler.queues.groups) > least, "many wait"
            llm.pause_generation(mode, clear_cache)
            assert not engine.scheduler.has_unfinished
            load(llm, chosen.randrange(3), weights[number % 2])
            watch.note(llm.weight_version)
            assert llm.weights_digest() == digests[number % 2], "a fresh load's"
            if num_replicas == 1:
                watch.take(engine.step())
            elif mode == "abort":
                watch.take(llm.wait_for_completion(use_tqdm=False))
            llm.resume_generation()
        watch.take(llm.wait_for_completion(use_tqdm=False))
        assert watch.outputs.keys() == watch.marks.keys(), "all are answered"
        watch.check()
        completions = [each for output in watch.outputs.values() for each in output.outputs]
        report = {
            "outputs": {
                name: [[list(each.token_ids), each.weight_versions] for each in output.outputs]
                for name, output in sorted(watch.outputs.items())
            },
            "reasons": dict.fromkeys(sorted({each.finish_reason for each in completions})),
            "num_spans": {
                str(count): sum(len(each.weight_versions) == count for each in completions) for count in (1, 2)
            },
            "num_preemptions": engine.counters.num_preemptions,
        }
        (folder / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = sys.argv[1:]
    main(json.loads(given[0]), *map(int, given[1:4]), Path(given[4]))
    os._exit(0)
