"""Places of tokens, and of late chunks, in the text that they were encoded from."""

from collections.abc import Callable

from spmd_worker.compat.prompts import Encoded
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.model_config.sentence_folder import TextTransform
from spmd_worker.replica.sequence.late_chunking import LateChunkingMetadata, chunks_of
from spmd_worker.tokenizer.tokenizer import Tokenizer


def text_offsets(
    text: str, token_ids: tuple[int, ...], tokenizer: Tokenizer, form: TextTransform, max_tokens: int | None
) -> tuple[tuple[int, int], ...] | None:
    """(start, end) of each token in characters of `text`, which is encoded once more, as the folder's `form` says, to
    at most `max_tokens`, None for all; (0, 0) of special tokens and of the folder's prompt. None for messages, and for
    ids of another text.
    """
    if form.message_format:
        return None
    num_before = len(form.prompt)
    ids, offsets = tokenizer.encode_with_offsets(form.prompt + text, max_tokens)
    # Decoders keep the last tokens.
    if not token_ids or tuple(ids[-len(token_ids) :]) != tuple(token_ids):
        return None
    kept = offsets[-len(token_ids) :]
    return tuple([(max(0, start - num_before), max(0, end - num_before)) for start, end in kept])


def late_chunks(
    encoded: Encoded, config: PoolingConfig | None, need_tokenizer: Callable[[], Tokenizer]
) -> LateChunkingMetadata | None:
    """Ranges of an encoded prompt's late chunks, without characters if it is not a text; None without chunks."""
    chunking = None if encoded.pooling is None else encoded.pooling.late_chunking_params
    if chunking is None or config is None:
        return None
    offsets = None
    if encoded.text is not None and not encoded.is_ids and not encoded.media:
        most = len(encoded.token_ids) if config.encodes_inside else None
        offsets = text_offsets(encoded.text, encoded.token_ids, need_tokenizer(), config.text, most)
    return chunks_of(chunking, len(encoded.token_ids), offsets)
