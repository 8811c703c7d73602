"""Ranks that bring prompts of their own: each gets its answers, and in turns no rank waits for a call that never is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from reference_models import checkpoint_folder

from spmd_worker import LLM
from spmd_worker.engine.data_parallel.per_rank_prompts import _placed


@pytest.mark.parametrize(
    ("ranks_of_prompts", "replica_size", "expected"),
    [
        ([0, 1, 2, 3], 2, [0, 0, 1, 1]),
        # No replica gets more than its share; those left over go where least is.
        ([0, 0, 0, 0, 3], 2, [0, 0, 0, 1, 1]),
        ([2, 2, 2], 1, [2, 0, 1]),
        ([], 1, []),
    ],
)
def test_prompts_with_images_are_placed_evenly(ranks_of_prompts: list[int], replica_size: int, expected: list[int]):
    indices = [4 * position + rank for position, rank in enumerate(ranks_of_prompts)]
    assert list(_placed(indices, 4, replica_size).items()) == list(zip(indices, expected))


LAYOUTS = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}

SCRIPT = """
import json, os, sys
from spmd_worker import LLM, SamplingParams

RANK = int(os.environ["RANK"])
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, max_tokens=5, ignore_eos=True)
OWN = [[[5, 6, 7], [8, 9], [3]], [[40, 41, 42, 43]]][RANK]
ALL = [[5, 6, 7], [8, 9], [3], [40, 41, 42, 43]]


def ids(outputs):
    return [output.outputs[0].token_ids if output.outputs else output.error for output in outputs]


def generate(prompts, params=GREEDY, **options):
    return ids(llm.generate(prompts, params, use_tqdm=False, **options))


