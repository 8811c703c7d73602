"""How `LLM` samples: log-probabilities, randomness named by the row, penalties, and rows that ask for the absurd."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from context_fixtures import fixture_of
from json_files import edit
from llm_calls import GREEDY, NAME, PROMPTS, SAMPLED, run, tokens
from reference_models import (
    EOS_TOKEN_ID,
    checkpoint_folder,
    random_prompt,
    reference_logits,
    reference_model,
    write_text_checkpoint,
)
from transformers import GenerationConfig
from transformers.generation import logits_process

from spmd_worker import LLM, PromptsRefusedError, SamplingParams
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.token_rules import TimestampRules, TokenRules

llm = fixture_of(lambda: LLM(checkpoint_folder(NAME), num_blocks=300))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


def log_softmax_after(prompt: list[int]) -> torch.Tensor:
    return torch.log_softmax(reference_logits(reference_model(NAME), prompt).double(), -1)


def check_entries(entries: list[TokenLogprobs], chosen: list[int], expected: torch.Tensor, count: int) -> None:
    """`expected` [tokens, V] predicts `chosen`, and each entry has the token and the `count` likeliest."""
    assert len(entries) == len(chosen)
    for entry, token, row in zip(entries, chosen, expected, strict=True):
        assert list(entry) == list(dict.fromkeys([token, *row.topk(count).indices.tolist()]))
        for each, value in entry.items():
            assert value.logprob == pytest.approx(float(row[each]), abs=1e-4)
            assert value.rank == int((row > row[each]).sum()) + 1


@pytest.mark.parametrize("num_batched_tokens", [2048, 16])
def test_logprobs_and_prompt_logprobs_are_transformers_log_softmax(num_batched_tokens: int):
    sampling = replace(SAMPLED, logprobs=3, prompt_logprobs=2, seed=1)
    settings = {"max_num_batched_tokens": num_batched_tokens, "max_num_seqs": 8}
    with LLM(checkpoint_folder(NAME), num_blocks=300, **settings) as llm:
        outputs = run(llm, PROMPTS, sampling)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (completion,) = output.outputs
        expected = log_softmax_after([*prompt, *completion.token_ids])
        assert output.prompt_logprobs[0] is None
        check_entries(output.prompt_logprobs[1:], prompt[1:], expected[: len(prompt) - 1], 2)
        check_entries(completion.logprobs, completion.token_ids, expected[len(prompt) - 1 : -1], 3)
        chosen = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_the_comparison_sees_logprobs_of_the_place_before():
    prompt = PROMPTS[0]
    expected = log_softmax_after(prompt)
    with LLM(checkpoint_folder(NAME), num_blocks=300) as llm:
        (output,) = run(llm, prompt, replace(GREEDY, prompt_logprobs=0))
    with pytest.raises(AssertionError):
        check_entries(output.prompt_logprobs[1:], prompt[1:], expected[1:], 0)


def test_rows_that_do_not_ask_get_no_logprobs(llm: LLM):
    (output,) = run(llm, PROMPTS[0])
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_samples_differ_and_are_batch_invariant(llm: LLM):
    params = [replace(SAMPLED, n=4, seed=100 + index) for index in range(8)]
    together = tokens(run(llm, PROMPTS, params))
    assert all(len(dict.fromkeys(map(tuple, row))) == 4 for row in together)
    reverse = tokens(run(llm, PROMPTS[::-1], params[::-1]))[::-1]
    alone = [tokens(run(llm, prompt, each))[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert together == reverse == alone
    # Sample 0 is what a single sample would have been.
    assert tokens(run(llm, PROMPTS, [replace(each, n=1) for each in params])) == [row[:1] for row in together]


def test_samples_are_equal_under_preemption(llm: LLM):
    params = [replace(SAMPLED, n=4, seed=100 + index) for index in range(8)]
    expected = tokens(run(llm, PROMPTS, params))
    with LLM(checkpoint_folder(NAME), num_blocks=8, max_model_len=60, block_size=8) as small:
        assert tokens(run(small, PROMPTS, params)) == expected
        assert small.llm_engine.counters.num_preemptions > 0


def test_four_greedy_samples_are_one_answer_four_times(llm: LLM):
    (single,), (row,) = tokens(run(llm, PROMPTS[0])), tokens(run(llm, PROMPTS[0], replace(GREEDY, n=4)))
    assert row == single * 4


def draws_of_a_program(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """All answers to one prompt, drawn without seeds, four in each of two calls and one each by two requests; and with
    one seed, four in a call and one by a request.
    """
    prompts, seeded = [PROMPTS[0]] * 4, replace(SAMPLED, seed=3)
    with LLM(checkpoint_folder(NAME), num_blocks=300, seed=seed) as llm:
        engine = llm.llm_engine

        def by_request(sampling: SamplingParams) -> list[int]:
            engine.add_request(PROMPTS[0], sampling)
            (output,) = [output for _ in range(13) for output in engine.step()]
            return output.outputs[0].token_ids

        requested = [by_request(SAMPLED)]
        called = [row for _ in range(2) for (row,) in tokens(run(llm, prompts, SAMPLED))]
        requested.append(by_request(SAMPLED))
        return [*called, *requested], [*(row for (row,) in tokens(run(llm, prompts, seeded))), by_request(seeded)]


@pytest.mark.guarantee("Each call draws anew, a rerun the same")
def test_random_streams_differ_per_row_and_call():
    drawn, seeded = draws_of_a_program()
    assert len(dict.fromkeys(map(tuple, drawn))) == 10
    assert seeded == [seeded[0]] * 5
    assert draws_of_a_program() == (drawn, seeded)
    others, seeded_too = draws_of_a_program(seed=1)
    assert not dict.fromkeys(map(tuple, others)).keys() & dict.fromkeys(map(tuple, drawn)).keys()
    assert seeded_too == seeded


def test_random_streams_continue_after_layout_change():
    with LLM(checkpoint_folder(NAME), num_blocks=300) as llm, LLM(checkpoint_folder(NAME), num_blocks=300) as other:
        for each in (llm, other):
            run(each, PROMPTS[0], SAMPLED)
        llm.reinitialize_distributed()
        drawn = [tokens(run(each, PROMPTS[0], SAMPLED)) for each in (llm, other)]
        assert drawn[0] == drawn[1]
        llm.llm_engine.requests.num_calls -= 1
        assert tokens(run(llm, PROMPTS[0], SAMPLED)) == drawn[0], "negative control"


@pytest.mark.control("Each call draws anew, a rerun the same")
def test_control_missing_call_number_repeats_samples(llm: LLM):
    """Negative control: so it once was, and a trainer saw one rollout for ever."""
    first, second = (tokens(run(llm, [PROMPTS[0]] * 2, SAMPLED)) for _ in range(2))
    llm.llm_engine.requests.num_calls -= 1
    assert tokens(run(llm, [PROMPTS[0]] * 2, SAMPLED)) == second != first


@pytest.mark.guarantee("The host's random states stay", is_control_inside=True)
def test_host_random_generators_are_unchanged():
    def states() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = states()
    with LLM(checkpoint_folder(NAME), num_blocks=300) as llm:
        run(llm, PROMPTS, replace(SAMPLED, n=2, top_p=0.9))
    with LLM(checkpoint_folder(NAME), load_format="dummy", num_blocks=300) as llm:
        run(llm, PROMPTS, SAMPLED)
    assert states() == before


def test_penalties_bias_and_minimum_length_reach_the_sampler(llm: LLM):
    (plain,) = tokens(run(llm, PROMPTS[0], replace(GREEDY, max_tokens=40)))
    (penalised,) = tokens(run(llm, PROMPTS[0], replace(GREEDY, max_tokens=40, frequency_penalty=2.0)))
    assert len(set(penalised[0])) > len(set(plain[0]))
    assert tokens(run(llm, PROMPTS[0], replace(GREEDY, logit_bias={77: 100.0}))) == [[[77] * 12]]
    forced = replace(GREEDY, ignore_eos=False, logit_bias={EOS_TOKEN_ID: 100.0})
    (ended,) = run(llm, PROMPTS[0], forced)
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([EOS_TOKEN_ID], "stop")
    (later,) = run(llm, PROMPTS[0], replace(forced, min_tokens=4))
    assert later.outputs[0].token_ids[4:] == [EOS_TOKEN_ID]
    assert EOS_TOKEN_ID not in later.outputs[0].token_ids[:4]


# What may not be sampled, and what alone may.


def transformers_greedy(prompt: list[int], **arguments: object) -> list[int]:
    model = reference_model(NAME)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **arguments,
    )
    return made[0, len(prompt) :].tolist()


def test_bad_words_and_allowed_tokens_equal_transformers(llm: LLM):
    plain = [ids for (ids,) in tokens(run(llm, PROMPTS))]
    # Of each answer its third token alone, its first two together, and the end of the prompt with its first.
    words = [
        [[ids[2]], ids[:2], [prompt[-1], ids[0]], [prompt[-1], 0, 1, 2, 3]]
        for prompt, ids in zip(PROMPTS, plain, strict=True)
    ]
    ours = tokens(run(llm, PROMPTS, [replace(GREEDY, bad_words_ids=each) for each in words]))
    for prompt, ids, each, (found,) in zip(PROMPTS, plain, words, ours, strict=True):
        assert found == transformers_greedy(prompt, bad_words_ids=each)
        assert found != ids
    some = [3, 8, 50, 100, 150, 207, 210]
    ours = tokens(run(llm, PROMPTS, replace(GREEDY, allowed_token_ids=some)))
    for prompt, (found,) in zip(PROMPTS, ours, strict=True):
        assert found == transformers_greedy(prompt, prefix_allowed_tokens_fn=lambda _batch, _ids: some)


RULES = TokenRules(
    forced_tokens=(9,),
    suppress_tokens=(*range(0, 100, 3),),
    begin_suppress_tokens=(140, 141),
    no_repeat_ngram_size=3,
    timestamps=TimestampRules(130, 90, 40),
)


def transformers_rules(prompt: list[int]) -> list[int]:
    config = GenerationConfig(eos_token_id=90, no_timestamps_token_id=129)
    config.max_initial_timestamp_index = 40
    begin = len(prompt) + 1
    processors = [
        logits_process.SuppressTokensAtBeginLogitsProcessor((140, 141), begin),
        logits_process.SuppressTokensLogitsProcessor((*range(0, 100, 3),)),
        logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=begin),
    ]
    return [9, *transformers_greedy([*prompt, 9], no_repeat_ngram_size=3, logits_processor=processors)]


def test_token_rules_equal_transformers(llm: LLM):
    params = replace(GREEDY, max_tokens=13, token_rules=RULES)
    ours = tokens(run(llm, PROMPTS, params))
    assert [found for (found,) in ours] == [transformers_rules(prompt) for prompt in PROMPTS]
    assert min(sum(each >= 130 for each in found) for (found,) in ours) > 1
    assert ours != tokens(run(llm, PROMPTS, replace(params, token_rules=None)))


@pytest.mark.gate("recompute")
@pytest.mark.parametrize("mode", ["recompute", pytest.param("swap", marks=pytest.mark.matrix)])
def test_token_rules_hold_in_chunks_and_after_preemption(llm: LLM, mode: str):
    params = [replace(SAMPLED, max_tokens=30, seed=index, token_rules=RULES) for index in range(len(PROMPTS))]
    expected = [tokens(run(llm, [prompt], own))[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    settings = {"num_blocks": 24, "block_size": 4, "max_model_len": 90, "max_num_batched_tokens": 9, "max_num_seqs": 9}
    with LLM(checkpoint_folder(NAME), preemption_mode=mode, **settings) as scarce:
        assert tokens(run(scarce, PROMPTS, params)) == expected
        assert scarce.llm_engine.counters.num_preemptions > 0


def test_sampled_rows_keep_to_what_is_allowed(llm: LLM):
    allowed = replace(SAMPLED, n=4, allowed_token_ids=[3, 8, 50], top_p=0.9, logprobs=1)
    found = tokens(run(llm, PROMPTS, allowed))
    assert {token for samples in found for ids in samples for token in ids} == {3, 8, 50}
    # What is reported is the model's own distribution, as everywhere.
    never = replace(SAMPLED, n=4, bad_words_ids=[[each] for each in range(200)])
    found = tokens(run(llm, PROMPTS, never))
    assert min(token for samples in found for ids in samples for token in ids) >= 200


def test_bad_words_are_never_written(text_folder: Path):
    with LLM(text_folder, num_blocks=300) as llm:
        params = replace(GREEDY, max_tokens=40)
        (plain,) = run(llm, "hello world", params)
        written = next(each for each in plain.outputs[0].text if each.isascii() and each.isalpha())
        (other,) = run(llm, "hello world", replace(params, bad_words=[written]))
        assert other.outputs[0].token_ids != plain.outputs[0].token_ids
        (ids,) = {tuple(llm.get_tokenizer().encode(written, add_special_tokens=False))}
        assert not set(ids) & set(other.outputs[0].token_ids)
    with LLM(checkpoint_folder(NAME), num_blocks=300) as llm:
        (refused,) = run(llm, PROMPTS[0], replace(GREEDY, bad_words=["a"]), on_error="row")
        assert refused.error == "bad_words need a tokenizer.json in the model folder: use bad_words_ids"
        (refused,) = run(llm, PROMPTS[0], replace(GREEDY, bad_words_ids=[[1, 211]]), on_error="row")
        assert refused.error == "bad_words_ids: token id 211 is outside the vocabulary of 211 tokens"
        (refused,) = run(llm, PROMPTS[0], replace(GREEDY, allowed_token_ids=[211]), on_error="row")
        assert refused.error == "allowed_token_ids: token id 211 is outside the vocabulary of 211 tokens"


def test_invalid_bad_word_is_rejected_before_queueing(tmp_path: Path):
    """A normaliser may delete a whole word. That was found when its prompt was queued, after those before it, which
    nobody asked for any more.
    """
    folder = write_text_checkpoint(tmp_path)
    edit(folder / "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "~"}, "content": ""})
    with LLM(folder, num_blocks=300) as llm:
        params = [GREEDY, replace(GREEDY, bad_words=["~"]), replace(GREEDY, bad_words=["a"])]
        with pytest.raises(PromptsRefusedError, match=r"bad_words: .*'~'"):
            run(llm, PROMPTS[:3], params)
        assert not llm.llm_engine.has_unfinished_requests()
        rows = run(llm, PROMPTS[:3], params, on_error="row")
        assert [row.error is None for row in rows] == [True, False, True]
        assert rows[0].outputs[0].token_ids == run(llm, PROMPTS[0])[0].outputs[0].token_ids


def test_logprobs_minus_one_returns_every_token(llm: LLM):
    params = replace(GREEDY, logprobs=-1, prompt_logprobs=-1, max_tokens=3)
    (output,) = run(llm, PROMPTS[0], params)
    (completion,) = output.outputs
    expected = log_softmax_after([*PROMPTS[0], *completion.token_ids])
    check_entries(completion.logprobs, completion.token_ids, expected[len(PROMPTS[0]) - 1 : -1], 211)
    check_entries(output.prompt_logprobs[1:], PROMPTS[0][1:], expected[: len(PROMPTS[0]) - 1], 211)


def test_prompt_is_truncated_before_length_check(llm: LLM):
    prompt = random_prompt(600, 3)
    for length, kept in ((20, 20), (-1, 500)):
        (cut,) = run(llm, [prompt], replace(GREEDY, truncate_prompt_tokens=length))
        (expected,) = run(llm, [prompt[-kept:]])
        assert cut.prompt_token_ids == prompt[-kept:]
        assert tokens([cut]) == tokens([expected])
    engine = llm.llm_engine
    number = engine.add_request(prompt, replace(GREEDY, truncate_prompt_tokens=20))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [(each.request_id, each.prompt_token_ids) for each in outputs] == [(str(number), prompt[-20:])]


def test_skip_reading_prefix_cache_row_still_fills_cache(llm: LLM):
    prompt = random_prompt(64, 77)
    skips = replace(GREEDY, skip_reading_prefix_cache=True)
    found = [run(llm, [prompt], params)[0] for params in (skips, skips, GREEDY)]
    assert [each.num_cached_tokens for each in found] == [0, 0, 48]
    assert tokens(found[:1]) == tokens(found[1:2]) == tokens(found[2:])


def test_params_assigned_later_affect_next_call(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    first = run(llm, PROMPTS[:1], params)
    params.max_tokens, params.allowed_token_ids = 5, [9]
    second = run(llm, PROMPTS[:1], params)
    assert tokens(second) == [[[9] * 5]]
    assert len(first[0].outputs[0].token_ids) == 3
    params.min_tokens = 6
    with pytest.raises(ValueError, match="min_tokens=6 must not exceed max_tokens=5"):
        run(llm, PROMPTS[:1], params)
    defaults = llm.get_default_sampling_params()
    defaults.max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens != 1


CHOICES = {
    "n": [1, 1, 1, 2, 5],
    "temperature": [0, 0, 1e-6, 1.1e-5, 0.5, 1, 2, 1e30, 1e300],
    "top_p": [1, 1, 1e-9, 0.5, 0.999999],
    "top_k": [0, -1, 1, 2, 320, 10**9],
    "min_p": [0, 0, 1e-9, 0.1, 1],
    "seed": [None, None, 0, -5, 2**63],
    "max_tokens": [None, 5, 17, 40],
    "min_tokens": [0, 0, 1, 3],
    "stop": [(), (), (" ",), ("a", "b"), ("\n",)],
    "stop_token_ids": [(), (), (5,), tuple(range(320))],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "logprobs": [None, None, 0, 5, 64],
    "prompt_logprobs": [None, None, 0, 64],
    "presence_penalty": [0, 0, 2, -2],
    "frequency_penalty": [0, 0, 2, -2],
    "repetition_penalty": [1, 1, 1.3, 1e-300, 1e300],
    "logit_bias": [{}, {}, {3: 100.0}, dict.fromkeys(range(320), -100.0)],
    "allowed_token_ids": [None, None, None, [3], [5]],
    "bad_words": [(), (), ("e", " the"), ("z", "naïve")],
    "bad_words_ids": [(), (), (), ((5,),), ((3,), (3, 3))],
    "truncate_prompt_tokens": [None, None, -1, 1, 30],
    "skip_reading_prefix_cache": [None, True, False],
    "cache_salt": [None, None, "a", "b"],
}


@pytest.mark.gate("processed_logprobs-10")
@pytest.mark.parametrize(
    ("mode", "num_rows"),
    [
        ("raw_logprobs", 20),
        pytest.param("processed_logprobs", 10, marks=pytest.mark.matrix),
        pytest.param("raw_logprobs", 200, marks=pytest.mark.stress),
        pytest.param("processed_logprobs", 200, marks=pytest.mark.stress),
    ],
)
def test_random_rows_never_end_the_engine(text_folder: Path, mode: str, num_rows: int):
    chance = random.Random(mode)
    params = [SamplingParams(**{key: chance.choice(given) for key, given in CHOICES.items()}) for _ in range(num_rows)]
    prompts = [random_prompt(chance.randint(1, 63), index, 320) for index in range(num_rows)]
    settings = {"num_blocks": 9, "block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 6}
    with LLM(text_folder, max_model_len=64, logprobs_mode=mode, **settings) as llm:
        outputs = run(llm, prompts, params)
        assert llm.llm_engine.counters.num_preemptions > 0
        assert llm.llm_engine.scheduler.cache.num_used_blocks == 0
    for prompt, asked, output in zip(prompts, params, outputs, strict=True):
        assert output.error is None
        assert len(output.outputs) == asked.n
        assert output.prompt_token_ids == prompt[len(prompt) - len(output.prompt_token_ids) :]
        prompt = output.prompt_token_ids
        assert len(output.prompt_logprobs or prompt) == len(prompt)
        for completion in output.outputs:
            assert all(0 <= token < 320 for token in completion.token_ids)
            assert 1 <= len(completion.token_ids) <= min(asked.max_tokens or 64, 64 - len(prompt))
            assert completion.finish_reason in ("stop", "length")
            assert len(completion.logprobs or completion.token_ids) == len(completion.token_ids)
