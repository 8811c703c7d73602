"""Late interaction (ColBERT): vectors and scores of sentence-transformers, and of transformers' model with plain torch,
for the folders of three libraries; a pair's score is of the pair alone, by every door.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from cut_jobs import Ended, end_after
from encoder_models import encoder_folder, error
from jobs_of_rows import answers_of_job
from json_files import edit
from late_models import LATE, SIZE, late_folder, library_model, matrix
from safetensors.torch import load_file, save_file
from serving import ServedHere
from torch.nn import functional as F
from transformers import AutoTokenizer, BertModel

from spmd_worker import LLM, PoolingParams
from spmd_worker.base.config.schema import SchedulerConfig
from spmd_worker.base.errors import CheckpointError, ConfigError, ModelConfigError
from spmd_worker.compat.late_texts import encode_late_text
from spmd_worker.frontends.batch.parquet_rows import VectorColumns, parquet_row
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.replica.sequence.similarity import max_similarity
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.runner import batch

QUERIES = ["hello world", "the cache of blocks", "a text, about the scheduler! " * 6, "x"]
DOCUMENTS = ["hello, world.", "the cache of blocks. And, more!", "a text about the scheduler " * 12, "y !"]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
QUERY, DOCUMENT = (PoolingParams(task="token_embed", input_type=each) for each in ("query", "document"))


def vectors(name: str, texts: list[str], params: PoolingParams, **settings: Any) -> list[np.ndarray]:
    with LLM(late_folder(name), **{**SETTINGS, **settings}) as llm:
        return [np.array(each.outputs.data) for each in llm.encode(texts, params, use_tqdm=False)]


@cache
def scores(name: str, dtype: str = "float32", layout: tuple[tuple[str, int], ...] = ()) -> list[float]:
    with LLM(late_folder(name), device="cpu", dtype=dtype, **dict(layout)) as llm:
        return [each.outputs.score for each in llm.score(QUERIES, DOCUMENTS, use_tqdm=False)]


@pytest.mark.stress
@pytest.mark.parametrize("name", [*LATE])
def test_vectors_and_scores_equal_sentence_transformers(name: str) -> None:
    theirs = library_model(name)
    with LLM(late_folder(name), **SETTINGS) as llm:
        assert llm.supported_tasks == ("token_embed", "score")
        found = [llm.encode(*each, use_tqdm=False) for each in ((QUERIES, QUERY), (DOCUMENTS, DOCUMENT))]
        scored = [each.outputs.score for each in llm.score(QUERIES, DOCUMENTS, use_tqdm=False)]
    # One by one: padding changes roundings.
    encoded = [list(map(theirs.encode_query, QUERIES)), list(map(theirs.encode_document, DOCUMENTS))]
    for ours, wanted in zip(found, encoded, strict=True):
        assert all(error(one.outputs.data, other) < 1e-5 for one, other in zip(ours, wanted, strict=True))
    assert scored == pytest.approx(theirs.similarity_pairwise(*encoded).tolist(), abs=1e-4)


@torch.no_grad()
def by_hand(text: str, marker: str, length: int, *, expands: bool) -> torch.Tensor:
    """[T, SIZE]: transformers' BERT with a mask, the matrix, and unit lengths."""
    folder = late_folder("stanford")
    tokenizer, tensors = AutoTokenizer.from_pretrained(folder), load_file(folder / "model.safetensors")
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = tokenizer(text, truncation=True, max_length=length - 1)["input_ids"]
    ids.insert(1, tokenizer.convert_tokens_to_ids(marker))
    attended = [1] * len(ids) + [0] * ((length - len(ids)) * expands)
    ids += [tokenizer.mask_token_id] * (len(attended) - len(ids))
    states = model(torch.tensor([ids]), attention_mask=torch.tensor([attended])).last_hidden_state[0]
    skipped = set(tokenizer.convert_tokens_to_ids(list(".,!"))) if not expands else set()
    kept = [index for index, each in enumerate(ids) if each not in skipped]
    return F.normalize(F.linear(states, tensors["linear.weight"]), dim=1)[kept]


