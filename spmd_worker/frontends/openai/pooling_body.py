"""Output records of pooling rows: OpenAI's for embeddings, vLLM's for scores, classes and pooling, Jina's for
reranking.

Every value depends only on the row, as in `openai_body.py`. Vectors are float32; a number is written with its shortest
unique digits.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from spmd_worker.frontends.openai.decimals import FormattedVectors, Numbers, shortest_decimals
from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow
from spmd_worker.frontends.openai.row import PoolingInputs, TextPrompt, answer_name
from spmd_worker.frontends.openai.row_writer import json_line, response_line
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.similarity import compared

FormatVector = Callable[[Numbers], Any]
_KEYS: Final = {"embed": "embedding", "token_embed": "token_embeddings"}
"""Keys of plain records, by task; those of others are `scores`."""


def pooled_line(encoded: EncodedPooledRow, outputs: Sequence[RequestOutput], default_model: str) -> bytes:
    """Output line of a pooling row, with its line end."""

    def line(format_vector: FormatVector) -> bytes:
        if encoded.row.kind == "pooled":
            return json_line(pooled_record(encoded, outputs[0], format_vector))
        return response_line(encoded.row, pooling_body(encoded, outputs, default_model, format_vector))

    vectors = FormattedVectors()
    return vectors.fill(line(vectors.mark)) or line(shortest_decimals)


def pooled_record(
    encoded: EncodedPooledRow, output: RequestOutput, format_vector: FormatVector = shortest_decimals
) -> JsonObject:
    """Output record of a plain row."""
    row = encoded.row
    assert row.pooling is not None
    key = _KEYS.get(row.pooling.params.task or "", "scores")
    return {
        "custom_id": row.custom_id,
        "index": row.index,
        **({} if row.adapter is None else {"adapter": row.adapter}),
        key: format_vector(_numbers(output)),
        **_of_tokens(encoded, output),
        "usage": {"prompt_tokens": len(output.prompt_token_ids)},
        "error": None,
    }


def _of_tokens(encoded: EncodedPooledRow, output: RequestOutput) -> JsonObject:
    """Labels, tokens and places in a record with numbers for each token."""
    if output.token_vectors is None:
        return {}
    places, num_scores = encoded.places, output.token_vectors.shape[1]
    labels = {"labels": [_label(encoded.labels, index) for index in range(num_scores)]}
    return {
        **(labels if encoded.params.task == "token_classify" else {}),
        "tokens": None if places is None else places.tokens,
        "offsets": None if places is None else places.offsets,
        **_of_chunks(encoded, 0),
    }


def _of_chunks(encoded: EncodedPooledRow, index: int) -> JsonObject:
    """vLLM's record of a text's late chunks, by its key."""
    return {"late_chunking": asdict(encoded.chunks[index])} if encoded.chunks else {}


def _numbers(output: RequestOutput) -> Numbers:
    """The vector of a row, or those of its tokens."""
    numbers = output.vector if output.token_vectors is None else output.token_vectors
    assert numbers is not None, output.request_id
    return numbers


def pooling_body(
    encoded: EncodedPooledRow,
    outputs: Sequence[RequestOutput],
    default_model: str,
    format_vector: FormatVector = shortest_decimals,
) -> JsonObject:
    """Body of the response to an OpenAI row; `default_model` is for rows that name no model."""
    row, inputs = encoded.row, encoded.row.pooling
    assert inputs is not None
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    model = row.model if row.model is not None else default_model
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    if row.kind == "rerank":
        results = _ranked(inputs, _scores(encoded, inputs, outputs))
        return {"id": f"rerank-{answer_name(row)}", "model": model, "usage": counts, "results": results}
    data = _entries(encoded, inputs, outputs, format_vector)
    if row.kind == "embedding":
        return {"object": "list", "data": data, "model": model, "usage": counts}
    top: JsonObject = {"id": f"{row.kind}-{answer_name(row)}", "object": "list", "created": 0}
    return {**top, "model": model, "data": data, "usage": counts}


def _entries(
    encoded: EncodedPooledRow, inputs: PoolingInputs, outputs: Sequence[RequestOutput], format_vector: FormatVector
) -> list[JsonObject]:
    """The list of a body, in the order of its texts."""
    kind = encoded.row.kind
    if kind == "score":
        scores = _scores(encoded, inputs, outputs)
        return [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
    if kind == "classify":
        return [_class(index, output, encoded.labels, format_vector) for index, output in enumerate(outputs)]
    vectors = [_vector(output, inputs, format_vector) for output in outputs]
    if kind == "pooling":
        return [
            {"index": index, "object": "pooling", "data": vector, **_of_chunks(encoded, index)}
            for index, vector in enumerate(vectors)
        ]
    return [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]


def _scores(encoded: EncodedPooledRow, inputs: PoolingInputs, outputs: Sequence[RequestOutput]) -> list[float]:
    """One number per pair: its score, or the similarity of its texts' vectors."""
    vectors = [_numbers(output) for output in outputs]
    if encoded.are_pairs:
        return [shortest_decimals(vector)[0] for vector in vectors]
    assert encoded.pooling is not None, "rows whose texts are compared have their model's"
    firsts, seconds = vectors[: inputs.num_firsts], vectors[inputs.num_firsts :]
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    return [compared(encoded.pooling, first, second) for first, second in zip(firsts, seconds, strict=True)]


def _ranked(inputs: PoolingInputs, scores: Sequence[float]) -> list[JsonObject]:
    """The highest score first; of equal ones the earlier document."""
    documents = inputs.prompts[inputs.num_firsts :]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: inputs.top_n]
    results = []
    for index in order:
        document = documents[index]
        assert isinstance(document, TextPrompt)
        results.append({"index": index, "document": {"text": document.text}, "relevance_score": scores[index]})
    return results


def _class(index: int, output: RequestOutput, labels: Sequence[str | None], format_vector: FormatVector) -> JsonObject:
    """The scores of a text, with the label of the highest, the first of equal ones."""
    scores = output.vector
    assert scores is not None
    highest = scores.index(max(scores))
    return {
        "index": index,
        "label": _label(labels, highest),
        "probs": format_vector(scores),
        "num_classes": len(scores),
    }


def _label(labels: Sequence[str | None], index: int) -> str | None:
    """Name of a score: transformers' if config.json names none."""
    return labels[index] if labels else f"LABEL_{index}"


def _vector(output: RequestOutput, inputs: PoolingInputs, format_vector: FormatVector) -> Any:
    numbers = _numbers(output)
    if not inputs.is_base64:
        return format_vector(numbers)
    return base64.b64encode(np.array(numbers, dtype="<f4").tobytes()).decode("ascii")
