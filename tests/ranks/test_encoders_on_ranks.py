"""Encoders on several ranks: stages and replicas give one rank's bits, shards its numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_pooling_on_ranks
from encoder_models import encoder_folder
from test_pooling_on_ranks import PROMPTS, SETTINGS, answers

from spmd_worker import LLM, PoolingParams

NAMES = (
    "bert_mean",
    "mpnet_pairs",
    "t5_mean",
    "xlm_pairs",
    "modern_labels",
    "gemma_dense",
    "distil_labels",
    "electra",
    "nomic_labels",
    "gte",
    "euro_labels",
    "deberta_masked",
    "debertav1_labels",
    "deberta_mean",
    "albert",
    "modern_tokens",
)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pipeline_parallel_size", marks=pytest.mark.matrix),
        pytest.param("data_parallel_size", marks=pytest.mark.stress),
        pytest.param("tensor_parallel_size", marks=pytest.mark.stress),
    ],
)
def test_encoders_on_two_ranks_match_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(test_pooling_on_ranks, "pooling_folder", encoder_folder)
    names = (*NAMES[:3], *NAMES[-2:]) if layout == "pipeline_parallel_size" else NAMES
    settings: dict[str, Any] = {"max_model_len": 64}
    monkeypatch.setattr(test_pooling_on_ranks, "SETTINGS", {**SETTINGS, **settings})
    test_pooling_on_ranks.run(tmp_path, 2, names=names, **{layout: 2}).checked()
    first, second = answers(tmp_path, 2)
    assert first == second
    for name in names:
        with LLM(encoder_folder(name), device="cpu", **{**SETTINGS, **settings}) as llm:
            rows = [{"prompt_token_ids": each} for each in PROMPTS]
            outputs = llm.encode(rows, use_tqdm=False)
            if "token_embed" in llm.supported_tasks:
                outputs += llm.encode(rows, pooling_task="token_embed", use_tqdm=False)
                outputs += llm.encode(rows, PoolingParams(**test_pooling_on_ranks.CHUNKED), use_tqdm=False)
        alone = [output.outputs.data for output in outputs]
        if layout != "tensor_parallel_size":
            assert first[name] == alone, name
        for ours, theirs in zip(first[name], alone, strict=True):
            assert np.array(ours) == pytest.approx(np.array(theirs), abs=1e-5), name
