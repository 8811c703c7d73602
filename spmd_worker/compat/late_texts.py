"""Encodes queries and documents of models whose tokens' vectors are compared (late interaction)."""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from spmd_worker.model_config.late_interaction import LateInteraction, QueryExpansion
from spmd_worker.tokenizer.tokenizer import Tokenizer

_SKIPPED: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], frozenset[int]]] = WeakKeyDictionary()
"""Ids of words, by tokenizer."""
_NOWHERE = (0, 0)


class LateText(NamedTuple):
    """`offsets` are the start and end of each token in the text, in characters, (0, 0) of a marker, special tokens,
    the prompt and expansion tokens. `num_attended` is None if tokens attend to all of the row.
    """

    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    num_attended: int | None


def encode_late_text(
    late: LateInteraction, tokenizer: Tokenizer, text: str, input_type: str, length: int | None, max_model_len: int
) -> LateText:
    """Encode a query or a document, truncated to `length` tokens, None for the folder's own length. An expansion that
    truncates has one length. Raises ValueError.
    """
    is_query = input_type == "query"
    role, expansion = (late.query, late.expansion) if is_query else (late.document, None)
    most = min(length or role.max_tokens or max_model_len, max_model_len)
    if expansion is not None:
        most = expansion.length if expansion.truncates else max(most, expansion.length)
    marker, rest = _marker_id(tokenizer, role.marker)
    before = rest + role.prompt
    special = [] if marker is None else tokenizer.encode("")
    if marker is not None and most <= len(special) + 1:
        rule = f"{len(special)} are special tokens and one is the marker {role.marker!r}"
        raise ValueError(f"{most} tokens leave none for text: {rule}: allow more tokens")
    ids, places = tokenizer.encode_with_offsets(before + text, most - (marker is not None))
    offsets = [(max(0, start - len(before)), max(0, end - len(before))) for start, end in places]
    if marker is not None:
        # As in training: a token behind the first special one.
        index = int(bool(special) and ids[:1] == special[:1])
        ids, offsets = [*ids[:index], marker, *ids[index:]], [*offsets[:index], _NOWHERE, *offsets[index:]]
    num_tokens, num_attended = len(ids), None
    if expansion is not None and num_tokens < expansion.length:
        num_more = expansion.length - num_tokens
        ids, offsets = [*ids, *[_expansion_id(tokenizer, expansion)] * num_more], [*offsets, *[_NOWHERE] * num_more]
        num_attended = None if expansion.is_attended else num_tokens
    return LateText(tuple(ids), tuple(offsets), num_attended)


def kept_tokens(
    late: LateInteraction | None, tokenizer: Tokenizer | None, token_ids: Sequence[int], input_type: str | None
) -> list[int] | None:
    """Indices of the tokens whose vectors count, None for all. Without a tokenizer no word is left out."""
    if late is None or tokenizer is None or input_type not in late.skips_in or not late.skipped_words:
        return None
    known = _SKIPPED.setdefault(tokenizer, {})
    if late.skipped_words not in known:
        ids = map(tokenizer.token_id, late.skipped_words)
        known[late.skipped_words] = frozenset(each for each in ids if each is not None)
    skipped = known[late.skipped_words]
    return [index for index, token_id in enumerate(token_ids) if token_id not in skipped]


def _marker_id(tokenizer: Tokenizer, marker: str) -> tuple[int | None, str]:
    """Id of the marker, or of its first word, and the rest of its text; None for one that is text."""
    for token in (marker, *marker.split(maxsplit=1)[:1]):
        token_id = tokenizer.token_id(token) if marker.startswith(token) and token else None
        if token_id is not None:
            return token_id, marker[len(token) :]
    return None, marker


def _expansion_id(tokenizer: Tokenizer, expansion: QueryExpansion) -> int:
    names = ("mask_token", "eos_token")
    token = expansion.token or next((found for each in names if (found := tokenizer.special_tokens.get(each))), "")
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise ValueError(
            f"queries are expanded to {expansion.length} tokens by {token or 'the mask token'!r}, which the tokenizer "
            f"does not have: set query_expansion.token in the model folder to one of its tokens"
        )
    return token_id
