"""Encoders: transformers' numbers, the same bits in any batch, transformers' tokenisation of pairs, and no cache."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import (
    ENCODERS,
    WITH_SCORES,
    WITH_TOKENS,
    backbone,
    encoder_folder,
    error,
    expected,
    hidden_states,
    logits_of,
)
from family_mutants import entries
from json_files import edit
from reference_models import random_prompt
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoTokenizer

from spmd_worker import LLM, LLMEngine, PoolingParams
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.distances import rows_of
from spmd_worker.model.layers.embedding import PositionEmbedding
from spmd_worker.model.layers.relative_bias import buckets_of
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.families.encoder_rows import ENCODERS as ROWS
from spmd_worker.model_config.families.family import Family, Names
from spmd_worker.model_config.layer_config import RelativeBias
from spmd_worker.model_config.model_config import family_of, model_config_of, read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import layout_of, stage_of
from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.sequence.metadata import SequenceGroupMetadata
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.memory.estimate import weights_bytes
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

# With the padding token inside, of RoBERTa's positions and of BERT's; longer than every window.
PROMPTS = [random_prompt(40, 1), [17, 1, 0, 40, 5], random_prompt(90, 2), [12], random_prompt(17, 3)]
RAW = PoolingParams(use_activation=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 100, "max_num_batched_tokens": 100, "max_num_seqs": 4}
WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "all at once": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
    "in other blocks": {"block_size": 64},
}
PAIRS = [("hello world", "the cache"), ("naïve café", "hello " * 30), ("a text about the scheduler " * 9, "x")]

# Of heads for tokens, one of each form and of each name.
OF_STRESS = [name for name in WITH_TOKENS if name.partition("_")[0] not in ("bert", "roberta", "modern", "gte")]
# `test_pair_scores_equal_transformers` has their numbers, and no window or distance of theirs is longer than its pairs.
OF_PAIRS = [f"{each}_pairs" for each in ("albert", "bert", "distil", "electra", "euro", "gte", "jina", "mpnet", "xlm")]


def every(but: list[str]) -> pytest.MarkDecorator:
    """Each encoder; the stress tier has those of `but`."""
    names = [name for name in ENCODERS if name != "bert_mean"]
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.stress if name in but else ()) for name in names]
    )


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def pooled(name: str, **settings: Any) -> list[list[float]]:
    with LLM(encoder_folder(name), **{**SETTINGS, **settings}) as llm:
        outputs = llm.encode(ids(PROMPTS), RAW if name in WITH_SCORES else None, use_tqdm=False)
    return [output.outputs.data for output in outputs]


@cache
def plainly_pooled(name: str) -> list[list[float]]:
    return pooled(name)


def most_error(name: str) -> float:
    """The float32 of AMX is as exact as others, and a norm of small numbers in this model makes 1.2e-5 of it."""
    return 2e-5 if name == "modern_labels" else 1e-5


@torch.no_grad()
def worst_error(name: str) -> float:
    return max(error(ours, expected(name, prompt)) for ours, prompt in zip(plainly_pooled(name), PROMPTS, strict=True))


@pytest.mark.guarantee("Encoders compute what transformers computes", is_control_inside=True)
def test_vectors_equal_transformers_and_ignore_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert worst_error("bert_mean") < 1e-5
    assert pooled("bert_mean", **WAYS["one by one"]) == plainly_pooled("bert_mean")
    # The control of both: tokens that see only what is before them.
    monkeypatch.setattr("spmd_worker.worker.runner.batch.AttentionMetadata", replace_sees_later)
    causal = pooled("bert_mean")
    assert max(error(ours, expected("bert_mean", prompt)) for ours, prompt in zip(causal, PROMPTS)) > 1e-3


def replace_sees_later(**given: Any) -> Any:
    from spmd_worker.ops.attention.metadata import AttentionMetadata

    return AttentionMetadata(**{**given, "sees_later": False})


# One of each family, and of each head.
@pytest.mark.gate(
    *("bert_masked", "roberta_tokens", "distil_masked", "electra_labels", "electra_trained", "xlm_cls", "mpnet_labels"),
    *("modern_tokens", "modern_dense", "gte_tokens", "euro_masked", "jina_mean", "nomic_labels", "nomic_pairs"),
    *(
        "albert_trained",
        "deberta_masked",
        "deberta_wide",
        "debertav1_pairs",
        "t5_gates",
        "umt5",
        "gemma",
        "gemma_dense",
    ),
)
@pytest.mark.matrix
@every(OF_STRESS + OF_PAIRS)
def test_numbers_are_those_of_transformers(name: str) -> None:
    assert worst_error(name) < most_error(name)


@pytest.mark.control("Encoders compute what transformers computes")
@pytest.mark.parametrize("name", ["mpnet", "t5", "umt5"])
def test_comparison_detects_buckets_one_token_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(distances: Tensor, bias: RelativeBias, *, sees_later: bool) -> Tensor:
        return buckets_of(distances + 1, bias, sees_later=sees_later)

    assert worst_error(name) < most_error(name)
    monkeypatch.setattr("spmd_worker.model.layers.relative_bias.buckets_of", shifted)
    assert max(error(ours, expected(name, prompt)) for ours, prompt in zip(pooled(name), PROMPTS)) > 1e-2


@pytest.mark.control("Encoders compute what transformers computes")
@pytest.mark.parametrize("name", ["deberta", "debertav1"])
def test_comparison_detects_embedded_distances_one_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_error(name) < most_error(name)
    monkeypatch.setattr(
        "spmd_worker.model.layers.distances.rows_of", lambda distances, config: rows_of(distances + 1, config)
    )
    assert max(error(ours, expected(name, prompt)) for ours, prompt in zip(pooled(name), PROMPTS)) > 1e-2


def test_longest_row_has_buckets_of_released_models() -> None:
    """Beside short ones, of which each has the bits that it has alone."""
    prompts = [random_prompt(512, 5), random_prompt(130, 6), [7]]
    with LLM(encoder_folder("deberta_wide"), device="cpu", max_model_len=512, max_num_batched_tokens=1024) as llm:
        outputs = llm.embed(ids(prompts), use_tqdm=False)
        alone = [llm.embed(ids([prompt]), use_tqdm=False)[0].outputs.embedding for prompt in prompts]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert error(output.outputs.embedding, expected("deberta_wide", prompt)) < 1e-5
    assert [output.outputs.embedding for output in outputs] == alone


@pytest.mark.gate("one by one")
@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_encoder_row_bits_are_independent_of_batching(way: str) -> None:
    names = (
        "bert_mean",
        "xlm_cls",
        "modern_pairs",
        "gemma_dense",
        "mpnet_mean",
        "t5_mean",
        "nomic_pairs",
        "euro_labels",
        "deberta_mean",
        "debertav1_pairs",
        "jina_mean",
        "modern_tokens",
    )
    for name in names:
        assert pooled(name, **WAYS[way]) == plainly_pooled(name), name
        # The gate has one of each kind of positions.
        if way != "one by one" or name in ("bert_mean", "modern_tokens", "t5_mean", "deberta_mean"):
            kept = pooled(name, dtype="bfloat16")
            assert pooled(name, dtype="bfloat16", **WAYS[way]) == kept, name


@pytest.mark.parametrize(
    "name",
    [
        "bert_pairs",
        *[
            pytest.param(each, marks=pytest.mark.matrix)
            for each in (
                "xlm_pairs",
                "modern_pairs",
                "mpnet_pairs",
                "distil_pairs",
                "electra_pairs",
                "nomic_pairs",
                "gte_pairs",
                "euro_pairs",
                "jina_pairs",
                "albert_pairs",
                "deberta_pairs",
                "debertav1_pairs",
            )
        ],
    ],
)
def test_pair_scores_equal_transformers(name: str) -> None:
    theirs = AutoTokenizer.from_pretrained(encoder_folder(name))
    firsts, seconds = [list(each) for each in zip(*PAIRS, strict=True)]
    with LLM(encoder_folder(name), **{**SETTINGS, "max_model_len": 128}) as llm:
        assert llm.supported_tasks == ("classify", "score", "reward")
        outputs = llm.score(firsts, seconds, truncate_prompt_tokens=24, use_tqdm=False)
        raw = llm.score(firsts[0], seconds[:1], pooling_params=RAW, use_tqdm=False)
        with pytest.raises(ValueError, match=r"prompt has \d+ tokens"):
            llm.score(firsts[0], "hello world " * 200, use_tqdm=False)
    for output, pair in zip(outputs, PAIRS, strict=True):
        inputs = theirs(*pair, truncation="longest_first", max_length=24)
        assert output.prompt_token_ids == inputs["input_ids"]
        types = inputs.get("token_type_ids")
        first = None if types is None else types.index(1)
        logits = logits_of(name, inputs["input_ids"], first)
        assert abs(output.outputs.score - float(logits.sigmoid())) < 1e-5
        if name == "bert_pairs":
            # The control: the same without types.
            assert abs(output.outputs.score - float(logits_of(name, inputs["input_ids"]).sigmoid())) > 1e-3
    assert len({round(output.outputs.score, 3) for output in outputs}) == len(PAIRS), "scores hang on their texts"
    logits = logits_of(name, raw[0].prompt_token_ids, theirs(*PAIRS[0])["token_type_ids"].index(1) if first else None)
    assert abs(raw[0].outputs.score - float(logits)) < 1e-5


def test_roberta_positions_skip_padding_tokens_in_rows() -> None:
    class Context:
        @staticmethod
        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.arange(shape[0]).float().view(shape), requires_grad=False)

    token_ids = torch.tensor([5, 1, 7, 1, 1, 8, 1, 9, 6])
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
    # What it takes of a context, and no more.
    taken = PositionEmbedding(Context, 12, 1, 2, 1)(positions, token_ids).squeeze(1)  # type: ignore[arg-type]
    assert taken.tolist() == [2, 1, 3, 1, 1, 2, 1, 3, 4]
    plain = PositionEmbedding(Context, 12, 1, 2)(positions, token_ids).squeeze(1)  # type: ignore[arg-type]
    assert plain.tolist() == [2, 3, 4, 5, 6, 2, 3, 4, 5]


@pytest.mark.parametrize("most", [None, 3, 4, 5, 7, 12, 40])
def test_texts_are_cut_as_the_library_cuts_them(most: int | None) -> None:
    ours, theirs = Tokenizer.open(encoder_folder("bert")), AutoTokenizer.from_pretrained(encoder_folder("bert"))
    options = {} if most is None else {"truncation": "longest_first", "max_length": most}
    assert ours.encode_inside("hello world " * 9, None, most)[0] == theirs("hello world " * 9, **options)["input_ids"]
    for pair in (*PAIRS, ("x", "hello " * 30)):
        if most == 3:
            with pytest.raises(ValueError, match=r"^3 tokens .*none .*text"):
                ours.encode_inside(*pair, most)
            continue
        token_ids, num_first = ours.encode_inside(*pair, most)
        inputs = theirs(*pair, **options)
        assert token_ids == inputs["input_ids"]
        assert inputs["token_type_ids"] == [0] * num_first + [1] * (len(token_ids) - num_first)


def test_encoder_plan_has_no_cache_and_longest_row() -> None:
    with LLM(encoder_folder("bert"), device="cpu", max_num_batched_tokens=8, max_num_seqs=2, num_blocks=3) as llm:
        (output,) = llm.embed(ids([random_prompt(128, 4)]), use_tqdm=False)
        engine = llm.llm_engine
        resolved, cache_manager = engine.resolved, engine.scheduler.cache
        assert (cache_manager.num_blocks, engine.config.scheduler.max_num_batched_tokens) == (0, 128)
        with pytest.raises(ValueError, match=r"129 tokens but max_model_len is 128"):
            llm.embed(ids([random_prompt(129, 4)]), use_tqdm=False)
        with pytest.raises(ValueError, match="this run pools"):
            llm.generate("x", use_tqdm=False)
    assert error(output.outputs.embedding, hidden_states("bert", random_prompt(128, 4)).mean(0)) < 1e-5
    lines = describe_plan(make_plan(resolved)).splitlines()
    # 128 tokens fill 8 blocks of 16, and each of two rows may begin one more.
    assert any(line.startswith("blocks     no cache") and "80.0 KiB" in line for line in lines), lines
    assert not any(line.startswith(("swap", "rejected")) for line in lines), lines


def test_mirror_without_cache_accepts_only_complete_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[StepPlan] = []
    take = Mirror.apply
    monkeypatch.setattr(Mirror, "apply", lambda self, plan: (plans.append(plan), take(self, plan))[1])
    with LLM(encoder_folder("bert"), **SETTINGS) as llm:
        llm.embed(ids(PROMPTS), use_tqdm=False)
        llm.llm_engine.scheduler.check_integrity()
    monkeypatch.undo()
    first, seen = next(plan for plan in plans if plan.groups), Mirror(0, 16)
    (group, *others) = first.groups
    assert isinstance(group, SequenceGroupMetadata)
    (data,) = group.sequences
    assert (data.block_ids, data.num_computed_tokens, data.num_samples) == ((), 0, 1)
    for change in ({"num_scheduled_tokens": 7, "num_samples": 0}, {"block_ids": (0,)}):
        other = replace(data, **change)  # type: ignore[arg-type]  # a table has no types
        num_tokens = first.num_tokens - data.num_scheduled_tokens + other.num_scheduled_tokens
        wrong = replace(first, groups=(replace(group, sequences=(other,)), *others), num_tokens=num_tokens)
        with pytest.raises(MirrorError, match=r"num_scheduled_tokens .*40 .*no cache$|block_ids .* 0 to -1$"):
            seen.apply(wrong)
    seen.apply(first)


_EMBEDDED = {"relative_attention": True, "pos_att_type": "c2p"}


@pytest.mark.parametrize(
    ("architecture", "given", "words"),
    [
        ("Gemma3TextModel", {}, r"use_bidirectional_attention=False .*not"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("XLMRobertaModel", {"pad_token_id": 0}, "pad_token_id=0 is not supported"),
        ("XLMRobertaModel", {"max_position_embeddings": 2}, r"max_position_embeddings=2 must .*from 3 "),
        ("XLMRobertaModel", {"position_embedding_type": "rotary"}, "position_embedding_type='rotary' is not supported"),
        ("XLMRobertaLoRA", {}, "its adapters of tasks are parts of its weights.*jina-embeddings-v3-hf"),
        ("BertForMultipleChoice", {}, "is unknown"),
        ("DebertaV2Model", {"conv_kernel_size": 3}, "conv_kernel_size=3 is not supported, only 0"),
        ("DebertaV2Model", {"embedding_size": 8}, "embedding_size=8 is not supported, only 1536"),
        ("DebertaV2Model", {"attention_head_size": 8}, "attention_head_size=8 is not supported, only 64"),
        ("DebertaV2Model", {"pooler_hidden_size": 8}, "pooler_hidden_size=8 is not supported, only 1536"),
        ("DebertaV2Model", {"relative_attention": True}, "pos_att_type=None is not supported with relative_attention"),
        ("DebertaV2Model", {"pos_att_type": "c2p|p2p"}, r"pos_att_type='c2p\|p2p' must have c2p, p2c or both"),
        ("DebertaV2Model", {**_EMBEDDED, "position_buckets": 1}, "position_buckets=1 must be from 2 to"),
        (
            "DebertaV2Model",
            {**_EMBEDDED, "position_buckets": 1022},
            "less than twice max_position_embeddings=512 less 1",
        ),
        ("DebertaV2Model", {**_EMBEDDED, "norm_rel_ebd": 1}, "norm_rel_ebd=1 must be"),
        ("DebertaModel", {"talking_head": True}, "talking_head=True is not supported, only False"),
        ("MPNetModel", {"relative_attention_num_buckets": 64}, r"_num_buckets=64 is not supported, only 32"),
    ],
)
def test_unsupported_encoder_is_rejected(architecture: str, given: dict[str, Any], words: str, tmp_path: Any) -> None:
    with pytest.raises(ModelConfigError, match=words):
        model_config_of({"architectures": [architecture], **given}, tmp_path / "config.json")


def test_encoder_does_not_generate() -> None:
    with pytest.raises(ConfigError, match=r"=generate: .*language-model head"):
        LLM(encoder_folder("bert_masked"), runner="generate", **SETTINGS)


@pytest.mark.stress
@pytest.mark.parametrize("architecture", ROWS)
def test_family_test_detects_each_llama_entry(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the table: each entry alone taken out of its row is an error, or other numbers."""
    names = [
        name for name in ENCODERS if read_model_files(encoder_folder(name)).model_config.architecture == architecture
    ]
    if architecture == "CamembertModel":
        # The same row, so the same files.
        assert replace(ROWS[architecture], models="") == replace(ROWS["XLMRobertaModel"], models="")
        return
    if architecture == "NewModel":
        # transformers writes no such files (test_original_encoders.py).
        return
    row, silent = family_of(architecture), []
    for what, mutant in [*entries(row, Family(), "names", *UNSEEN), ("names", replace(row, names=Names()))]:
        monkeypatch.setitem(ROWS, architecture, mutant)
        if not any(_is_noticed(name) for name in names):
            silent.append(what)
    monkeypatch.setitem(ROWS, architecture, row)
    assert not any(_is_noticed(name) for name in names)
    assert silent == ([] if architecture == "ModernBertModel" else UNSEEN_OF.get(architecture, ["file_keys"]))


