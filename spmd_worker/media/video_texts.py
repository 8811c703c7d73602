"""Texts of videos: what stands in a prompt in place of a video's placeholder, by rule."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple


class TextOfVideo(NamedTuple):
    """`tokens` are the tokens of each step of frames, a text, and `seconds` when each of the frames was taken,
    `step_frames` of which are a step's. `duration_s` is the length of the video.
    """

    tokens: Sequence[str]
    seconds: Sequence[float]
    step_frames: int
    duration_s: float

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


def _smolvlm(video: TextOfVideo) -> str:
    minutes, seconds = divmod(int(video.duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    duration = f"{days} day{'s' * (days > 1)}, " * bool(days) + f"{hours}:{minutes:02d}:{seconds:02d}"
    number = in_words(len(video.tokens))
    frames = [
        f"\nFrame from {int(each // 60):02d}:{int(each % 60):02d}:"
        f"<fake_token_around_image><global-img>{tokens}<fake_token_around_image>"
        for each, tokens in zip(video.seconds, video.tokens, strict=True)
    ]
    beginning = f"You are provided the following series of {number} frames from a {duration} [H:MM:SS] video.\n"
    return f"{beginning}{''.join(frames)}\n\n"


_SMALL: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below a million in English, as the package num2words writes it."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10 - 2] + f"-{_SMALL[number % 10]}" * bool(number % 10)
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    leading, rest = divmod(number, size)
    between = " and " if rest < 100 else ", "
    return f"{in_words(leading)} {name}" + (f"{between}{in_words(rest)}" if rest else "")


_TEXTS: Final[dict[str, Callable[[TextOfVideo], str]]] = {
    "run": _run,
    "qwen3": _qwen3,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
}
