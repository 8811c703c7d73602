"""Output records of pooling rows: OpenAI's for embeddings, vLLM's for scores, Jina's for reranking.

Every value depends only on the row, as in `openai_body.py`. Vectors are float32; a number is written with its shortest
unique digits.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from spmd_worker.frontends.openai.decimals import shortest_decimals
from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.row import PoolingAsk, Row, TextPrompt
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import similarity

_CREATED: Final = 0


Spell = Callable[[Sequence[float]], Any]
"""Formats a vector as numbers for a record."""


def pooled_record(row: Row, outputs: Sequence[RequestOutput], spell: Spell = shortest_decimals) -> JsonObject:
    """Output record of a plain row."""
    (output,), ask = outputs, row.pooling
    assert ask is not None
    assert output.vector is not None
    key = "embedding" if ask.params.task == "embed" else "scores"
    return {
        "custom_id": row.custom_id,
        "index": row.index,
        key: spell(output.vector),
        "usage": {"prompt_tokens": len(output.prompt_token_ids)},
        "error": None,
    }


def pooling_body(
    row: Row,
    outputs: Sequence[RequestOutput],
    scores: Sequence[float],
    model_name: str,
    spell: Spell = shortest_decimals,
) -> JsonObject:
    """Body of a response: `outputs` of the row's texts; for a row that scores, `scores` of its pairs."""
    ask = row.pooling
    assert ask is not None
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    model = row.model if row.model is not None else model_name
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    if row.kind == "rerank":
        return {"id": f"rerank-{row.index}", "model": model, "usage": counts, "results": _ranked(ask, scores)}
    if row.kind == "score":
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        top: JsonObject = {"id": f"score-{row.index}", "object": "list", "created": _CREATED}
        return {**top, "model": model, "data": data, "usage": counts}
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(output, ask, spell)}
        for index, output in enumerate(outputs)
    ]
    return {"object": "list", "data": data, "model": model, "usage": counts}


def pair_scores(
    ask: PoolingAsk, outputs: Sequence[RequestOutput], *, are_pairs: bool, measure: str = "cosine"
) -> list[float]:
    """One number per pair: its score, or the similarity of its texts' vectors. Empty if the row does not score."""
    if not ask.num_firsts:
        return []
    vectors = [output.vector or [] for output in outputs]
    if are_pairs:
        return [shortest_decimals(vector)[0] for vector in vectors]
    firsts, seconds = vectors[: ask.num_firsts], vectors[ask.num_firsts :]
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    return [similarity(measure, first, second) for first, second in zip(firsts, seconds, strict=True)]


def _ranked(ask: PoolingAsk, scores: Sequence[float]) -> list[JsonObject]:
    """The best first; of equal ones the earlier document."""
    documents = ask.prompts[ask.num_firsts :]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: ask.top_n]
    results = []
    for index in order:
        document = documents[index]
        assert isinstance(document, TextPrompt)
        results.append({"index": index, "document": {"text": document.text}, "relevance_score": scores[index]})
    return results


def _vector(output: RequestOutput, ask: PoolingAsk, spell: Spell) -> Any:
    assert output.vector is not None
    if not ask.is_base64:
        return spell(output.vector)
    return base64.b64encode(np.array(output.vector, dtype="<f4").tobytes()).decode("ascii")
