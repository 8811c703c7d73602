"""Texts of videos: what stands in a prompt in place of a video's placeholder, by rule."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple


class TextOfVideo(NamedTuple):
    """`tokens` are the tokens of each step of frames, a text, and `seconds` when each of the frames was taken,
    `step_frames` of which are a step's.
    """

    tokens: Sequence[str]
    seconds: Sequence[float]
    step_frames: int

    @property
    def firsts(self) -> Sequence[float]:
        """Seconds of the first frame of each step."""
        return self.seconds[:: self.step_frames]

    @property
    def middles(self) -> list[float]:
        """Seconds between the first and the last frame of each step."""
        lasts = self.seconds[self.step_frames - 1 :: self.step_frames]
        return [(first + last) / 2 for first, last in zip(self.firsts, lasts, strict=True)]


def text_of_video(rule: str, video: TextOfVideo) -> str:
    """The text by `VideoRule.text`."""
    return _TEXTS[rule](video)


def _run(video: TextOfVideo) -> str:
    return "".join(video.tokens)


def _qwen3(video: TextOfVideo) -> str:
    pairs = zip(video.middles, video.tokens, strict=True)
    return "".join([f"<{each:.1f} seconds><|vision_start|>{tokens}<|vision_end|>" for each, tokens in pairs])


def _glm4v(video: TextOfVideo) -> str:
    pairs = zip(video.firsts, video.tokens, strict=True)
    return "".join([f"<|begin_of_image|>{tokens}<|end_of_image|>{int(each)}" for each, tokens in pairs])


def _glm46v(video: TextOfVideo) -> str:
    pairs = zip(video.firsts, video.tokens, strict=True)
    return "".join([f"<|begin_of_image|>{tokens}<|end_of_image|>{each:.1f} seconds" for each, tokens in pairs])


def _internvl(video: TextOfVideo) -> str:
    return "\n".join([f"Frame{index + 1}: <img>{tokens}</img>" for index, tokens in enumerate(video.tokens)])


_TEXTS: Final[dict[str, Callable[[TextOfVideo], str]]] = {
    "run": _run,
    "qwen3": _qwen3,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "internvl": _internvl,
}
