"""Prompts with images without a model: tokenizer, template, and images that are prepared in this process."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from media_models import byte_tokenizer, media_folder

from spmd_worker.compat.image_prompts import ImagePrompts, MediumTokens
from spmd_worker.media.decode import checked_array, decode
from spmd_worker.media.errors import MediaError
from spmd_worker.media.image_processor import read_image_processor
from spmd_worker.media.limits import MediaLimits
from spmd_worker.media.placeholders import PLACEHOLDERS
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.media.preparing import prepare
from spmd_worker.media.source import read_source
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.tokenizer.tokenizer import Tokenizer

PAD: Final = "<|image_pad|>"
WRITTEN: Final = f"<|vision_start|>{PAD}<|vision_end|>"
TEMPLATE: Final = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}" + WRITTEN + "{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
"""As Qwen's: it writes a placeholder for each image part."""
STRINGS_ALONE: Final = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
"""A template that takes no parts."""


@dataclass
class HeldImages:
    """Images that are prepared when `is_held` is false."""

    made: list[PreparedImage] | MediaError
    is_held: bool = False

    def done(self) -> bool:
        return not self.is_held

    def result(self) -> list[PreparedImage]:
        if isinstance(self.made, MediaError):
            raise self.made
        return self.made


@dataclass
class HerePreparer:
    """`ImagePreparer` without processes. `asked` are the sources of each prompt, `held` what was submitted; with
    `holds` it is not prepared before a test says so.
    """

    folder: Path
    kind: str = "qwen3_vl"
    root: Path | None = None
    holds: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    held: list[HeldImages] = field(default_factory=list)

    def prepare(self, sources: Sequence[Any]) -> list[PreparedImage]:
        self.asked.append(tuple(sources))
        processor = read_image_processor(self.folder, VisionConfig(self.kind, 1), None)
        return [self._one(each, processor, len(sources) == 1) for each in sources]

    def _one(self, source: Any, processor: Any, is_alone: bool) -> PreparedImage:
        if isinstance(source, np.ndarray):
            return prepare(checked_array(source, self.limits), processor, is_alone=is_alone, source_digest=b"array")
        data = read_source(source, self.root, self.limits.max_image_bytes)
        return prepare(decode(data, self.limits), processor, is_alone=is_alone, source_digest=sha256(data).digest())

    def submit(self, sources: Sequence[Any]) -> HeldImages:
        try:
            self.held.append(HeldImages(self.prepare(sources), self.holds))
        except MediaError as error:
            self.held.append(HeldImages(error, self.holds))
        return self.held[-1]

    def close(self) -> None:
        pass


def image_tokenizer(folder: Path, template: str = TEMPLATE, kind: str = "qwen3_vl") -> Tokenizer:
    """A folder of `kind` with a tokenizer of bytes, which has its media tokens."""
    media_folder(folder, kind)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer.open(folder)


def image_prompts(folder: Path, tokenizer: Tokenizer, kind: str = "qwen3_vl", **preparer: Any) -> ImagePrompts:
    """The images of the folder's model."""
    placeholders = PLACEHOLDERS[kind]
    token_id = tokenizer.token_id(placeholders.image_token)
    assert token_id is not None
    return ImagePrompts(HerePreparer(folder, kind, **preparer), (MediumTokens(placeholders, token_id),))
