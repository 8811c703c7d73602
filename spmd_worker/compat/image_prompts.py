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
from spmd_worker.media.source import AUDIO, IMAGE, VIDEO, Medium
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.tokenizer.messages import MEDIA_PARTS, MediumName
from spmd_worker.tokenizer.video_parts import VideoPart, is_open

TRUNCATED: Final = (
    "truncate_prompt_tokens cuts tokens, and may cut an image or a recording of this prompt: leave it out"
)
NUM_DIGEST_BYTES: Final = 16
_MISMATCH: Final = "placeholder_mismatch"
_MEDIA: Final[Mapping[MediumName, Medium]] = {"image": IMAGE, "audio": AUDIO}
_KEYS_OF_DATA: Final[Mapping[MediumName, Mapping[str, str]]] = {
    "image": {"image": "images", "video": "videos"},
    "audio": {"audio": "audio"},
}
"""Keys of `multi_modal_data` that have a medium, and what they have."""


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
    """Ids of a prompt with images, which of them take the rows of each, and the images."""

    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]
    media: tuple[PreparedMedia, ...]
    """Images, frames of videos and recordings in the order of the prompt, as `items`."""


class MediumTokens(NamedTuple):
    """Placeholders of a medium, and the id of the tokens that take rows, and of those that take rows of frames."""

    placeholders: Placeholders
    token_id: int
    video_token_id: int | None = None