@pytest.mark.guarantee("Late interaction: the vectors of plain torch", is_control_inside=True)
def test_vectors_of_colberts_authors_equal_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, document = by_hand(QUERIES[0], "[unused0]", 20, expands=True), DOCUMENTS[1]
    (ours,) = vectors("stanford", QUERIES[:1], QUERY)
    assert error(ours, query) < 1e-5
    assert error(vectors("stanford", [document], DOCUMENT)[0], by_hand(document, "[unused1]", 40, expands=False)) < 1e-5
    # Controls: the other marker, no expansion, no unit lengths, expansion tokens that are attended to.
    assert error(ours, by_hand(QUERIES[0], "[unused1]", 20, expands=True)) > 1e-3
    assert len(by_hand(QUERIES[0], "[unused0]", 20, expands=False)) == 5
    (raw,) = vectors("stanford", QUERIES[:1], PoolingParams(task="token_embed", input_type="query", normalize=False))
    assert error(raw, query) > 1e-3
    assert error(F.normalize(torch.tensor(raw), dim=1).tolist(), query) < 1e-5
    monkeypatch.setattr(batch, "_last_attended", lambda *_: None)
    assert error(vectors("stanford", QUERIES[:1], QUERY)[0], query) > 1e-3


@pytest.mark.parametrize("name", ["pylate", *(pytest.param(each, marks=pytest.mark.stress) for each in ("decoder",))])
def test_scores_are_of_the_pair_alone(name: str) -> None:
    alone = []
    with LLM(late_folder(name), **SETTINGS, max_num_seqs=2) as llm:
        for pair in zip(QUERIES, DOCUMENTS, strict=True):
            (output,) = llm.score(*pair, use_tqdm=False)
            alone.append(output.outputs.score)
        ranked = llm.score(QUERIES[0], DOCUMENTS, use_tqdm=False)
    assert alone == scores(name)
    assert ranked[0].outputs.score == alone[0]
    assert scores(name, "bfloat16") == pytest.approx(scores(name), rel=0.05, abs=0.05)