UNSEEN = (
    *("models", "defaults", "required", "windows.full_every", "windows.full_every_key", "windows.is_full_first"),
    *("rope.rounding", "encoder.classifier."),
)
"""For people, what files of new releases have in any case, what is refused, and what float32 does not show, as other
tests see.
"""

_T5 = [*(f"{part}_bias" for part in ("attention.qkv", "attention.output")), "feed_forward.bias"]
_T5 += ["feed_forward.activation_words"]
UNSEEN_OF = {
    "Gemma3TextModel": ["attention.head_size", "feed_forward.bias"],
    "DistilBertModel": ["norms.eps_key"],
    "EuroBertModel": ["older_keys"],
    "GteModel": ["feed_forward.bias", "file_keys"],
    "NomicBertModel": [
        *("attention.qkv_bias", "attention.output_bias", "feed_forward.bias"),
        "file_keys",
        "older_keys",
    ],
    "T5EncoderModel": [*_T5, "newer"],
    "MT5EncoderModel": [*_T5, "variants", "newer"],
    "UMT5EncoderModel": [*_T5, "variants", "newer"],
}
"""Entries of the others: keys that are not there, which nobody looks for, and what other tests see."""


def _is_noticed(name: str) -> bool:
    try:
        found = pooled(name)
    except Exception:  # whatever is wrong with a row that is wrong
        return True
    return not max(
        error(ours, expected(name, prompt)) for ours, prompt in zip(found, PROMPTS, strict=True)
    ) < most_error(name)


