"""Adapters of an engine of several ranks: loaded on all or on none, and the same answers in every layout."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
from adapter_folders import CONFIG, lora_tensors, write_lora

from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import AdapterError
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.ops.kernels.cpu import adapters as kernels

TP, PP, DP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}
MULTIPROC = {"distributed_executor_backend": "multiproc"}
SCRIPT, MODEL = __file__, ranks.REPOSITORY / "scripts/demo/model"
PROMPT, PARAMS = tuple(range(7, 27)), SamplingParams(temperature=0, max_tokens=6)


def tokens_with(llm: LLM, *requests: LoRARequest | None) -> list[list[int]]:
    """Answers to the same prompt with each adapter, all in one batch."""
    engine = llm.llm_engine
    digests = engine.adapters.digests_of(requests)
    numbers = [engine.requests.add(PromptContent(PROMPT, adapter=digest), PARAMS) for digest in digests]
    answers = {}
    while engine.has_unfinished_requests():
        answers |= {int(each.request_id): list(each.outputs[0].token_ids) for each in engine.step()}
    return [answers[number] for number in numbers]


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(AdapterError) as refused:
        call(*arguments)
    return str(refused.value)


def main(folder: Path, **options: Any) -> None:
    """What a rank sees of adapters in folders of its own, in a file: texts, and answers in `answers`."""
    keywords = {"device": "cpu", "num_blocks": 64, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
    with LLM(MODEL, **keywords, **options) as llm:
        engine = llm.llm_engine
        rank = engine.engine_channel.rank
        own = folder / f"rank{rank}"
        first, second, third = (LoRARequest(name, i, write_lora(own / name, i)) for i, name in enumerate("abc", 1))
        seen: dict[str, Any] = {"loaded": [llm.add_lora(first), sorted(llm.list_loras())]}
        answers = tokens_with(llm, None, first, second, first)
        seen["on workers"] = sorted(engine.executor.list_loras())
        # A file of one rank is cut short: its folder is the last rank's.
        weights = own / "c" / "adapter_model.safetensors"
        whole = weights.read_bytes()
        num_ranks = max(engine.engine_channel.size, 1)
        if rank == num_ranks - 1:
            weights.write_bytes(whole[:-100])
        engine.requests.add(PromptContent(PROMPT, adapter=engine.adapters.digest_of(first)), PARAMS)
        seen["cut"] = refusal(llm.add_lora, third)
        seen["after cut"] = sorted(engine.executor.list_loras())
        # Another content on one rank.
        weights.write_bytes(whole)
        if rank == num_ranks - 1:
            write_lora(own / "c", 30)
        seen["other"] = refusal(llm.add_lora, third) if num_ranks > 1 else ""
        weights.write_bytes(whole)
        # No memory for the packed matrices, of which the ranks learn before any of them has the adapter.
        if "distributed_executor_backend" not in options:
            is_full = mock.patch.object(kernels, "_packed_outputs", side_effect=MemoryError("full"))
            with is_full if rank == num_ranks - 1 else nullcontext():
                seen["full"] = refusal(llm.add_lora, third)
        seen["in use"] = refusal(llm.remove_lora, 1)
        # The first has an unanswered request, so the second gives way.
        llm.add_lora(third)
        seen["evicted"] = sorted(llm.list_loras())
        while engine.has_unfinished_requests():
            engine.step()
        answers += tokens_with(llm, third, first, None)
        llm.pin_lora(1)
        llm.pin_lora(3)
        seen["pinned"] = refusal(llm.add_lora, second)
        # Other weights under a loaded id, as tensors if they can reach the workers, and the first ones again.
        write_lora(own / "d", 4)
        changed = LoRARequest("a", 1, str(own / "d"), load_inplace=True)
        if "distributed_executor_backend" not in options:
            changed = LoRARequest("a", 1, lora_tensors=lora_tensors(4), peft_config=CONFIG, load_inplace=True)
        answers += tokens_with(llm, changed) + tokens_with(llm, LoRARequest("a", 1, first.lora_path, load_inplace=True))
        seen["removed"] = [llm.remove_lora(1), llm.remove_lora(1), sorted(engine.executor.list_loras())]
        if engine.channel.size > 1:
            seen["followed"] = follow(llm, second)
        (folder / f"seen{rank}").write_text(json.dumps([seen, answers]))
        shutil.rmtree(own)


def follow(llm: LLM, request: LoRARequest) -> list[Any]:
    """Rank 0 loads, uses and removes adapters while the others follow and read its folder; they have no tensors."""
    engine = llm.llm_engine
    if not engine.is_leader:
        engine.follow()
        # Rank 0 has loaded it again from another folder, which is the one to name from now on.
        assert engine.scheduler.adapters.entries[2].path != request.lora_path
        tokens_with(llm, LoRARequest("b", 2, engine.scheduler.adapters.entries[2].path))
        return sorted(llm.list_loras())
    refused = refusal(engine.add_lora, LoRARequest("t", 9, lora_tensors=lora_tensors(9), peft_config=CONFIG))
    assert refused.startswith("rank 1: LoRA adapter 9 ('t') has tensors on rank 0 and none here"), refused
    before = tokens_with(llm, request)
    assert before == tokens_with(llm, request)
    engine.pin_lora(2)
    engine.remove_lora(3)
    other = write_lora(Path(request.lora_path).parent / "other", 2)
    engine.add_lora(LoRARequest("b", 2, other, load_inplace=True))
    engine.close_followers()
    assert tokens_with(llm, LoRARequest("b", 2, other)) == before
    return sorted(llm.list_loras())


@pytest.mark.gate(
    "{'tensor_parallel_size': 2}", "{'pipeline_parallel_size': 2, 'distributed_executor_backend': 'multiproc'}", "{}"
)
@pytest.mark.guarantee("An adapter is loaded on all ranks or on none")
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    "layout",
    [
        TP,
        {**PP, **MULTIPROC},
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ({}, PP, DP, {**TP, **MULTIPROC})),
    ],
    ids=str,
)
def test_adapters_are_loaded_on_all_ranks(layout: dict[str, Any], tmp_path: Path):
    if not layout or "distributed_executor_backend" in layout:
        main(tmp_path, **layout)
    else:
        ranks.run_forked([SCRIPT, json.dumps(layout), tmp_path], nproc=2, timeout_s=240).checked()
    for path in sorted(tmp_path.glob("seen*")):
        seen, answers = json.loads(path.read_text())
        assert seen["loaded"] == [True, [1]]
        assert seen["on workers"] == seen["after cut"] == [1, 2]
        bad_rank = 1 if layout in (TP, PP, DP) else 0
        assert seen["cut"].startswith(f"rank {bad_rank}: {tmp_path}/rank{bad_rank}/c"), seen["cut"]
        assert seen.get("full", "rank 0: MemoryError: full") == f"rank {bad_rank}: MemoryError: full"
        assert "unanswered" in seen["in use"]
        assert seen["evicted"] == [1, 3]
        assert "2 of them pinned" in seen["pinned"]
        assert seen["removed"] == [True, False, [3]]
        assert seen.get("followed", [2]) == [2]
        plain, first, second, again, third, once_more, plain_again, changed, back = answers
        assert first == again == once_more == back
        assert plain == plain_again
        assert len(dict.fromkeys(map(tuple, (plain, first, second, third, changed)))) == 5


if __name__ == "__main__":
    main(Path(sys.argv[2]), **json.loads(sys.argv[1]))
