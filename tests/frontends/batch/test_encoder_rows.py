"""Rows of an encoder: embeddings, scored and ranked pairs, and their replay from the step log."""

from pathlib import Path
from typing import Any

import pytest
from cut_jobs import Ended, end_after
from encoder_models import encoder_folder, error, expected, logits_of
from jobs_of_rows import answers_of_job
from test_pooled_rows import TEXTS, openai

from spmd_worker.base.config.schema import SchedulerConfig
from spmd_worker.frontends.openai.split_rows import SplitRows
from spmd_worker.frontends.tools import replay
from spmd_worker.tokenizer.tokenizer import Tokenizer


def answered(folder: Path, name: str, rows: list[Any], **settings: Any) -> list[dict[str, Any]]:
    scheduler = SchedulerConfig(**settings)
    return answers_of_job(folder, encoder_folder(name), rows, dtype="auto", scheduler=scheduler, step_log=True)


@pytest.mark.matrix
def test_pairs_are_ranked_and_replayed_from_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "hello " * 200
    asked = [
        openai("rank", "rerank", query=TEXTS[0], documents=TEXTS[1:]),
        openai("score", "score", text_1=TEXTS[0], text_2=[TEXTS[1], long], truncate_prompt_tokens=-1),
        openai("long", "score", text_1=TEXTS[0], text_2=[TEXTS[1], long]),
        {"reward": TEXTS[0]},
    ]
    ranked, scored, refused, reward = answered(tmp_path, "bert_pairs", asked, max_num_batched_tokens=32, max_num_seqs=2)
    tokenizer = Tokenizer.open(encoder_folder("bert_pairs"))

    def score(second: str) -> float:
        token_ids, num_first = tokenizer.encode_inside(TEXTS[0], second, 128)
        return float(logits_of("bert_pairs", token_ids, num_first).sigmoid())

    results = {each["index"]: each["relevance_score"] for each in ranked["response"]["body"]["results"]}
    assert results == pytest.approx({index: score(text) for index, text in enumerate(TEXTS[1:])}, abs=1e-5)
    found = [each["score"] for each in scored["response"]["body"]["data"]]
    assert found == pytest.approx([score(TEXTS[1]), score(long)], abs=1e-5)
    assert refused["error"]["code"] == "prompt_too_long"
    assert error(reward["scores"], expected("bert_pairs", tokenizer.encode(TEXTS[0]))) < 1e-5
    assert replay.main([str(tmp_path / "out.jsonl.run" / "steps.log"), "--with-model"]) == 0
    assert "tokens equal" in capsys.readouterr().out


@pytest.mark.matrix
def test_embedding_job_has_equal_bytes_resumed_or_rebatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [openai(str(number), "embeddings", input=[TEXTS[number % 3] * (1 + number % 7)]) for number in range(60)]
    rows = answered(tmp_path, "modern_dense", asked)
    folder = tmp_path / "other"
    folder.mkdir()
    with monkeypatch.context() as patch:
        end_after(patch, 20)
        with pytest.raises(Ended):
            answered(folder, "modern_dense", asked, max_num_batched_tokens=300, max_num_seqs=3)
    assert not (folder / "out.jsonl").exists()
    admit, admitted = SplitRows.admit, []
    monkeypatch.setattr(
        SplitRows, "admit", lambda self, row, *given: (admitted.append(row), admit(self, row, *given))[1]
    )
    assert answered(folder, "modern_dense", asked, max_num_batched_tokens=300, max_num_seqs=3) == rows
    assert len(admitted) == 40