@pytest.mark.stress
@pytest.mark.parametrize("layout", ["pipeline_parallel_size", "tensor_parallel_size"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_one_ranks_scores(layout: str, dtype: str, tmp_path: Path) -> None:
    script = (
        "import json, sys\nfrom pathlib import Path\nfrom spmd_worker import LLM\n"
        "job = json.loads(sys.argv[1])\n"
        "with LLM(job['folder'], **job['settings']) as llm:\n"
        "    found = [each.outputs.score for each in llm.score(*job['texts'], use_tqdm=False)]\n"
        "Path(job['out']).write_text(json.dumps(found))\n"
    )
    for name in ("stanford", "pylate", "native", "decoder"):
        settings = {"device": "cpu", "dtype": dtype, layout: 2}
        out = tmp_path / f"{name}.json"
        job = {"folder": str(late_folder(name)), "settings": settings, "texts": [QUERIES, DOCUMENTS], "out": str(out)}
        ranks.run_ranks(script, 2, timeout_s=240, arguments=[json.dumps(job)]).checked()
        assert json.loads(out.read_text()) == scores(name, dtype), name


def openai_row(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": url, "method": "POST", "url": url, "body": body}


ROWS: list[dict[str, Any]] = [
    openai_row("/v1/score", text_1=QUERIES[0], text_2=DOCUMENTS),
    openai_row("/v1/rerank", query=QUERIES[1], documents=DOCUMENTS, top_n=2),
    {"token_embed": DOCUMENTS[1], "input_type": "document"},
    {"token_embed": QUERIES[0], "input_type": "query"},
    {"token_embed": DOCUMENTS[1]},
    openai_row("/pooling", input=DOCUMENTS[1], input_type="document", encoding_format="base64"),
    {"token_embed": [1, 320, 99, 2], "input_type": "query"},
    {"embed": "x"},
    {"token_embed": "x", "input_type": "passage"},
    {"token_embed": "hello " * 200},
    {"token_embed": "x", "dimensions": 8},
    openai_row("/v1/score", text_1=QUERIES[0], text_2=DOCUMENTS, input_type="query"),
]


def test_rows_of_jobs_score_rank_and_place_tokens(tmp_path: Path) -> None:
    *answered, kind, typed, long, short, other = answers_of_job(tmp_path, late_folder("pylate"), ROWS)
    score, rank, document, query, plain, packed, of_ids = answered
    with LLM(late_folder("pylate"), **SETTINGS) as llm:
        wanted = [[o.outputs.score for o in llm.score(each, DOCUMENTS, use_tqdm=False)] for each in QUERIES[:2]]
    assert [each["score"] for each in score["response"]["body"]["data"]] == wanted[0]
    ranked = rank["response"]["body"]["results"]
    order = sorted(range(4), key=lambda index: -wanted[1][index])[:2]
    assert [(each["index"], each["relevance_score"]) for each in ranked] == [(i, wanted[1][i]) for i in order]
    # Two of the tokens are left out, and a marker is in.
    text, kept = DOCUMENTS[1], document["usage"]["prompt_tokens"] - 3
    assert [len(document[key]) for key in ("token_embeddings", "tokens", "offsets")] == [kept] * 3
    assert (document["tokens"][1], len(document["token_embeddings"][0])) == ("[D] ", SIZE)
    assert "".join(text[start:end] for start, end in document["offsets"]) == text.translate(
        str.maketrans("", "", ".,!")
    )
    assert (len(query["tokens"]), query["tokens"][1], query["tokens"][-1]) == (24, "[Q] ", "<mask>")
    assert "".join(QUERIES[0][start:end] for start, end in query["offsets"]) == QUERIES[0]
    assert (len(plain["tokens"]), plain["tokens"][0], "[D] " in plain["tokens"]) == (kept + 2, "<s>", False)
    row = parquet_row(0, json.dumps(packed).encode(), VectorColumns("embedding", 0, SIZE))
    assert np.array(row["token_embeddings"]) == pytest.approx(np.array(document["token_embeddings"]), abs=1e-6)
    assert (len(of_ids["token_embeddings"]), of_ids["offsets"]) == (4, None)
    codes = [each["error"]["code"] for each in (kind, typed, long, short)]
    assert codes == ["wrong_runner", "invalid_value", "prompt_too_long", "invalid_value"]
    assert "input_type" in str(other["error"]) + str(other["response"])


@pytest.mark.stress
def test_rows_have_equal_bytes_batched_resumed_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answers_of_job(tmp_path, late_folder("pylate"), ROWS * 3)
    scheduler = SchedulerConfig(max_num_seqs=3)
    with monkeypatch.context() as patch:
        end_after(patch, 20)
        with pytest.raises(Ended):
            answers_of_job(tmp_path, late_folder("pylate"), ROWS * 3, "b.jsonl", scheduler=scheduler)
    assert answers_of_job(tmp_path, late_folder("pylate"), ROWS * 3, "b.jsonl", scheduler=scheduler) == rows
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    with ServedHere(model=late_folder("pylate")) as served:
        for row, answer in zip(ROWS[:2], rows, strict=False):
            status, body, _ = served.client.ask(row["url"], row["body"])
            key = "results" if "rerank" in row["url"] else "data"
            assert (status, body[key]) == (200, answer["response"]["body"][key])


def test_products_are_added_in_one_order_exactly() -> None:
    generator = np.random.default_rng(3)
    query, document = (generator.standard_normal((n, SIZE)).astype(np.float32) for n in (32, 1100))
    wanted = (query.astype(np.float64) @ document.T.astype(np.float64)).max(1).sum()
    assert max_similarity(query, document) == pytest.approx(wanted, rel=1e-12)
    assert max_similarity(query, document, averages=True) == pytest.approx(wanted / 32, rel=1e-12)
    assert max_similarity(query, document[::-1]) == max_similarity(query, document)
    assert max_similarity(query, document[:0]) == 0.0


def changed(folder: Path, name: str, file: str, **changes: Any) -> Path:
    shutil.copytree(late_folder(name), folder)
    edit(folder / file, **changes)
    return folder


SETTINGS_FILE = "config_sentence_transformers.json"
BAD: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "length of queries": ("pylate", SETTINGS_FILE, {"query_length": 0}, "query_length=0 must be"),
    "length of documents": ("stanford", "artifact.metadata", {"doc_maxlen": "long"}, "doc_maxlen='long' must be"),
    "prefix": ("pylate", SETTINGS_FILE, {"query_prefix": 3}, "query_prefix=3 must be a text"),
    "words": ("pylate", SETTINGS_FILE, {"skiplist_words": "!"}, "skiplist_words='!' must be a list"),
    "attention": ("pylate", SETTINGS_FILE, {"attend_to_expansion_tokens": 1}, "must be true or false"),
    "strategy": ("pylate", "sentence_bert_config.json", {"query_expansion": {"strategy": "all"}}, "fixed or min"),
    "distance": ("stanford", "artifact.metadata", {"similarity": "l2"}, "similarity='l2' is not supported"),
    "images": ("native", "2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
    "decoder": ("decoder", SETTINGS_FILE, {"do_query_expansion": True}, "is a decoder"),
    "tower": ("stanford", "config.json", {"model_type": "deberta-v2"}, "HF_ColBERT"),
    "dense": ("pylate", "1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name"),
}


@pytest.mark.parametrize("case", [*BAD])
def test_bad_settings_name_file_and_key(case: str, tmp_path: Path) -> None:
    name, file, changes, message = BAD[case]
    with pytest.raises(ModelConfigError) as raised:
        read_model_files(changed(tmp_path / "bad", name, file, **changes))
    assert message in str(raised.value)
    assert file in str(raised.value) or case in ("decoder", "tower")


def test_settings_without_effect_or_room_are_refused(tmp_path: Path) -> None:
    for settings in ({"pooling_type": "mean"}, {"max_model_len": 23}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            LLM(late_folder("pylate"), **SETTINGS, **settings)
    folder = changed(tmp_path / "wide", "stanford", "artifact.metadata", dim=SIZE + 1)
    with pytest.raises(CheckpointError, match=r"linear\.weight"):
        LLM(folder, **SETTINGS)
    with LLM(encoder_folder("bert_mean"), **SETTINGS) as llm, pytest.raises(ValueError, match="late interaction"):
        llm.encode("x", QUERY, use_tqdm=False)


def test_error_counts_marker_and_special_tokens() -> None:
    """Regression: it named one token fewer than the row had asked for."""
    folder = late_folder("stanford")
    late, tokenizer = read_model_files(folder).model_config.pooling.late, Tokenizer.open(folder)
    assert encode_late_text(late, tokenizer, "hello world", "document", 4, 128).token_ids[1] == 2
    with pytest.raises(ValueError, match=r"^3 tokens leave none for text: 2 are special tokens and one is the marker"):
        encode_late_text(late, tokenizer, "hello world", "document", 3, 128)


@pytest.mark.stress
def test_dimensions_and_lengths_are_as_for_other_vectors(tmp_path: Path) -> None:
    folder = changed(tmp_path / "cut", "stanford", "config.json", matryoshka_dimensions=[8])
    cut = PoolingParams(task="token_embed", input_type="document", dimensions=8)
    attended = PoolingParams(task="token_embed", input_type="query", num_attended_tokens=3)
    with LLM(folder, **SETTINGS) as llm:
        (short,) = llm.encode(DOCUMENTS[:1], cut, use_tqdm=False)
        (long,) = llm.encode([DOCUMENTS[2]], DOCUMENT, use_tqdm=False)
        params = PoolingParams(task="token_embed", input_type="document", truncate_prompt_tokens=9)
        (nine,) = llm.encode([DOCUMENTS[2]], params, use_tqdm=False)
        with pytest.raises(ValueError, match=r"num_attended_tokens=3 is for queries of token ids: .*input_type=query"):
            llm.encode(QUERIES[:1], attended, use_tqdm=False)
    (raw,) = vectors(
        "stanford", DOCUMENTS[:1], PoolingParams(task="token_embed", input_type="document", normalize=False)
    )
    assert error(short.outputs.data, F.normalize(torch.tensor(raw[:, :8]), dim=1)) < 1e-6
    assert (len(long.prompt_token_ids), len(nine.prompt_token_ids)) == (40, 9)
    # A folder that has both, as some on the hub: the Dense counts, and the matrix of the checkpoint is left alone.
    both = tmp_path / "both"
    shutil.copytree(late_folder("pylate"), both)
    tensors = load_file(both / "model.safetensors")
    save_file({**tensors, "linear.weight": matrix(SIZE, 64, 9)}, both / "model.safetensors", {"format": "pt"})
    with LLM(both, **SETTINGS) as llm:
        assert [each.outputs.score for each in llm.score(QUERIES, DOCUMENTS, use_tqdm=False)] == scores("pylate")
