"""Vector numbers are written as numpy writes a float32, and read from lines as JSON reads them."""

import json
import struct
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_worker.frontends.batch.parquet_rows import VectorColumns, parquet_row
from spmd_worker.frontends.openai.decimals import FormattedVectors, read_decimals, shortest_decimals, shortest_text


def one_by_one(vector: list[float]) -> list[float]:
    return [float(str(each)) for each in np.array(vector, dtype=np.float32)]


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8))
@example([0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 0.3, 1e-5, 1e-13, 9.9999998e-14, 1e6, 999999.94, 16777216.0, 3.4e38, 1e-45])
@example([0.5, 0.25, 2.0**-20, 2.0**-40, 2.0**19, 2.0**20, 0.49999997, 9.99999e-05, 0.001, 0.00099999999])
@settings(max_examples=50)
def test_float32_list_is_written_like_single_numbers(vector: list[float]):
    assert bits(shortest_decimals(vector)) == bits(one_by_one(vector))
    assert shortest_text(vector) == json.dumps(one_by_one(vector))


def test_numbers_like_vectors_are_written_like_single_numbers():
    chance = np.random.default_rng(5)
    values = np.concatenate(
        [
            chance.standard_normal(6000) * 0.05,
            chance.standard_normal(2000) * 10.0 ** chance.integers(-14, 8, 2000),
            # Of few digits, and their neighbours.
            np.round(chance.standard_normal(1000), 3),
            np.nextafter(np.round(chance.standard_normal(1000), 4).astype(np.float32), np.float32(9)),
        ]
    ).astype(np.float32)
    assert bits(shortest_decimals(values.tolist())) == bits(one_by_one(values.tolist()))
    assert shortest_text(values.tolist()) == json.dumps(one_by_one(values.tolist()))
    finite = chance.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    finite = finite[np.isfinite(finite)]
    assert shortest_text(finite.tolist()) == json.dumps(one_by_one(finite.tolist()))
    # The control: as many digits for all is another spelling.
    assert [float(f"{each:.9g}") for each in values[:6000]] != one_by_one(values[:6000].tolist())


def test_decimals_are_read_exactly_when_count_matches():
    chance = np.random.default_rng(7)
    values = chance.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    text = shortest_text(values.tolist())[1:-1].encode("ascii")
    numbers = read_decimals(text, len(values))
    assert numbers is not None
    assert numbers.tobytes() == values.tobytes()
    assert read_decimals(text, len(values) + 1) is None
    assert read_decimals(text, len(values) - 1) is None
    neighbour = np.nextafter(values[:1], np.float32(0))
    assert read_decimals(shortest_text(neighbour.tolist())[1:-1].encode(), 1) != values[:1], "the control"


def test_non_finite_numbers_are_left_to_numpy():
    assert shortest_text([1.0, float("inf"), float("nan")]) == "[1.0, inf, nan]"


def test_vector_is_extracted_as_json_reads_it():
    chance = np.random.default_rng(6)
    vectors = (chance.standard_normal((4, 6)) * 10.0 ** chance.integers(-9, 3, (4, 6))).astype(np.float32)
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    for vector in vectors:
        numbers = shortest_decimals(vector.tolist())
        data: list[Any] = [{"object": "embedding", "index": 0, "embedding": numbers}]
        shapes = (
            {"custom_id": '"embedding": [1]', "index": 7, "embedding": numbers, "usage": usage, "error": None},
            {"custom_id": "a", "response": {"body": {"data": data, "usage": usage}}, "error": None},
        )
        for answer in shapes:
            line = f"{json.dumps(answer)}\n".encode()
            row = parquet_row(7, line, VectorColumns("embedding", 6))
            assert np.array(row["embedding"], dtype=np.float32).tobytes() == vector.tobytes()
            assert (row["json"], row["custom_id"]) == (line.decode().rstrip(), answer["custom_id"])
            assert row["prompt_tokens"] == 3
            # Of another length, or several of them, there is none; without the column nothing is cut.
            assert parquet_row(7, line, VectorColumns("embedding", 5))["embedding"] is None
            assert "embedding" not in parquet_row(7, line)
        two = {"custom_id": "a", "response": {"body": {"data": data * 2, "usage": usage}}, "error": None}
        assert parquet_row(7, json.dumps(two).encode(), VectorColumns("embedding", 6))["embedding"] is None


def test_marks_are_replaced_unless_row_contains_them():
    vectors = [[0.25, -0.125], [1e-7]]
    for name, fills in (("a", True), ("\0numbers", True), ("\0numbers\0", False)):
        numbers = FormattedVectors()
        marked = {"custom_id": name, "data": [numbers.mark(each) for each in vectors], "end": 1}
        filled = numbers.fill(json.dumps(marked).encode())
        assert filled == (json.dumps({**marked, "data": vectors}).encode() if fills else None)
    assert FormattedVectors().fill(b"{}") == b"{}"
