"""Adapters of an engine of one rank: what is refused and in which words, and what they outlive."""

import gc
import logging
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import CONFIG, lora_tensors, write_adapter, write_lora, write_prompt_adapter
from pooling_models import pooling_folder
from safetensors.torch import load_file
from test_adapters_on_ranks import MODEL, PARAMS, PROMPT, refusal, tokens_with

from spmd_worker import LLM, LoRARequest
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.engine import adapters_at_start, startup
from spmd_worker.engine.changes import Changes
from spmd_worker.engine.startup import read_run
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.model.adapters import source
from spmd_worker.ops.kernels.adapters import AdapterSizes, ReferenceStack
from spmd_worker.ops.kernels.triton.adapters import TritonAdapterStack
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.scheduler.adapter_plans import addition_of
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.adapter_kind import LORA
from spmd_worker.replica.sequence.lora_request import TensorSnapshot

OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "enable_lora": True, "max_cpu_loras": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the adapters a, b and c."""
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc", 1):
        write_lora(made / name, seed)
    return made


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """Without adapters."""
    for int_id in shared.list_loras():
        shared.remove_lora(int_id)
    return shared


@pytest.fixture
def requests(folder: Path) -> list[LoRARequest]:
    return [LoRARequest(name, int_id, str(folder / name)) for int_id, name in enumerate("abc", 1)]


def add(llm: LLM, request: LoRARequest) -> int:
    """Queue a request with this adapter."""
    engine = llm.llm_engine
    return engine.requests.add(PromptContent(PROMPT, adapter=engine.adapters.digest_of(request)), PARAMS)


def finish(llm: LLM) -> None:
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def num_cached(llm: LLM, adapter: int) -> int | None:
    number = llm.llm_engine.requests.add(PromptContent(PROMPT, adapter=adapter), PARAMS)
    while True:
        for output in llm.llm_engine.step():
            if output.request_id == str(number):
                return output.num_cached_tokens


def test_more_adapters_than_loaded_ones_are_refused(llm: LLM, requests: list[LoRARequest]):
    adapters = llm.llm_engine.adapters
    with pytest.raises(AdapterError, match=r"3 different LoRA adapters are requested at once, and .*max_cpu_loras=2"):
        adapters.digests_of(requests)
    assert llm.list_loras() == set()
    # Adapters of unanswered requests do not give way either, and those of one call not to each other.
    add(llm, requests[0])
    assert 0 not in adapters.digests_of([requests[2], requests[0], requests[2]])
    assert refusal(adapters.digests_of, requests[1:]).startswith("2 LoRA adapters are loaded, 0 of them pinned")
    finish(llm)
    assert adapters.digests_of([None, requests[1], requests[2]])[0] == 0
    assert llm.list_loras() == {2, 3}


def test_removal_waits_for_answers_and_aborts(llm: LLM, requests: list[LoRARequest]):
    numbers = [add(llm, requests[0]) for _ in range(3)]
    expected = "LoRA adapter 1 ('a') cannot be removed: 3 requests with it are unanswered"
    assert refusal(llm.remove_lora, 1).startswith(expected)
    llm.llm_engine.step()
    llm.llm_engine.abort_request(numbers[1:])
    assert "3 requests" in refusal(llm.remove_lora, 1)
    finish(llm)
    assert llm.remove_lora(1)
    with pytest.raises(AdapterError, match="not loaded any more"):
        llm.llm_engine.requests.add(PromptContent(PROMPT, adapter=12345), PARAMS)


def test_request_meets_adapter_that_is_leaving(llm: LLM, requests: list[LoRARequest]):
    """Another thread adds it while rank 0 has decided what gives way."""
    engine = llm.llm_engine
    digest = engine.adapters.digest_of(requests[0])
    engine.requests.leaving_adapters = (digest,)
    try:
        with pytest.raises(AdapterError, match="add it again"):
            engine.requests.add(PromptContent(PROMPT, adapter=digest), PARAMS)
    finally:
        engine.requests.leaving_adapters = ()
    assert engine.requests.num_with_adapter(digest) == 0


def test_id_name_and_content_must_fit(llm: LLM, requests: list[LoRARequest], folder: Path):
    adapters = llm.llm_engine.adapters
    digest = adapters.digest_of(requests[0])
    assert adapters.digest_of(LoRARequest("a", 1, f"{folder}//a/")) == digest == adapters.digest_of_name("a")
    for name, path in (("b", "a"), ("a", "b")):
        other = LoRARequest(name, 1, str(folder / path))
        assert refusal(adapters.digest_of, other).startswith("lora_int_id=1 is loaded as 'a' from")
    tensors = LoRARequest("t", 2, lora_tensors=lora_tensors(5), peft_config=CONFIG)
    assert adapters.digest_of(tensors) == adapters.digest_of(tensors) != digest
    # A trainer changes its tensors in place.
    next(iter(tensors.lora_tensors.values())).add_(1)
    assert "lora_int_id=2 is loaded as 't' from tensors" in refusal(adapters.digest_of, tensors)
    with pytest.raises(AdapterError, match=r"is that of .* and of"):
        adapters.digests_of([requests[1], LoRARequest("x", 2, "elsewhere")])
    with pytest.raises(AdapterError, match=r"adapter 'z' is not loaded: loaded are 1 \('a'\), 2 \('t'\)"):
        adapters.digest_of_name("z")
    with pytest.raises(AdapterError, match="LoRA adapter 9 cannot be pinned"):
        llm.pin_lora(9)
    with pytest.raises(TypeError, match="give a LoRARequest"):
        llm.add_lora("a")


def test_tensors_of_evicted_and_removed_adapters_are_freed(llm: LLM):
    """A trainer that pushes each policy under a new id must not fill the memory."""
    snapshots = []
    for int_id in range(1, 5):
        tensors = TensorSnapshot.of(lora_tensors(int_id))
        llm.add_lora(LoRARequest("policy", int_id, lora_tensors=tensors, peft_config=CONFIG))
        snapshots.append(weakref.ref(tensors))
        del tensors
    llm.remove_lora(3)
    gc.collect()
    assert [each() is not None for each in snapshots] == [False, False, False, True]


def test_reloaded_id_computes_with_its_new_weights(llm: LLM, requests: list[LoRARequest], tmp_path: Path):
    """Neither an id nor a name finds blocks of the weights that it had before."""
    path = write_lora(tmp_path / "policy", 6)
    first = LoRARequest("policy", 1, path)
    before = tokens_with(llm, first)
    assert num_cached(llm, llm.llm_engine.adapters.digest_of_name("policy")) == 16
    write_lora(tmp_path / "policy", 7)
    # The loaded weights count until the folder is read again.
    assert tokens_with(llm, first) == before
    again = LoRARequest("policy", 1, path, load_inplace=True)
    digest = llm.llm_engine.adapters.digest_of(again)
    assert num_cached(llm, digest) == 0
    after = tokens_with(llm, first)
    assert after != before
    llm.remove_lora(1)
    assert tokens_with(llm, LoRARequest("other", 5, path)) == after
    assert num_cached(llm, digest) == 16
    write_lora(tmp_path / "policy", 6)
    assert tokens_with(llm, LoRARequest("policy", 1, path)) == before


def test_adapters_outlive_sleep_and_new_weights(llm: LLM, requests: list[LoRARequest]):
    expected = tokens_with(llm, requests[0], None)
    for level in (1, 2):
        llm.sleep(level=level)
        with pytest.raises(RuntimeError, match="asleep"):
            llm.llm_engine.requests.add(PromptContent(PROMPT), PARAMS)
        # A trainer's order: weights, adapter, cache.
        llm.wake_up(["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        llm.add_lora(requests[1])
        llm.wake_up()
        assert tokens_with(llm, requests[0], None) == expected
    llm.collective_rpc("reload_weights")
    digest = llm.llm_engine.adapters.digest_of(requests[0])
    llm.reset_prefix_cache()
    assert num_cached(llm, digest) == 0
    assert tokens_with(llm, requests[0], None) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_takes_adapters_off_the_device(level: int, folder: Path, requests: list[LoRARequest]):
    """On GPUs their stacks stayed in its memory. Here the device only says that it is not the host's."""
    with LLM(MODEL, **OPTIONS, device_backend="torch") as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        expected = tokens_with(llm, *requests[:2], None)
        stacks, sleep = worker.loaded.adapters.stacks, worker.running.sleep
        sleep.device = torch.device("meta")
        before = [weakref.ref(tensor) for stack in stacks for tensor in stack.tensors()]
        num_bytes, weights = sleep.adapters.num_bytes, sleep.weights.num_bytes
        assert num_bytes > 0
        freed = commit_of(sleep, "commit_sleep")
        llm.sleep(level=level)
        gc.collect()
        assert all(each() is None for each in before)
        assert freed == [weights + num_bytes]
        taken = commit_of(sleep, "commit_wake_up")
        # A second one, and an adapter that is replaced while the others are away.
        llm.sleep(level=level)
        llm.remove_lora(2)
        llm.add_lora(requests[1])
        llm.wake_up()
        assert taken == [weights + num_bytes]
        if level == 2:
            llm.collective_rpc("reload_weights")
        assert tokens_with(llm, *requests[:2], None) == expected
        assert sleep.adapters.is_allocated


