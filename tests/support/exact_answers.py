"""Everything that outputs say, for comparisons bit for bit. Brings no transformers, which takes ranks seconds."""

from collections.abc import Iterable
from typing import Any

from spmd_worker import RequestOutput


def ids_and_entries(outputs: Iterable[RequestOutput]) -> list[Any]:
    """Token ids of each sample of each row, and log-probabilities of all listed tokens at each position."""
    return [
        [[one.token_ids, [[*each.items()] for each in one.logprobs or []]] for one in output.outputs]
        for output in outputs
    ]


def ids_and_logprobs(outputs: Iterable[RequestOutput]) -> list[Any]:
    """Ids of each prompt, and of its only sample, with all listed log-probabilities."""
    return [
        [
            list(output.prompt_token_ids or ()),
            list(output.outputs[0].token_ids),
            [[[token, each.logprob] for token, each in entry.items()] for entry in output.outputs[0].logprobs or ()],
        ]
        for output in outputs
    ]


def complete_answers(outputs: Iterable[RequestOutput]) -> list[Any]:
    """Token ids and log-probabilities of each sample of each row, why it ended, and its text."""
    return [
        [
            [
                list(each.token_ids),
                [value.logprob.hex() for entry in each.logprobs or () for value in entry.values()],
                each.finish_reason,
                str(each.stop_reason),
                each.text,
            ]
            for each in output.outputs
        ]
        for output in outputs
    ]
