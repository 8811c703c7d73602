"""Pooled rows: transformers' numbers, the same bits with any scheduling, and reported tasks."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import ranks
import tokenizers
import torch
from json_files import edit
from pooling_models import (
    PROMPTS,
    SETTINGS,
    SIZES,
    WAYS,
    change_of,
    changed_folder,
    changed_tensors,
    pooling_folder,
    reference_difference,
    reference_logits_of_labels,
    reference_vector,
)
from reference_models import checkpoint_folder

import spmd_worker.worker.runner.pooling as pooling_module
from spmd_worker import (
    LLM,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PromptsRefusedError,
    SamplingParams,
    ScoringOutput,
    ScoringRequestOutput,
)
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model.pooler import Pooler
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.sequence.pooling_params import pooled_sampling, resolve_pooling
from spmd_worker.worker.runner.pooling import RowPooling

RAW = PoolingParams(use_activation=False)


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def pooled(name: str, prompts: list[list[int]] = PROMPTS, times: int = 1, **settings: Any) -> list[list[float]]:
    """Result of the last of several calls."""
    runner = {"runner": "pooling"} if name in ("causal", "untied") else {}
    with LLM(pooling_folder(name), **{**SETTINGS, **runner, **settings}) as llm:
        for _ in range(times):
            outputs = llm.encode(ids(prompts), use_tqdm=False)
        return [output.outputs.data for output in outputs]


@cache
def plainly_pooled(name: str) -> list[list[float]]:
    return pooled(name)


def assert_near(ours: list[float], theirs: torch.Tensor) -> None:
    assert len(ours) == len(theirs)
    assert (torch.tensor(ours, dtype=torch.float64) - theirs.double()).abs().max() < 1e-5


EMBEDDERS = [pytest.param(name, marks=pytest.mark.matrix) for name in ("mean", "cls", "last", "causal", "untied")]


@pytest.mark.parametrize("name", ["dense", *EMBEDDERS])
def test_vectors_equal_transformers_and_sentence_transformers_modules(name: str) -> None:
    for ours, prompt in zip(pooled(name), PROMPTS, strict=True):
        assert_near(ours, reference_vector(name, prompt))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["labels", "reward"])
def test_scores_equal_classifier_with_and_without_activation(name: str) -> None:
    with LLM(pooling_folder(name), **SETTINGS) as llm:
        raw = llm.encode(ids(PROMPTS), RAW, use_tqdm=False)
        activated = llm.classify(ids(PROMPTS), use_tqdm=False)
        rewards = llm.reward(ids(PROMPTS), use_tqdm=False) if name == "reward" else raw
        tasks = llm.supported_tasks
    assert tasks == (("classify", "score", "reward") if name == "reward" else ("classify",))
    for prompt, scores, output in zip(PROMPTS, raw, activated, strict=True):
        logits = reference_logits_of_labels(name, prompt)
        assert_near(scores.outputs.data, logits)
        assert_near(output.outputs.probs, logits.sigmoid() if name == "reward" else logits.softmax(0))
    assert [output.outputs.data for output in rewards] == [output.outputs.data for output in raw]


@pytest.mark.gate("untied")
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["causal", "untied"])
def test_classifier_from_two_tokens_scores_like_qwen3_reranker(name: str) -> None:
    with LLM(pooling_folder(name), classifier_from_token=["n", "y"], **SETTINGS) as llm:
        tokenizer = llm.llm_engine.need_tokenizer()
        no, yes = tokenizer.token_id("n"), tokenizer.token_id("y")
        assert no is not None
        assert yes is not None
        outputs = llm.encode(ids(PROMPTS[:3]), RAW, use_tqdm=False)
        score = llm.score("a text", "a text", use_tqdm=False)[0].outputs.score
        difference = reference_difference(name, tokenizer.encode("a texta text"), no, yes)
        assert_near([score], difference.sigmoid()[None])
    for prompt, output in zip(PROMPTS, outputs):
        assert_near(output.outputs.data, reference_difference(name, prompt, no, yes)[None])


def test_matryoshka_dimensions_are_truncated_then_normalised() -> None:
    with LLM(pooling_folder("last"), **SETTINGS) as llm:
        for dimensions in (16, 32):
            (output,) = llm.embed(ids(PROMPTS[:1]), pooling_params=PoolingParams(dimensions=dimensions), use_tqdm=False)
            assert_near(output.outputs.embedding, reference_vector("last", PROMPTS[0], dimensions))
        for dimensions, words in ((17, "one of 16, 32"), (65, "more than the 64")):
            with pytest.raises(ValueError, match=words):
                llm.embed(ids(PROMPTS[:1]), pooling_params=PoolingParams(dimensions=dimensions), use_tqdm=False)
        (whole,) = llm.embed(ids(PROMPTS[:1]), use_tqdm=False)
        nothing = {"chat_template": None, "tokenization_kwargs": {}, "use_tqdm": False}
        cosine = llm.score("ab", ["ab", "naïve café"], **nothing)
        for key, value in (("chat_template", "{{ messages }}"), ("tokenization_kwargs", {"truncation": True})):
            with pytest.raises(ValueError, match=f"{key}="):
                llm.score("ab", "ab", **{**nothing, key: value})
    assert whole.outputs.hidden_size == SIZES["hidden_size"]
    assert cosine[0].outputs.score == pytest.approx(1.0, abs=1e-12)
    assert cosine[1].outputs.score < 0.999


@pytest.mark.gate("in chunks", "recomputed")
@pytest.mark.guarantee("Vectors and scores: the row alone", is_control_inside=True)
@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_pooled_row_bits_are_independent_of_scheduling(way: str) -> None:
    for name in ("mean", "last", "cls"):
        assert pooled(name, times=2, **WAYS[way]) == plainly_pooled(name), name


@pytest.mark.guarantee("Vectors and scores: the row alone", is_control_inside=True)
def test_mean_bits_are_independent_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pooled("mean", PROMPTS[:1])
    assert pooled("mean", PROMPTS[:1], **WAYS["in chunks"]) == plain

    def summed(totals: torch.Tensor, hidden: torch.Tensor, spans: list[tuple[int, int]]) -> None:
        for total, (start, end) in zip(totals, spans, strict=True):
            total.add_(hidden[start:end].float().sum(0))

    # The control: each chunk is summed by itself.
    monkeypatch.setattr(pooling_module, "add_rows", summed)
    assert pooled("mean", PROMPTS[:1], **WAYS["in chunks"]) != plain


def test_step_sums_equal_sums_per_row_and_token() -> None:
    chance = torch.Generator().manual_seed(2)
    for lengths in ([1], [5, 5], [1, 9, 2, 9, 30], [7] * 12, [40, 1, 1]):
        ends = [0, *accumulate(lengths)]
        spans = list(pairwise(ends))
        for dtype in (torch.float32, torch.bfloat16):
            hidden = torch.randn(ends[-1], 24, generator=chance).to(dtype)
            begun = torch.randn(len(lengths), 24, generator=chance)
            totals, expected = begun.clone(), begun.clone()
            pooling_module.add_rows(totals, hidden, spans)
            for row, (start, end) in enumerate(spans):
                for token in range(start, end):
                    expected[row] = expected[row] + hidden[token].float()
            assert torch.equal(totals, expected), lengths


def test_mean_ignores_prefix_cache_last_token_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for name in ("mean", "last"):
        with LLM(pooling_folder(name), **SETTINGS) as llm:
            first, again = [llm.embed(ids(PROMPTS[:1]), use_tqdm=False)[0] for _ in range(2)]
        assert first.outputs == again.outputs
        found[name] = again.num_cached_tokens
    assert found == {"mean": 0, "last": 36}
    # The control: with what is cached, a mean would lack the tokens that were found.
    monkeypatch.setattr(PoolingConfig, "needs_all_tokens", False)
    with LLM(pooling_folder("mean"), **SETTINGS) as llm:
        llm.embed(ids(PROMPTS[:1]), use_tqdm=False)
        with pytest.raises(KeyError):
            llm.embed(ids(PROMPTS[:1]), use_tqdm=False)


def test_rows_that_are_aborted_leave_nothing_behind() -> None:
    with LLM(pooling_folder("mean"), **{**SETTINGS, **WAYS["in chunks"]}) as llm:
        engine = llm.llm_engine
        plain = llm.embed(ids(PROMPTS[:1]), use_tqdm=False)[0].outputs
        # `driver_worker` is of executors in this process, which this one is.
        pooling: RowPooling = engine.executor.driver_worker.model_runner._pooling  # type: ignore[attr-defined]  # in process
        request = _add(llm, PROMPTS[4])
        assert engine.step() + engine.step() == []
        assert list(pooling._begun) == [request]
        engine.abort_request(request)
        outputs = engine.step() + engine.step()
        assert [(output.vector, output.error, output.finished) for output in outputs] == [(None, None, True)]
        assert llm.embed(ids(PROMPTS[:1]), use_tqdm=False)[0].outputs == plain
        assert not pooling._begun


def _add(llm: LLM, prompt: list[int]) -> Any:
    config = llm.llm_engine.limits.pooling
    assert config is not None
    params = resolve_pooling(PoolingParams(), config)
    return llm.llm_engine.requests.admit(PromptContent(tuple(prompt), pooling=params), pooled_sampling(params, config))


def test_run_reports_its_tasks_and_rejects_others() -> None:
    with LLM(checkpoint_folder("llama_tied"), **SETTINGS) as llm:
        assert llm.supported_tasks == llm.llm_engine.executor.supported_tasks == ("generate",)
        with pytest.raises(ValueError, match=r"^embed .*generates .*=pooling"):
            llm.embed(ids(PROMPTS[:1]), use_tqdm=False)
        with pytest.raises(ValueError, match=r"^encode .*generates .*=pooling"):
            llm.encode(ids(PROMPTS[:1]), use_tqdm=False)
        with pytest.raises(ValueError, match=r"^pooling .*generates .*=pooling"):
            llm.llm_engine.add_request("0", ids(PROMPTS[:1])[0], PoolingParams())
    with LLM(pooling_folder("mean"), **SETTINGS) as llm:
        assert llm.supported_tasks == llm.llm_engine.executor.supported_tasks == ("embed", "score", "token_embed")
        with pytest.raises(PromptsRefusedError, match=r"run pools .*=generate"):
            llm.generate(ids(PROMPTS[:1]), SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(ValueError, match=r"^classify .*: .*embed, score"):
            llm.classify(ids(PROMPTS[:1]), use_tqdm=False)
        with pytest.raises(PromptsRefusedError, match=r"65 tokens .*truncate_prompt_tokens"):
            llm.embed(ids([[5] * 65]), use_tqdm=False)
        (cut,) = llm.embed(ids([[7, *[5] * 64]]), truncate_prompt_tokens=-1, use_tqdm=False)
        assert cut.outputs == llm.embed(ids([[5] * 64]), use_tqdm=False)[0].outputs


@pytest.mark.finding(number="D12")
def test_outputs_are_of_vllms_classes() -> None:
    with LLM(pooling_folder("last"), **SETTINGS) as llm:
        (vector,), (score,) = llm.embed("a", use_tqdm=False), llm.score("a", "b", use_tqdm=False)
        (plain,) = llm.encode("a", use_tqdm=False)
    assert (type(vector), type(vector.outputs)) == (EmbeddingRequestOutput, EmbeddingOutput)
    assert (type(score), type(score.outputs)) == (ScoringRequestOutput, ScoringOutput)
    assert (type(plain), type(plain.outputs)) == (PoolingRequestOutput, PoolingOutput)
    with LLM(pooling_folder("labels"), **SETTINGS) as llm:
        (labels,) = llm.classify(ids(PROMPTS[:1]), use_tqdm=False)
    assert (type(labels), type(labels.outputs)) == (ClassificationRequestOutput, ClassificationOutput)
    assert all(isinstance(each, PoolingRequestOutput) for each in (vector, score, labels))


@pytest.mark.matrix
def test_non_finite_vector_fails_only_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Pooler.forward

    def broken(self: Pooler, pooled: torch.Tensor, **options: Any) -> torch.Tensor:
        vector = own(self, pooled, **options)
        return vector if abs(float(vector[0]) - first) > 1e-7 else vector * torch.inf

    plain = pooled("last", PROMPTS[:3])
    first = plain[1][0]
    monkeypatch.setattr(Pooler, "forward", broken)
    with LLM(pooling_folder("last"), **SETTINGS) as llm:
        requests = [_add(llm, prompt) for prompt in PROMPTS[:3]]
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {int(output.request_id): output for output in llm.llm_engine.step()}
        with pytest.raises(ValueError, match=r"vector .*not finite"):
            llm.embed(ids(PROMPTS[1:2]), use_tqdm=False)
    assert [outputs[each].vector for each in requests] == [plain[0], None, plain[2]]
    assert outputs[requests[1]].error_code == "non_finite_vector"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runner": "generate", "pooling_type": "mean"}, "pooling_type=mean needs runner=pooling"),
        ({"runner": "draft"}, "runner=draft"),
        ({"classifier_from_token": ["no"]}, "must be two tokens"),
        ({"classifier_from_token": ["no", "such token"]}, "two tokens of the model's tokenizer.json"),
    ],
)
def test_settings_that_go_nowhere_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(pooling_folder("causal"), **SETTINGS, **settings)


def test_label_outside_the_models_vocabulary_is_rejected(tmp_path: Path) -> None:
    folder = shutil.copytree(pooling_folder("causal"), tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    extra = [f"<more{number}>" for number in range(SIZES["vocab_size"] - tokenizer.get_vocab_size() + 1)]
    tokenizer.add_tokens(extra)
    tokenizer.save(str(folder / "tokenizer.json"))
    number = tokenizer.token_to_id(extra[-1])
    assert number == SIZES["vocab_size"]
    with pytest.raises(ConfigError, match=rf"'{extra[-1]}' is token {number}.*vocab_size={number}"):
        LLM(folder, classifier_from_token=["n", extra[-1]], **SETTINGS)


def test_new_weights_change_vectors_and_skip_lm_head() -> None:
    def doubled(model: Any) -> torch.Tensor:
        weight: torch.Tensor = model.get_parameter("score.weight").detach() * 2
        return weight

    with LLM(pooling_folder("labels"), **SETTINGS) as llm:
        before = llm.encode(ids(PROMPTS[:1]), RAW, use_tqdm=False)[0].outputs.data
        (weights,) = llm.apply_model(doubled)
        with llm.weight_update(partial=True) as load:
            load("score.weight", weights)
            load("lm_head.weight", torch.zeros(SIZES["vocab_size"], SIZES["hidden_size"]))
        after = llm.encode(ids(PROMPTS[:1]), RAW, use_tqdm=False)[0].outputs.data
    assert after == [2 * score for score in before]


@pytest.mark.parametrize("settings", [{"runner": "pooling"}, {"classifier_from_token": ["n", "y"]}], ids=str)
@pytest.mark.parametrize("given", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str)
def test_bidirectional_model_is_rejected_without_pooling_config(
    tmp_path: Path, settings: dict[str, Any], given: dict[str, Any]
) -> None:
    """Regression: it was computed with causal attention."""
    folder = tmp_path / "model"
    shutil.copytree(pooling_folder("causal"), folder)
    edit(folder / "config.json", **given)
    (key,) = given
    with pytest.raises(ModelConfigError, match=rf"config\.json: {key}={given[key]} .*attends .*before"):
        LLM(folder, **SETTINGS, **settings)


def by_an_update(llm: LLM, name: str) -> None:
    with llm.weight_update() as load:
        for key, tensor in changed_tensors(name).items():
            load(key, tensor)


def as_trainers_do(llm: LLM, name: str) -> None:
    # `driver_worker` is of executors in this process, which this one is.
    llm.llm_engine.executor.driver_worker.model_runner.model.load_weights(changed_tensors(name).items())


def from_a_folder(llm: LLM, name: str) -> None:
    llm.collective_rpc("reload_weights", args=(str(changed_folder(name)),))


def asleep(llm: LLM, name: str) -> None:
    llm.sleep(level=2)
    llm.wake_up()
    from_a_folder(llm, name)


def in_place(llm: LLM, name: str) -> None:
    del name

    def change(model: Any) -> None:
        for key, parameter in model.named_parameters():
            parameter.data.mul_(change_of(key))

    llm.apply_model(change)
    llm.reset_prefix_cache()


@pytest.mark.gate("causal")
@pytest.mark.parametrize("name", ["causal", pytest.param("untied", marks=pytest.mark.matrix)])
def test_new_weights_of_two_token_classifier_change_scores(name: str) -> None:
    """Rows of a tied embedding were held twice, and each of these ways failed after it had begun to write."""
    ways: list[Callable[[LLM, str], None]] = [by_an_update, as_trainers_do, from_a_folder, asleep, in_place]
    options: dict[str, Any] = {"classifier_from_token": ["n", "y"], **SETTINGS}

    def scores(llm: LLM) -> list[list[float]]:
        return [each.outputs.data for each in llm.encode(ids(PROMPTS[:3]), RAW, use_tqdm=False)]

    with LLM(changed_folder(name), **options) as llm:
        new = scores(llm)
    with LLM(pooling_folder(name), **options) as llm:
        old = scores(llm)
        for way in ways:
            way(llm, name)
            assert scores(llm) == new != old, way
            llm.collective_rpc("reload_weights")
            assert scores(llm) == old, way


def test_apply_model_does_not_round_classifier_rows() -> None:
    def zero(model: Any) -> None:
        model.lm_head.weight.data.zero_()

    with LLM(pooling_folder("causal"), classifier_from_token=["n", "y"], dtype="bfloat16", **SETTINGS) as llm:
        before = llm.encode(ids(PROMPTS[:1]), RAW, use_tqdm=False)[0].outputs.data
        assert llm.apply_model(lambda model: model.lm_head.weight.dtype) == [torch.bfloat16]
        assert llm.encode(ids(PROMPTS[:1]), RAW, use_tqdm=False)[0].outputs.data == before
        llm.apply_model(zero)
        llm.reset_prefix_cache()
        assert llm.encode(ids(PROMPTS[:1]), RAW, use_tqdm=False)[0].outputs.data == [0.0]


def test_llm_engine_gives_equal_vectors_by_name() -> None:
    with LLM(pooling_folder("last"), **SETTINGS) as llm:
        plain = plainly_pooled("last")
        engine = llm.llm_engine
        for index, prompt in enumerate(ids(PROMPTS)):
            assert engine.add_request(f"row {index}", prompt, PoolingParams()) == f"row {index}"
        engine.add_request("cut", ids(PROMPTS)[0], PoolingParams(dimensions=16, truncate_prompt_tokens=3))
        with pytest.raises(ValueError, match=r"^classify .*: .*embed, score"):
            engine.add_request("other", ids(PROMPTS)[0], PoolingParams(task="classify"))
        with pytest.raises(ValueError, match="this run pools"):
            engine.add_request("tokens", ids(PROMPTS)[0], SamplingParams(max_tokens=2))
        found = {}
        while engine.has_unfinished_requests():
            found.update({output.request_id: output.outputs.data for output in engine.step()})
        (cut,) = llm.embed(ids([PROMPTS[0][-3:]]), pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
        assert found == {**{f"row {index}": each for index, each in enumerate(plain)}, "cut": cut.outputs.embedding}


@pytest.mark.matrix
def test_pooled_bits_equal_on_two_pipeline_workers(forked_workers_of_module: None) -> None:
    settings = {"pipeline_parallel_size": 2, "distributed_executor_backend": "multiproc"}
    for name in ("mean", "last"):
        assert pooled(name, **settings) == plainly_pooled(name)


@pytest.mark.matrix
def test_two_replicas_give_the_same_bits(tmp_path: Path) -> None:
    source = """
        import json, os, sys
        from pathlib import Path
        from spmd_worker import LLM
        prompts, settings = json.loads(sys.argv[2])
        with LLM(sys.argv[1], data_parallel_size=2, **settings) as llm:
            outputs = llm.encode([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        vectors = [output.outputs.data for output in outputs]
        Path(sys.argv[3], os.environ["RANK"]).write_text(json.dumps(vectors))
        """
    arguments = [pooling_folder("mean"), json.dumps([PROMPTS, SETTINGS]), tmp_path]
    ranks.run_ranks(source, 2, 120, arguments).checked()
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [plainly_pooled("mean")] * 2
