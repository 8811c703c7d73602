"""What one rank raises before a call's prompts are answered is known on all ranks at once, and the engine goes on.

A wrong number of parameters on one rank once left the others waiting for `timeout_s`, for an error that named nobody.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ranks
from reference_models import checkpoint_folder

LAYOUTS = {"tensor parallel": {"tensor_parallel_size": 2}, "data parallel": {"data_parallel_size": 2}}

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from spmd_worker import LLM, BeamSearchParams, SamplingParams

BEAMS = BeamSearchParams(beam_width=2, max_tokens=2)
RANK = int(os.environ["RANK"])
PROMPTS = [[5, 6, 7], [8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
CALLS = {
    "good": lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False),
    "parameters on rank 1": lambda: llm.generate(PROMPTS, [GREEDY] * (2 + RANK), use_tqdm=False),
    "prompts on rank 0": lambda: llm.generate(PROMPTS if RANK else 5, GREEDY, use_tqdm=False),
    "a chat on rank 1": lambda: llm.chat("hello" if RANK else [], GREEDY, use_tqdm=False),
    "on both": lambda: llm.generate(PROMPTS, [GREEDY] * (3 + RANK), use_tqdm=False),
    "a request of rank 0 alone": lambda: with_request_of_rank_0(),
    "prompts that are refused": lambda: llm.generate([PROMPTS[0], [], [999]], GREEDY, use_tqdm=False),
    "rows on rank 1 alone": lambda: llm.generate(
        [PROMPTS[0], []], GREEDY, use_tqdm=False, on_error="row" if RANK else "raise"
    ),
    "a call more on rank 1": lambda: with_call_more_on_rank_1(),
    "a long text on rank 1": lambda: llm.generate(FailingList() if RANK else PROMPTS, GREEDY, use_tqdm=False),
    "a payload on rank 1": lambda: llm.worker_event("swap", 1j if RANK else 1),
    "no folder on rank 1": lambda: llm.start_profile(None if RANK else sys.argv[3]),
    "no width on rank 1": lambda: llm.beam_search(PROMPTS, None if RANK else BEAMS),
    "an adapter on rank 1": lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request="x" if RANK else None),
    "sizes on rank 1": lambda: llm.reinitialize_distributed(tensor_parallel_size="2" if RANK else 2),
    "a request of rank 0 alone at a restart": lambda: with_request_of_rank_0(llm.reinitialize_distributed),
    "a source on rank 0 alone": lambda: with_source_on_rank_0(),
    "version of text": lambda: llm.set_weight_version("x"),
    "version too large": lambda: llm.set_weight_version(2**70),
    "abort of None": lambda: llm.llm_engine.abort_request(None),
    "aborts of nobody": lambda: llm.llm_engine.abort_request(["x", "7", 2**70]),
}


class FailingList(list):
    def __iter__(self):
        raise KeyError("\\ud800" + 5000 * "x")


def with_request_of_rank_0(call=lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
    engine = llm.llm_engine
    if RANK == 0:
        request_id = engine.add_request([1, 2], GREEDY)
    try:
        return call()
    finally:
        if RANK == 0:
            engine.abort_request(request_id)
        engine.step()


def with_source_on_rank_0():
    norm = torch.ones(llm.llm_engine.resolved.model_config.hidden_size)
    try:
        llm.update_weights([("model.norm.weight", norm)], **({} if RANK else {"source": 9}))
    finally:
        llm.collective_rpc("reload_weights")


def with_call_more_on_rank_1():
    llm.llm_engine.requests.num_calls += RANK
    try:
        return CALLS["good"]()
    finally:
        llm.llm_engine.requests.num_calls -= RANK


def attempt(call):
    try:
        outputs = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return outputs and [output.outputs[0].token_ids for output in outputs]


with LLM(sys.argv[1], num_blocks=64, timeout_s=240.0, **json.loads(sys.argv[2])) as llm:
    exchanges = []
    gather = llm.llm_engine.engine_channel.gather
    llm.llm_engine.engine_channel.gather = lambda payload: (exchanges.append(payload), gather(payload))[1]
    report = {}
    for digest_every in (1, 0):
        # Of the calls' own agreement; that of the steps has begun.
        object.__setattr__(llm.llm_engine.config.executor, "digest_every", digest_every)
        for name, call in CALLS.items():
            if sys.argv[4:] and name not in sys.argv[4:]:
                continue
            exchanges.clear()
            answer = attempt(call)
            num_exchanges = len(exchanges)
            report[f"{name}, {digest_every}"] = [answer, num_exchanges, attempt(CALLS["good"])]
Path(sys.argv[3], f"{RANK}.json").write_text(json.dumps(report))
"""

