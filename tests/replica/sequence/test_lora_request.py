"""LoRARequest: vLLM's fields, each taken or refused by name."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from spmd_worker import LoRARequest, PromptAdapterRequest


def test_paths_of_one_folder_are_equal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    expected = LoRARequest("a", 1, "/home/me/a")
    for path in ("/home/me/a/", "/home/me//a", "/home/me/./a", "~/a"):
        assert LoRARequest("a", 1, path) == expected
        assert PromptAdapterRequest("a", 1, path, 4).local_path == "/home/me/a"
    assert LoRARequest("a", 1, "/home/me/../me/a") != expected, "a link may be there"


def test_base_model_name_is_kept_and_changes_nothing():
    request = LoRARequest("a", 1, "/a", base_model_name="base")
    copies = (request, replace(request, lora_name="a"), pickle.loads(pickle.dumps(request)))
    assert [each.base_model_name for each in copies] == ["base"] * 3
    assert request == LoRARequest("a", 1, "/a")
    assert (request.adapter_id, request.name, request.path, request.local_path) == (1, "a", "/a", "/a")
    assert request.tensorizer_config_dict is None
    with pytest.raises(TypeError, match=r"LoRARequest.base_model_name=3 is a int: give text"):
        LoRARequest("a", 1, "/a", base_model_name=3)
    with pytest.raises(ValueError, match=r"LoRARequest.base_model_name=.* contains a lone surrogate"):
        LoRARequest("a", 1, "/a", base_model_name="\ud800")


@pytest.mark.parametrize(
    ("name", "neutral", "value", "words"),
    [
        ("lora_local_path", "", "/a", "give the folder as lora_path"),
        ("long_lora_max_len", None, 8192, "leave it out"),
        ("tensorizer_config_dict", {}, {"tensorizer_uri": "s3://a"}, "adapters are read from PEFT folders"),
        ("is_3d_lora_weight", False, True, "is seen in its tensors"),
    ],
)
def test_other_fields_must_be_neutral(name: str, neutral: Any, value: Any, words: str):
    assert LoRARequest("a", 1, "/a", **{name: neutral}) == LoRARequest("a", 1, "/a")
    with pytest.raises(ValueError, match=rf"LoRARequest.{name}=.* is not supported: .*{words}"):
        LoRARequest("a", 1, "/a", **{name: value})
