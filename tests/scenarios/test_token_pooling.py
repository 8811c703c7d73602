"""Numbers for each token of a row: those of transformers and sentence-transformers, the same bits with any scheduling,
and clear errors.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_models import encoder_folder, error, logits_of
from family_checkpoints import CASES, family_folder, stir
from peft import LoraConfig, PeftModel, get_peft_model
from pooling_models import (
    PROMPTS,
    SETTINGS,
    SIZES,
    SMALL_STEPS,
    WAYS,
    changed_folder,
    changed_tensors,
    hidden_states,
    pooling_folder,
    reference_logits_of_tokens,
    write_modules,
)
from reference_models import random_prompt
from torch.nn import functional as F

from spmd_worker import LLM, LateChunkingParams, LoRARequest, PoolingOutput, PoolingParams, PoolingRequestOutput
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.model.pooler import Pooler
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.transport.frames import MAX_FRAME_BYTES
from spmd_worker.replica.sequence.pooling_params import MAX_STEP_NUMBERS, MAX_TOKEN_NUMBERS, resolve_pooling
from spmd_worker.worker.runner.pooling import RowPooling

RAW = PoolingParams(use_activation=False)
TEXTS = ["hello world", "naïve café 你好", "the cache " * 9]


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def pooled(name: str, task: str, params: Any = None, times: int = 1, **settings: Any) -> list[list[list[float]]]:
    """Numbers of the last of several calls."""
    with LLM(pooling_folder(name), **{**SETTINGS, "runner": "pooling", **settings}) as llm:
        for _ in range(times):
            outputs = llm.encode(ids(PROMPTS), params, pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


@cache
def plainly_pooled(name: str, task: str, dtype: str = "float32") -> list[list[list[float]]]:
    return pooled(name, task, dtype=dtype)


@pytest.mark.parametrize("name", ["tokens", "steps", pytest.param("neox_tokens", marks=pytest.mark.stress)])
def test_token_scores_of_decoders_equal_transformers(name: str) -> None:
    raw, activated = pooled(name, "token_classify", RAW), pooled(name, "token_classify")
    for prompt, scores, probs in zip(PROMPTS, raw, activated, strict=True):
        logits = reference_logits_of_tokens(name, prompt)
        assert error(scores, logits) < 1e-5
        assert error(probs, logits.softmax(1)) < 1e-5
        # The control: the scores of the tokens before.
        assert len(prompt) == 1 or error(scores, logits.roll(1, 0)) > 1e-2


@pytest.mark.parametrize("name", ["dense", pytest.param("last", marks=pytest.mark.stress)])
def test_token_vectors_of_decoders_equal_transformers(name: str) -> None:
    plain, normalised = (pooled(name, "token_embed", PoolingParams(normalize=each)) for each in (False, None))
    for prompt, ours, unit in zip(PROMPTS, plain, normalised, strict=True):
        states = hidden_states(name, prompt)
        assert error(ours, states) < 1e-5
        assert error(unit, F.normalize(states, dim=1)) < 1e-5


def test_activation_is_that_of_the_number_of_labels() -> None:
    for name, expected in (("bert_tokens", lambda x: x.softmax(1)), ("xlm_tokens", torch.sigmoid)):
        with LLM(encoder_folder(name), device="cpu", max_model_len=100) as llm:
            outputs = llm.encode(ids(PROMPTS[:2]), use_tqdm=False)
        for output, prompt in zip(outputs, PROMPTS, strict=False):
            assert error(output.outputs.data, expected(logits_of(name, prompt))) < 1e-5


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.stress), 16, 2**63 - 1])
def test_late_chunks_are_normalised_means_of_states(size: int) -> None:
    params = PoolingParams(late_chunking_params={"chunk_size": size})  # type: ignore[arg-type]  # a mapping too
    plain = pooled("last", "token_embed", params)
    for prompt, ours in zip(PROMPTS, plain, strict=True):
        means = [each.mean(0) for each in hidden_states("last", prompt).split(min(size, len(prompt)))]
        assert error(ours, F.normalize(torch.stack(means), dim=1)) < 1e-5
    for way in ("in chunks", "recomputed"):
        assert pooled("last", "token_embed", params, times=2, **WAYS[way]) == plain, way
    if size == 1:
        assert plain == plainly_pooled("last", "token_embed")


def test_late_chunks_name_their_tokens_and_characters() -> None:
    params = PoolingParams(task="token_embed", late_chunking_params=LateChunkingParams(4))
    with LLM(encoder_folder("bert_mean"), device="cpu") as llm:
        text, of_ids = llm.encode([TEXTS[1], {"prompt_token_ids": [5, 6, 7, 8, 9]}], params, use_tqdm=False)
        with pytest.raises(ValueError, match=r"chunk_size=4 is for token_embed, and the task is embed"):
            llm.embed(TEXTS[1], pooling_params=replace(params, task=None), use_tqdm=False)
        llm.llm_engine.add_request("a", TEXTS[1], params)
        while not (outputs := llm.llm_engine.step()):
            pass
        assert replace(outputs[0], request_id=text.request_id) == text
    assert text.late_chunking is not None
    assert of_ids.late_chunking is not None
    chunks, num_tokens = text.late_chunking.chunks, len(text.prompt_token_ids)
    assert [each.token_range for each in chunks] == [
        (start, min(start + 4, num_tokens)) for start in range(0, num_tokens, 4)
    ]
    assert len(chunks) == len(text.outputs.data)
    places = [each.char_range for each in chunks if each.char_range is not None]
    assert (places[0][0], places[-1][1]) == (0, len(TEXTS[1]))
    assert [each.char_range for each in of_ids.late_chunking.chunks] == [None, None]


@pytest.mark.parametrize("name", ["bert_mean", pytest.param("modern_dense", marks=pytest.mark.stress)])
def test_token_vectors_equal_sentence_transformers(name: str) -> None:
    # A second of each process that collects the tests.
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(encoder_folder(name)), device="cpu")
    with LLM(encoder_folder(name), device="cpu") as llm:
        assert llm.supported_tasks == ("embed", "score", "token_embed")
        outputs = llm.encode(TEXTS, PoolingParams(task="token_embed", normalize=False), use_tqdm=False)
        units = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
        pair = llm.encode(TEXTS[0], use_tqdm=False) + llm.embed(TEXTS[0], use_tqdm=False)
    for text, output, unit in zip(TEXTS, outputs, units, strict=True):
        expected = theirs.encode(text, output_value="token_embeddings")
        assert error(output.outputs.data, expected) < 1e-5
        assert error(unit.outputs.data, F.normalize(expected, dim=1)) < 1e-5
    assert pair[0].outputs.data == pair[1].outputs.embedding


@pytest.mark.gate("in chunks", "recomputed")
@pytest.mark.guarantee("Vectors and scores: the row alone", is_control_inside=True)
@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_token_numbers_are_independent_of_scheduling(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, task in (("tokens", "token_classify"), ("last", "token_embed")):
        assert pooled(name, task, times=2, **WAYS[way]) == plainly_pooled(name, task), name
    kept = plainly_pooled("tokens", "token_classify", "bfloat16")
    assert pooled("tokens", "token_classify", dtype="bfloat16", **WAYS[way]) == kept
    if way == "in chunks":
        # The control: a head whose numbers depend on the number of tokens of its step.
        monkeypatch.setattr(Pooler, "_of_tokens", scores_at_once)
        assert pooled("tokens", "token_classify", **WAYS[way]) != pooled("tokens", "token_classify")


def scores_at_once(self: Pooler, states: torch.Tensor, **_: Any) -> torch.Tensor:
    scores = F.linear(states, self.score, self.score_bias)
    return scores / (1 + 1e-4 * len(states))


def test_rows_of_both_kinds_share_a_step() -> None:
    """A row of a vector, and one of its tokens' vectors, in steps that hold some of each."""
    params = [PoolingParams(task=task) for task in ("embed", "token_embed") * 3]
    with LLM(pooling_folder("mean"), **SETTINGS, **SMALL_STEPS) as llm:
        mixed = llm.encode(ids(PROMPTS), params, use_tqdm=False)
        (alone,) = llm.encode(ids(PROMPTS[4:5]), use_tqdm=False)
    assert mixed[4].outputs == alone.outputs
    assert [len(each.outputs.data) for each in mixed[1::2]] == [len(prompt) for prompt in PROMPTS[1::2]]
    assert {len(vector) for each in mixed[1::2] for vector in each.outputs.data} == {64}
    assert mixed[5].outputs.data == pooled("mean", "token_embed")[5]


