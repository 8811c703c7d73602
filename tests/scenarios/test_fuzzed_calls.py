"""Public calls with random arguments in random order: each gives an answer or an error, and the engine continues.

On one rank, on two ranks with the same arguments, and on two ranks with different ones. The stress tier makes 10,000
calls, or SPMD_WORKER_FUZZ_COUNT. Each bug found so far has a test below.
"""

import json
import os
from pathlib import Path
from typing import Any

import fuzzed_calls
import pytest
import ranks
import torch
from context_fixtures import fixture_of
from stress_seed import SEED

from spmd_worker import LLM, SamplingParams
from spmd_worker.engine.changes import Changes

SCRIPT = fuzzed_calls.__file__
FIRST = int(os.environ.get("SPMD_WORKER_FUZZ_FIRST", str(10_000 * (SEED - 1) + 1000)))
COUNT = int(os.environ.get("SPMD_WORKER_FUZZ_COUNT", "10000"))
NUM_PARTS = 20
LIMIT_S = 1200.0
WAYS = {"one rank": (1, ""), "two ranks alike": (2, ""), "two ranks apart": (2, "1")}
WAY_OF_PART = ("one rank", "two ranks alike", "one rank", "two ranks apart", "one rank")


def run(way: str, first: int, count: int, limit_s: float) -> None:
    num_ranks, apart = WAYS[way]
    done = ranks.run_forked([SCRIPT, str(first), str(count)], num_ranks, limit_s, env={"FUZZ_APART": apart})
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in found:
        print(f"\nFUZZ {way}, from {first}: {json.dumps(line)}", end="")
    assert done.returncode == 0, done.output[-20_000:]
    assert len(found) == num_ranks
    # Both kinds are drawn: refused calls alone would show nothing of what comes after.
    assert all(each.get(what, 0) > count // 4 for each in found for what in ("answered", "refused"))


@pytest.mark.gate("one rank")
@pytest.mark.guarantee("Wrong calls are refused, the engine goes on")
@pytest.mark.parametrize("way", ["one rank", *(pytest.param(way, marks=pytest.mark.matrix) for way in list(WAYS)[1:])])
def test_any_call_is_answered_or_rejected_engine_continues(way: str):
    run(way, 0, 15, 240.0)


@pytest.mark.stress
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_ten_thousand_sequences(part: int):
    run(WAY_OF_PART[part % len(WAY_OF_PART)], FIRST + part * COUNT // NUM_PARTS, COUNT // NUM_PARTS, LIMIT_S)


@pytest.mark.control("Wrong calls are refused, the engine goes on")
def test_fuzz_detects_a_call_failing_mid_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Negative control: a check that is gone lets an argument into a step, which ends the engine."""

    def unchecked(changes: Changes, name: str, payload: Any, then: Any, run_step: Any) -> list[Any]:
        return changes.run_worker_event(name, payload, list(then), run_step)

    # Profiles are written where the process is.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Changes, "worker_event", unchecked)
    poisoned = fuzzed_calls.method("llm_engine.worker_event", ["start_profile", "profile", []])
    monkeypatch.setattr(fuzzed_calls, "CALLS", {"engine.worker_event": poisoned})
    found = fuzzed_calls.fuzz(0, 60)
    assert "not usable afterwards" in str(found["troubles"])


llm = fixture_of(lambda: LLM(fuzzed_calls.MODEL, num_blocks=20, max_model_len=64), "function")


def test_worker_event_must_carry_events(llm: LLM):
    with pytest.raises(TypeError, match=r"^then contains 'x': .*SetWeightVersion"):
        llm.llm_engine.worker_event("start_profile", "folder", "xy")
    assert llm.generate([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_completions_that_are_no_list_are_named(llm: LLM):
    with pytest.raises(TypeError, match=r"^completions .*SamplingParams: .*list"):
        llm.score_tokens(["add"], SamplingParams())


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((torch.zeros(1), torch.zeros(1)), r"^the name .*Tensor: "),
        ((7, torch.zeros(1)), r"^the name .*int: "),
        ((fuzzed_calls.WEIGHTS[0][0], None), r"^\S+: is .*NoneType: .*pairs"),
    ],
)
@pytest.mark.parametrize("source", [None, 0])
def test_new_weights_must_be_name_tensor_pairs(llm: LLM, pair: tuple[Any, Any], words: str, source: int | None):
    """They were asked for what texts and tensors have."""
    with pytest.raises(TypeError, match=words):
        llm.update_weights([pair], source=source)
    assert llm.generate([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("other", "call"),
    [
        ("pass", "finish_weight_update"),
        # In the block, too, where it was reported a second time.
        ("llm.update_weights(None, source=1)", "update_weights"),
    ],
)
def test_weight_update_error_of_one_rank_reaches_all(other: str, call: str):
    """They waited for its next call, and every call after was one too late."""
    source = f"""
        import os
        from spmd_worker import LLM
        rank = int(os.environ["RANK"])
        with LLM({str(fuzzed_calls.MODEL)!r}, num_blocks=20, max_model_len=64, tensor_parallel_size=2) as llm:
            try:
                with llm.weight_update(partial=True):
                    if rank == 1:
                        raise ValueError("of the block")
                    {other}
            except Exception as error:
                said = f"{{type(error).__name__}}: {{error}}"
            llm.collective_rpc("reload_weights")
            answer = llm.generate([[3, 4]], use_tqdm=False)[0].outputs[0].token_ids
            os.write(1, f"{{rank}} {{said}} | {{len(answer) > 0}}\\n".encode())
        """
    done = ranks.run_ranks(source, 2, 240.0)
    assert sorted(done.stdout.splitlines()) == [
        f"0 RankFailedError: rank 1 failed before {call}: ValueError: of the block | True",
        "1 ValueError: of the block | True",
    ], done.output


def test_missing_weights_of_one_rank_reach_all():
    """They were found once the ranks had agreed to sleep or resume, so that the others waited for the timeout."""
    source = """
        import os
        from spmd_worker import LLM
        from test_fuzzed_calls import fuzzed_calls
        rank = int(os.environ["RANK"])
        settings = {"num_blocks": 20, "max_model_len": 64, "tensor_parallel_size": 2, "timeout_s": 60}
        with LLM(fuzzed_calls.MODEL, **settings) as llm:
            llm.pause_generation()
            for call in (llm.sleep, llm.resume_generation):
                if rank == 1:
                    llm.update_weights(fuzzed_calls.WEIGHTS)
                try:
                    call()
                except Exception as error:
                    os.write(1, f"{rank} {call.__name__} {type(error).__name__} {str(error)[:72]}\\n".encode())
            llm.collective_rpc("reload_weights")
            llm.resume_generation()
            answer = llm.generate([[3, 4]], use_tqdm=False)[0].outputs[0].token_ids
            os.write(1, f"{rank} {len(answer) > 0}\\n".encode())
        """
    done = ranks.run_ranks(source, 2, 240.0)
    found = [line for line in done.stdout.splitlines() if line[:1] in "01"]
    assert len(found) == 6, done.output
    for call in ("sleep", "resume_generation"):
        assert f"0 {call} RankFailedError rank 1 failed before {call}: MissingWeightsError" in done.stdout, done.output
        assert f"1 {call} MissingWeightsError 37 of 38 weights" in done.stdout, done.output
    assert {"0 True", "1 True"} <= set(found), done.output


def test_invalid_flag_on_one_rank_fails_on_both():
    """Regression: its truth was tested before the ranks met, so the other rank waited for the next call."""
    source = f"""
        import json, os
        import torch
        from spmd_worker import LLM, BeamSearchParams
        rank, odd = int(os.environ["RANK"]), torch.zeros(2, 2)
        with LLM({str(fuzzed_calls.MODEL)!r}, num_blocks=20, max_model_len=64, tensor_parallel_size=2) as llm:
            def said(call):
                try:
                    call()
                except Exception as error:
                    return f"{{type(error).__name__}}: {{error}}"
            options = {{"on_error": "row", "gather": True, "use_tqdm": False}}
            found = [
                said(lambda: llm.generate([[3, 4]], **{{**options, name: odd if rank else options[name]}}))
                for name in options
            ]
            beams = BeamSearchParams(beam_width=2, max_tokens=2)
            found.append(said(lambda: llm.beam_search([[3, 4]], beams, use_tqdm=odd if rank else False)))
            answer = llm.generate([[3, 4]], use_tqdm=False)[0].outputs[0].token_ids
            os.write(1, f"{{rank}} {{json.dumps([*found, len(answer) > 0])}}\\n".encode())
        """
    done = ranks.run_ranks(source, 2, 240.0)
    own = [
        "TypeError: on_error is a Tensor: give one of 'raise', 'row'",
        "TypeError: gather is a Tensor: give True or False",
        "TypeError: use_tqdm is a Tensor: give True, False, or a function that makes the bar",
        "TypeError: use_tqdm is a Tensor: give True, False, or a function that makes the bar",
    ]
    calls = [*["generate(gather=True)"] * 3, "beam_search"]
    heard = [f"RankFailedError: rank 1 failed before {call}: {words}" for call, words in zip(calls, own)]
    expected = [f"0 {json.dumps([*heard, True])}", f"1 {json.dumps([*own, True])}"]
    assert sorted(done.stdout.splitlines()) == expected, done.output


def test_weights_are_of_the_models_own_kind():
    """The good update of the drawn calls is one: else it would only ever be refused."""
    with LLM(fuzzed_calls.MODEL, num_blocks=20, max_model_len=64) as llm:
        shapes = llm.apply_model(lambda model: {name: tuple(each.shape) for name, each in model.named_parameters()})[0]
    for name, tensor in fuzzed_calls.WEIGHTS:
        assert torch.Size(shapes[name]) == tensor.shape