def commit_of(sleep: Any, name: str) -> list[int]:
    """Bytes of weights that this call of a worker's sleep reports, as they come."""
    found, commit = [], getattr(sleep, name)

    def noted(staged: Any) -> dict[str, int]:
        num_bytes = commit(staged)
        found.append(num_bytes["weights"])
        setattr(sleep, name, commit)
        return num_bytes

    setattr(sleep, name, noted)
    return found


@pytest.mark.parametrize("make", [ReferenceStack, TritonAdapterStack])
def test_stack_has_its_matrices_elsewhere_and_back(make: Any):
    stack = make(AdapterSizes(2, 16, 8, ((0, 4), (4, 6)), torch.float32, torch.device("cpu")))
    stack.write(1, stack.pack([(torch.ones(3, 8), torch.ones(4, 3)), None]))
    before, copies = stack.tensors(), [tensor.clone() for tensor in stack.tensors()]
    stack.replace(copies)
    assert all(one is other for one, other in zip(stack.tensors(), copies, strict=True))
    assert [tensor.data_ptr() for tensor in before] != [tensor.data_ptr() for tensor in stack.tensors()]
    stack.write(0, stack.pack([None, (torch.ones(2, 8), torch.ones(2, 2))]))
    stack.clear(1)
    assert not stack.is_empty


