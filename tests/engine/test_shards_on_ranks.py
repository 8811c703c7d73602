"""FSDP2 on two ranks, and the weights of engines on the same ranks: two of one rank each, and one of two.

As a script it is one of the ranks.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spmd_worker import LLM, SamplingParams

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
PROMPTS = ["sort 21 87 57 15 33 12 84 61 =", "reverse h x a f w ="]
LARGE = {"vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 1, "intermediate_size": 65536}
"""Rows of one matrix and columns of another are divided in an engine of two ranks: 128 MiB each."""
BUCKET_BYTES, ALLOWED_BYTES = 8 * 2**20, 100 * 2**20


class Trained(nn.Module):
    """Parameters by the names of a checkpoint."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.of = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(each) for name, each in tensors.items()})

    def pairs(self) -> list[tuple[str, Tensor]]:
        return [(name.removeprefix("of.").replace("/", "."), each) for name, each in self.named_parameters()]


def sharded_by_fsdp(tensors: dict[str, Tensor]) -> Trained:
    trained = Trained(tensors)
    fully_shard(trained, mesh=init_device_mesh("cpu", (2,)))
    return trained


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, dtype="float32", device="cpu", num_blocks=32, timeout_s=120.0, **options)


def outcome_of(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def logprobs_of(llm: LLM) -> list[float]:
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [next(iter(entry.values())).logprob for each in outputs for entry in each.logprobs or ()]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    whole = {name: tensor * 0.75 for name, tensor in load_file(MODEL / "model.safetensors").items()}
    pairs = sharded_by_fsdp({name: tensor.clone() for name, tensor in whole.items()}).pairs()
    assert all(each.to_local().numel() < each.numel() for _, each in pairs if each.ndim > 1)
    seen: dict[str, Any] = {}
    for size in (1, 2):
        with open_llm(MODEL, tensor_parallel_size=size) as llm:
            llm.load_weights(whole.items())
            found = {"digests of a whole load": llm.tensor_digests(), "log-probabilities of it": logprobs_of(llm)}
            llm.collective_rpc("reload_weights")
            found["before"] = llm.tensor_digests()
            llm.load_weights(pairs, bucket_bytes=1 << 14, verify=True)
            found |= {"digests": llm.tensor_digests(), "log-probabilities": logprobs_of(llm)}
            found["digests of shards"] = llm.digests_of(iter(pairs))
            own = pairs[:-1] if dist.get_rank() else pairs
            found["left out"] = outcome_of(lambda given=own: llm.update_weights(given))
            found["left out at the end"] = outcome_of(lambda given=own: llm.update_weights(iter(given)))
            found["unchanged"] = llm.tensor_digests()
            # Before, with `verify`, the other rank waited in its update; in one engine, at the end of it.
            wrong: Any = whole if dist.get_rank() else whole.items()
            group = dist.group.WORLD if size == 1 else None
            found["a dict"] = outcome_of(partial(llm.load_weights, wrong, group=group, verify=True))
            seen[str(size)] = found
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.stress
@pytest.mark.guarantee("Weights from shards are those of whole tensors")
def test_shards_of_fsdp_give_whole_weights(tmp_path: Path):
    ranks.run_forked([__file__, "bits", tmp_path], nproc=2, timeout_s=240).checked()
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        for found in report.values():
            whole = found["digests of a whole load"]
            assert whole == found["digests"] == found["digests of shards"] == found["unchanged"] != found["before"]
            expected = pytest.approx(found["log-probabilities of it"], rel=0.0, abs=1e-6)
            assert found["log-probabilities"] == expected
            for case in ("left out", "left out at the end"):
                assert re.match(r"RanksDisagreeError: tensor \d+ of the update is", found[case]), found[case]
    for size in "12":
        others, own = (report[size]["a dict"] for report in reports)
        assert own == "TypeError: weights are a dict: give its items(), pairs of a name and a tensor"
        assert others.startswith("RankFailedError: rank 1 ")
        assert own in others


def peak_bytes(call: Callable[[], object]) -> int:
    """Growth of this process's largest resident memory in the call, not hidden by freed memory that malloc has kept."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main_of_memory(folder: Path, model: Path, size: int) -> None:
    dist.init_process_group("gloo")
    whole = load_file(model / "model.safetensors")
    trained = sharded_by_fsdp(whole)
    del whole
    pairs = trained.pairs()
    seen = {}
    with open_llm(model, tensor_parallel_size=size, load_format="dummy", skip_tokenizer_init=True) as llm:
        for update in ("first", "second"):
            seen[update] = peak_bytes(lambda: llm.load_weights(pairs, bucket_bytes=BUCKET_BYTES))
        gathered = ((name, each.full_tensor()) for name, each in pairs)
        seen["gathered"] = peak_bytes(lambda: llm.load_weights(gathered))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.stress
@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_ever_has_a_whole_tensor(size: int, tmp_path: Path):
    """Control: a gather has one, of 128 MiB."""
    # Imports transformers, for which the ranks would wait.
    from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint

    model = write_checkpoint(tmp_path / "model", CheckpointSpec(LlamaConfig, {**LARGE, "tie_word_embeddings": False}))
    # In processes of its own, whose allocator keeps no memory of another engine.
    ranks.run_forked([__file__, "memory", tmp_path, model, size], nproc=2, timeout_s=480).checked()
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        os.write(1, f"TP {size}, rank {rank}: {json.dumps(seen)}\n".encode())
        assert max(seen["first"], seen["second"]) < ALLOWED_BYTES
        assert seen["gathered"] > 120 * 2**20


if __name__ == "__main__":
    if sys.argv[1] == "bits":
        main(Path(sys.argv[2]))
    else:
        main_of_memory(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