def test_prefix_cache_gives_nothing_to_rows_of_tokens() -> None:
    with LLM(pooling_folder("last"), **SETTINGS) as llm:
        llm.embed(ids(PROMPTS[:1]), use_tqdm=False)
        (tokens,) = llm.encode(ids(PROMPTS[:1]), pooling_task="token_embed", use_tqdm=False)
        (row,) = llm.embed(ids(PROMPTS[:1]), use_tqdm=False)
    assert tokens.num_cached_tokens == 0 < row.num_cached_tokens
    assert len(tokens.outputs.data) == len(PROMPTS[0])


def test_aborted_rows_leave_no_tokens_behind() -> None:
    with LLM(pooling_folder("tokens"), **{**SETTINGS, "max_num_batched_tokens": 16}) as llm:
        engine = llm.llm_engine
        # `driver_worker` is of executors in this process, which this one is.
        pooling: RowPooling = engine.executor.driver_worker.model_runner._pooling  # type: ignore[attr-defined]  # in process
        engine.add_request("a", ids(PROMPTS[4:5])[0], PoolingParams(task="token_classify"))
        assert engine.step() + engine.step() == []
        ((chunk, *_),) = pooling._begun_tokens.values()
        assert chunk.shape == (16, 5)
        engine.abort_request("a")
        engine.add_request("b", ids(PROMPTS[1:2])[0], PoolingParams())
        while engine.has_unfinished_requests():
            output = engine.step()[-1:]
        assert not pooling._begun_tokens
    (output,) = output
    assert isinstance(output, PoolingRequestOutput)
    assert isinstance(output.outputs, PoolingOutput)
    assert np.shape(output.outputs.data) == (3, 5)


