"""New weights as a trainer hands them over: nothing is computed with some of them, or with other ones than other ranks.

As a script it is one of several ranks.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from context_fixtures import fixture_of
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import CheckpointError, MissingWeightsError, ReplicaDivergedError
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.model.weights.weight_update import WeightUpdate, content_digest
from spmd_worker.replica.sequence.events import CommitWeights, EndWorkerEvent

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPTS = ["sort 21 87 57 15 33 12 84 61 =", "reverse h x a f w ="]
NORM, LAYER_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"
TP, PP, DP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}


def new_tensors() -> dict[str, Tensor]:
    """As a trainer may have them: in another order of memory."""
    tensors = load_file(MODEL / "model.safetensors")
    return {name: (tensor * (0.6 + 0.3 * (len(name) % 5))).t().contiguous().t() for name, tensor in tensors.items()}


def changed_model() -> Path:
    def write(folder: Path) -> None:
        shutil.copytree(MODEL, folder)
        tensors = {name: tensor.contiguous() for name, tensor in new_tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return made_once("demo model with other weights", write)


def open_llm(model: Path = MODEL, **options: Any) -> LLM:
    return LLM(model, **{"dtype": "float32", "device": "cpu", "num_blocks": 64, "timeout_s": 120.0, **options})


def answers(llm: LLM) -> list[Any]:
    return in_words(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def in_words(outputs: list[RequestOutput]) -> list[Any]:
    completions = [output.outputs[0] for output in outputs]
    return [
        [each.token_ids, [next(iter(entry.values())).logprob.hex() for entry in each.logprobs]] for each in completions
    ]


def own_answers(llm: LLM) -> list[Any]:
    return in_words(llm.generate(PROMPTS, GREEDY, use_tqdm=False, gather=True))


def end_of_turns(llm: LLM) -> None:
    with llm.turns():
        pass


def trainers_model(llm: LLM) -> Any:
    """The way that trainers know."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


@pytest.fixture(scope="module")
def old() -> list[Any]:
    with open_llm() as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def new() -> list[Any]:
    with open_llm(changed_model()) as llm:
        return answers(llm)


llm = fixture_of(open_llm, "function")


def one_by_one(llm: LLM) -> None:
    for name, tensor in reversed(new_tensors().items()):
        trainers_model(llm).load_weights([(name, tensor.to(torch.float64))])
    llm.reset_prefix_cache()


def all_at_once_without_a_word(llm: LLM) -> None:
    assert llm.llm_engine.model_executor.driver_worker.worker.model_runner.model is trainers_model(llm)
    trainers_model(llm).load_weights(weights=new_tensors().items())


def by_the_names_of_vllm(llm: LLM) -> None:
    llm.start_weight_update()
    for pair in new_tensors().items():
        llm.update_weights(iter([pair]))
    llm.finish_weight_update()


def in_a_with(llm: LLM) -> None:
    with llm.weight_update() as load:
        for name, tensor in new_tensors().items():
            load(name, tensor)


def in_two_parts(llm: LLM) -> None:
    tensors = list(new_tensors().items())
    for some in (tensors[::2], tensors[1::2]):
        with llm.weight_update(partial=True):
            llm.update_weights(some)


def from_a_folder(llm: LLM) -> None:
    llm.collective_rpc("reload_weights", args=(str(changed_model()),))


@pytest.mark.parametrize(
    "load", [one_by_one, all_at_once_without_a_word, by_the_names_of_vllm, in_a_with, in_two_parts, from_a_folder]
)
def test_new_weights_answer_like_their_own_model(llm: LLM, load: Callable[[LLM], None], old: Any, new: Any):
    assert answers(llm) == old
    assert max(output.num_cached_tokens for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)) > 0
    load(llm)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert in_words(outputs) == new != old
    assert [output.num_cached_tokens for output in outputs] == [0, 0], "nothing of the old weights is found"
    llm.collective_rpc("reload_weights")
    assert answers(llm) == old


def test_worker_event_version_is_not_compared(llm: LLM, old: Any, new: Any):
    assert answers(llm) == old
    llm.llm_engine.worker_event("start_hidden_states", (1,), [CommitWeights(7, 38)])
    llm.llm_engine.worker_event("stop_hidden_states", None, [CommitWeights(8, 38)])
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert (in_words(again), again[0].num_cached_tokens) == (old, 0)
    # Negative control: ranks go on comparing what they have loaded.
    trainers_model(llm).load_weights(new_tensors().items())
    llm.reset_prefix_cache()
    assert answers(llm) == new
    with pytest.raises(ReplicaDivergedError, match="38 tensors of version 7"):
        llm.llm_engine.changes.weights.check_agreed([CommitWeights(7, 38), EndWorkerEvent(1, "")])


