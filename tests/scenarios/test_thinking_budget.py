"""Budgets of reasoning: as many tokens as are sampled without one, then the end's marker, then what follows it."""

import json
import random
import shutil
from pathlib import Path

import pytest
from reference_models import write_text_checkpoint

from spmd_worker import LLM, SamplingParams
from spmd_worker.engine.request_error import RequestError
from spmd_worker.replica.grammar.rule_masks import end_of_thinking
from spmd_worker.replica.sequence.token_rules import ThinkingRules

BEGIN, END = "<think>", "</think>"
NUM_TOKENS = 40
OPEN, CLOSED, NEVER = f"a{BEGIN}\nb{END}c{BEGIN}\n", f"a{BEGIN}b{END}c", "abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("thinking"))


def made(folder: Path, **options: object) -> LLM:
    return LLM(folder, num_blocks=300, device="cpu", reasoning_format="think", **options)


@pytest.fixture(scope="module")
def llm(folder: Path):
    with made(folder) as opened:
        yield opened


def params(budget: int | None, **fields: object) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
    return SamplingParams(**given, thinking_token_budget=budget)


def answers(llm: LLM, prompts: list[str], *given: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, [*given], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def expected(llm: LLM, prompt: str, budget: int) -> list[int]:
    """The answer of a prompt that opens reasoning, put together from answers without budgets."""
    tokenizer = llm.llm_engine.tokenizer
    ids, end = tokenizer.encode(prompt), tokenizer.encode(END, add_special_tokens=False)
    (free,) = answers(llm, [prompt], params(None))
    # The newline behind the marker counts.
    begun = [*free[: max(budget - 1, 0)], *end]
    rest = NUM_TOKENS - len(begun)
    outputs = llm.generate([{"prompt_token_ids": [*ids, *begun]}], params(None, max_tokens=rest), use_tqdm=False)
    return [*begun, *outputs[0].outputs[0].token_ids]


@pytest.mark.guarantee("Reasoning ends at its budget, and changes nothing else")
def test_reasoning_ends_at_its_budget(llm: LLM):
    budgets = [0, 1, 7, 30]
    found = answers(llm, [OPEN] * len(budgets), *map(params, budgets))
    assert found == [expected(llm, OPEN, budget) for budget in budgets]
    assert [answers(llm, [OPEN], params(budget))[0] for budget in budgets] == found
    # Sampled tokens are those without a budget, up to the marker.
    free, bound = answers(llm, [OPEN] * 2, *(params(each, temperature=1.0, seed=3) for each in (None, 9)))
    assert bound[:8] == free[:8]
    assert bound[8:16] == llm.llm_engine.tokenizer.encode(END, add_special_tokens=False)


@pytest.mark.guarantee("Reasoning ends at its budget, and changes nothing else")
def test_answers_without_open_reasoning_are_free(llm: LLM):
    """Beside a row that has a budget, and behind as many tokens as it."""
    prompts = [CLOSED, NEVER, OPEN, OPEN]
    found = answers(llm, prompts, *map(params, [2, 2, 2, -1]))
    free = answers(llm, prompts, *[params(None)] * 4)
    assert (found[:2], found[3]) == (free[:2], free[3])
    assert found[2] != free[2]


@pytest.mark.control("Reasoning ends at its budget, and changes nothing else")
def test_budget_check_detects_one_token_more(llm: LLM):
    assert answers(llm, [OPEN], params(8)) != [expected(llm, OPEN, 7)]


def test_drafts_keep_budgets(folder: Path, llm: LLM):
    """Negative control: the repeated text is drafted, and without a budget accepted."""
    prompts, given = [f"{OPEN * 4}\n", OPEN], [params(6), params(11)]
    with made(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as drafting:
        assert answers(drafting, prompts, *given) == answers(llm, prompts, *given)
        assert drafting.llm_engine.scheduler.counters.num_drafted_tokens


def test_reasoning_inside_of_a_form_ends_at_its_budget(llm: LLM):
    form = {"regex": r"[a-d]{0,30}</think>[xyz]{3}"}
    given = [params(each, structured_outputs=form, ignore_eos=False) for each in (None, 4)]
    free, bound = answers(llm, [OPEN] * 2, *given)
    end = llm.llm_engine.tokenizer.encode(END, add_special_tokens=False)
    begun = max(size for size in range(3) if free[3 - size : 3] == end[:size])
    assert bound[: 3 + len(end) - begun] == [*free[:3], *end[begun:]]
    assert len(bound) == 3 + len(end) - begun + 4


def their_next(tokens: list[int], begin: list[int], end: list[int], budget: int) -> int | None:
    """vLLM's rule, over prompt and answer: the last markers count, and sizes of the marker's part from the largest."""
    starts = [at for at in range(len(tokens)) if tokens[at : at + len(begin)] == begin]
    ends = [at for at in range(len(tokens)) if tokens[at : at + len(end)] == end]
    if not starts or starts[-1] < (ends or [-1])[-1]:
        return None
    if len(tokens) - starts[-1] - len(begin) < budget:
        return None
    sizes = [size for size in range(1, len(end)) if tokens[-size:] == end[:size]]
    return end[max(sizes, default=0)]


def test_forced_tokens_are_those_of_a_plain_search():
    """Random answers of four tokens, in which markers come by chance; each is followed to its end."""
    generator, num_forced = random.Random(5), 0
    for _ in range(400):
        begin, end = [1, 2][: generator.randrange(1, 3)], [3, 0, 3][: generator.randrange(1, 4)]
        budget, tokens, num_prompt = generator.randrange(6), [], generator.choice([0, 4])
        for position in range(24):
            if position < num_prompt:
                tokens.append([*begin, 0, 0, 0][position])
                continue
            thinking = ThinkingRules(budget, begin, end, num_prompt - len(begin) if num_prompt else None)
            forced = end_of_thinking(thinking, tokens[num_prompt:])
            # A second beginning inside of reasoning begins vLLM's count anew, and not ours.
            if 1 not in tokens[num_prompt:]:
                assert forced == (() if (theirs := their_next(tokens, begin, end, budget)) is None else (theirs,))
            num_forced += len(forced)
            tokens.append(forced[0] if forced else generator.choice([0, 1, 2, 3] if position % 3 else [0, 3]))
    assert num_forced > 500


def test_budgets_that_cannot_be_are_errors(folder: Path, llm: LLM):
    with pytest.raises(ValueError, match="thinking_token_budget=-2 must be 0 or more, or -1 for none"):
        params(-2)
    with LLM(folder, num_blocks=40, device="cpu") as plain:
        with pytest.raises(ValueError, match=r"thinking_token_budget needs .*: set reasoning_format to one of think, "):
            plain.generate([NEVER], params(4), use_tqdm=False)
        with pytest.raises(RequestError) as caught:
            plain.llm_engine.add_request("a", NEVER, params(4))
        assert caught.value.code == "reasoning_unknown"


def test_markers_outside_the_vocabulary_are_errors(folder: Path, tmp_path: Path):
    """Forced, such a token ended the job on every rank."""
    made_of = shutil.copytree(folder, tmp_path / "more_tokens")
    content = json.loads((made_of / "tokenizer.json").read_text())
    vocab_size = json.loads((made_of / "config.json").read_text())["vocab_size"]
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    content["added_tokens"].append({"id": vocab_size, "content": END, **dict.fromkeys(names, False)})
    (made_of / "tokenizer.json").write_text(json.dumps(content))
    with made(made_of) as llm, pytest.raises(RequestError, match=rf"'</think>', \[{vocab_size}\], are not in"):
        llm.llm_engine.add_request("a", NEVER, params(4))
