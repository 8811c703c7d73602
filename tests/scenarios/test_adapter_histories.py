"""Random histories of an engine with adapters: ids are used again with other contents, replaced, removed, evicted and
pinned while rows run, are aborted and preempted. Whatever happens, each row's answer is that of its adapter alone.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_adapter
from run_folder import made_once
from stress_seed import SEED

from kv_cache.block_hash import root_hash
from spmd_worker import LLM, LoRARequest, SamplingParams
from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.scheduler import allocator

NUM_CONTENTS, NUM_IDS, NUM_OPERATIONS = 6, 4, 150
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "block_size": 2,
    "num_blocks": 32,
    "max_model_len": 60,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
}
STARTS_AND_LENGTHS = ((0, 1), (0, 20), (0, 33), (5, 9))
PROMPTS = [[3 + (7 * each + start) % 190 for each in range(length)] for start, length in STARTS_AND_LENGTHS]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)


@cache
def folders() -> tuple[Path, list[Path]]:
    """A model, and the contents that adapters may have."""
    from reference_models import checkpoint_folder

    model = checkpoint_folder("llama3")

    def write(root: Path) -> None:
        for number in range(NUM_CONTENTS):
            write_adapter(root / str(number), model, 1 + number, rank=2 + number, scale=0.3)

    root = made_once("adapters of histories", write)
    return model, [root / str(number) for number in range(NUM_CONTENTS)]


@cache
def alone(prompt: int, content: int | None) -> str:
    """The answer of an engine that has answered nothing else with this adapter."""
    model, contents = folders()
    request = None if content is None else LoRARequest("alone", 1, str(contents[content]))
    with LLM(model, num_blocks=64, enable_lora=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[prompt]}], GREEDY, use_tqdm=False, lora_request=request)
    return repr(output.outputs[0].token_ids) + repr(output.outputs[0].logprobs)


class History:
    """Random calls of one engine, and the content that each open row was given."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.engine, self.random = llm.llm_engine, random.Random(seed)
        self.contents_of: dict[int, int] = {}
        self.open: dict[str, tuple[int, int | None]] = {}
        self.num_rows = self.num_refused = self.num_answers = 0

    def request(self) -> tuple[LoRARequest, int]:
        number, content = self.random.randint(1, NUM_IDS), self.random.randrange(NUM_CONTENTS)
        if self.random.random() < 0.5:
            content = self.contents_of.get(number, content)
        inplace = self.random.random() < 0.3
        path = str(folders()[1][content])
        return LoRARequest(f"n{number}", number, path, load_inplace=inplace), content

    def attempt(self, call: Any, *given: Any, **named: Any) -> bool:
        """Whether the engine accepted the call; one that it refuses has changed nothing."""
        before = self.engine.list_loras()
        try:
            call(*given, **named)
        except AdapterError:
            self.num_refused += 1
            assert self.engine.list_loras() == before
            return False
        return True

    def add_row(self) -> None:
        name, prompt = f"row {self.num_rows}", self.random.randrange(len(PROMPTS))
        self.num_rows += 1
        request, content = (None, None) if self.random.random() < 0.2 else self.request()
        given = (name, {"prompt_token_ids": PROMPTS[prompt]}, GREEDY)
        if self.attempt(self.engine.add_request, *given, lora_request=request):
            self.open[name] = prompt, content
            if request is not None and content is not None:
                self.contents_of[request.lora_int_id] = content

    def add_adapter(self) -> None:
        request, content = self.request()
        if self.attempt(self.engine.add_lora, request):
            self.contents_of[request.lora_int_id] = content

    def remove_adapter(self) -> None:
        self.attempt(self.engine.remove_lora, self.random.randint(1, NUM_IDS))

    def pin_adapter(self) -> None:
        self.attempt(self.engine.pin_lora, 1)

    def abort_row(self) -> None:
        if self.open:
            name = self.random.choice(sorted(self.open))
            self.engine.abort_request(name)
            del self.open[name]

    def step(self) -> None:
        for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
            if output.finished and output.request_id in self.open:
                prompt, content = self.open.pop(output.request_id)
                (completion,) = output.outputs
                assert repr(completion.token_ids) + repr(completion.logprobs) == alone(prompt, content)
                self.num_answers += 1

    def run(self) -> None:
        calls = [self.add_row, self.add_adapter, self.remove_adapter, self.pin_adapter, self.abort_row, self.step]
        for _ in range(NUM_OPERATIONS):
            (call,) = self.random.choices(calls, (10, 2, 2, 0.2, 1, 8))
            call()
            self.engine.scheduler.check_integrity()
        while self.open:
            self.step()


def run_histories(preemption_mode: str, num_histories: int) -> None:
    with LLM(folders()[0], preemption_mode=preemption_mode, **SETTINGS) as llm:
        for number in range(num_histories):
            history = History(llm, SEED * 1000 + number)
            history.run()
            assert history.num_answers > 10
            for int_id in llm.llm_engine.list_loras():
                llm.llm_engine.remove_lora(int_id)
        assert llm.llm_engine.counters.num_preemptions > 0


@pytest.mark.stress
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_random_histories_answer_as_alone(preemption_mode: str):
    run_histories(preemption_mode, 20)


@pytest.mark.stress
def test_history_detects_blocks_named_without_contents(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control: blocks of one adapter are found by rows of another."""
    monkeypatch.setattr(allocator, "root_hash", lambda version, adapter_id, **rest: root_hash(version, **rest))
    with control():
        run_histories("recompute", 1)
