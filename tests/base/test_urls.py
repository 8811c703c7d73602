"""URLs in texts: users and queries are left out, other texts are as they were."""

import pytest

from spmd_worker.base.urls import all_without_credentials, without_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/x?sig=a&b=c", "https://host/x?..."),
        ("s3://me:p@ss@bucket/x", "s3://bucket/x"),
        ("'HTTPS://me@host/x?sig=a' is no file", "'HTTPS://host/x?...' is no file"),
        ("[redis://:pass@host:6379/0?db=a, 3]", "[redis://host:6379/0?... 3]"),
        # A path of pathlib.
        ("https:/me:pass@host/x?sig=a: no such file", "https:/host/x?... no such file"),
        ("hf://datasets/a/b@main/c.jsonl", "hf://datasets/a/b@main/c.jsonl"),
        ("file:///a/me@host/b?.jsonl", "file:///a/me@host/b?.jsonl"),
        ("memory://a?b", "memory://a?b"),
        ("/a/b?c@d:/e@f?g", "/a/b?c@d:/e@f?g"),
        ("write to me@host: why?", "write to me@host: why?"),
    ],
)
def test_users_and_queries_are_left_out(text: str, shown: str):
    assert without_credentials(text) == shown
    assert without_credentials(f"{shown}: no such file") == f"{shown}: no such file"


def test_values_keep_their_structure():
    given = {"a": ["https://me@h/x", 3], "b": {"c": None, "d": "e?f"}}
    assert all_without_credentials(given) == {"a": ["https://h/x", 3], "b": {"c": None, "d": "e?f"}}
