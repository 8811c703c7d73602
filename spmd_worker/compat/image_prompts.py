"""Prompts with images, or audio: a model's media and placeholders as token ids, and as the media of a request.

sources --prepare--> images; text or ids, with a placeholder for each image --expand--> ids and MediaItems
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from spmd_worker.base.config.plain_values import shown
from spmd_worker.compat.video_prompts import videos_of
from spmd_worker.media.errors import MediaError
from spmd_worker.media.placeholders import Encode, Placeholders
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.media.source import AUDIO, IMAGE, Medium
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.tokenizer.messages import MediumName
from spmd_worker.tokenizer.video_parts import is_open

TRUNCATED: Final = (
    "truncate_prompt_tokens cuts tokens, and may cut an image or a recording of this prompt: leave it out"
)
NUM_DIGEST_BYTES: Final = 16
_MISMATCH: Final = "placeholder_mismatch"


class PendingImages(Protocol):
    """Images or audio being prepared. `result` raises MediaError."""

    def done(self) -> bool: ...

    def result(self) -> Sequence[PreparedMedia]: ...


class Preparer(Protocol):
    """Bytes, paths, URLs, arrays or PIL images of one prompt -> prepared images (`ImagePreparer`), or audio."""

    def prepare(self, sources: Sequence[Any]) -> Sequence[PreparedMedia]: ...

    def submit(self, sources: Sequence[Any]) -> PendingImages: ...

    def close(self) -> None: ...


class MediaPrompt(NamedTuple):
    """Ids of a prompt with images, which of them take the rows of each, and the images in the order of the prompt."""

    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]
    media: tuple[PreparedMedia, ...]


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Prompts with images, or with audio, for one model. All methods raise MediaError."""

    preparer: Preparer
    placeholders: Placeholders
    image_token_id: int
    video_token_id: int | None = None

    @property
    def medium(self) -> Medium:
        """Images or audio."""
        return self.placeholders.medium

    def prepare(self, sources: Sequence[Any]) -> tuple[PreparedMedia, ...]:
        return tuple(self.preparer.prepare(sources))

    def of_text(self, text: str, images: Sequence[PreparedMedia], encode: Encode) -> MediaPrompt:
        """The prompt of a text with placeholders; `encode` may add special tokens."""
        images = self.placeholders.in_text_order(text, images)
        return self._prompt(tuple(encode(self.placeholders.expand_text(text, images))), images)

    def of_chat(self, text: str, images: Sequence[PreparedMedia], encode: Encode) -> MediaPrompt:
        """The prompt of a text that a chat template has rendered."""
        try:
            return self.of_text(text, images, encode)
        except MediaError as error:
            if error.code != _MISMATCH:
                raise
            medium = self.medium
            name = medium.name
            raise MediaError(
                _MISMATCH,
                f"the chat template does not write a placeholder for each {name} part: {error}; render the messages "
                f"yourself, with {self.placeholders.written!r} for each {medium.one}, as prompt, and give the "
                f"{medium.plural} with it",
            ) from None

    def of_ids(self, token_ids: Sequence[int], images: Sequence[PreparedMedia], encode: Encode) -> MediaPrompt:
        """The prompt of ids, with a placeholder's id for each image, or expanded; `encode` adds no special tokens."""
        images = self.placeholders.in_ids_order(token_ids, images, encode)
        return self._prompt(tuple(self.placeholders.expand_ids(token_ids, images, encode)), images)

    def _prompt(self, token_ids: tuple[int, ...], images: Sequence[PreparedMedia]) -> MediaPrompt:
        items = self.placeholders.media_items(token_ids, images, self.image_token_id, self.video_token_id)
        return MediaPrompt(token_ids, items, tuple(images))


def check_images(
    images: ImagePrompts | None,
    sources: Sequence[Any],
    medium: MediumName,
    *,
    is_truncated: bool,
    architecture: str = "",
) -> ImagePrompts:
    """`images`, for a prompt whose sources, of a `medium`, can be prepared. Raises MediaError, which names the
    `architecture`.
    """
    plural = (AUDIO if medium == "audio" else IMAGE).plural
    if images is None:
        raise MediaError(
            f"{plural}_unsupported",
            f"this run takes no {plural}: the model{f' ({architecture})' if architecture else ''} runs with text "
            f"alone, its folder has no preprocessor_config.json, or limits.max_{medium}s is 0: leave {plural} out",
        )
    if images.medium.name != medium:
        message = f"the model takes {images.medium.plural} in its prompts and no {plural}: leave {plural} out"
        raise MediaError(f"{plural}_unsupported", message)
    if is_truncated:
        raise MediaError("conflicting_keys", TRUNCATED)
    if any(each is not None and is_open(each) for each in sources):
        raise MediaError("video_missing", "a video part has no video: give it video or video_url")
    if any(each is None for each in sources):
        if images.medium == AUDIO:
            raise MediaError("audio_missing", "an audio part has no audio: give it input_audio, audio_url or audio")
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


def check_sizes(images: Sequence[PreparedMedia]) -> None:
    """Check that no image was resized, cut or padded. Raises MediaError."""
    for number, image in enumerate(images):
        if not isinstance(image, PreparedImage):
            continue
        # Both frames of a video have one size.
        kept = (image.pixels.size,) * (1 if image.frame is None else len(image.pixels.shapes))
        if image.pixels.shapes != kept:
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


def medium_of_data(data: Any, images: ImagePrompts | None) -> MediumName:
    """The medium of vLLM's `multi_modal_data`: the model's, or that of what is given to a model of text alone."""
    if images is not None:
        return "image" if images.medium == IMAGE else "audio"
    return (
        "audio"
        if isinstance(data, Mapping) and data.get("image") is None and data.get("audio") is not None
        else "image"
    )


def media_of(data: Any, images: ImagePrompts | None) -> list[Any]:
    """Images or recordings of vLLM's `multi_modal_data`, for a model that takes these. Raises MediaError for anything
    else in it.
    """
    if data is None:
        return []
    medium = AUDIO if medium_of_data(data, images) == "audio" else IMAGE
    kind, code = medium.name, f"{medium.plural}_unsupported"
    if not isinstance(data, Mapping):
        raise MediaError(code, f"multi_modal_data={shown(data)} must be a dict: {{{kind!r}: {kind}}}")
    kinds = (kind,) if medium == AUDIO else (kind, "video")
    others = [str(each) for each, value in data.items() if each not in kinds and value is not None]
    if others:
        verb = "is" if medium == AUDIO else "are"
        known = " and ".join([medium.plural, *(["videos"] if len(kinds) > 1 else [])])
        under = " and ".join(map(repr, kinds))
        message = f"multi_modal_data has {', '.join(others)}: only {known} {verb} supported, under {under}"
        raise MediaError(code, message)
    given = data.get(kind)
    if medium == AUDIO:
        return _recordings(given)
    listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if any(isinstance(each, Mapping) for each in listed):
        raise MediaError("images_unsupported", "multi_modal_data has rows of images: give the images themselves")
    return [*listed, *videos_of(data.get("video"))]


def _recordings(given: Any) -> list[Any]:
    """One recording or a list; a list that begins with a number is the samples of one."""
    if given is None:
        return []
    if isinstance(given, list) and not (given and isinstance(given[0], int | float)):
        return list(given)
    return [given]