def test_waiting_request_is_answered_by_new_weights(llm: LLM, new: Any):
    answers(llm)
    for prompt in PROMPTS:
        llm.llm_engine.add_request(llm.get_tokenizer().encode(prompt), GREEDY)
    all_at_once_without_a_word(llm)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert in_words(outputs) == new


def test_without_the_commit_what_was_cached_is_found(llm: LLM, new: Any, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    answers(llm)
    all_at_once_without_a_word(llm)
    trainers_model(llm).weights.update.end()
    assert answers(llm) != new


@pytest.mark.finding(number="D12")
def test_load_weights_takes_all_or_names_what_lacks(llm: LLM, new: Any):
    tensors = new_tensors()
    with pytest.raises(MissingWeightsError, match=NORM):
        llm.load_weights((name, tensor) for name, tensor in tensors.items() if name != NORM)
    llm.load_weights(tensors.items())
    assert answers(llm) == new


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": answers,
    "gather": own_answers,
    "turns": end_of_turns,
    "chat": lambda llm: llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, on_error="row"),
    "reset": LLM.reset_prefix_cache,
    "step": lambda llm: llm.llm_engine.step(),
    "event": lambda llm: llm.worker_event("stop_profile"),
}


@pytest.mark.guarantee("Weight updates are whole or refused")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_missing_weights_are_named_and_block_steps(llm: LLM, call, new: Any):
    tensors = new_tensors()
    last = tensors.pop(NORM)
    trainers_model(llm).load_weights(tensors.items())
    num_steps = llm.llm_engine.counters.num_steps
    for _ in range(2):
        with pytest.raises(MissingWeightsError, match=rf"^1 of {len(tensors) + 1} weights .*not (.|\n)*{NORM}"):
            call(llm)
    assert llm.llm_engine.counters.num_steps == num_steps
    trainers_model(llm).load_weights([(NORM, last)])
    assert answers(llm) == new


def test_partial_update_keeps_other_weights(llm: LLM, old: Any, new: Any):
    trainers_model(llm).load_weights([(NORM, new_tensors()[NORM])])
    with pytest.raises(MissingWeightsError):
        answers(llm)
    llm.start_weight_update(partial=True)
    llm.finish_weight_update()
    assert answers(llm) not in (old, new)
    with llm.weight_update(partial=True) as load:
        load(NORM, load_file(MODEL / "model.safetensors")[NORM])
    assert answers(llm) == old