@pytest.mark.matrix
@every(OF_STRESS)
def test_plan_counts_weights_per_stage(name: str) -> None:
    config = read_model_files(encoder_folder(name)).model_config
    for num_stages in (1, 2):
        layout = layout_of(ParallelConfig(1, num_stages))
        for rank in range(num_stages):
            context = LayerContext(
                single_group(), ReferenceKernels(), SdpaBackend(), torch.bfloat16, torch.device("meta")
            )
            model = build_model(context, config, stage_of(layout, config, rank))
            held = sum(each.nbytes for each in model.parameters())
            assert held == weights_bytes(config, layout, rank, "bfloat16", "cpu"), (num_stages, rank)
    if name not in WITH_SCORES:
        whole = sum(each.numel() for each in _transformers_parameters(name))
        # Keys of the first DeBERTa have no biases: zeros are held, for tokens and for distances.
        zeros = 2 * config.hidden_size * config.num_layers * (name == "debertav1")
        assert config.num_parameters == whole + zeros


def _transformers_parameters(name: str) -> list[Tensor]:
    """Parameters of the backbone, without the pooler, which vectors do not use."""
    model = backbone(name)
    return [each for key, each in model.named_parameters() if not key.startswith("pooler.")]


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "xlm", "modern", "mpnet", "bert_labels", "roberta_labels", "distil_labels", "electra", "albert"),
        *("deberta_labels", "debertav1"),
        *("roberta_tokens", "modern_tokens"),
    ],
)
def test_weight_update_accepts_file_names_without_prefix(name: str) -> None:
    files = load_file(encoder_folder(name) / "model.safetensors")
    model_config = read_model_files(encoder_folder(name)).model_config
    files = {key.removeprefix(model_config.names.optional_prefix): each for key, each in files.items()}
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    model = build_model(context, model_config)
    loaded = model.load_weights(files.items())
    assert loaded == set(model.weights.shapes)
    assert model.weights.update.missing(model.weights.shapes) == []
    with model.as_checkpoint() as view:
        for key, each in view.named_parameters():
            prefix = model_config.names.optional_prefix
            assert torch.equal(each, files[key.removeprefix(prefix)]), key