def test_non_finite_token_fails_only_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Pooler._of_tokens

    def broken(self: Pooler, states: torch.Tensor, **options: Any) -> torch.Tensor:
        scores = own(self, states, **options)
        scores[-1, 2] = float("inf") if len(states) == 3 else scores[-1, 2]
        return scores

    monkeypatch.setattr(Pooler, "_of_tokens", broken)
    with LLM(pooling_folder("tokens"), **SETTINGS) as llm:
        with pytest.raises(ValueError, match="vector is not finite"):
            llm.encode(ids(PROMPTS[1:2]), use_tqdm=False)
        assert len(llm.encode(ids(PROMPTS[:1]), use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("name", "task", "given", "words"),
    [
        ("labels", "token_classify", {}, r"token_classify .*model does classify; .*\*ForTokenClassification$"),
        ("last", "token_classify", {}, r"token_classify .*embed, score, token_embed; .*names a"),
        ("labels", "token_embed", {}, "token_embed .*classify; vectors of tokens need an embedding model"),
        ("tokens", "token_embed", {}, "token_embed .*model does token_classify; vectors"),
        ("tokens", "classify", {}, "classify is not supported: this model does token_classify$"),
        ("last", "token_embed", {"dimensions": 16}, "dimensions=16 .*with token_embed, .*leave it out"),
        ("tokens", None, {"dimensions": 16}, "dimensions=16 .*with token_classify"),
        ("tokens", None, {"normalize": True}, "normalize=True is not supported: this model gives scores"),
        ("last", "token_embed", {"use_activation": False}, "use_activation=False .*gives vectors"),
        (
            "last",
            "token_embed",
            {"late_chunking_params": {"size": 3}},
            "late_chunking_params has 'size', not chunk_size",
        ),
        (
            "last",
            "token_embed",
            {"late_chunking_params": {"chunk_size": 0}},
            "late_chunking_params.chunk_size=0 must be",
        ),
        (
            "last",
            "token_embed",
            {"late_chunking_params": 3},
            "late_chunking_params=3 must be a mapping with chunk_size",
        ),
    ],
)
def test_unsupported_token_parameter_is_rejected(name: str, task: str | None, given: dict[str, Any], words: str):
    config = read_model_files(pooling_folder(name)).model_config.pooling
    with pytest.raises(ValueError, match=words):
        resolve_pooling(PoolingParams(task=task, **given), config)


def test_rows_with_too_many_numbers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_worker.engine.validation.MAX_TOKEN_NUMBERS", 200)
    with LLM(pooling_folder("tokens"), **SETTINGS) as llm:
        with pytest.raises(ValueError, match=r"token_classify with 5 numbers .*at most 40 tokens, not 60\n"):
            llm.encode(ids(PROMPTS[4:5]), use_tqdm=False)
        assert len(llm.encode(ids(PROMPTS[:1]), use_tqdm=False)[0].outputs.data) == 40
        monkeypatch.setattr("spmd_worker.engine.validation.MAX_STEP_NUMBERS", 200)
        with pytest.raises(ValueError, match=r"5 numbers .*max_num_batched_tokens=\d+ to be at most 40: lower it"):
            llm.encode(ids(PROMPTS[:1]), use_tqdm=False)
    assert 4 * (MAX_STEP_NUMBERS + MAX_TOKEN_NUMBERS) < MAX_FRAME_BYTES


def test_token_scorer_takes_no_pooling_type() -> None:
    with pytest.raises(ConfigError, match=r"^pooling_type=mean: .*numbers for each token.*leave it out"):
        LLM(pooling_folder("tokens"), pooling_type="mean", **SETTINGS)


def has_token_scores(name: str) -> bool:
    return hasattr(transformers, f"{CASES[name][0]}ForTokenClassification")


@pytest.mark.stress
@pytest.mark.parametrize("name", list(filter(has_token_scores, CASES)))
def test_token_scores_of_every_family_equal_transformers(name: str, tmp_path: Path) -> None:
    config = read_config(family_folder(name))
    reference = getattr(transformers, f"{CASES[name][0]}ForTokenClassification")(config).float().eval()
    stir(reference)
    reference.save_pretrained(tmp_path)
    prompts = [random_prompt(length, 3, vocab_size=96) for length in (12, 30, 1)]
    with LLM(tmp_path, **{**SETTINGS, "block_size": 16, "max_num_batched_tokens": 16}) as llm:
        outputs = llm.encode(ids(prompts), RAW, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert error(output.outputs.data, expected) < 1e-4


def read_config(folder: Path) -> Any:
    """The configuration of a family's checkpoint, with three labels."""
    found = transformers.AutoConfig.from_pretrained(folder, num_labels=3)
    # The eager attention of Falcon's class adds slopes twice.
    found._attn_implementation = "sdpa" if getattr(found, "alibi", False) else "eager"
    return found


@pytest.mark.parametrize("name", ["steps", pytest.param("tokens", marks=pytest.mark.stress)])
def test_new_weights_change_token_scores(name: str) -> None:
    with LLM(changed_folder(name), **SETTINGS) as llm:
        expected = [each.outputs for each in llm.encode(ids(PROMPTS), use_tqdm=False)]
    with LLM(pooling_folder(name), **SETTINGS) as llm:
        before = [each.outputs for each in llm.encode(ids(PROMPTS), use_tqdm=False)]
        llm.update_weights(changed_tensors(name).items())
        after = [each.outputs for each in llm.encode(ids(PROMPTS), use_tqdm=False)]
    assert after == expected != before


def test_adapter_of_token_scores_equals_peft(tmp_path: Path) -> None:
    """Scores that were trained along are the row's own."""
    folder, prompt = encoder_folder("bert_tokens"), PROMPTS[1]

    def reference() -> Any:
        kind = transformers.AutoModelForTokenClassification
        return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    config = LoraConfig(task_type="TOKEN_CLS", r=4, lora_alpha=8, target_modules=["query", "value"])
    model, generator = get_peft_model(reference(), config), torch.Generator().manual_seed(2)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(reference(), tmp_path).eval()(torch.tensor([prompt])).logits[0]
    adapters = [LoRARequest("a", 1, str(tmp_path)), None]
    with LLM(folder, device="cpu", enable_lora=True) as llm:
        adapted, plain = llm.encode(ids([prompt, prompt]), RAW, lora_request=adapters, use_tqdm=False)
    assert error(adapted.outputs.data, expected) < 1e-4
    assert error(plain.outputs.data, logits_of("bert_tokens", prompt)) < 1e-5
    assert error(plain.outputs.data, expected) > 1e-2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"token_classification_bias": 1}, "token_classification_bias=1 must be true or false"),
        ({"id2label": 5, "num_labels": 1 << 40}, r"num_labels=1099511627776 must be .*1 to 1048576"),
        ({"architectures": ["Gemma3TextForTokenClassification"]}, "use_bidirectional_attention=False is not supported"),
        ({"architectures": ["T5ForTokenClassification"]}, "T5ForTokenClassification.* is unknown"),
        ({"architectures": ["BertForProcessRewardModel"]}, "BertForProcessRewardModel.* is unknown"),
    ],
)
def test_wrong_config_of_token_scores_is_rejected(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = json.loads((pooling_folder("tokens") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **given}))
    with pytest.raises(ModelConfigError, match=words):
        read_model_files(tmp_path)


def test_folder_of_sentence_transformers_scores_no_tokens(tmp_path: Path) -> None:
    shutil.copytree(pooling_folder("tokens"), tmp_path, dirs_exist_ok=True)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    with pytest.raises(ModelConfigError, match=r"modules\.json"):
        read_model_files(tmp_path)


def test_token_scores_may_have_no_bias(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**{**SIZES, "num_labels": 3}, token_classification_bias=False)
    reference = transformers.Qwen3ForTokenClassification(config).float().eval()
    stir(reference)
    reference.save_pretrained(tmp_path)
    with LLM(tmp_path, **SETTINGS) as llm:
        (output,) = llm.encode(ids(PROMPTS[:1]), RAW, use_tqdm=False)
    with torch.no_grad():
        assert error(output.outputs.data, reference(torch.tensor(PROMPTS[:1])).logits[0]) < 1e-4
