"""LoRA adapters of one engine, from folders and from a trainer's tensors."""

from collections.abc import Iterable
from typing import Any

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.engine.adapters import Adapters
from spmd_worker.replica.scheduler.adapter_plans import taken
from spmd_worker.replica.scheduler.adapter_registry import RegisteredAdapter
from spmd_worker.replica.sequence.adapter_kind import AdapterRequest
from spmd_worker.replica.sequence.lora_request import LoRARequest, TensorSnapshot


class LoRAAdapters(Adapters):
    """`limits` None is a run without them."""

    def __init__(self, *given: Any, limits: AdapterLimits | None) -> None:
        super().__init__(*given)
        self._limits = limits
        self._loaded_requests: dict[int, tuple[int, LoRARequest]] = {}
        """Number and request of the adapters that this rank's own calls have loaded, by id."""

    def add(self, request: AdapterRequest) -> bool:
        """Load an adapter, as `Adapters.add` says."""
        with self._calls.inside("add_lora"):
            super().add(request)
            assert isinstance(request, LoRARequest), request
            number = self._registry.entries[request.lora_int_id].number
            self._loaded_requests[request.lora_int_id] = (number, request)
            return True

    def digest_of(self, request: LoRARequest | None) -> int:
        """The number by which a `Request` names the adapter; 0 for None. An adapter that is not loaded, or is to be
        loaded again (`load_inplace`), is added first, with the errors of `add`.

        Raises AdapterError if the id is loaded under another name, from another folder, or with other tensors.
        """
        return self.digests_of([request])[0]

    def digests_of(self, requests: Iterable[LoRARequest | None], *, is_prepared: bool = False) -> tuple[int, ...]:
        """`digest_of` for the requests of one call: what one of them needs does not give way to another.
        `is_prepared`: the call has passed them to `prepare`. Raises AdapterError, before anything is loaded, if they
        name more adapters than `max_cpu_loras`, or two by one id.
        """
        listed = list(requests)
        wanted = [each for each in listed if each is not None]
        if not wanted:
            return (0,) * len(listed)
        self._check_call()
        found = self._load(wanted, is_prepared=is_prepared)
        return tuple([0 if each is None else found[each.lora_int_id].digest for each in listed])

    def digest_of_name(self, name: str) -> int:
        """The number of a loaded adapter; of several with one name, of the one loaded last. Raises AdapterError."""
        return self._entry_of_name(name).digest

    def _is_same(self, known: LoRARequest, other: LoRARequest) -> bool:
        return known is other or (known == other and known.lora_tensors is other.lora_tensors)

    def _must_load(self, request: LoRARequest) -> bool:
        return request.load_inplace or super()._must_load(request)

    def _check_entry(self, request: LoRARequest, entry: RegisteredAdapter) -> None:
        super()._check_entry(request, entry)
        if request.lora_tensors is not None and not self._is_loaded_snapshot(request, entry):
            # A trainer changes its tensors in place.
            digest, _ = self._on_workers.stage(request)
            self._on_workers.unstage()
            if digest != entry.digest:
                raise AdapterError(taken(self._kind, request, entry))

    def _is_loaded_snapshot(self, request: LoRARequest, entry: RegisteredAdapter) -> bool:
        """Whether a request has the snapshot that this rank's own call has loaded under the id."""
        number, last = self._loaded_requests.get(request.lora_int_id, (-1, request))
        is_same = request.lora_tensors is last.lora_tensors and request.peft_config is last.peft_config
        return number == entry.number and is_same and isinstance(request.lora_tensors, TensorSnapshot)

    def _forget(self, int_id: int) -> None:
        # Trainers push each policy under a new id: tensors of those that gave way must not pile up.
        super()._forget(int_id)
        self._loaded_requests.pop(int_id, None)

    def _check_call(self) -> None:
        super()._check_call()
        if self._limits is None:
            raise ConfigError(
                "this run has no LoRA adapters: set model.enable_lora=true, or name some in model.adapters"
            )
