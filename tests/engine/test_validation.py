"""What an engine cannot answer is refused with a code and a way out, once a request; what names a request."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from jobs_of_rows import answers_of_job
from ranks import REPOSITORY

from spmd_worker import LLM, SamplingParams
from spmd_worker.compat.audio_reading import LazyPreparer
from spmd_worker.compat.image_prompts import ImagePrompts, MediumTokens
from spmd_worker.engine.encoder_limits import EncoderLimits
from spmd_worker.engine.request_error import RequestError
from spmd_worker.engine.validation import RequestLimits, as_request_ids
from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.media.preparer import ImagePreparer
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.replica.scheduler.media_rows import MediaRowLimits
from spmd_worker.replica.sequence.media_items import MediaItem

MODEL = REPOSITORY / "scripts" / "demo" / "model"
LIMITS = RequestLimits(vocab_size=10, max_model_len=4, has_tokenizer=False)


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "words"),
    [
        ((), {}, "empty_prompt", "has no tokens"),
        ((1, 10), {}, "token_out_of_vocabulary", r"^token id 10 .*10 tokens"),
        ((1, -1, 10), {}, "token_out_of_vocabulary", r"^token id -1 .*outside"),
        ((10**5000,), {}, "token_out_of_vocabulary", r"^token id .*64 bits"),
        ((1, 2, 3, 4), {}, "prompt_too_long", "has 4 tokens but model.max_model_len is 4"),
        ((1,), {"stop": "x"}, "tokenizer_missing", "use stop_token_ids"),
        ((1,), {"stop_token_ids": [10]}, "token_out_of_vocabulary", r"stop_token_ids: .*id 10 .*outside"),
    ],
)
def test_invalid_request_has_code_and_remedy(prompt, sampling, code, words):
    with pytest.raises(RequestError, match=words) as refused:
        LIMITS.check(PromptContent(prompt), SamplingParams(**sampling))
    assert refused.value.code == code


def test_only_tokens_of_images_are_beyond_the_vocabulary():
    images = ImagePrompts(LazyPreparer(ImagePreparer), (MediumTokens(PLACEHOLDERS["llava"], 12),))
    limits = replace(LIMITS, max_model_len=9, images=images, media=MediaRowLimits(num_rows=8))
    items = (MediaItem(bytes(16), ((1, 2),), 4),)
    limits.check(PromptContent((1, 12, 12, 2), media_items=items), SamplingParams())
    for given in ((1, 12, 12, 2, 12), (1, 12, 12, 11)):
        with pytest.raises(RequestError, match=f"token id {given[-1]} is outside"):
            limits.check(PromptContent(given, media_items=items), SamplingParams())
    with pytest.raises(RequestError, match="token id 12 is outside"):
        limits.check(PromptContent((1, 12, 12, 2)), SamplingParams())


@pytest.mark.parametrize("kind", ["text", "audio"])
def test_long_texts_of_encoders_have_their_own_limit(kind: str):
    """The decoder's length refused texts of more than 10,000 characters that the encoder reads."""

    class Words:
        min_num_tokens = staticmethod(len)

    limits = replace(LIMITS, encoder=EncoderLimits(kind, 20_000, may_raise=True))
    words = "encoder's text has at least 20001 tokens but scheduler.max_encoder_len is 20000: shorten it or raise"
    if kind == "audio":
        words = "prompt has at least 20001 tokens but model.max_model_len is 4"
    else:
        limits.check_text(cast(Any, Words), "x" * 20_000)
    with pytest.raises(RequestError, match=words):
        limits.check_text(cast(Any, Words), "x" * 20_001)


def test_the_largest_request_that_can_be_answered_passes():
    LIMITS.check(PromptContent((0, 9, 9)), SamplingParams(n=1024, stop_token_ids=[9]))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts that were checked."""
    lengths: list[int] = []
    check = RequestLimits.check

    def noting(limits: RequestLimits, prompt: PromptContent, sampling: SamplingParams) -> None:
        lengths.append(len(prompt.token_ids))
        check(limits, prompt, sampling)

    monkeypatch.setattr(RequestLimits, "check", noting)
    return lengths


def test_a_prompt_is_checked_once(checked: list[int]):
    with LLM(MODEL, num_blocks=64, device="cpu", max_model_len=64) as llm:
        params = SamplingParams(max_tokens=1)
        prompts = [{"prompt_token_ids": [60] * length} for length in (5, 64, 7)]
        outputs = llm.generate(prompts, params, on_error="row", use_tqdm=False)
        assert [output.error is None for output in outputs] == [True, False, True]
        assert checked == [5, 64, 7]
        # One that comes from outside is checked where it comes in.
        with pytest.raises(RequestError):
            llm.llm_engine.add_request((), params)
        assert checked == [5, 64, 7, 0]


def test_a_row_is_checked_once(checked: list[int], tmp_path: Path):
    rows = [{"prompt_token_ids": [60] * length, "max_tokens": 1} for length in (5, 300, 7)]
    answers = answers_of_job(tmp_path, MODEL, rows, dtype="auto", num_blocks=64)
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [None, "prompt_too_long", None]
    # In the order of their beginnings.
    assert checked == [5, 7, 300]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, [3]),
        ("3", [3]),
        (np.int64(3), [3]),
        ([], []),
        (["3", 4, "5"], [3, 4, 5]),
        ((each for each in "12"), [1, 2]),
        ({"7": "kept"}, [7]),
        (2**70, [2**70]),
        # The ids of no request.
        ("", [-1]),
        ("x", [-1]),
        ("-3", [-1]),
        (" 3", [-1]),
        ("٣", [-1]),
        ("9" * 5000, [-1]),
    ],
)
def test_request_ids_may_be_numbers_texts_or_iterables(given: object, expected: list[int]):
    assert as_request_ids(given) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [(None, "None"), (1.0, "1.0"), (True, "True"), (b"12", "b'12'"), (["1", None], "None"), ([["1"]], "['1']")],
)
def test_invalid_request_id_is_named(given: object, named: str):
    with pytest.raises(TypeError) as refused:
        as_request_ids(given)
    assert str(refused.value) == (
        f"{named} is not a request id: give the number that add_request returned, an output's request_id, or several "
        f"of these in a list"
    )


def test_request_errors_are_type_or_value_errors():
    LIMITS.check(PromptContent((1, 2)), SamplingParams())
    for ids, sampling in (("12", SamplingParams()), ([1.5], SamplingParams()), ([1], None)):
        with pytest.raises(TypeError, match=r"^prompt_token_ids.* number|^sampling .*SamplingParams$"):
            LIMITS.check(PromptContent(ids), sampling)
    for ids in ([], [10], [-1], [2**70], [1] * 8):
        with pytest.raises(ValueError, match=r"no tokens|vocabulary|64 bits|max_model_len"):
            LIMITS.check(PromptContent(ids), SamplingParams())