def words(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def loop(num_turns):
    seen = []
    with llm.turns():
        for turn in range(num_turns):
            seen.append(generate(OWN[turn % len(OWN) :]))
    return seen


def refused_and_asked_again():
    with llm.turns():
        if RANK == 0:
            return generate(OWN)
        return [words(lambda: generate([OWN[0], []])), generate([OWN[0], []], on_error="row")]


def broken_tool():
    with llm.turns():
        if RANK:
            raise KeyError("no such tool")
        return generate(OWN)


def tool_after_the_end():
    with llm.turns():
        if RANK:
            raise KeyError("no such tool")
        words(lambda: generate(OWN))
        return generate(OWN)


def event_in_turns():
    with llm.turns():
        return words(lambda: llm.worker_event("anything")) if RANK else generate(OWN)


def update_in_turns():
    with llm.turns(), llm.weight_update():
        raise KeyError("no such weight")


def nested():
    with llm.turns(), llm.turns():
        pass


def loop_without_turns():
    for turn in range(2 - RANK):
        generate(OWN, gather=True)
    return generate(ALL)


options = dict(num_blocks=64, device="cpu", dtype="float32", timeout_s=60.0, **json.loads(sys.argv[2]))
seen = {}
for num_of_rank_1 in (0, 2):
    with LLM(sys.argv[1], **options) as llm:
        seen[f"drawn beside {num_of_rank_1}"] = generate(OWN if RANK == 0 else ALL[:num_of_rank_1], DRAWN, gather=True)
with LLM(sys.argv[1], **options) as llm:
    seen["alone"] = dict(zip(map(str, ALL), generate(ALL)))
    seen["own"] = [output.request_id for output in llm.generate(OWN, GREEDY, use_tqdm=False, gather=True)]
    seen["gathered"] = generate(OWN, gather=True)
    seen["nothing"] = generate(OWN if RANK else [], gather=True)
    seen["refused"] = words(lambda: generate([OWN[0], []][: 1 + RANK], gather=True))
    seen["turns"] = loop(3 - 2 * RANK)
    seen["no turns"] = loop(0)
    seen["turns of rank 1 only"] = loop(2 * RANK)
    seen["drawn twice"] = [generate(OWN[:1], DRAWN, gather=True) for _ in range(2)]
    seen["refused in turns"] = refused_and_asked_again()
    for call in (nested, event_in_turns, broken_tool, tool_after_the_end, loop_without_turns):
        seen[call.__name__] = words(call)
    seen["afterwards"] = generate(ALL) == list(seen["alone"].values())
    seen["prompts"] = OWN
    seen["update_in_turns"] = words(update_in_turns)
with open(f"{sys.argv[3]}/{RANK}", "w") as file:
    json.dump(seen, file)
"""


@pytest.fixture(
    scope="module", params=[*LAYOUTS][:1] + [pytest.param(name, marks=pytest.mark.matrix) for name in [*LAYOUTS][1:]]
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("seen")
    arguments = [checkpoint_folder("llama3"), json.dumps(LAYOUTS[request.param]), folder]
    ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=arguments).checked()
    return [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]


def answers(seen: dict[str, Any], first: int = 0) -> list[list[int]]:
    return [seen["alone"][str(prompt)] for prompt in seen["prompts"][first:]]


@pytest.mark.gate("tensor parallel", "data parallel")
def test_rank_gets_only_its_own_answers(seen: list[dict[str, Any]]):
    for each in seen:
        assert each["gathered"] == answers(each)
        assert each["own"] == [str(index) for index in range(len(each["prompts"]))]
    assert len(seen[0]["gathered"]) != len(seen[1]["gathered"])
    assert (seen[0]["nothing"], seen[1]["nothing"]) == ([], answers(seen[1]))


def test_row_random_stream_is_independent_of_other_ranks(seen: list[dict[str, Any]]):
    assert seen[0]["drawn beside 0"] == seen[0]["drawn beside 2"]
    # Another rank's prompts of the same index draw other numbers, and so does another call.
    assert seen[1]["drawn beside 2"][0] != seen[0]["drawn beside 2"][0]
    assert seen[0]["drawn twice"][0] != seen[0]["drawn twice"][1]


@pytest.mark.guarantee("In turns() loops need not be equally long")
def test_ranks_may_differ_in_number_of_turns(seen: list[dict[str, Any]]):
    assert seen[0]["turns"] == [answers(seen[0], first) for first in (0, 1, 2)]
    assert seen[1]["turns"] == [answers(seen[1])]
    assert [each["no turns"] for each in seen] == [[], []]
    assert [each["turns of rank 1 only"] for each in seen] == [[], [answers(seen[1])] * 2]


def test_prompts_that_are_refused_are_their_ranks_error(seen: list[dict[str, Any]]):
    refused = "PromptsRefusedError: 1 of 2 prompts cannot be answered, and none was:"
    assert seen[1]["refused"] == refused
    assert seen[0]["refused"] == f"RankFailedError: rank 1 failed before generate(gather=True): {refused}"
    # In turns nobody else needs to hear of them.
    first, (answer, error) = seen[1]["refused in turns"]
    assert (first, answer, type(error)) == (refused, answers(seen[1])[0], str)
    assert seen[0]["refused in turns"] == answers(seen[0])


def test_turns_end_on_all_ranks_after_an_error(seen: list[dict[str, Any]]):
    assert [each["broken_tool"] for each in seen] == [
        "RankFailedError: rank 1 failed before turns: KeyError: 'no such tool'",
        "KeyError: 'no such tool'",
    ]
    ended = "RuntimeError: another rank failed and ended this block of llm.turns() on every rank: leave the block"
    assert seen[0]["tool_after_the_end"] == ended
    for each in seen:
        assert each["nested"] == "RuntimeError: llm.turns() cannot be nested: leave the block of llm.turns() first"
        # Before a weight is loaded, and not that an update was begun and has not ended.
        call = "start_weight_update is a call that all ranks make together"
        assert each["update_in_turns"] == f"RuntimeError: {call}: leave the block of llm.turns() first"
        assert each["afterwards"]


def test_turns_reject_collective_calls_locally(seen: list[dict[str, Any]]):
    refused = "RuntimeError: worker_event is a call that all ranks make together: leave the block of llm.turns() first"
    assert [each["event_in_turns"] for each in seen] == [answers(seen[0]), refused]
    assert all(each["afterwards"] for each in seen)


CALLS_OF_ALL: dict[str, Callable[[LLM], object]] = {
    "worker_event": lambda llm: llm.worker_event("stop_profile"),
    "sleep": LLM.sleep,
    "wake_up": LLM.wake_up,
    "reinitialize_distributed": LLM.reinitialize_distributed,
    "update_weights": lambda llm: llm.update_weights([], source=0),
    "finish_weight_update": LLM.finish_weight_update,
}


def test_turns_reject_every_collective_call():
    """Of one rank too, whose script may get more."""
    with LLM(checkpoint_folder("llama3"), num_blocks=64, device="cpu") as llm:
        for name, call in CALLS_OF_ALL.items():
            with llm.turns(), pytest.raises(RuntimeError, match=f"^{name} .*turns"):
                call(llm)
        # The control: outside turns each does what it is for, or says what else is wrong.
        errors = {}
        for name, call in CALLS_OF_ALL.items():
            try:
                call(llm)
            except RuntimeError as error:
                errors[name] = str(error)
        assert [*errors] == ["worker_event", "finish_weight_update"]
        assert not any("all ranks" in text for text in errors.values())


class Interrupted:
    """A channel of two ranks at which Ctrl-C comes."""

    size, rank = 2, 0

    def gather(self, payload: bytes) -> list[bytes]:
        raise KeyboardInterrupt

    def close(self) -> None:
        pass


def test_interrupted_exchange_fails_the_engine(monkeypatch: pytest.MonkeyPatch):
    """Half of what the other ranks sent would be read as the next call's."""
    with LLM(checkpoint_folder("llama3"), num_blocks=64, device="cpu") as llm:
        monkeypatch.setattr(llm.llm_engine, "engine_channel", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]], use_tqdm=False)
        with pytest.raises(RuntimeError, match="failed halfway"):
            llm.generate([[5, 6]], use_tqdm=False)


