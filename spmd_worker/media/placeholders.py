"""Placeholders of images and audio in prompts, and the tokens that take their rows.

A chat template, or a user, writes one marker for each image; it becomes the image's text, which has as many image
tokens as the image has rows. Expansion is of text, before there are tokens: line ends beside a marker may join with
those of the image's text (Gemma 3). Prompts of ids are expanded to the ids that their text would have.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from spmd_worker.media.errors import MediaError
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.media.source import AUDIO, IMAGE, Medium
from spmd_worker.replica.sequence.media_items import MediaItem

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Token ids of a text, without special tokens around it."""
_MISMATCH: Final = "placeholder_mismatch"
IMAGE_NUMBER: Final = "\0"
"""Stands in an image's text for its number among those of the prompt."""
_MAX_JOINED_LINE_ENDS: Final = 64
"""No vocabulary has a token of more line ends."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Texts of a kind of model: `written` is what a chat template writes for an image, `marker` the part of it that
    the image's text replaces, `image_token` the token that takes a row. Prompts may not contain `reserved` texts other
    than as placeholders. Images may be recordings, if the `medium` is audio. A kind that takes videos has a
    `video_token`; their text replaces `video_marker`, or the token alone. Rows of their frames are taken by
    `frame_token`, or without one by the `video_token`. A `written_video` is there for a video where a chat template
    writes nothing.
    """

    kind: str
    written: str
    marker: str
    image_token: str
    reserved: tuple[str, ...]
    medium: Medium = IMAGE
    video_marker: str = ""
    video_token: str = ""
    frame_token: str = ""
    written_video: str = ""

    @property
    def row_token(self) -> str:
        """The token that takes rows of frames."""
        return self.frame_token or self.video_token

    def without_videos(self) -> "Placeholders":
        """Those of a model of the kind that takes no videos: what stands for one is a text like others."""
        reserved = tuple([each for each in self.reserved if each != self.written_video])
        return Placeholders(self.kind, self.written, self.marker, self.image_token, reserved, self.medium)

    def check_reserved(self, text: str) -> None:
        """Raise MediaError for a text, of a prompt with images, that would be taken for an image's tokens."""
        for token in self.reserved:
            if token in text:
                what = "an image or a part of one" if self.medium == IMAGE else "audio or a part of it"
                rule = f"which stands for {what} in this model: remove it, or write it differently"
                raise MediaError("reserved_token", f"a text of the prompt contains {token!r}, {rule}")

    def in_text_order(self, text: str, images: Sequence[PreparedMedia]) -> list[PreparedMedia]:
        """Images, and videos, in the order of their placeholders. Raises MediaError."""
        found = [each[0] in (self.video_marker, self.video_token) for each in re.finditer(self._markers, text)]
        given = f"{found.count(False)} placeholders {self.marker!r}"
        return self._in_order(found, images, f"{given} and {found.count(True)} {self.video_token!r}")

    def expand_text(self, text: str, images: Sequence[PreparedMedia]) -> str:
        """The text with each marker replaced by its image's text. Raises MediaError."""
        pieces, groups = re.split(self._markers, text), by_source(images)
        if len(pieces) != len(groups) + 1:
            raise self._mismatch(f"{len(pieces) - 1} placeholders {self.marker!r}", images)
        pairs = zip(groups, pieces[1:], strict=True)
        return pieces[0] + "".join([_text_of(each, number) + piece for number, (each, piece) in enumerate(pairs)])

    def in_ids_order(
        self, token_ids: Sequence[int], images: Sequence[PreparedMedia], encode: Encode
    ) -> list[PreparedMedia]:
        """`in_text_order` of ids, whose markers may be expanded already. Raises MediaError."""
        groups = by_source(images)
        if not any(map(_is_video, groups)):
            return list(images)
        ids = (self._id_of(self.image_token, encode), self._video_id(encode))
        if self.frame_token == self.image_token and ids[1] not in token_ids:
            if all(map(_is_video, groups)):
                return list(images)
            rule = f"give {self.video_token!r} for each video, or the prompt as text"
            raise MediaError(_MISMATCH, f"ids of images and frames are one in this model ({ids[0]}): {rule}")
        found = [each == ids[1] for each in token_ids if each in ids]
        num_rows = [sum([_num_rows(each) for each in groups if _is_video(each) is kind]) for kind in (False, True)]
        is_expanded = [found.count(False), found.count(True)] == num_rows
        given = f"{found.count(False)} ids of images ({ids[0]}) and {found.count(True)} of videos ({ids[1]})"
        return self._in_order(found, images, given, is_expanded=is_expanded)

    def expand_ids(self, token_ids: Sequence[int], images: Sequence[PreparedMedia], encode: Encode) -> list[int]:
        """The ids with each marker replaced by its image's tokens, or as they are if all images are expanded already:
        counts must be exact, and images in the order of their markers. Raises MediaError.
        """
        ids = list(token_ids)
        if not images:
            return ids
        image_id = self._id_of(self.image_token, encode)
        line_ends = _line_ends(encode) if images[0].text.startswith("\n") else {}
        groups = by_source(images)
        around = list(encode(self.video_marker)) if any(map(_is_video, groups)) else []
        video_id, row_id = (self._video_id(encode), self._id_of(self.row_token, encode)) if around else (-1, -1)
        texts = [
            self._ids_of(each, number, row_id if _is_video(each) else image_id, encode)
            for number, each in enumerate(groups)
        ]
        num_rows = sum([image.num_rows for image in images])
        num_given = sum([ids.count(each) for each in {image_id, row_id}])
        shown = [
            _rows_of(row_id, each) if _is_video(group) else each for each, group in zip(texts, groups, strict=True)
        ]
        if num_given == num_rows and _has_in_order(ids, [_without(line_ends, each) for each in shown]):
            return ids
        if any(_is_video(each) and each[0].text.endswith("\n") for each in groups):
            rule = "give the prompt as text, or all tokens of its videos"
            raise MediaError(_MISMATCH, f"texts of videos join with those around them in this model: {rule}")
        marker_id = self._id_of(self.marker, encode)
        num_markers = ids.count(marker_id) + ids.count(video_id)
        if num_markers != len(groups) or (marker_id != image_id and num_given):
            given = (
                f"{num_markers} placeholder ids ({marker_id}) and {num_given} {self.medium.name} token ids ({image_id})"
            )
            raise self._mismatch(given, images)
        if line_ends:
            return _expanded_lines(ids, marker_id, [image.text for image in images], line_ends, encode)
        return _expanded(ids, (marker_id, video_id), texts, around)

    def media_items(
        self,
        token_ids: Sequence[int],
        images: Sequence[PreparedMedia],
        image_token_id: int,
        video_token_id: int | None = None,
    ) -> tuple[MediaItem, ...]:
        """Images of an expanded prompt: the image tokens are theirs, in order, and video tokens those of frames. Raises
        MediaError.
        """
        # Rows of frames may have the tokens of images.
        kinds = (image_token_id, None if video_token_id == image_token_id else video_token_id)
        found = [[index for index, token_id in enumerate(token_ids) if token_id == each] for each in kinds]
        firsts, items = [0, 0], []
        for image in images:
            frame = image.frame if isinstance(image, PreparedImage) else None
            kind = int(frame is not None and kinds[1] is not None)
            first, stop = firsts[kind], firsts[kind] + image.num_rows
            if stop > len(found[kind]):
                break
            runs, firsts[kind] = _runs(found[kind][first:stop]), stop
            place = (0, 0, False) if frame is None else (frame.number + 1, frame.time, frame.goes_on)
            items.append(MediaItem(image.media_id, runs, image.num_patches, image.token_grid, *place))
        if len(items) < len(images) or firsts != [len(each) for each in found]:
            videos = f" and {len(found[1])} video tokens" if found[1] else ""
            raise self._mismatch(f"{len(found[0])} {self.medium.name} tokens{videos}", images)
        return tuple(items)

    @property
    def _markers(self) -> str:
        """A regular expression of what media replace."""
        return "|".join([re.escape(each) for each in (self.video_marker, self.video_token, self.marker) if each])

    def _in_order(
        self, are_videos: Sequence[bool], images: Sequence[PreparedMedia], given: str, *, is_expanded: bool = False
    ) -> list[PreparedMedia]:
        """Images and videos as placeholders of the prompt ask for them, or, if it is expanded, all of their tokens."""
        groups = by_source(images)
        if not any(are_videos) and not any(map(_is_video, groups)):
            return list(images)
        left = {kind: [each for each in groups if _is_video(each) is kind] for kind in (False, True)}
        ordered: list[PreparedMedia] = []
        index = 0
        while index < len(are_videos):
            if not left[are_videos[index]]:
                raise self._mismatch(given, images)
            group = left[are_videos[index]].pop(0)
            ordered += group
            index += _num_rows(group) if is_expanded else 1
        if left[False] or left[True]:
            raise self._mismatch(given, images)
        return ordered

    def _mismatch(self, given: str, images: Sequence[PreparedMedia]) -> MediaError:
        groups = by_source(images)
        videos = [each for each in groups if _is_video(each)]
        taken = sum(image.num_rows for image in images) - sum(map(_num_rows, videos))
        name = self.medium.name
        given_media = f"{len(groups) - len(videos)} {self.medium.many}, which take {taken} {name} tokens"
        if videos:
            given_media += f", and {len(videos)} videos, which take {sum(map(_num_rows, videos))} video tokens"
        rule = f"it has {given_media}: give one placeholder for each {self.medium.one}{' and video' * bool(videos)}"
        return MediaError(_MISMATCH, f"the prompt has {given}, but {rule}")

    def _id_of(self, token: str, encode: Encode) -> int:
        ids = encode(token)
        if len(ids) != 1:
            message = f"the tokenizer has no token {token!r}: it splits into {len(ids)}"
            raise MediaError(f"{self.medium.plural}_unsupported", message)
        return ids[0]

    def _video_id(self, encode: Encode) -> int:
        """The id of the placeholder of a video; -1 where frames have another, and the tokenizer no such token."""
        ids = encode(self.video_token)
        return -1 if self.frame_token and len(ids) != 1 else self._id_of(self.video_token, encode)

    def _ids_of(self, images: Sequence[PreparedMedia], number: int, token_id: int, encode: Encode) -> list[int]:
        """Ids of the text of an image or of a video."""
        ids, num_rows = list(encode(_text_of(images, number))), _num_rows(images)
        if ids.count(token_id) != num_rows:
            one = "video" if _is_video(images) else self.medium.one
            what = f"{'video' if _is_video(images) else self.medium.name} tokens of the {num_rows} of a {one}"
            message = f"the tokenizer makes {ids.count(token_id)} {what}"
            raise MediaError(f"{self.medium.plural}_unsupported", message)
        return ids