def test_set_version_is_of_its_weights(llm: LLM):
    """A version that was set before an update without a step between once was that of the new weights."""
    tensors = new_tensors()
    llm.set_weight_version(1)
    llm.load_weights(tensors.items())
    committed = llm.weight_version
    assert committed not in (0, 1)
    llm.set_weight_version(2)
    trainers_model(llm).load_weights(tensors.items())
    llm.set_weight_version(3)
    answers(llm)
    assert llm.weight_version == 3
    with llm.weight_update():
        llm.update_weights(tensors.items())
        llm.set_weight_version(4)
    (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert output.outputs[0].weight_versions == [(0, 4)]


def test_callers_default_device_changes_nothing(old: Any, new: Any):
    """Host buffers once were made on the caller's default device: here without data, with "cuda" on a GPU."""
    torch.set_default_device("meta")
    try:
        with open_llm() as llm:
            assert answers(llm) == old
            digest = llm.weights_digest()
            llm.apply_model(lambda model: model.get_parameter(NORM).mul_(1))
            assert (answers(llm), llm.weights_digest()) == (old, digest)
            with torch.device("cpu"):
                tensors = new_tensors()
            trainers_model(llm).load_weights(tensors.items())
            assert answers(llm) == new
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


def test_open_update_blocks_steps(llm: LLM, new: Any):
    with pytest.raises(RuntimeError, match="start_weight_update"):
        llm.finish_weight_update()
    llm.start_weight_update()
    all_at_once_without_a_word(llm)
    llm.reset_prefix_cache()
    for call in (
        *(answers, own_answers, end_of_turns, lambda llm: llm.worker_event("stop_profile")),
        *(lambda llm: llm.llm_engine.step(), lambda llm: llm.start_weight_update()),
    ):
        with pytest.raises(RuntimeError, match="finish_weight_update"):
            call(llm)
    llm.finish_weight_update()
    assert answers(llm) == new


def in_a_with_that_raises(load: Callable[[str, Tensor], None]) -> None:
    load(NORM, new_tensors()[NORM])
    load("norm", new_tensors()[NORM])


def test_failed_update_block_requires_all_weights(llm: LLM, new: Any):
    with pytest.raises(ValueError, match=r"^norm: "), llm.weight_update(partial=True) as load:
        in_a_with_that_raises(load)
    with pytest.raises(MissingWeightsError):
        answers(llm)
    in_a_with(llm)
    assert answers(llm) == new


def test_rejected_tensors_change_nothing(llm: LLM, old: Any, tmp_path: Path):
    model, tensors = trainers_model(llm), new_tensors()
    wrong = (("norm", tensors[NORM]), (NORM, tensors[NORM][1:]), (NORM, tensors[NORM] / 0))
    for name, tensor in (*wrong, (NORM, tensors[NORM].to_sparse())):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            model.load_weights([(name, tensor)])
    save_file({**load_file(MODEL / "model.safetensors"), "more": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="\n  more"):
        llm.collective_rpc("reload_weights", args=(str(tmp_path),))
    assert answers(llm) == old


def test_while_a_request_is_answered_no_weight_changes(llm: LLM, old: Any, new: Any):
    engine = llm.llm_engine
    for prompt in PROMPTS:
        engine.add_request(llm.get_tokenizer().encode(prompt), GREEDY)
    outputs = [*engine.step(), *engine.step()]
    with pytest.raises(RuntimeError, match=r"^2 requests"):
        all_at_once_without_a_word(llm)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert in_words(outputs) == old
    all_at_once_without_a_word(llm)
    assert answers(llm) == new


def test_max_model_len_is_where_trainers_read_it():
    with open_llm(max_model_len=77) as llm:
        assert llm.llm_engine.model_config.max_model_len == 77


@pytest.mark.matrix
@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_load_from_a_folder(old: Any, new: Any):
    with open_llm(distributed_executor_backend="multiproc", **PP) as llm:
        assert answers(llm) == old
        with pytest.raises(AttributeError, match="other processes"):
            llm.update_weights([])
        llm.llm_engine.add_request([7, 8], GREEDY)
        llm.llm_engine.step()
        with pytest.raises(RuntimeError, match="1 requests"):
            from_a_folder(llm)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        from_a_folder(llm)
        assert answers(llm) == new


def assert_near(found: list[Any], expected: list[Any], tolerance: float) -> None:
    """Ranks of a tensor-parallel group add in another order than one."""
    for (token_ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        assert token_ids == expected_ids
        values = [float.fromhex(each) for each in expected_logprobs]
        assert [float.fromhex(each) for each in logprobs] == pytest.approx(values, rel=0.0, abs=tolerance)


@pytest.mark.gate("{'tensor_parallel_size': 2}", "{'data_parallel_size': 2}")
@pytest.mark.guarantee("Weight updates are whole or refused")
@pytest.mark.guarantee("While ranks load new weights nothing is exchanged")
@pytest.mark.parametrize("layout", [TP, DP, pytest.param(PP, marks=pytest.mark.matrix)], ids=str)
def test_ranks_compute_with_equal_new_weights_only(layout: dict[str, int], tmp_path: Path, old: Any, new: Any):
    ranks.run_forked([__file__, json.dumps(layout), tmp_path, changed_model()], nproc=2, timeout_s=240).checked()
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for report in seen:
        assert_near(report["before"], old, 1e-4 if layout == TP else 0.0)
        assert_near(report["after"], new, 1e-4 if layout == TP else 0.0)
        assert report["before"] != report["after"] == report["again"]
        assert "new weights.model.norm.weight is" in report["another norm on rank 1"]
        assert report["another norm on rank 1"].endswith("; load these weights again, the same on every rank")
        assert report["another norm on rank 1"].startswith("RanksDisagreeError: ranks were given different calls")
        assert "model.norm.weight is" in report["another norm on rank 1, finished"]
        assert report["another norm on rank 1, finished"].startswith("RanksDisagreeError")
        # Of two that differ the error names one; loading that again is not enough.
        assert f"new weights.{LAYER_NORM} is" in report["two others on rank 1"]
        assert f"new weights.{NORM} is" in report["one of them mended"]
        assert report["both mended"] is report["tried again"] is None
        assert report["after partial updates"] == report["after the second try"] == report["after"]
        heard = "RankFailedError: rank 1 failed before finish_weight_update: " * (report["rank"] == 0)
        assert report["an exception on rank 1"] == f"{heard}KeyError: 'gone'"
        assert report["from rank 1 alone"] == report["after"]
        assert report["from nobody"].startswith(
            ("ValueError: rank 0 alone gives tensors, the others None", "RankFailed")
        )
        failed = "RankFailedError: rank 1 failed in update_weights: " * (report["rank"] == 0)
        assert report["an error on rank 1"] == f"{failed}KeyError: 'gone'"
        assert report["an unknown name"].startswith("CheckpointError: norm: the model has no such weight")
        check_loaded_alone(report)
        if layout != DP:
            # Rank 0 hears of it with the next step, before it computes anything.
            assert "new weights: none on rank 0, " in report[f"step {1 - report['rank']} with those of rank 1 alone"]
    assert seen[0]["after"] == seen[1]["after"]


def check_loaded_alone(report: dict[str, Any]) -> None:
    assert report["loaded by rank 1 alone"] is None


@pytest.mark.stress
@pytest.mark.control("While ranks load new weights nothing is exchanged")
def test_control_load_with_collective_is_detected(tmp_path: Path, control):
    """Negative control: rank 1 waits until rank 0, which loads nothing, has closed."""
    ranks.run_forked([__file__, json.dumps(TP), tmp_path, "waiting"], nproc=2, timeout_s=240).checked()
    first, second = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    check_loaded_alone(first)
    with control():
        check_loaded_alone(second)


def pairs_and_an_error() -> Iterator[tuple[str, Tensor]]:
    yield NORM, new_tensors()[NORM] * 3
    raise KeyError("gone")


def update_partially(llm: LLM, tensors: dict[str, Tensor], *names: str, fails: bool = False) -> None:
    with llm.weight_update(partial=True) as load:
        for name in names:
            load(name, tensors[name])
        if fails:
            raise KeyError("gone")


def load_alone(llm: LLM) -> None:
    """On rank 1."""
    if llm.llm_engine.engine_channel.rank == 1:
        trainers_model(llm).load_weights(new_tensors().items())


def main_of_waiting(layout: dict[str, int], folder: Path) -> None:
    """A load that has a collective, on rank 1 alone. The other comes to none, and ends its part of the world."""
    with open_llm(**layout) as llm:
        answers(llm)
        begin = WeightUpdate.begin
        WeightUpdate.begin = lambda self: (dist.barrier(), begin(self))[1]
        seen = {"loaded by rank 1 alone": outcome_of(lambda: load_alone(llm))}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


def outcome_of(call: Callable[[], object]) -> object:
    """What it returns, or what it raises in words."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(layout: dict[str, int], folder: Path) -> None:
    tensors, seen = new_tensors(), {"rank": int(os.environ["RANK"])}

    def attempt(name: str, call: Callable[[], object]) -> None:
        seen[name] = outcome_of(call)

    with open_llm(**layout) as llm:
        engine = llm.llm_engine
        rank = engine.engine_channel.rank
        load = trainers_model(llm).load_weights
        other = {**tensors, NORM: tensors[NORM] * (1 + rank)}
        two = {**other, LAYER_NORM: tensors[LAYER_NORM] * (1 + rank)}
        attempt("before", lambda: answers(llm))
        load(other.items())
        attempt("another norm on rank 1", lambda: answers(llm))
        load(tensors.items())
        attempt("after", lambda: answers(llm))
        llm.start_weight_update()
        load(other.items())
        attempt("another norm on rank 1, finished", llm.finish_weight_update)
        load(tensors.items())
        attempt("again", lambda: answers(llm))
        attempt("two others on rank 1", lambda: update_partially(llm, two, NORM, LAYER_NORM))
        attempt("one of them mended", lambda: update_partially(llm, tensors, LAYER_NORM))
        attempt("both mended", lambda: update_partially(llm, tensors, NORM))
        attempt("after partial updates", lambda: answers(llm))
        attempt("an exception on rank 1", lambda: update_partially(llm, tensors, NORM, fails=rank == 1))
        attempt("tried again", lambda: update_partially(llm, tensors, NORM))
        attempt("after the second try", lambda: answers(llm))
        load(other.items())
        llm.update_weights(tensors.items() if rank == 1 else None, source=1)
        attempt("from rank 1 alone", lambda: answers(llm))
        attempt("from nobody", lambda: llm.update_weights(None, source=0))
        attempt("an error on rank 1", lambda: llm.update_weights(pairs_and_an_error() if rank else None, source=1))
        attempt("an unknown name", lambda: llm.update_weights([("norm", tensors[NORM])] if rank else None, source=1))
        load(tensors.items())
        attempt("again", lambda: answers(llm))
        attempt("loaded by rank 1 alone", lambda: load_alone(llm))
        if "data_parallel_size" not in layout:
            for step in range(2):
                attempt(f"step {step} with those of rank 1 alone", engine.step)
        (folder / f"{rank}.json").write_text(json.dumps(seen))


def test_digests_tell_tensors_apart_and_equal_ones_not():
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(1500, 1000, generator=generator)
    first = content_digest(large)
    assert content_digest(large.t().contiguous().t()) == first == content_digest(torch.nn.Parameter(large))
    others = [large.double(), large.t(), large.reshape(-1), large[1:], large.roll(1, dims=0), large.roll(1, dims=1)]
    for index in (0, 511, 512, 700_000, 1_499_999):
        changed = large.clone()
        changed.view(-1)[index] += 1
        others.append(changed)
    assert len({first, *map(content_digest, others)}) == 1 + len(others)
    assert content_digest(torch.tensor(1.0)) != content_digest(torch.tensor(2.0, dtype=torch.bfloat16))


class Rank:
    """One rank's weights `a` and `b`, without a model. `call` is of `apply_model`, `compare` of what computes."""

    def __init__(self, *, counts_calls: bool = True) -> None:
        self.update, self._counts_calls = WeightUpdate(), counts_calls
        executor: Any = SimpleNamespace(
            num_workers=1,
            watch_requests=lambda num_in_flight: None,
            attach_engine=lambda engine: None,
            get_weight_updates=lambda: [self.update.report(["a", "b"])],
            end_weight_update=self.update.end,
        )
        self._updates = WeightUpdates(executor, 0, lambda: 0)

    def call(self, is_refused: bool) -> None:
        self.update.num_calls += self._counts_calls
        if is_refused:
            self.update.rejected_calls.append(self.update.num_calls)

    def load_all(self) -> None:
        self.update.begin()
        for name in ("a", "b"):
            self.update.add(name, torch.ones(2))

    def compare(self) -> tuple[dict[str, str], int | None]:
        """What is compared in a call's exchange, and the version in a step."""
        event = self._updates.commit(is_partial=False)
        return self._updates.uncompared, None if event is None else event.version


def are_equal_after(*calls: str, **how: Any) -> list[bool]:
    """Of two ranks. A call is in which of them it is refused: "0", "1", "01" or "", and "alone" is one of rank 0 alone
    that looks. "?" compares, "all" loads.
    """
    both, found = [Rank(**how), Rank(**how)], []
    for each in (*calls, "?"):
        if each == "?":
            first, other = [rank.compare() for rank in both]
            found.append(first == other)
            continue
        for number, rank in enumerate(both[:1] if each == "alone" else both):
            if each == "all":
                rank.load_all()
            else:
                rank.call(str(number) in each)
    return found


def test_ranks_compare_all_rejected_calls():
    # As often on both, and not the same calls.
    assert are_equal_after("0", "1") == [False]
    # What all refused afterwards does not make good what one refused, nor what the other one refused.
    assert are_equal_after("0", "?", "01") == [False, False]
    assert are_equal_after("0", "?", "1") == [False, False]
    assert are_equal_after("", "0", "?", "", "1") == [False, False]
    # Until all weights were loaded.
    assert are_equal_after("0", "?", "1", "all") == [False, True]
    assert are_equal_after("0", "?", "all", "?", "01") == [False, True, True]
    # A call of one rank alone moves the numbers of those after it, until then.
    assert are_equal_after("alone", "?", "01", "?", "all", "?", "01") == [True, False, True, True]
    # What every rank has refused changed nothing.
    assert are_equal_after("", "01", "", "01", "?", "01") == [True, True]
    # Negative control: without the numbers of the calls it is how often.
    assert are_equal_after("0", "1", counts_calls=False) == [True]


if __name__ == "__main__":
    run = main_of_waiting if sys.argv[3] == "waiting" else main
    run(json.loads(sys.argv[1]), Path(sys.argv[2]))