BROKEN_LATER = """
import sys
from spmd_worker import LLM
from spmd_worker.ranks.transport.channel import ControlChannel

where, fault = sys.argv[2:]
layout = {"tensor_parallel_size": 2} if where == "prompts that differ" else {"data_parallel_size": 2}
llm = LLM(sys.argv[1], num_blocks=64, device="cpu", dtype="float32", timeout_s=60.0, **layout)
rank = llm.llm_engine.executor.environment.rank
method = "collect" if where == "answers" else "gather"
right, num_calls = getattr(ControlChannel, method), 0
# The first exchange of a call is that of what was called.
last = {"answers": 1, "prompts that differ": 2}[where]

def broken(channel, *given):
    global num_calls
    num_calls += channel is llm.llm_engine.engine_channel
    if num_calls == last and channel is llm.llm_engine.engine_channel:
        raise KeyboardInterrupt if fault == "Ctrl-C" else RuntimeError("of gloo")
    return right(channel, *given)

def call():
    llm.generate([[5, 6 + (rank if where == "prompts that differ" else 0)]], use_tqdm=False)

setattr(ControlChannel, method, broken)
try:
    call()
except (KeyboardInterrupt, RuntimeError) as error:
    # In one write: ranks share the stream.
    sys.stdout.write(f"{rank} {type(error).__name__}\\n")
    sys.stdout.flush()
else:
    raise AssertionError("it was answered")
setattr(ControlChannel, method, right)
try:
    call()
except RuntimeError as error:
    assert "close this LLM and make a new one" in str(error), error
else:
    raise AssertionError("it was answered")
llm.close()
"""


@pytest.mark.parametrize("fault", ["Ctrl-C", pytest.param("an error", marks=pytest.mark.stress)])
@pytest.mark.parametrize("where", ["answers", "prompts that differ"])
def test_later_exchanges_of_a_call_stay_matched(tmp_path: Path, where: str, fault: str):
    arguments = [checkpoint_folder("llama3"), where, fault]
    done = ranks.run_ranks(BROKEN_LATER, 2, timeout_s=240, arguments=arguments, cwd=tmp_path).checked()
    name = "KeyboardInterrupt" if fault == "Ctrl-C" else "R"
    assert [line[:3] for line in sorted(done.stdout.splitlines())] == [f"{rank} {name[0]}" for rank in range(2)]


@pytest.mark.control("In turns() loops need not be equally long")
def test_control_unequal_loops_deadlock_without_turns(seen: list[dict[str, Any]]):
    for each in seen:
        assert each["loop_without_turns"] == (
            'RanksDisagreeError: ranks were given different calls: call is "generate(gather=True)" on rank 0, '
            '"generate" on rank 1; make the same call on every rank'
        )
