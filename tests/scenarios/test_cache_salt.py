"""`cache_salt`: a prompt hits only cached blocks of prompts with the same salt."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
from context_fixtures import fixture_of
from jobs_of_rows import openai_row
from serving import MODEL, ServedHere

from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.scheduler import allocator

pytestmark = pytest.mark.finding(number="D16")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ORDER = [None, None, "a", "a", "b", None, "a", "b"]
FOUND = [False, True, False, True, False, True, True, True]
"""Whether something is found."""

llm = fixture_of(lambda: LLM(str(MODEL), device="cpu", dtype="float32", num_blocks=256, block_size=16))


def prompt_of(seed: int, num_tokens: int = 64) -> list[int]:
    return random.Random(seed).choices(range(10, 200), k=num_tokens)


def asked_by_parameter(llm: LLM, prompt: list[int], salt: str | None) -> Any:
    return llm.generate([prompt], replace(GREEDY, cache_salt=salt), use_tqdm=False)[0]


def asked_by_prompt(llm: LLM, prompt: list[int], salt: str | None) -> Any:
    salted: dict[str, Any] = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    return llm.generate([salted], GREEDY, use_tqdm=False)[0]


@pytest.mark.parametrize("ask", [asked_by_parameter, asked_by_prompt])
def test_prompts_find_what_their_own_salt_left(llm: LLM, ask: Any):
    prompt = prompt_of(hash_of(ask.__name__))
    outputs = [ask(llm, prompt, salt) for salt in ORDER]
    assert [each.num_cached_tokens > 0 for each in outputs] == FOUND
    # Nothing else of the answer knows of it.
    assert len({tuple(each.outputs[0].token_ids) for each in outputs}) == 1


def hash_of(name: str) -> int:
    return sum(name.encode())


def test_salt_test_detects_ignored_salts(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    root_hash = allocator.root_hash
    monkeypatch.setattr(allocator, "root_hash", lambda *args, cache_salt, **root: root_hash(*args, **root))
    with pytest.raises(AssertionError):
        test_prompts_find_what_their_own_salt_left(llm, lambda *arguments: asked_by_parameter(*arguments))


def test_prompt_salt_overrides_parameter_salt(llm: LLM):
    prompt = prompt_of(5)
    both = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    assert asked_by_parameter(llm, prompt, "theirs").num_cached_tokens == 0
    assert llm.generate([both], replace(GREEDY, cache_salt="theirs"), use_tqdm=False)[0].num_cached_tokens == 0
    assert asked_by_parameter(llm, prompt, "mine").num_cached_tokens > 0


def test_scores_and_added_requests_keep_their_salt(llm: LLM):
    prompt = prompt_of(6)
    salted = {"prompt_token_ids": prompt, "cache_salt": "scores"}
    llm.score_tokens([salted], [[11, 12]])
    assert asked_by_parameter(llm, prompt, None).num_cached_tokens == 0
    assert asked_by_parameter(llm, prompt, "scores").num_cached_tokens > 0


@pytest.mark.parametrize("salt", ["", 5, "a" * 1025, "\ud800", True])
def test_invalid_salt_is_an_error(llm: LLM, salt: Any):
    with pytest.raises(ValueError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": [10], "cache_salt": salt}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="cache_salt"):
        SamplingParams(cache_salt=salt)


def test_beams_have_no_salt(llm: LLM):
    from spmd_worker.compat.beam_search import BeamSearchParams

    with pytest.raises(ValueError, match=r"^cache_salt .*not .*beam_search"):
        llm.beam_search([{"prompt_token_ids": [10], "cache_salt": "a"}], BeamSearchParams(2, 3))


def test_bodies_have_salts():
    text = "copy a b c d e f g h i j k l m n o p q r s t u v w x y z ="
    body = {"prompt": text, "max_tokens": 2, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    with ServedHere(max_queued=4) as server:
        for path, plain in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            found = []
            for salt in ORDER:
                before = server.engine.counters.num_cached_prompt_tokens
                assert server.client.ask(path, plain | ({} if salt is None else {"cache_salt": salt}))[0] == 200
                found.append(server.engine.counters.num_cached_prompt_tokens > before)
            assert found == FOUND
        # A request without a seed draws by its content, of which the salt is no part.
        drawn = [
            server.client.ask("/v1/completions", {**body, "temperature": 2.0, "max_tokens": 20, **more})[1]["choices"]
            for more in ({}, {"cache_salt": "a"})
        ]
        assert drawn[0] == drawn[1]
        status, said, _ = server.client.ask("/v1/completions", {**body, "cache_salt": ""})
        assert (status, said["error"]["code"]) == (400, "invalid_value")


@pytest.mark.matrix
def test_ranks_agree_on_salts_of_rows(tmp_path: Path):
    """One at a time; rows of both kinds."""
    plain = {"prompt_token_ids": prompt_of(9), "max_tokens": 3, "temperature": 0}
    body = {"prompt": prompt_of(9), "max_tokens": 3, "temperature": 0}
    rows: list[Any] = [
        plain | {"cache_salt": "a"},
        plain,
        openai_row("x", "/v1/completions", body | {"cache_salt": "b"}),
    ]
    rows += [plain | {"cache_salt": "a"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ranks.run_forked(
        [
            *(ranks.REPOSITORY / "launch.py", f"model.path={MODEL}", "device=cpu", "parallel.tensor_parallel_size=2"),
            *("cache.num_blocks=64", "scheduler.max_num_seqs=1", "executor.digest_every=1"),
            *(f"job.input={tmp_path / 'rows.jsonl'}", f"job.output={tmp_path / 'out.jsonl'}"),
        ],
        2,
        timeout_s=240,
    ).checked()
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    # Of the last row alone, all but its last block.
    assert metrics["cached_prompt_tokens"] == 48
