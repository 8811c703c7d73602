"""Calls that one rank alone cannot make: its error reaches the others before any of them waits for its steps."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from adapter_folders import DEMO, write_lora
from safetensors.torch import load_file

from spmd_worker import LLM, LoRARequest

SCRIPT = __file__
SETTINGS = {"num_blocks": 20, "max_model_len": 64, "tensor_parallel_size": 2, "timeout_s": 60, "device": "cpu"}
CALLS = ("add_lora", "remove_lora", "pin_lora", "enqueue", "sleep", "wake_up")


def main(folder: Path) -> None:
    """What a rank hears in each call, in a file."""
    rank = int(os.environ["RANK"])
    first, second = (LoRARequest(name, i, write_lora(folder / f"{name}{rank}", i)) for i, name in enumerate("ab", 1))
    heard: dict[str, str] = {}

    def hear(what: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        try:
            heard[what] = f"returned {call(*arguments, **keywords)!r}"
        except Exception as error:
            heard[what] = f"{type(error).__name__}: {error}"

    with LLM(DEMO, enable_lora=True, **SETTINGS) as llm:
        llm.add_lora(first)
        hear("other level", llm.sleep, 1 + rank)
        hear("other call", llm.sleep if rank else llm.wake_up)
        for call, arguments in zip(CALLS, [(second,), (1,), (1,), ([[3, 4]],), (), ()]):
            keywords = {"lora_request": second} if call == "enqueue" else {}
            if rank == 1:
                llm.update_weights([*load_file(DEMO / "model.safetensors").items(), ("lm_head.weight", _other_head())])
            hear(call, getattr(llm, call), *arguments, **keywords)
            llm.collective_rpc("reload_weights")
        if rank == 1:
            llm.start_weight_update(partial=True)
        hear("update", llm.add_lora, second)
        if rank == 1:
            llm.llm_engine.changes.weights.release()
        other = LoRARequest("a", 1, write_lora(folder / "other", 1)) if rank == 1 else first
        hear("folder", llm.generate, [[3, 4]], use_tqdm=False, lora_request=other)
        hear("queued folder", llm.enqueue, [[3, 4]], lora_request=other)
        llm.enqueue([[3, 4]])
        llm.sleep(2, mode="keep")
        llm.wake_up(["weights"])
        if rank == 1:
            llm.collective_rpc("reload_weights")
        hear("missing", llm.wake_up)
        llm.collective_rpc("reload_weights")
        llm.wake_up()
        heard["answers"] = str(len(llm.wait_for_completion(use_tqdm=False)))
        heard["loaded"] = str(sorted(llm.list_loras()))
    (folder / f"heard{rank}").write_text(json.dumps(heard))


def _other_head() -> torch.Tensor:
    return load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"] + 1


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run_forked([SCRIPT, str(folder)], 2, 240.0).checked()
    return [json.loads((folder / f"heard{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("call", CALLS)
def test_differing_head_of_one_rank_reaches_all(heard: list[dict[str, str]], call: str):
    """It was found once the ranks had agreed, so that the others waited for the timeout."""
    assert heard[0][call].startswith(f"RankFailedError: rank 1 failed before {call}: CheckpointError"), heard
    assert heard[1][call].startswith("CheckpointError: "), heard


def test_other_arguments_of_one_rank_are_named(heard: list[dict[str, str]]):
    """They were `[1].tuple[0]`."""
    for each in heard:
        assert "calls: level is 1 on rank 0, 2 on rank 1; make the same call" in each["other level"], heard
        assert 'calls: call is "wake_up" on rank 0, "sleep" on rank 1; make the same call' in each["other call"], heard


def test_other_folder_of_one_rank_reaches_all(heard: list[dict[str, str]]):
    for what, call in (("folder", "generate"), ("queued folder", "enqueue")):
        assert heard[0][what].startswith(f"RankFailedError: rank 1 failed before {call}: AdapterError"), heard
        assert heard[1][what].startswith("AdapterError: lora_int_id=1 is loaded as 'a' from "), heard


def test_open_update_of_one_rank_reaches_all(heard: list[dict[str, str]]):
    assert heard[0]["update"].startswith("RankFailedError: rank 1 failed before add_lora: RuntimeError"), heard


def test_missing_weights_of_one_rank_end_no_pause(heard: list[dict[str, str]]):
    """The rank that had them took a step for which the other did not come."""
    for each in heard:
        assert each["missing"].startswith("RanksDisagreeError: ranks were given different calls: "), heard
        assert (each["answers"], each["loaded"]) == ("1", "[1]"), heard


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]))
