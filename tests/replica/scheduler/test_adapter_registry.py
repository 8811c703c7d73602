"""The registry of adapters: who gives way to a new one, and which contents are still needed."""

import pytest

from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.scheduler.adapter_plans import plan_addition, plan_removal
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.sequence.events import AddAdapter
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest


def registry_of(*digests: int, max_adapters: int = 3) -> AdapterRegistry:
    """Ids from 1 on with these contents."""
    registry = AdapterRegistry(max_adapters)
    for int_id, digest in enumerate(digests, 1):
        registry.add(AddAdapter(int_id, f"name {int_id}", "folder", digest))
    return registry


def unused(_: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("used", "pinned", "needed", "expected"),
    [
        ((), (), (), (1,)),
        ((10,), (), (), (2,)),
        ((10, 20), (), (), (3,)),
        ((), (1, 2), (), (3,)),
        ((), (1,), (20,), (3,)),
    ],
)
def test_least_recently_used_adapter_gives_way(used, pinned, needed, expected):
    registry = registry_of(10, 20, 30)
    for digest in used:
        registry.use(digest)
    for int_id in pinned:
        registry.pin(int_id)
    assert registry.victims(4, 40, lambda digest: digest in needed) == expected


def test_nothing_gives_way_to_a_loaded_content():
    registry = registry_of(10, 20, 30)
    assert registry.victims(4, 20, bool) == ()
    # A replaced adapter makes room itself.
    assert registry.victims(2, 40, bool) == ()


def test_ids_of_one_content_give_way_together():
    registry = registry_of(10, 10, 20, 30)
    registry.use(10)
    assert registry.victims(5, 40, lambda _: False) == (3,)
    registry.use(20)
    registry.use(30)
    assert registry.victims(5, 40, lambda _: False) == (1, 2)
    assert registry.unneeded((1,)) == ()
    assert registry.unneeded((1, 2)) == (10,)
    assert registry.unneeded((1, 2), 10) == ()


def test_addition_is_refused_when_nothing_may_give_way():
    registry = registry_of(10, 20, 30)
    registry.pin(2)
    with pytest.raises(AdapterError, match=r"3 LoRA adapters are loaded, 1 of them pinned .*max_cpu_loras is 3"):
        registry.victims(4, 40, lambda digest: digest != 20)


def test_replaced_adapter_stays_pinned():
    registry = registry_of(10, 20)
    registry.pin(1)
    registry.add(AddAdapter(1, "new", "elsewhere", 11))
    assert registry.entries[1].is_pinned
    assert registry.digests == (20, 11)
    assert not registry.has(10)


def test_name_is_that_of_the_last_loaded():
    registry = AdapterRegistry(3)
    for int_id, digest in ((7, 70), (5, 50)):
        registry.add(AddAdapter(int_id, "policy", "", digest))
    found = registry.of_name("policy")
    assert found is not None
    assert found.digest == 50
    assert registry.of_name("other") is None


def request(int_id: int, *, load_inplace: bool = False, name: str = "") -> LoRARequest:
    return LoRARequest(name or f"name {int_id}", int_id, "folder", load_inplace=load_inplace)


def test_text_without_utf8_is_refused():
    """It could not be sent to the other ranks: the event would fail halfway."""
    for given in (("\ud800", 1, "folder"), ("name", 1, "/folder/\udc80")):
        with pytest.raises(ValueError, match="contains a lone surrogate"):
            LoRARequest(*given)
        with pytest.raises(ValueError, match="contains a lone surrogate"):
            PromptAdapterRequest(*given, 4)


def test_loaded_id_with_other_content_is_refused():
    registry = registry_of(10)
    assert plan_addition(registry, request(1), (10, ""), unused).problem == ""
    for other in (request(1), request(1, name="other")):
        digest = 10 if other.lora_name == "other" else 11
        assert "lora_int_id=1 is loaded as 'name 1'" in plan_addition(registry, other, (digest, ""), unused).problem
    change = plan_addition(registry, request(1, load_inplace=True), (11, ""), unused)
    assert (change.problem, change.evicted, change.dropped) == ("", (), (10,))


def test_unanswered_requests_keep_their_adapter():
    registry = registry_of(10, 20)
    replaced = plan_addition(registry, request(1, load_inplace=True), (11, ""), lambda digest: 3 * (digest == 10))
    assert replaced.problem.startswith("LoRA adapter 1 cannot be replaced: 3 requests with it are unanswered")
    removed = plan_removal(registry, 1, lambda digest: 2 * (digest == 10))
    assert removed.problem.startswith("LoRA adapter 1 ('name 1') cannot be removed: 2 requests with it are unanswered")
    assert plan_removal(registry, 2, lambda digest: 2 * (digest == 10)).dropped == (20,)


def test_problem_of_the_content_is_kept():
    assert plan_addition(registry_of(), request(1), (0, "no file"), unused).problem == "no file"