def test_folders_are_loaded_again_after_a_restart(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    changing = write_lora(tmp_path / "changing", 8)
    gone = shutil.copytree(folder / "b", tmp_path / "gone")
    names = {"b": str(folder / "b"), "a": str(folder / "a"), "gone": str(gone)}
    with LLM(MODEL, **{**OPTIONS, "max_cpu_loras": 6}, adapters=names) as llm:
        assert [each.name for each in llm.llm_engine.scheduler.adapters.entries.values()] == ["a", "b", "gone"]
        assert llm.llm_engine.scheduler.limits.max_loras == 3
        digests = [llm.llm_engine.adapters.digest_of_name(name) for name in "ab"]
        requests = [LoRARequest("a", 1, names["a"]), LoRARequest("c", 7, str(folder / "c"))]
        expected = tokens_with(llm, *requests)
        llm.add_lora(LoRARequest("changing", 8, changing))
        llm.add_lora(LoRARequest("tensors", 9, lora_tensors=lora_tensors(3), peft_config=CONFIG))
        write_lora(tmp_path / "changing", 9)
        # Before, the check of a first start made this one fatal.
        shutil.rmtree(gone)
        llm.pin_lora(7)
        # By the name of one of the configuration, from another folder.
        llm.add_lora(LoRARequest("b", 10, str(folder / "c")))
        llm.pin_lora(10)
        with caplog.at_level(logging.WARNING):
            llm.reinitialize_distributed()
        assert llm.list_loras() == llm.llm_engine.executor.list_loras() == {1, 2, 7, 10}
        pinned = {number for number, each in llm.llm_engine.scheduler.adapters.entries.items() if each.is_pinned}
        assert pinned == {1, 2, 7, 10}
        assert "adapter 3 ('gone') is not loaded any more: " in caplog.text
        assert "adapter 8 ('changing') is not loaded any more: " + changing in caplog.text
        assert "adapter 9 ('tensors') is not loaded any more: it was given as tensors" in caplog.text
        assert [llm.llm_engine.scheduler.adapters.entries[number].digest for number in (1, 2)] == digests
        assert tokens_with(llm, *requests) == expected


def test_adapters_of_the_configuration_are_pinned(folder: Path):
    options = {**OPTIONS, "max_cpu_loras": None}
    with LLM(MODEL, **options, adapters={"a": str(folder / "a")}) as llm:
        assert "1 LoRA adapter is loaded, 1 of them pinned" in refusal(
            llm.add_lora, LoRARequest("b", 2, str(folder / "b"))
        )
        assert llm.remove_lora(1)
        assert llm.add_lora(LoRARequest("b", 2, str(folder / "b")))
    other = str(write_adapter(folder / "other", Path(pooling_folder("causal")), 1))
    with pytest.raises(AdapterError, match=rf"^rank 0: {other}.*the adapter cannot be used"):
        LLM(MODEL, **options, adapters={"a": other})


def test_any_failure_to_read_a_prompt_adapter_is_told_to_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Some errors left the reading rank at the start, before it had told the others."""
    path = str(write_prompt_adapter(tmp_path / "soft", 128, 4, 1))

    def read(_: str) -> None:
        raise KeyError("no reader")

    monkeypatch.setattr(adapters_at_start, "read_prompt_adapter", read)
    with pytest.raises(ConfigError, match=r"prompt_adapters\.soft: .*soft cannot be read: KeyError: 'no reader'"):
        LLM(MODEL, device="cpu", num_blocks=64, prompt_adapters={"soft": path})
    monkeypatch.setattr(startup, "check_folders", lambda _: None)
    with pytest.raises(AdapterError, match=r"^rank 0: KeyError: 'no reader'"):
        LLM(MODEL, device="cpu", num_blocks=64, prompt_adapters={"soft": path})


def test_rank_notes_what_rank_0_has_evicted(llm: LLM, requests: list[LoRARequest], monkeypatch: pytest.MonkeyPatch):
    """After a start of one replica in place of two, whose uses differed, a rank forgot the folder of an adapter that
    stayed, and refused rows with it where the others did not.
    """
    run, victims = Changes.run_worker_event, [(), (), (1,)]

    def as_rank_0_says(changes: Changes, name: str, change: AdapterChange, then: list[Any], run_step: Any) -> Any:
        evicted = victims.pop(0)
        dropped = tuple([llm.llm_engine.scheduler.adapters.entries[each].digest for each in evicted])
        change = replace(change, path=f"/of rank 0/{change.name}", evicted=evicted, dropped=dropped)
        return run(changes, name, change, [addition_of(LORA, change)], run_step)

    a, b, c = requests
    with monkeypatch.context() as patch:
        patch.setattr(Changes, "run_worker_event", as_rank_0_says)
        llm.add_lora(a)
        llm.add_lora(b)
        before = tokens_with(llm, b)
        # Here the second was used longest ago.
        tokens_with(llm, a)
        llm.add_lora(c)
    assert llm.list_loras() == {2, 3}
    assert tokens_with(llm, b) == before


def test_merged_adapter_is_refused_for_rows(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder / "a", tmp_path / "copy")
    words = "('x') is merged into the weights for all rows (lora_merge), and those that name it would have it"
    with LLM(MODEL, **OPTIONS, lora_merge=str(folder / "a")) as llm:
        merged = tokens_with(llm, None)
        for request in (
            LoRARequest("x", 1, str(copy)),
            LoRARequest("x", 2, lora_tensors=lora_tensors(1), peft_config=CONFIG),
        ):
            for call in (llm.add_lora, llm.llm_engine.adapters.digest_of):
                assert words in refusal(call, request).replace("model.lora", "lora")
        assert llm.list_loras() == set()
        other = LoRARequest("b", 1, str(folder / "b"))
        assert tokens_with(llm, other, None) != [merged[0]] * 2
        # A trainer's weights have no adapter in them.
        llm.load_weights(load_file(MODEL / "model.safetensors").items())
        assert tokens_with(llm, LoRARequest("x", 2, str(copy)))[0] != tokens_with(llm, None)[0]
        expected = "has by now the content of an adapter that rows may name"
        assert expected in refusal(partial(llm.collective_rpc, "reload_weights"))
        llm.remove_lora(2)
        llm.collective_rpc("reload_weights")
        assert words in refusal(llm.add_lora, request)
    with pytest.raises(AdapterError, match=r"^rank 0: .*\('x'\) is merged into the weights for all rows"):
        LLM(MODEL, **OPTIONS, adapters={"x": str(copy)}, lora_merge=str(folder / "a"))


def test_workers_leave_their_adapters_to_the_engine(llm: LLM, requests: list[LoRARequest]):
    assert llm.llm_engine.model_executor.add_lora(requests[0])
    for method, argument in (("add_lora", requests[1]), ("remove_lora", 1)):
        with pytest.raises(AdapterError, match=f"call LLM.{method}"):
            llm.collective_rpc(method, args=(argument,))
    assert llm.list_loras() == llm.llm_engine.model_executor.list_loras() == llm.collective_rpc("list_loras")[0] == {1}


def test_dummy_batch_with_all_adapters_loaded(llm: LLM, requests: list[LoRARequest]):
    expected = tokens_with(llm, *requests[:2])
    assert len(llm.list_loras()) == OPTIONS["max_cpu_loras"]
    llm.llm_engine.model_executor.execute_dummy_batch()
    assert tokens_with(llm, *requests[:2]) == expected


def test_digest_that_cannot_be_computed_is_a_refusal(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """An error beside the event would leave the other ranks waiting for this one."""

    def fail(state: object, tensor: object) -> None:
        raise RuntimeError("no bytes")

    monkeypatch.setattr(source, "_add_tensor", fail)
    request = LoRARequest("t", 2, lora_tensors=lora_tensors(5), peft_config=CONFIG)
    assert refusal(llm.add_lora, request) == "rank 0: RuntimeError: no bytes"
    assert llm.list_loras() == set()


def test_run_without_adapters_names_the_key(requests: list[LoRARequest]):
    with LLM(MODEL, device="cpu", num_blocks=64) as llm:
        for call in (lambda: llm.add_lora(requests[0]), lambda: llm.llm_engine.adapters.digest_of(requests[0])):
            with pytest.raises(ConfigError, match=r"this run has no LoRA adapters: set .*enable_lora="):
                call()
        assert llm.list_loras() == set()


def test_executor_alone_loads_adapters(requests: list[LoRARequest]):
    """An executor and a worker without an engine."""
    resolved = read_run(run_config({"model": MODEL, **OPTIONS}))
    executor = UniProcExecutor(resolved, RankEnvironment())
    executor.start()
    try:
        executor.load_model()
        executor.initialize_from_config(64, 0)
        assert [executor.add_lora(each) for each in requests] == [True] * 3
        assert (executor.pin_lora(2), executor.remove_lora(1), executor.list_loras()) == (True, False, {2, 3})
        with pytest.raises(AdapterError, match=r"^/nowhere: is not a folder"):
            executor.add_lora(LoRARequest("x", 8, "/nowhere"))
        assert (executor.remove_lora(3), executor.list_loras()) == (True, {2})
        wrapper = executor.driver_worker
        assert (wrapper.add_lora(requests[0]), wrapper.pin_lora(1), wrapper.list_loras()) == (True, True, {1, 2})
        with pytest.raises(AdapterError, match="max_cpu_loras=2 LoRA adapters are loaded"):
            wrapper.add_lora(requests[2])
        assert (wrapper.remove_lora(1), wrapper.remove_lora(1), wrapper.list_loras()) == (True, False, {2})
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras=2 adapters are loaded, and max_loras needs 3"),
        ({"adapters": {"a": ""}}, "must map names to folders"),
        ({"max_lora_rank": 513}, "max_lora_rank=513 must be from 1 to 512"),
        ({"max_cpu_loras": 10**9}, "max_cpu_loras=1000000000 must be from 1 to 65536"),
        ({"max_loras": 10**9}, "max_loras=1000000000 must be from 1 to 65536"),
        ({"adapters": {"a\ud800": "/x"}}, r"^adapters: the text='a.ud800' contains a lone surrogate, .*: rename the"),
        ({"adapters": {"a": "/\ud800"}}, r"^adapters: the text='/.ud800' contains a lone surrogate, .*: rename the"),
        ({"adapters": ["a"]}, "must be texts by name, such as {a: b}"),
        ({"lora_merge": ""}, "lora_merge is empty: give the folder"),
        ({"adapters": {"a": "/x"}, "lora_merge": "a"}, "lora_merge=a is merged .* 'a' of adapters would have it twice"),
        ({"adapters": {"a": "/x"}, "lora_merge": "/x/"}, "lora_merge=/x/ is merged .* 'a' of adapters would have it"),
        (
            {"adapters": {"a": "b"}, "prompt_adapters": {"a": "c"}},
            "adapters and prompt_adapters both have 'a'",
        ),
        (
            {"prompt_adapters": {"a": "b", "c": "b"}, "max_prompt_adapters": 1},
            "max_prompt_adapters to at least 2",
        ),
        (
            {"prompt_adapters": {"a": "b"}, "runner": "pooling"},
            "prompt_adapters are for models that generate",
        ),
    ],
)
def test_settings_of_adapters_are_checked(given: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        LLM(MODEL, enable_lora=True, **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapters": {"a": "/none"}}, r"adapters\.a: /none: is not a folder: an adapter is one with"),
        ({"adapters": {"a": "{a}"}, "max_lora_rank": 2}, "has the rank 4, above max_lora_rank=2: raise it"),
        ({"adapters": {"a": "{prompt}"}}, "adapters are of the type LORA"),
        ({"adapters": {"a": "{pickle}"}}, r"has only adapter_model\.bin, and no adapter_model\.safetensors"),
        ({"prompt_adapters": {"a": "{a}"}}, "it is a LoRA adapter"),
        ({"lora_merge": "{prompt}"}, "adapters are of the type LORA"),
    ],
)
def test_wrong_folder_is_found_before_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
):
    """Before, the weights were loaded first."""
    write_prompt_adapter(tmp_path / "prompt", 128, 2, 1)
    shutil.copytree(folder / "a", tmp_path / "pickle")
    (tmp_path / "pickle/adapter_model.safetensors").rename(tmp_path / "pickle/adapter_model.bin")
    paths = {"a": folder / "a", "prompt": tmp_path / "prompt", "pickle": tmp_path / "pickle"}
    given = {key: {"a": each["a"].format(**paths)} for key, each in options.items() if isinstance(each, dict)}
    given |= {key: each.format(**paths) for key, each in options.items() if isinstance(each, str)}
    monkeypatch.setattr(UniProcExecutor, "load_model", lambda _: pytest.fail("the model is loaded"))
    with pytest.raises(ConfigError, match=words):
        LLM(MODEL, device="cpu", num_blocks=64, **options | given)
