"""URLs in texts: users and queries are left out, other texts are as they were."""

import pytest

from spmd_worker.base import urls
from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.urls import all_without_credentials, shortened, without_credentials


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pass@host/x?sig=a&b=c", "https://host/x?..."),
        ("s3://me:p@ss@bucket/x", "s3://bucket/x"),
        ("'HTTPS://me@host/x?sig=a' is no file", "'HTTPS://host/x?...' is no file"),
        ("[redis://:pass@host:6379/0?db=a, 3]", "[redis://host:6379/0?..., 3]"),
        # A path of pathlib.
        ("https:/me:pass@host/x?sig=a: no such file", "https:/host/x?...: no such file"),
        # Any character of a password but a slash.
        ("s3://u:p'w@h/x", "s3://h/x"),
        ('https://u:p"w@h', "https://h"),
        ("https://u:p#w@h/x", "https://h/x"),
        ("'https://u:p?w@h/x', 3", "'https://h/x', 3"),
        ("https://h/it's?sig=a'b", "https://h/it's?..."),
        # Punctuation after it is the text's.
        ("url=https://h/v1?a=1: use X", "url=https://h/v1?...: use X"),
        ("(s3://b/x?a=1), then; see https://h?b=2.", "(s3://b/x?...), then; see https://h?...."),
        ("as in `https://h/x?a=1`", "as in `https://h/x?...`"),
        ("['https://h/a?b','c?d']", "['https://h/a?...','c?d']"),
        # A pattern of a store.
        ("job.input=s3://b/part-?.jsonl: no file", "job.input=s3://b/part-?.jsonl: no file"),
        ("s3://b/x?versionId=3", "s3://b/x?..."),
        ("s3://b/part-?,https://h/x?sig", "s3://b/part-?..."),
        ("hf://datasets/a/b@main/c.jsonl", "hf://datasets/a/b@main/c.jsonl"),
        ("file:///a/me@host/b?.jsonl", "file:///a/me@host/b?.jsonl"),
        ("memory://a?b", "memory://a?b"),
        ("/a/b?c@d:/e@f?g", "/a/b?c@d:/e@f?g"),
        ("write to me@host: why?", "write to me@host: why?"),
    ],
)
def test_users_and_queries_are_left_out(text: str, expected: str):
    assert without_credentials(text) == expected
    assert without_credentials(f"{expected}: no such file") == f"{expected}: no such file"


@pytest.mark.parametrize("unit", ["a-", "http://a.b/c,", "a://", "https:/a,", "a,", "'s3://h?b','"])
def test_long_texts_take_linear_time(unit: str):
    """Texts of a size that would take minutes each in quadratic time."""
    text = "http://" + unit * (300_000 // len(unit))
    assert without_credentials(f"{text} s3://me@b").endswith(" s3://b")


def test_of_values_little_is_read(monkeypatch: pytest.MonkeyPatch):
    lengths: list[int] = []
    monkeypatch.setattr(urls, "without_credentials", lambda text: lengths.append(len(text)) or text)
    assert shown("a" * 10_000_000, 80) == f"'{'a' * 76}..."
    assert max(lengths) < 5000


@pytest.mark.parametrize("name", ["https://me:{}@h/x", "s3://b/x?{}=", "https:/me:{}@h"])
def test_cut_texts_end_without_credentials(name: str):
    """A user's end, and the sign that tells a query, may be after the cut."""
    text = shortened(name.format("planted" * 1000), 80)
    assert "planted" not in text
    assert text.endswith("...")


def test_values_keep_their_structure():
    given = {"a": ["https://me@h/x", 3], "b": {"c": None, "d": "e?f"}}
    assert all_without_credentials(given) == {"a": ["https://h/x", 3], "b": {"c": None, "d": "e?f"}}
