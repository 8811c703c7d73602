"""Prompts with images: a model's images and placeholders as token ids, and as the images of a request.

sources --prepare--> images; text or ids, with a placeholder for each image --expand--> ids and MediaItems
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from spmd_worker.base.config.plain_values import shown
from spmd_worker.media.errors import MediaError
from spmd_worker.media.placeholders import Encode, Placeholders
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.sequence.media_items import MediaItem

TRUNCATED: Final = "truncate_prompt_tokens cuts tokens, and may cut an image of this prompt: leave it out"
NUM_DIGEST_BYTES: Final = 16
_MISMATCH: Final = "placeholder_mismatch"


class PendingImages(Protocol):
    """Images that are being prepared. `result` raises MediaError."""

    def done(self) -> bool: ...

    def result(self) -> Sequence[PreparedImage]: ...


class Preparer(Protocol):
    """Bytes, paths, URLs, arrays or PIL images of one prompt -> prepared images (`ImagePreparer`)."""

    def prepare(self, sources: Sequence[Any]) -> Sequence[PreparedImage]: ...

    def submit(self, sources: Sequence[Any]) -> PendingImages: ...

    def close(self) -> None: ...


class MediaPrompt(NamedTuple):
    """Ids of a prompt with images, and which of them take the rows of each."""

    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Prompts with images for one model. All methods raise MediaError."""

    preparer: Preparer
    placeholders: Placeholders
    image_token_id: int

    def prepare(self, sources: Sequence[Any]) -> tuple[PreparedImage, ...]:
        return tuple(self.preparer.prepare(sources))

    def of_text(self, text: str, images: Sequence[PreparedImage], encode: Encode) -> MediaPrompt:
        """The prompt of a text with placeholders; `encode` may add special tokens."""
        token_ids = tuple(encode(self.placeholders.expand_text(text, images)))
        return MediaPrompt(token_ids, self.placeholders.media_items(token_ids, images, self.image_token_id))

    def of_chat(self, text: str, images: Sequence[PreparedImage], encode: Encode) -> MediaPrompt:
        """The prompt of a text that a chat template has rendered."""
        try:
            return self.of_text(text, images, encode)
        except MediaError as error:
            if error.code != _MISMATCH:
                raise
            raise MediaError(
                _MISMATCH,
                f"the chat template does not write a placeholder for each image part: {error}; render the messages "
                f"yourself, with {self.placeholders.written!r} for each image, as prompt, and give the images with it",
            ) from None

    def of_ids(self, token_ids: Sequence[int], images: Sequence[PreparedImage], encode: Encode) -> MediaPrompt:
        """The prompt of ids, with a placeholder's id for each image, or expanded; `encode` adds no special tokens."""
        ids = tuple(self.placeholders.expand_ids(token_ids, images, encode))
        return MediaPrompt(ids, self.placeholders.media_items(ids, images, self.image_token_id))


def check_images(
    images: ImagePrompts | None, sources: Sequence[Any], *, is_truncated: bool, architecture: str = ""
) -> ImagePrompts:
    """`images`, for a prompt whose images can be prepared. Raises MediaError, which names the `architecture`."""
    if images is None:
        raise MediaError(
            "images_unsupported",
            f"this run takes no images: the model{f' ({architecture})' if architecture else ''} runs with text alone, "
            "its folder has no preprocessor_config.json, or limits.max_images is 0: leave images out",
        )
    if is_truncated:
        raise MediaError("conflicting_keys", TRUNCATED)
    if any(each is None for each in sources):
        raise MediaError("image_missing", "an image part has no image: give it image_url or image")
    return images


def check_conversation(images: ImagePrompts, messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that no text of a conversation with images would be taken for an image. Raises MediaError."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                images.placeholders.check_reserved(text)


def check_sizes(images: Sequence[PreparedImage]) -> None:
    """Check that no image was resized, cut or padded. Raises MediaError."""
    for number, image in enumerate(images):
        if image.pixels.shapes != (image.pixels.size,):
            height, width = image.pixels.size
            shapes = ", ".join(f"{shape[1]}x{shape[0]}" for shape in image.pixels.shapes)
            raise MediaError(
                "images_unsupported",
                f"image {number} of {width}x{height} pixels would be prepared as {shapes}, which do_resize=False "
                f"forbids: give it in a size that the model takes, or leave do_resize out",
            )


def num_media_bytes(media: Sequence[PreparedMedia]) -> int:
    """Bytes of memory of prepared images and audio, once they are here."""
    return sum(each.content.num_bytes for each in media)


def media_digest(source_digests: Sequence[bytes]) -> str:
    """Digest of a prompt's images, of SHA-256 of the bytes of each, as they were given; empty without images."""
    sources = b"".join(source_digests)
    return blake2b(sources, digest_size=NUM_DIGEST_BYTES).hexdigest() if sources else ""


def images_of(data: Any) -> list[Any]:
    """Images of vLLM's `multi_modal_data`. Raises MediaError for anything else in it."""
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise MediaError("images_unsupported", f"multi_modal_data={shown(data)} must be a dict: {{'image': image}}")
    others = [str(kind) for kind, value in data.items() if kind != "image" and value is not None]
    if others:
        raise MediaError(
            "images_unsupported", f"multi_modal_data has {', '.join(others)}: only images are supported, under 'image'"
        )
    given = data.get("image")
    listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if any(isinstance(each, Mapping) for each in listed):
        raise MediaError("images_unsupported", "multi_modal_data has rows of images: give the images themselves")
    return listed
