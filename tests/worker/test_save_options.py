"""Arguments of calls that save: paths, sizes, tensorizer's configuration."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.worker.save_options import saved_folder, size_in_bytes, tensorizer_folder

KEYS = {"encryption_keyfile": "key", "s3_access_key_id": "id", "s3_endpoint": "host"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (5, 5), ("5GB", 5 * 10**9), ("512MiB", 2**29), ("1.5 kb", 1500), ("7B", 7)],
)
def test_size_is_bytes_or_text(given: Any, expected: int | None):
    assert size_in_bytes(given) == expected


@pytest.mark.parametrize("given", [0, -1, "0GB", "5", "5 GBs", "many", "-1GB", True, 1.5, [1], "9" * 400 + "TB"])
def test_other_sizes_are_refused(given: Any):
    with pytest.raises((TypeError, ValueError), match="max_size"):
        size_in_bytes(given)


@pytest.mark.parametrize("path", ["s3://bucket/model", "https://host/x", "gs://a", "http://a/b", "", ".", None, 3])
def test_urls_and_non_paths_are_refused(path: Any):
    with pytest.raises((TypeError, ValueError), match="path"):
        saved_folder(path)


def test_url_is_shown_without_its_credentials():
    with pytest.raises(ValueError, match=r"path=https://host/x\?\.\.\. is a URL"):
        saved_folder("https://me:planted@host/x?X-Amz-Signature=planted")
    with pytest.raises(ValueError, match=r"tensorizer_config with \['s3_secret_access_key'\] needs tensorizer_dir"):
        tensorizer_folder({"s3_secret_access_key": "planted"})


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", "~no such user/x"])
def test_names_of_no_folder_are_refused(path: str):
    with pytest.raises(ValueError, match=r"path=.* cannot be the name of a folder"):
        saved_folder(path)


@pytest.mark.parametrize(
    "config",
    [
        {"tensorizer_uri": "/a/b/model.tensors", "num_readers": 4, "encryption_keyfile": None},
        {"tensorizer_dir": "/a/b"},
        {"tensorizer_uri": "/a/b"},
        json.dumps({"tensorizer_uri": "/a/b/model-%03d.tensors"}),
        SimpleNamespace(tensorizer_uri=None, tensorizer_dir="/a/b"),
    ],
)
def test_tensorizers_configuration_names_a_folder(config: Any):
    assert tensorizer_folder(config) == Path("/a/b")


@pytest.mark.parametrize(
    "config",
    [
        {**KEYS},
        {},
        3,
        {"tensorizer_uri": "s3://bucket/model.tensors"},
        *({"tensorizer_dir": "/a", key: value} for key, value in KEYS.items()),
    ],
)
def test_encryption_and_stores_are_refused_by_name(config: Any):
    with pytest.raises(ValueError, match="|".join((*KEYS, "tensorizer_config", "tensorizer_uri"))):
        tensorizer_folder(config)