def by_source(images: Sequence[PreparedMedia]) -> list[list[PreparedMedia]]:
    """Each image alone, and all frames of each video."""
    groups: list[list[PreparedMedia]] = []
    for image in images:
        if isinstance(image, PreparedImage) and image.frame is not None and image.frame.number:
            groups[-1].append(image)
        else:
            groups.append([image])
    return groups


def _text_of(group: Sequence[PreparedMedia], number: int) -> str:
    """The text of an image or a video, of this number in the prompt."""
    return group[0].text.replace(IMAGE_NUMBER, str(number))


def _is_video(group: Sequence[PreparedMedia]) -> bool:
    return isinstance(group[0], PreparedImage) and group[0].frame is not None


def _num_rows(group: Sequence[PreparedMedia]) -> int:
    return sum([each.num_rows for each in group])


def _rows_of(row_id: int, ids: list[int]) -> list[int]:
    """Ids of a video from its first row to its last: those of the text around them may join with the prompt's."""
    return ids[ids.index(row_id) : len(ids) - ids[::-1].index(row_id)]


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(start, count) of consecutive numbers."""
    starts = [index for index, place in enumerate(places) if index == 0 or place != places[index - 1] + 1]
    return tuple([(places[start], stop - start) for start, stop in zip(starts, [*starts[1:], len(places)])])


def _has_in_order(ids: list[int], texts: Sequence[list[int]]) -> bool:
    """Whether each text is in `ids` where its first token first occurs behind the text before."""
    position = 0
    for text in texts:
        try:
            position = ids.index(text[0], position)
        except ValueError:
            return False
        if ids[position : position + len(text)] != text:
            return False
        position += len(text)
    return True


def _expanded(
    ids: list[int], marker_ids: Sequence[int], texts: Sequence[list[int]], around: Sequence[int]
) -> list[int]:
    """`around` are the ids of the marker of a video, which its text replaces as a whole where they are all there."""
    remaining, expanded, index = iter(texts), list[int](), 0
    while index < len(ids):
        if len(around) > 1 and ids[index : index + len(around)] == around:
            expanded += next(remaining)
            index += len(around)
            continue
        expanded += next(remaining) if ids[index] in marker_ids else [ids[index]]
        index += 1
    return expanded


# Line ends beside an image.


def _line_ends(encode: Encode) -> dict[int, int]:
    """Ids of tokens that are line ends alone -> how many."""
    encoded = [(encode("\n" * number), number) for number in range(1, _MAX_JOINED_LINE_ENDS + 1)]
    return {ids[0]: number for ids, number in encoded if len(ids) == 1}


def _without(line_ends: dict[int, int], ids: list[int]) -> list[int]:
    start, stop = 0, len(ids)
    while ids[start] in line_ends:
        start += 1
    while ids[stop - 1] in line_ends:
        stop -= 1
    return ids[start:stop]


def _expanded_lines(
    ids: list[int], marker_id: int, texts: Sequence[str], line_ends: dict[int, int], encode: Encode
) -> list[int]:
    """Line ends on both sides of a marker are tokenised with the image's text."""
    expanded: list[int] = []
    rest = ids
    for text in texts:
        at = rest.index(marker_id)
        expanded += rest[:at]
        left = right = 0
        while expanded and expanded[-1] in line_ends:
            left += line_ends[expanded.pop()]
        stop = at + 1
        while stop < len(rest) and rest[stop] in line_ends:
            right += line_ends[rest[stop]]
            stop += 1
        made = list(encode("\n" * left + text + "\n" * right))
        # The line ends behind this image may also be those before the next one.
        num_kept = len(made)
        while made[num_kept - 1] in line_ends:
            num_kept -= 1
        expanded += made[:num_kept]
        rest = made[num_kept:] + rest[stop:]
    return expanded + rest