PARAMETERS = "ValueError: {} sampling params for 2 prompts: give one, or one for each prompt"
WAITS = (
    "RuntimeError: 1 requests of llm_engine.add_request or enqueue are not answered yet: call llm_engine.step until "
    "they are, or wait_for_completion"
)
NO_PROMPTS = "TypeError: prompts is a int: give a prompt or a list of prompts"
NO_MESSAGES = "TypeError: messages is a str: give a list of messages, or a list of such lists"
NO_PAYLOAD = (
    "TypeError: a value of type complex cannot cross processes, because nothing is unpickled: use numbers, strings, "
    "bytes, lists, tuples, sets or dicts"
)
NO_FOLDER = "ValueError: start_profile needs the folder to write to: start_profile(folder)"
NO_BEAMS = "TypeError: params is a NoneType: give BeamSearchParams"
NO_ADAPTER = "TypeError: lora_request='x' is a str: give LoRARequest, None, or, for several prompts, a list of these"
NO_SIZE = "ConfigError: tensor_parallel_size='2' must be a whole number"
FAILED = "RankFailedError: rank {} failed before {}: {}"
EXPECTED = {
    "parameters on rank 1": (FAILED.format(1, "generate", PARAMETERS.format(3)), PARAMETERS.format(3)),
    "prompts on rank 0": (NO_PROMPTS, FAILED.format(0, "generate", NO_PROMPTS)),
    "a chat on rank 1": (FAILED.format(1, "chat", NO_MESSAGES), NO_MESSAGES),
    "on both": (PARAMETERS.format(3), PARAMETERS.format(4)),
    "a request of rank 0 alone": (WAITS, FAILED.format(0, "generate", WAITS)),
    "a payload on rank 1": (FAILED.format(1, "worker_event", NO_PAYLOAD), NO_PAYLOAD),
    "no folder on rank 1": (FAILED.format(1, "worker_event", NO_FOLDER), NO_FOLDER),
    "no width on rank 1": (FAILED.format(1, "beam_search", NO_BEAMS), NO_BEAMS),
    "an adapter on rank 1": (FAILED.format(1, "generate", NO_ADAPTER), NO_ADAPTER),
    "sizes on rank 1": (FAILED.format(1, "reinitialize_distributed", NO_SIZE), NO_SIZE),
    "a request of rank 0 alone at a restart": (WAITS, FAILED.format(0, "reinitialize_distributed", WAITS)),
}
ALIKE = {
    "version of text": "TypeError: version='x' is a str: give a whole number",
    "version too large": f"ValueError: version={2**70} must fit 64 bits",
    "abort of None": (
        "TypeError: None is not a request id: give the number that add_request returned, an output's request_id, or "
        "several of these in a list"
    ),
    "aborts of nobody": None,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """As `reports_of`."""
    return reports_of(tmp_path_factory.mktemp("calls"), LAYOUTS[request.param])


def reports_of(folder: Path, layout: dict[str, int], *names: str, plant: str = "") -> list[dict[str, Any]]:
    """What each of two ranks saw: of each call, or those of `names`, its answer, its exchanges, and the answer of a
    good call after it. `plant` is run before.
    """
    arguments = [checkpoint_folder("llama3"), json.dumps(layout), folder, *names]
    ranks.run_ranks(plant + SCRIPT, 2, timeout_s=240, arguments=arguments).checked()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.guarantee("One rank's early error is RankFailedError on the others, which go on")
@pytest.mark.parametrize("digest_every", [1, 0])
@pytest.mark.parametrize("name", EXPECTED)
def test_failing_rank_raises_and_others_name_it(reports, name: str, digest_every: int):
    assert tuple(report[f"{name}, {digest_every}"][0] for report in reports) == EXPECTED[name]


@pytest.mark.parametrize("digest_every", [1, 0])
def test_rejected_prompts_are_one_error_on_every_rank(reports, digest_every: int):
    first, second = (report[f"prompts that are refused, {digest_every}"][:2] for report in reports)
    assert first == second
    assert first[0].startswith("PromptsRefusedError: 2 of 3 prompts cannot be answered, and none was:")
    assert first[1] == 1


@pytest.mark.parametrize("digest_every", [1, 0])
def test_on_error_must_be_equal_on_every_rank(reports, digest_every: int):
    for report in reports:
        assert report[f"rows on rank 1 alone, {digest_every}"][0] == (
            "RanksDisagreeError: ranks were given different calls: "
            'on_error is "raise" on rank 0, "row" on rank 1; make the same call on every rank'
        )


@pytest.mark.parametrize("digest_every", [1, 0])
def test_call_numbers_must_be_equal_on_every_rank(reports, digest_every: int):
    """Ranks that count differently would sample different tokens."""
    words = r"RanksDisagreeError: .*: number of the call is (\d+) on rank 0, (\d+) on rank 1; "
    for report in reports:
        first, second = re.match(words, report[f"a call more on rank 1, {digest_every}"][0]).groups()
        assert int(second) == int(first) + 1


@pytest.mark.parametrize("digest_every", [1, 0])
def test_long_error_reaches_other_ranks_truncated(reports, digest_every: int):
    own, others = reports[1], reports[0]
    own_text, text = (report[f"a long text on rank 1, {digest_every}"][0] for report in (own, others))
    assert own_text.startswith("KeyError: ")
    assert len(own_text) > 5000
    assert text == FAILED.format(1, "generate", own_text[:2000])


@pytest.mark.parametrize("digest_every", [1, 0])
def test_local_error_does_not_match_the_next_call(reports, digest_every: int):
    """`update_weights` has one with a source alone. Each rank then makes its next call at its own time."""
    own, other = (report[f"a source on rank 0 alone, {digest_every}"] for report in reports)
    assert own[:2] == ["ValueError: source=9 must be a rank of this engine, from 0 to 1", 1]
    assert other[:2] == [None, 0]


@pytest.mark.parametrize("name", ALIKE)
def test_invalid_argument_fails_on_each_rank_without_exchange(reports, name: str):
    for report in reports:
        assert report[f"{name}, 1"][:2] == [ALIKE[name], 0]


@pytest.mark.guarantee("One rank's early error is RankFailedError on the others, which go on")
def test_engine_continues_on_all_ranks_after_any_error(reports):
    expected = reports[0]["good, 1"][0]
    assert [len(row) for row in expected] == [3, 3]
    for report in reports:
        for name, (_, _, after) in report.items():
            assert after == expected, name


def test_call_has_one_exchange(reports):
    """That of the prompts' digests, with or without them."""
    for report in reports:
        for digest_every in (1, 0):
            for name in ("good", *EXPECTED):
                assert report[f"{name}, {digest_every}"][1] == 1, name


UNHEARD = """
from spmd_worker.engine.data_parallel import agreement

right = agreement.exchange

def exchange(engine, call, prepare, answer_of, is_optional=False):
    prepared = prepare()
    return right(engine, call, lambda: prepared, answer_of, is_optional)

agreement.exchange = exchange
"""
"""What `prepare` raises, the other ranks do not hear of."""


@pytest.mark.stress
@pytest.mark.control("One rank's early error is RankFailedError on the others, which go on")
@pytest.mark.matrix
def test_error_check_detects_an_error_unheard_by_others(tmp_path: Path, control):
    """Negative control: rank 0 takes the next call of rank 1 for this one, and no later calls meet as they should."""
    name = "parameters on rank 1"
    reports = reports_of(tmp_path, LAYOUTS["tensor parallel"], "good", name, plant=UNHEARD)
    assert [report[f"{name}, 1"][0] for report in reports] == [reports[0]["good, 1"][0], EXPECTED[name][1]]
    with control():
        test_failing_rank_raises_and_others_name_it(reports, name, 1)
    with pytest.raises(AssertionError, match=name):
        test_engine_continues_on_all_ranks_after_any_error(reports)


WITHOUT_RANK_1 = """
import os, sys
from spmd_worker import LLM

llm = LLM(sys.argv[1], num_blocks=64, timeout_s=240.0, tensor_parallel_size=2)
llm.generate([[5, 6]], use_tqdm=False)
if os.environ["RANK"] == "1":
    os._exit(0)
for _ in range(2):
    try:
        llm.generate([[5, 6]], use_tqdm=False)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
llm.close()
"""


def test_missing_rank_is_named_and_ends_the_engine():
    """It once was an error of gloo's, which named nobody."""
    done = ranks.run_ranks(WITHOUT_RANK_1, 2, timeout_s=240, arguments=[checkpoint_folder("llama3")]).checked()
    first, second = done.stdout.splitlines()
    assert first.startswith("RankFailedError: rank 1 is gone: "), done.output
    assert second == "RuntimeError: an earlier step failed halfway: close this LLM and make a new one"
