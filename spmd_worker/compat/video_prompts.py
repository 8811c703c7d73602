"""Videos of vLLM's `multi_modal_data`, as the parts of a conversation that they would be."""

from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.media.errors import MediaError
from spmd_worker.tokenizer.video_parts import VIDEO_OPTIONS, VideoPart, video_part, video_with_metadata

_CODE: Final = "video_unreadable"
_VIDEO: Final = "video"


def videos_of(given: Any) -> list[VideoPart]:
    """One video or a list of them. A video is an array of frames, a list of frames, (frames, metadata), or a dict with
    `video` and the keys of a conversation's part; a list of paths is one video's frames. Raises MediaError.
    """
    if given is None or (isinstance(given, list | tuple) and not given):
        return []
    try:
        if getattr(given, "ndim", 0) == 5:
            return [video_part(each, {}) for each in given]
        if isinstance(given, list | tuple) and not _is_metadata_pair(given) and any(map(_is_video, given)):
            return [_video(each) for each in given]
        return [_video(given)]
    except ValueError as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(_CODE, f"a video of multi_modal_data {error}") from None


def _video(given: Any) -> VideoPart:
    if _is_metadata_pair(given):
        return video_with_metadata(given[0], given[1] or {})
    if isinstance(given, Mapping):
        options = {key: value for key, value in given.items() if key != _VIDEO}
        if _VIDEO not in given or not set(options) <= {*VIDEO_OPTIONS}:
            rule = f"give video, and perhaps {', '.join(VIDEO_OPTIONS)}"
            raise MediaError("videos_unsupported", f"a video with {', '.join(map(repr, given))}: {rule}")
        return video_part(given[_VIDEO], options)
    return video_part(given, {})


def _is_metadata_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping | None)


def _is_video(given: Any) -> bool:
    """Whether an element of a list is a video, and not a frame of one."""
    return isinstance(given, list | tuple | Mapping) or getattr(given, "ndim", 0) == 4