# The table.

_QWEN: Final = (
    *("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|image_pad|>"),
    ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
)
_QWEN_AUDIO: Final = (
    *("<|audio_bos|><|AUDIO|><|audio_eos|>", "<|AUDIO|>", "<|AUDIO|>"),
    ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
)
_QWEN2_5_OMNI: Final = (
    *("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|IMAGE|>", "<|IMAGE|>"),
    ("<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"),
)
_QWEN3_ASR: Final = (
    *("<|audio_start|><|audio_pad|><|audio_end|>", "<|audio_pad|>", "<|audio_pad|>"),
    ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
)
_VOXTRAL: Final = ("[BEGIN_AUDIO][AUDIO]", "[AUDIO]", "[AUDIO]", ("[AUDIO]", "[BEGIN_AUDIO]"))
_GLMASR: Final = (
    *("<|begin_of_audio|><|pad|><|end_of_audio|>", "<|pad|>", "<|pad|>"),
    ("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
)
_SOUND: Final = ("<sound>", "<sound>", "<sound>", ("<sound>",))
_GEMMA4: Final = (
    *("<|image|>", "<|image|>", "<|image|>"),
    ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
)
_GLM: Final = (
    *("<|begin_of_image|><|image|><|end_of_image|>", "<|image|>", "<|image|>"),
    ("<|image|>", "<|video|>", *(f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end"))),
)
_DEEPSEEK: Final = ("<image_placeholder>", "<image_placeholder>", "<image_placeholder>", ("<image_placeholder>",))
_LIGHTON: Final = (
    *("<|image_pad|>", "<|image_pad|>", "<|image_pad|>"),
    ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
)
_PADDLEOCR: Final = (
    *("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_PLACEHOLDER|>"),
    ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
)
_KIMI: Final = (
    *("<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "<|media_pad|>", "<|media_pad|>"),
    (*(f"<|media_{part}|>" for part in ("begin", "content", "pad", "end")), "<|kimi_k25_video_placeholder|>"),
)
_LFM2: Final = (
    *("<image>", "<image>", "<image>"),
    ("<image>", *(f"<|{each}|>" for each in ("image_start", "image_end", "img_thumbnail"))),
)
_EXAONE: Final = (
    *("<vision><|image_pad|></vision>", "<|image_pad|>", "<|image_pad|>"),
    ("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>"),
)
_INTERNVL: Final = (
    *("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<IMG_CONTEXT>"),
    ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
)
_AYA_TOKENS: Final = tuple([f"<|{each}|>" for each in ("IMG_PATCH", "START_OF_IMG", "END_OF_IMG")])
_AYA: Final = ("<image>", "<image>", "<|IMG_PATCH|>", ("<image>", *_AYA_TOKENS))
_COMMAND_A: Final = ("<|IMG_PATCH|>", "<|IMG_PATCH|>", "<|IMG_PATCH|>", (*_AYA_TOKENS, "<|IMG_LINE_BREAK|>"))
_MINICPM: Final = (
    *("<|image_pad|>", "<|image_pad|>", "<|image_pad|>"),
    (
        "<|image_pad|>",
        "<|video_pad|>",
        *(f"<{end}{each}>" for each in ("image", "slice", "image_id") for end in ("", "/")),
    ),
)
_LLAVA: Final = ("<image>", "<image>", "<image>", ("<image>", "<video>"))
_PIXTRAL: Final = ("[IMG]", "[IMG]", "[IMG]", ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
_SEPARATORS: Final = ("<|tile_x_separator|>", "<|tile_y_separator|>")
_MAX_GRID: Final = 6
"""Lines and columns of tiles that have tokens of their own in Idefics3."""
_MAX_GRANITE_GRID: Final = 16


def _tiles(most: int) -> tuple[str, ...]:
    return tuple([f"<row_{row + 1}_col_{column + 1}>" for row in range(most) for column in range(most)])


_OF_TILES: Final = ("<image>", "<fake_token_around_image>", "<global-img>")
_SMOLVLM: Final = (*("<image>", "<image>", "<image>"), ("<video>", *_OF_TILES, *_tiles(_MAX_GRID)))

PLACEHOLDERS: Final = {
    kind: Placeholders(kind, *texts)
    for kind, texts in {
        "exaone4_5": _EXAONE,
        "paddleocr_vl": _PADDLEOCR,
        "kimi_k25": _KIMI,
        "gemma3": (
            *("<start_of_image>", "<start_of_image>", "<image_soft_token>"),
            ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        ),
        "gemma4": _GEMMA4,
        "gemma4_unified": _GEMMA4,
        "llava": _LLAVA,
        "deepseek_vl": _DEEPSEEK,
        "llava_next": _LLAVA,
        "aya_vision": _AYA,
        "minicpmv4_6": _MINICPM,
        "cohere2_vision": _COMMAND_A,
        "llama4": (
            *("<|image|>", "<|image|>", "<|patch|>"),
            ("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", *_SEPARATORS),
        ),
        "mistral3": _PIXTRAL,
        "pixtral": _PIXTRAL,
        "lighton_ocr": _LIGHTON,
        "lfm2_vl": _LFM2,
        "granite_docling": (*("<image>", "<image>", "<image>"), (*_OF_TILES, *_tiles(_MAX_GRANITE_GRID))),
    }.items()
} | {
    "qwen3_vl": Placeholders("qwen3_vl", *_QWEN, IMAGE, "<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>"),
    "qwen2_vl": Placeholders("qwen2_vl", *_QWEN, IMAGE, "<|video_pad|>", "<|video_pad|>"),
    "qwen2_5_vl": Placeholders("qwen2_5_vl", *_QWEN, IMAGE, "<|video_pad|>", "<|video_pad|>"),
    "glm4v": Placeholders("glm4v", *_GLM, IMAGE, "<|video|>", "<|video|>", "<|image|>"),
    "llava_onevision": Placeholders("llava_onevision", *_LLAVA, IMAGE, "<video>", "<video>"),
    "internvl": Placeholders("internvl", *_INTERNVL, IMAGE, "<video>", "<video>", "<IMG_CONTEXT>"),
    "smolvlm": Placeholders("smolvlm", *_SMOLVLM, IMAGE, "<video>", "<video>", "<image>", "<video>"),
    "qwen3_omni": Placeholders("qwen3_omni", *_QWEN, IMAGE, "<|video_pad|>", "<|video_pad|>"),
    "qwen2_5_omni": Placeholders("qwen2_5_omni", *_QWEN2_5_OMNI, IMAGE, "<|VIDEO|>", "<|VIDEO|>"),
    "qwen2_audio": Placeholders("qwen2_audio", *_QWEN_AUDIO, AUDIO),
    "qwen3_asr": Placeholders("qwen3_asr", *_QWEN3_ASR, AUDIO),
    "qwen2_5_omni_audio": Placeholders("qwen2_5_omni_audio", *_QWEN_AUDIO, AUDIO),
    "qwen3_omni_audio": Placeholders("qwen3_omni_audio", *_QWEN3_ASR, AUDIO),
    "voxtral": Placeholders("voxtral", *_VOXTRAL, AUDIO),
    "glmasr": Placeholders("glmasr", *_GLMASR, AUDIO),
    "audioflamingo3": Placeholders("audioflamingo3", *_SOUND, AUDIO),
}
"""Kind of model -> its texts."""


# Texts of images: `num_rows` image tokens in each.


def run_text(kind: str, num_rows: int) -> str:
    """Image tokens alone."""
    return PLACEHOLDERS[kind].image_token * num_rows


def video_text(kind: str, num_rows: int) -> str:
    """Tokens of frames alone."""
    return PLACEHOLDERS[kind].row_token * num_rows


def gemma_text(num_rows: int) -> str:
    """Line ends around it, which may join with the prompt's."""
    return f"\n\n<start_of_image>{run_text('gemma3', num_rows)}<end_of_image>\n\n"


def gemma4_text(num_rows: int) -> str:
    """A token before and behind the image tokens."""
    return f"<|image>{run_text('gemma4', num_rows)}<image|>"


def internvl_text(num_rows: int) -> str:
    """A token before and behind the image tokens."""
    return f"<img>{run_text('internvl', num_rows)}</img>"


def aya_text(num_tiles: int, rows_per_tile: int) -> str:
    """Tiles with their numbers, and the complete image behind several or alone."""
    tile = run_text("aya_vision", rows_per_tile)
    tiles = "".join([f"TILE_{number}{tile}" for number in range(1, num_tiles)])
    return f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{tile}<|END_OF_IMG|>"


def command_a_text(num_tiles: int, rows_per_tile: int) -> str:
    """Tiles with a break behind each, the last of which is the complete image."""
    tile = f"{run_text('cohere2_vision', rows_per_tile)}<|IMG_LINE_BREAK|>"
    return f"<|START_OF_IMG|>{tile * num_tiles}<|END_OF_IMG|>"


def minicpm_text(slices: Sequence[Sequence[int]], num_rows: int, *, is_numbered: bool) -> str:
    """The complete image of `num_rows`, with its number, and behind it lines of slices, by their numbers of rows."""
    lines = ["".join([f"<slice>{run_text('minicpmv4_6', each)}</slice>" for each in line]) for line in slices]
    before = f"<image_id>{IMAGE_NUMBER}</image_id>" * is_numbered
    return f"{before}<image>{run_text('minicpmv4_6', num_rows)}</image>" + "\n".join(lines)


def pixtral_text(num_lines: int, num_columns: int) -> str:
    """A break between lines, an end behind the last."""
    return "[IMG_BREAK]".join(["[IMG]" * num_columns] * num_lines) + "[IMG_END]"


def llama4_text(num_lines: int, num_columns: int, rows_per_tile: int) -> str:
    """Tiles with a token between those of a line and one behind each, and the complete image; a tile alone is that."""
    tile, (between, behind) = run_text("llama4", rows_per_tile), _SEPARATORS
    lines = (between.join([tile] * num_columns) + behind) * num_lines if num_lines * num_columns > 1 else ""
    return f"<|image_start|>{lines}<|image|>{tile}<|image_end|>"


def smolvlm_text(num_lines: int, num_columns: int, rows_per_tile: int) -> str:
    """Tiles line by line, with their places, and the complete image; without tiles this alone."""
    tile = run_text("smolvlm", rows_per_tile)
    tiles = _lines_text(num_lines, num_columns, tile) + "\n" * bool(num_lines)
    return f"{tiles}<fake_token_around_image><global-img>{tile}<fake_token_around_image>"


def _lines_text(num_lines: int, num_columns: int, tile: str) -> str:
    return "".join(
        [
            "".join([f"<fake_token_around_image><row_{line + 1}_col_{each + 1}>{tile}" for each in range(num_columns)])
            + "\n"
            for line in range(num_lines)
        ]
    )


def granite_text(num_lines: int, num_columns: int, rows_per_tile: int) -> str:
    """Tiles line by line, with their places, and behind several the complete image."""
    tile = run_text("granite_docling", rows_per_tile)
    lines = _lines_text(num_lines, num_columns, tile)
    behind = f"\n<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    return lines + behind * (num_lines * num_columns > 1)


def lfm2_text(num_lines: int, num_columns: int, rows_per_tile: int, num_rows: int) -> str:
    """Tiles, if they are several, with their places, and the complete image of `num_rows`."""
    tile = run_text("lfm2_vl", rows_per_tile)
    places = [(line, column) for line in range(num_lines) for column in range(num_columns)]
    tiles = "".join([f"<|img_row_{line + 1}_col_{column + 1}|>{tile}" for line, column in places])
    behind = f"{tiles}<|img_thumbnail|>" if len(places) > 1 else ""
    return f"<|image_start|>{behind}{run_text('lfm2_vl', num_rows)}<|image_end|>"