class GivenMedium(NamedTuple):
    """An image, a video or a recording of a prompt that may have several media."""

    medium: MediumName
    source: Any


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Prompts with images, or with audio, for one model, or with both: `kinds` are the tokens of each medium, images
    first. `media` is the medium of each source, the model's only one without. All methods raise MediaError.
    """

    preparer: Preparer
    kinds: tuple[MediumTokens, ...]

    @property
    def media(self) -> tuple[Medium, ...]:
        """Images, audio, or both."""
        return tuple([each.placeholders.medium for each in self.kinds])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that take rows."""
        return tuple(dict.fromkeys([each for _, *ids in self.kinds for each in ids if each is not None]))

    def takes(self, media: Sequence[MediumName]) -> bool:
        """Whether prompts may have all of these."""
        return {*media} <= {each.name for each in self.media}

    def prepare(self, sources: Sequence[Any], media: Sequence[MediumName] = ()) -> tuple[PreparedMedia, ...]:
        return tuple(self.preparer.prepare(self._given(sources, media)))

    def submit(self, sources: Sequence[Any], media: Sequence[MediumName] = ()) -> PendingImages:
        """`prepare` ahead of time."""
        return self.preparer.submit(self._given(sources, media))

    def _given(self, sources: Sequence[Any], media: Sequence[MediumName]) -> Sequence[Any]:
        if len(self.kinds) == 1:
            return sources
        return [GivenMedium(*each) for each in zip(media, sources, strict=True)]

    def for_template(self, messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
        """Messages for a template that may know nothing of videos: transformers has another for SmolVLM2, which writes
        the same but for these.
        """
        written = self.kinds[0].placeholders.written_video
        found = list(map(dict, messages))
        if not written or "video" in template:
            return found
        for message in [each for each in found if isinstance(each.get("content"), list)]:
            text = {"type": "text", "text": written}
            message["content"] = [text if each == MEDIA_PARTS["video"] else each for each in message["content"]]
        return found

    def of_text(self, text: str, images: Sequence[PreparedMedia], encode: Encode) -> MediaPrompt:
        """The prompt of a text with placeholders; `encode` may add special tokens."""
        ordered: list[PreparedMedia] = []
        for placeholders, *_ in self.kinds:
            own = placeholders.in_text_order(text, _of_medium(images, placeholders.medium))
            text = placeholders.expand_text(text, own)
            ordered += own
        return self._placed(tuple(encode(text)), ordered)

    def of_chat(self, text: str, images: Sequence[PreparedMedia], encode: Encode) -> MediaPrompt:
        """The prompt of a text that a chat template has rendered."""
        try:
            return self.of_text(text, images, encode)
        except MediaError as error:
            if error.code != _MISMATCH:
                raise
            names, plurals = (" or ".join(each) for each in zip(*[(each.name, each.plural) for each in self.media]))
            written = " and ".join([f"{each.written!r} for each {each.medium.one}" for each, *_ in self.kinds])
            raise MediaError(
                _MISMATCH,
                f"the chat template does not write a placeholder for each {names} part: {error}; render the messages "
                f"yourself, with {written}, as prompt, and give the {plurals} with it",
            ) from None

    def of_ids(self, token_ids: Sequence[int], images: Sequence[PreparedMedia], encode: Encode) -> MediaPrompt:
        """The prompt of ids, with a placeholder's id for each image, or expanded; `encode` adds no special tokens."""
        ids, ordered = list(token_ids), list[PreparedMedia]()
        for placeholders, *_ in self.kinds:
            own = placeholders.in_ids_order(ids, _of_medium(images, placeholders.medium), encode)
            ids = placeholders.expand_ids(ids, own, encode)
            ordered += own
        return self._placed(tuple(ids), ordered)

    def _placed(self, token_ids: tuple[int, ...], images: Sequence[PreparedMedia]) -> MediaPrompt:
        placed: list[tuple[MediaItem, PreparedMedia]] = []
        for placeholders, token_id, video_token_id in self.kinds:
            own = _of_medium(images, placeholders.medium)
            placed += zip(placeholders.media_items(token_ids, own, token_id, video_token_id), own, strict=True)
        placed.sort(key=lambda each: each[0].start)
        return MediaPrompt(token_ids, tuple([item for item, _ in placed]), tuple([each for _, each in placed]))


def _of_medium(media: Sequence[PreparedMedia], medium: Medium) -> list[PreparedMedia]:
    return [each for each in media if isinstance(each, PreparedImage) == (medium == IMAGE)]


def check_images(
    images: ImagePrompts | None,
    sources: Sequence[Any],
    media: Sequence[MediumName],
    *,
    is_truncated: bool,
    architecture: str = "",
) -> ImagePrompts:
    """`images`, for a prompt whose sources, of `media`, can be prepared. Raises MediaError, which names the
    `architecture`.
    """
    if images is None:
        medium = _medium_of(media[0], sources[0]) if media else IMAGE
        plural = medium.plural
        raise MediaError(
            f"{plural}_unsupported",
            f"this run takes no {plural}: the model{f' ({architecture})' if architecture else ''} runs with text "
            f"alone, its folder has no preprocessor_config.json, or limits.max_{medium.name}s is 0: leave {plural} out",
        )
    for name, source in zip(media, sources, strict=True):
        if not images.takes([name]):
            plural = _medium_of(name, source).plural
            message = f"the model takes {images.media[0].plural} in its prompts and no {plural}: leave {plural} out"
            raise MediaError(f"{plural}_unsupported", message)
    if is_truncated:
        raise MediaError("conflicting_keys", TRUNCATED)
    if any(each is not None and is_open(each) for each in sources):
        raise MediaError("video_missing", "a video part has no video: give it video or video_url")
    if any(each is None for each in sources):
        if media[[*sources].index(None)] == "audio":
            raise MediaError("audio_missing", "an audio part has no audio: give it input_audio, audio_url or audio")
        raise MediaError("image_missing", "an image part has no image: give it image_url or image")
    return images


def _medium_of(name: MediumName, source: Any) -> Medium:
    return VIDEO if isinstance(source, VideoPart) else _MEDIA[name]


def check_conversation(images: ImagePrompts, messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that no text of a conversation with images would be taken for an image. Raises MediaError."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                for placeholders, *_ in images.kinds:
                    placeholders.check_reserved(text)


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


def media_of(data: Any, images: ImagePrompts | None) -> tuple[list[Any], list[MediumName]]:
    """Images, videos and then recordings of vLLM's `multi_modal_data`, and the medium of each, for a model that takes
    these. Raises MediaError for anything else in it.
    """
    if data is None:
        return [], []
    kinds = _media_of_data(data, images)
    plurals = [_MEDIA[each].plural for each in kinds]
    code = f"{plurals[0]}_unsupported"
    if not isinstance(data, Mapping):
        raise MediaError(code, f"multi_modal_data={shown(data)} must be a dict: {{{kinds[0]!r}: {kinds[0]}}}")
    known = {name: plural for each in kinds for name, plural in _KEYS_OF_DATA[each].items()}
    empty = [each for each, value in data.items() if value is None or (isinstance(value, list | tuple) and not value)]
    others = [str(each) for each in data if each not in known and each not in empty]
    if others:
        verb = "is" if plurals == ["audio"] else "are"
        taken = {name: plural for name, plural in known.items() if name != "video" or _takes_videos(images)}
        message = (
            f"multi_modal_data has {', '.join(others)}: only {' and '.join(taken.values())} {verb} supported, under "
            f"{' or '.join(map(repr, taken))}"
        )
        raise MediaError(code, message)
    found = [(source, medium) for medium in kinds for source in _listed(data, medium)]
    return [source for source, _ in found], [medium for _, medium in found]


def _takes_videos(images: ImagePrompts | None) -> bool:
    """Whether a model takes videos, as far as is known."""
    return images is None or images.kinds[0].video_token_id is not None


def _media_of_data(data: Any, images: ImagePrompts | None) -> list[MediumName]:
    """Media of the model, or that of what is given to a model of text alone."""
    if images is not None:
        return [name for name, medium in _MEDIA.items() if medium in images.media]
    is_audio = isinstance(data, Mapping) and data.get("image") is None and data.get("audio") is not None
    return ["audio"] if is_audio else ["image"]


def _listed(data: Mapping[str, Any], medium: MediumName) -> list[Any]:
    given = data.get(medium)
    if medium == "audio":
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
