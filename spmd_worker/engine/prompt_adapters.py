"""Prompt adapters of one engine."""

from collections.abc import Iterable

from spmd_worker.base.errors import AdapterError
from spmd_worker.engine.adapters import Adapters
from spmd_worker.replica.scheduler.adapter_registry import RegisteredAdapter
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest, VirtualTokens


class PromptAdapters(Adapters):
    """Their contents are virtual tokens, by which rows name them."""

    def virtual_tokens(
        self, requests: Iterable[PromptAdapterRequest | None], *, is_prepared: bool = False
    ) -> list[VirtualTokens | None]:
        """The virtual tokens of each row of a call, None without an adapter. One that is not loaded is added first,
        with the errors of `add`; what one row needs does not give way to another's. `is_prepared`: the call has passed
        them to `prepare`.

        Raises AdapterError for an id that is loaded under another name, from another folder or with another number of
        virtual tokens, and for more adapters than `max_prompt_adapters`.
        """
        listed = list(requests)
        found = self._load([each for each in listed if each is not None], is_prepared=is_prepared)
        return [None if each is None else _virtual_tokens(found[each.prompt_adapter_id]) for each in listed]

    def of_name(self, name: str) -> VirtualTokens:
        """The virtual tokens of a loaded adapter; of several with one name, those of the one loaded last. Raises
        AdapterError.
        """
        return _virtual_tokens(self._entry_of_name(name))

    def _check_entry(self, request: PromptAdapterRequest, entry: RegisteredAdapter) -> None:
        super()._check_entry(request, entry)
        number = request.prompt_adapter_num_virtual_tokens
        if entry.num_tokens != number:
            raise AdapterError(
                f"prompt adapter {entry.int_id} ({entry.name!r}) has {entry.num_tokens} virtual tokens: "
                f"prompt_adapter_num_virtual_tokens={number} must be that"
            )


def _virtual_tokens(entry: RegisteredAdapter) -> VirtualTokens:
    return VirtualTokens(entry.digest, entry.num_tokens)