def test_encoder_of_t5_ignores_decoder_in_its_files(tmp_path: Path) -> None:
    """Files of T5 1.1, with the table of tokens by its other name."""
    shutil.copytree(encoder_folder("t5"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    others = ("lm_head.weight", "decoder.final_layer_norm.weight", "decoder.block.0.layer.0.SelfAttention.q.weight")
    tensors |= {name: torch.zeros(3, 3) for name in others}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    with LLM(tmp_path, **SETTINGS) as llm:
        outputs = llm.embed(ids(PROMPTS), use_tqdm=False)
    assert [output.outputs.embedding for output in outputs] == plainly_pooled("t5")


def test_rows_of_relative_positions_have_no_longest() -> None:
    """T5's and DeBERTa's may be longer than config.json says; positions of MPNet end."""
    prompt = random_prompt(700, 5)
    with LLM(encoder_folder("t5"), device="cpu", max_model_len=700) as llm:
        (output,) = llm.embed(ids([prompt]), use_tqdm=False)
    assert error(output.outputs.embedding, expected("t5", prompt)) < 1e-5
    with LLM(encoder_folder("deberta"), device="cpu", max_model_len=700) as llm:
        (output,) = llm.embed(ids([prompt]), use_tqdm=False)
    assert error(output.outputs.embedding, expected("deberta", prompt)) < 1e-5
    with pytest.raises(ConfigError, match="max_model_len=700 is more than the model's 128 tokens"):
        LLM(encoder_folder("mpnet"), device="cpu", max_model_len=700)


def _stepped(engine: LLMEngine) -> list[Any]:
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_llm_engine_truncates_texts_like_llm() -> None:
    text = "hello world the scheduler " * 40
    with LLM(encoder_folder("bert"), **SETTINGS) as llm:
        whole = llm.encode("hello", use_tqdm=False)[0].prompt_token_ids
        for length in (5, -1):
            params = PoolingParams(truncate_prompt_tokens=length)
            (expected,) = llm.encode([text], params, use_tqdm=False)
            engine = llm.llm_engine
            engine.add_request("cut", text, params)
            (output,) = _stepped(engine)
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert output.outputs.data == expected.outputs.data
            ends = output.prompt_token_ids[0], output.prompt_token_ids[-1]
            assert ends == (whole[0], whole[-1]), "special tokens stay"
            assert len(output.prompt_token_ids) == (5 if length == 5 else 100)
        with pytest.raises(ValueError, match=r"^2 tokens .*none .*text"):
            engine.add_request("short", text, PoolingParams(truncate_prompt_tokens=2))
        engine.add_request("ids", {"prompt_token_ids": [9, 8, 7, 6]}, PoolingParams(truncate_prompt_tokens=3))
        (output,) = _stepped(engine)
        assert list(output.prompt_token_ids) == [8, 7, 6], "ids are cut as they are"


@pytest.mark.matrix
def test_weights_are_listed_and_updated_by_file_names() -> None:
    for name in ("bert_labels", "modern_pairs"):
        with LLM(encoder_folder(name), **SETTINGS) as llm:
            before = llm.encode(ids(PROMPTS[:2]), RAW, use_tqdm=False)
            (held,) = llm.apply_model(
                lambda model: {key: each.detach().clone() for key, each in model.named_parameters()}
            )
            with llm.weight_update() as load:
                for key, each in held.items():
                    load(key, each)
            after = llm.encode(ids(PROMPTS[:2]), RAW, use_tqdm=False)
        assert [each.outputs.data for each in after] == [each.outputs.data for each in before]


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizerFast", "do_lower_case": True, "strip_accents": False},
        {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": False, "strip_accents": True},
        {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False},
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},
        {"tokenizer_class": "TokenizersBackend"},
        {"do_lower_case": False},
        {},
        {"model_type": "mpnet", "do_lower_case": False},
        {"model_type": "mpnet"},
        {"model_type": "distilbert", "do_lower_case": False},
        {"model_type": "electra"},
        {"model_type": "nomic_bert", "do_lower_case": False},
    ],
)
@pytest.mark.parametrize("is_lower", [True, False])
def test_bert_tokenizers_normalizer_is_that_of_transformers(
    settings: dict[str, Any], is_lower: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its normalizer is made from the configuration, not from tokenizer.json."""
    letters = [*"Helo", "h", "\u00e9", "\u00c9", "e", "E", "\u4f60"]
    words = ["<s>", "[UNK]", "</s>", "<pad>", "<mask>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    words += [*letters, *(f"##{each}" for each in letters)]
    settings = {**settings}
    kind = settings.pop("model_type", "bert")
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 7), ("[CLS]", 6))
    if kind == "mpnet":
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    texts = ["Hello", "h\u00e9llo", "\u00c9", "\u4f60\u4f60 hello"]
    ours, theirs = Tokenizer.open(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert [ours.encode(text) for text in texts] == [theirs(text).input_ids for text in texts]
    is_other = any(ours.encode(text) != backend.encode(text).ids for text in texts)
    assert not is_other or "the tokenizer's class and tokenizer_config.json override the normalizer's" in caplog.text


@pytest.mark.parametrize("name", ["bert", "xlm", "electra"])
def test_own_embeddings_give_the_bits_of_ids(name: str):
    """Types, positions and the norm before the layers apply to given rows as to tokens."""
    with LLM(encoder_folder(name), device="cpu", dtype="float32", runner="pooling") as llm:
        table = backbone(name).get_input_embeddings().weight.detach().float()
        # A row is no padding token, which has no position.
        prompts = [[token for token in prompt if token != 1] for prompt in PROMPTS]
        rows = [{"prompt_embeds": table[prompt]} for prompt in prompts]
        expected = [output.outputs.embedding for output in llm.embed(ids(prompts), use_tqdm=False)]
        assert [output.outputs.embedding for output in llm.embed(rows[::-1], use_tqdm=False)] == expected[::-1]
        with pytest.raises(ValueError, match="truncate_prompt_tokens cuts token ids"):
            llm.embed(rows, truncate_prompt_tokens=3, use_tqdm=False)
