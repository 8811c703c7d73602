"""Encoder-decoder models that classify: transformers' scores, the same bits in any batch, and rows without an end."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_classifiers import CLASSIFIERS, EOS, START, classifier_folder, classifier_logits
from encoder_models import error
from jobs_of_rows import answers_of_job, openai_row
from reference_models import random_prompt
from safetensors.torch import load_file
from serving import ServedHere
from transformers import AutoTokenizer

from spmd_worker import LLM, PoolingParams, PromptsRefusedError
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.model_config.pooling import ShiftedRow
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import layout_of, stage_of
from spmd_worker.worker.memory.estimate import weights_bytes

# Several ends, tokens behind the last one, an end alone, a padding token inside; longer than a block.
PROMPTS = [
    [0, *random_prompt(40, 1), EOS],
    [0, 17, EOS, EOS, 40, 5, EOS],
    [EOS],
    [0, 9, EOS, 33, 12],
    [0, 12, 1, 14, EOS, 61],
    [*random_prompt(60, 2), EOS],
]
RAW = PoolingParams(use_activation=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 300, "block_size": 4, "max_model_len": 64}
SMALL_STEPS = {"num_blocks": 44, "max_num_batched_tokens": 16, "max_num_seqs": 6}
WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "one by one": {"max_num_seqs": 1},
    "recomputed": {"preemption_mode": "recompute", **SMALL_STEPS},
    "swapped": {"preemption_mode": "swap", "swap_space": 0.01, **SMALL_STEPS},
    "in other blocks": {"block_size": 16},
    "without a cache of prefixes": {"enable_prefix_caching": False},
}
PAIRS = [("hello world", "the cache"), ("naïve café", "hello " * 30), ("a text about the scheduler " * 9, "x")]


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def scored(name: str, times: int = 1, **settings: Any) -> list[list[float]]:
    """Raw scores of the last of several calls."""
    with LLM(classifier_folder(name), **{**SETTINGS, **settings}) as llm:
        for _ in range(times):
            outputs = llm.encode(ids(PROMPTS), RAW, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(output.num_cached_tokens <= len(prompt) for output, prompt in zip(outputs, PROMPTS, strict=True))
    return [output.outputs.data for output in outputs]


@cache
def plainly_scored(name: str) -> list[list[float]]:
    return scored(name)


def worst_error(name: str, found: list[list[float]]) -> float:
    return max(error(ours, classifier_logits(name, row)) for ours, row in zip(found, PROMPTS, strict=True))


def first_end(self: ShiftedRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    start = token_ids[-1] if self.start_token_id is None else self.start_token_id
    return (start, *token_ids[: token_ids.index(self.eos_token_id)])


def not_shifted(self: ShiftedRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return token_ids[: len(token_ids) - token_ids[::-1].index(self.eos_token_id)]


def other_start(self: ShiftedRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return (START + 1, *token_ids[: len(token_ids) - 1 - token_ids[::-1].index(self.eos_token_id)])


@pytest.mark.gate("bart", "umt5")
@pytest.mark.guarantee("Encoder-decoder models classify as in transformers", is_control_inside=True)
@pytest.mark.matrix
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_decoder_classifier_equals_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_error(name, plainly_scored(name)) < 1e-5
    # The control: other tokens for the decoder.
    for mistake in (first_end, not_shifted, other_start):
        monkeypatch.setattr(ShiftedRow, "decoder_ids", mistake)
        assert worst_error(name, scored(name)) > 1e-3, mistake


@pytest.mark.gate("recomputed")
@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_decoder_classifier_bits_are_independent_of_batching(way: str) -> None:
    for name in ("bart", "t5"):
        assert scored(name, **WAYS[way]) == plainly_scored(name), name
        assert scored(name, dtype="bfloat16", **WAYS[way]) == scored(name, dtype="bfloat16"), name
    assert scored("mbart", 2, **WAYS[way]) == plainly_scored("mbart")


@pytest.mark.gate("tensor_parallel_size")
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_decoder_classifier_bits_equal_on_two_workers(layout: str, forked_workers_of_module: None) -> None:
    for name in ("mbart", "t5"):
        settings = {layout: 2, "distributed_executor_backend": "multiproc"}
        assert scored(name, **settings) == plainly_scored(name)


@pytest.mark.gate("bart_pairs")
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["bart_pairs", "t5_pairs"])
def test_decoder_classifier_encodes_pairs_like_transformers(name: str) -> None:
    theirs = AutoTokenizer.from_pretrained(classifier_folder(name))
    firsts, seconds = [list(each) for each in zip(*PAIRS, strict=True)]
    with LLM(classifier_folder(name), **SETTINGS) as llm:
        assert llm.supported_tasks == ("classify", "score", "reward")
        outputs = llm.score(firsts, seconds, truncate_prompt_tokens=24, use_tqdm=False)
        with pytest.raises(ValueError, match=r"at least|prompt has \d+ tokens"):
            llm.score(firsts[0], "hello world " * 200, use_tqdm=False)
    for output, pair in zip(outputs, PAIRS, strict=True):
        row = theirs(*pair, truncation="longest_first", max_length=24)["input_ids"]
        assert output.prompt_token_ids == row
        assert abs(output.outputs.score - float(classifier_logits(name, row).sigmoid())) < 1e-5
    assert len({round(output.outputs.score, 3) for output in outputs}) == len(PAIRS), "scores hang on their texts"


def test_row_without_an_end_is_an_error_row(tmp_path: Path) -> None:
    with LLM(classifier_folder("bart"), **SETTINGS) as llm:
        with pytest.raises(PromptsRefusedError, match=r"no token 2 \(eos_token_id of config\.json\)"):
            llm.classify(ids([[5, 6, 7]]), use_tqdm=False)
        (of_text,) = llm.classify("hello world", use_tqdm=False)
        with pytest.raises(ValueError, match="this run pools"):
            llm.generate("hello world", use_tqdm=False)
    rows = [
        {"custom_id": "a", "classify": [5, 6, 7]},
        openai_row("b", "/classify", {"input": "hello world"}),
        {"custom_id": "c", "classify": "hello world"},
    ]
    first, second, third = answers_of_job(tmp_path, classifier_folder("bart"), rows, options={"max_model_len": 64})
    assert first["error"]["code"] == "invalid_value"
    (answer,) = second["response"]["body"]["data"]
    assert answer["probs"] == third["scores"] == pytest.approx(of_text.outputs.probs, abs=1e-7)
    assert third["usage"]["prompt_tokens"] == len(of_text.prompt_token_ids)


def test_served_pairs_have_transformers_scores() -> None:
    theirs = AutoTokenizer.from_pretrained(classifier_folder("bart_pairs"))
    (first, second), _, _ = PAIRS
    with ServedHere(model=classifier_folder("bart_pairs"), max_queued=4) as served:
        status, found, _ = served.client.ask("/score", {"text_1": first, "text_2": second})
        refused = served.client.ask("/classify", {"input": [[5, 6]]})
    row = theirs(first, second)["input_ids"]
    assert status == 200
    assert abs(found["data"][0]["score"] - float(classifier_logits("bart_pairs", row).sigmoid())) < 1e-5
    assert found["usage"]["prompt_tokens"] == len(row)
    assert (refused[0], refused[1]["error"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"runner": "generate"}, "has no language-model head"),
        ({"pooling_type": "mean"}, "pooling_type=mean is not supported in a run that classifies"),
        ({"max_encoder_len": 32}, "max_encoder_len=32 must be .*max_model_len=64"),
        ({"enable_lora": True}, "enable_lora=True is not supported"),
        ({"quantization": "int8"}, "is for models that generate"),
    ],
)
def test_unsupported_setting_of_decoder_classifier_is_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(classifier_folder("bart"), **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("bart", {"eos_token_id": [2, 3]}, r"eos_token_id=\[2, 3\] must be a whole number"),
        ("t5", {"eos_token_id": 320}, "eos_token_id=320 must be a whole number from 0 to 319"),
        ("bart", {"decoder_start_token_id": "a"}, "decoder_start_token_id='a' must"),
        ("mbart", {"pad_token_id": -1}, "pad_token_id=-1 must be a whole number"),
    ],
)
def test_broken_ids_of_decoder_classifier_are_named(
    name: str, keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = json.loads((classifier_folder(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(ModelConfigError, match=sentence):
        read_model_files(tmp_path)


def test_decoder_classifier_ignores_ids_of_generation_config(tmp_path: Path) -> None:
    """transformers' classes for classification do not read the file."""
    folder = tmp_path / "model"
    shutil.copytree(classifier_folder("bart"), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3, "decoder_start_token_id": 8, "num_beams": 4}')
    pooling = read_model_files(folder).model_config.pooling
    assert pooling is not None
    assert pooling.shifted == ShiftedRow(EOS, START, 1)


@pytest.mark.parametrize("name", ["bart", "t5", "umt5"])
def test_decoder_classifier_weights_are_updated_by_file_names(name: str) -> None:
    files = load_file(classifier_folder(name) / "model.safetensors")
    config = read_model_files(classifier_folder(name)).model_config
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    model = build_model(context, config)
    # Fine-tuned from files with a token head's bias, which some tools keep.
    bias = {"final_logits_bias": torch.zeros(1, 320)} if name == "bart" else {}
    assert model.load_weights([*files.items(), *bias.items()]) == set(model.weights.shapes)
    assert model.weights.update.missing(model.weights.shapes) == []
    with model.as_checkpoint() as view:
        canonical = {config.names.canonical(key): each for key, each in files.items()}
        for key, each in view.named_parameters():
            assert torch.equal(each, canonical[key]), key
    layout = layout_of(ParallelConfig(1, 2))
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.bfloat16, torch.device("meta"))
    for rank in range(2):
        stage = build_model(context, config, stage_of(layout, config, rank))
        assert sum(each.nbytes for each in stage.parameters()) == weights_bytes(config, layout, rank, "bfloat16", "cpu")
