"""Records of a row: the request, its encoded prompt, and the error if it cannot run.

line --row_parser.parse_row--> Row --row_parser.resolve--> EncodedRow --row_writer.format_result--> line
                 \\--------------> RowError <------/             RowError --row_writer.format_error--> line
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.compat.image_prompts import media_digest, num_media_bytes
from spmd_worker.frontends.openai.transcript import ResponseFormat, Task
from spmd_worker.media.audio_prepared import PreparedAudio
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.continued_message import continued_text
from spmd_worker.tokenizer.messages import MediumName
from spmd_worker.tokenizer.token_texts import TokenText
from spmd_worker.tokenizer.video_parts import VideoPart

PoolingKind = Literal["embedding", "score", "rerank", "classify", "pooling"]

RowKind = Literal["plain", "completion", "chat", "audio", "pooled"] | PoolingKind
"""Format of the output row: the project's own, an OpenAI completion, chat completion or transcript; the same for
pooling rows.
"""

ErrorShape = Literal["plain", "openai"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to encode, with the tokenizer's default special tokens (a beginning-of-sequence token, say) unless
    `adds_special_tokens` is false. It has the model's placeholder for each of `images`, URLs or paths of images or
    recordings, or videos; `media` is the medium of each, "image" of a video.
    """

    text: str
    images: tuple[str | VideoPart, ...] = ()
    media: tuple[MediumName, ...] = ()
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, used unchanged: nothing is added. `resolve` checks the vocabulary. They have a placeholder for each of
    `images`, or all of their tokens.
    """

    token_ids: tuple[int, ...]
    images: tuple[str | VideoPart, ...] = ()
    media: tuple[MediumName, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template: plain JSON values, every message with a role. `template_kwargs` are further
    variables the template may read (`enable_thinking`, `date_string`). The last message is left open for the answer
    with `continue_final_message`. `images` are those of the image and audio parts, in order, None for a part without
    one, and `media` the medium of each.
    `adds_special_tokens`: the tokenizer's special tokens are added to those that the template writes.
    `reasoning_effort` is a variable of templates that read it.
    """

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    images: tuple[str | VideoPart | None, ...] = ()
    media: tuple[MediumName, ...] = ()
    adds_special_tokens: bool = False
    reasoning_effort: str | None = None

    @property
    def continued(self) -> str | None:
        """Text of the message that the answer continues; None if it begins a message."""
        return continued_text(self.messages) if self.continue_final_message else None


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """Rows of input embeddings, as in the row (`EmbedsReader.of_value`): they are read when the row is encoded."""

    value: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """Text or ids for the encoder of an encoder-decoder model. `decoder` None is the model's own decoder's prompt, or
    that of an answer in `target_language`; text is in `source_language`, None for the tokenizer's own.
    """

    encoder: TextPrompt | TokensPrompt
    decoder: TextPrompt | TokensPrompt | None = None
    target_language: str | None = None
    source_language: str | None = None


@dataclass(frozen=True, slots=True)
class AudioPrompt:
    """Audio for an encoder: bytes of a file, a data URL or a path. It is cut into windows, and each is a request whose
    decoder's prompt is `decoder`, or is written of the other values; `language` None is detected, `text` was spoken
    before. `key` is that of the row that has the audio.
    """

    source: str | bytes = field(repr=False)
    key: str = "audio"
    decoder: TextPrompt | TokensPrompt | None = None
    language: str | None = None
    task: Task = "transcribe"
    has_timestamps: bool = False
    text: str | None = None


ReadPrompt = TextPrompt | TokensPrompt | ChatPrompt
"""Prompts that are encoded as ids."""
Prompt = ReadPrompt | EmbedsPrompt | EncoderPrompt | AudioPrompt


@dataclass(frozen=True, slots=True)
class PoolingInputs:
    """Texts and parameters of a pooling row. If the row scores, the texts after the first `num_firsts` are compared
    with these: with one, or each with its own. `top_n` is the number of results of a rerank row, None for all.
    """

    prompts: tuple[ReadPrompt, ...]
    params: PoolingParams
    is_base64: bool = False
    num_firsts: int = 0
    top_n: int | None = None


EchoKind = Literal["both", "prompt"]
"""Text of a choice: the prompt and the completion, or only the prompt (`max_tokens` 0)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One well-formed input row. `index` counts input rows from 0; `model` is the name in an OpenAI body, `request` the
    constraints on its answer. With `pooling` nothing is generated: `prompt` is the first of its prompts, and `sampling`
    is unused. `returns_token_ids`: the answer has the ids of its prompt and texts. `adapter` and
    `prompt_adapter` are names in a plain row. `response_format` is that of a transcript. `request_id` is the client's
    name for the answer; without `includes_reasoning` a chat's answer has no reasoning.
    """

    index: int
    custom_id: str | None
    kind: RowKind
    prompt: Prompt
    sampling: SamplingParams
    model: str | None = None
    pooling: PoolingInputs | None = None
    request: ChatRequest | None = None
    echo: EchoKind | None = None
    returns_token_ids: bool = False
    adapter: str | None = None
    prompt_adapter: str | None = None
    response_format: ResponseFormat = "json"
    priority: int = 0
    request_id: str | None = None
    includes_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text before a completion; `is_alone`: nothing follows it. The first token has no log-probability."""

    text: str
    first_token: TokenText
    is_alone: bool


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row that can run: its prompt is 1 to `max_model_len - 1` ids of the vocabulary, `sampling.max_tokens` is a
    number.

    `content.text` is the text that was encoded (a chat after its template), None for token ids. `reader` parses tool
    calls and reasoning in the answers of a chat; None if they are only content. `adapter` and `prompt_adapter` are the
    names of its adapters in a plain row, `request_id` and `includes_reasoning` are the row's.
    """

    index: int
    custom_id: str | None
    kind: RowKind
    content: PromptContent
    sampling: SamplingParams
    model: str | None = None
    reader: AnswerReader | None = None
    echo: Echo | None = None
    returns_token_ids: bool = False
    adapter: str | None = None
    prompt_adapter: str | None = None
    request_id: str | None = None
    includes_reasoning: bool = True

    @property
    def media(self) -> tuple[PreparedMedia, ...]:
        return self.content.media

    def without_media(self) -> "EncodedRow":
        """The row without the embeddings and the images, which the engine holds."""
        return replace(self, content=replace(self.content, rows=None, media=()))


@dataclass(frozen=True, slots=True)
class RowError:
    """A row without an answer. `code` is one of the snake_case codes below, `message` is the error with the way out.

    Codes: line_too_long, invalid_utf8, invalid_json, nested_too_deeply, not_an_object, missing_key, invalid_value,
    unknown_key, missing_prompt, conflicting_prompts, conflicting_keys, empty_prompt, unsupported_url,
    unsupported_value, duplicate_custom_id, invalid_unicode, tokenizer_error, tokenizer_missing, chat_template_missing,
    chat_template_error, tools_unsupported, prompt_too_long, limit_exceeded, token_out_of_vocabulary, request_refused,
    grammar_refused, extra_missing, wrong_runner, model_not_found, invalid_embeddings, embeddings_missing,
    embeddings_outside, images_unsupported, image_missing, image_outside_root, image_unreadable, image_too_large,
    image_too_narrow, image_changed, image_too_long, too_many_images, videos_unsupported, video_missing,
    video_outside_root, video_unreadable, video_too_large, video_too_short, video_too_long, too_many_videos,
    reserved_token, placeholder_mismatch,
    audio_unsupported, audio_missing, audio_outside_root, audio_unreadable, audio_empty, audio_too_large,
    audio_too_long, audio_changed, too_many_audios, experts_unsupported, reasoning_unknown, encoder_unsupported,
    encoder_input_missing; and
    non_finite_logits, grammar_failed and non_finite_vector, for a row that ran and could not be completed.
    """

    index: int
    custom_id: str | None
    shape: ErrorShape
    code: str
    message: str


class ImagesOfRow(NamedTuple):
    """Bytes of a row's prepared images or audio, and the digest of what they were made of."""

    num_bytes: int
    digest: str

    @staticmethod
    def of(media: Sequence[PreparedMedia]) -> "ImagesOfRow":
        # Windows are made of the same bytes.
        # Videos are behind images, and recordings behind both, wherever a prompt has them.
        ordered = sorted(media, key=lambda each: 2 if isinstance(each, PreparedAudio) else each.frame is not None)
        sources = [each.source_digest for each in ordered if not isinstance(each, PreparedAudio) or not each.start_s]
        return ImagesOfRow(num_media_bytes(media), media_digest(sources))


NO_IMAGES: Final = ImagesOfRow(0, "")


def images_of_row(row: Row) -> tuple[str | VideoPart | None, ...]:
    """The images, videos and recordings of a row's prompt."""
    return row.prompt.images if isinstance(row.prompt, ReadPrompt) else ()


def media_of_row(row: Row) -> tuple[MediumName, ...]:
    """The medium of each of `images_of_row`."""
    return row.prompt.media if isinstance(row.prompt, ReadPrompt) else ()


def row_error(row: Row | EncodedRow, code: str, message: str) -> RowError:
    """Error of a row, in the format of the row."""
    return RowError(row.index, row.custom_id, shape_of(row), code, message)


def shape_of(row: Row | EncodedRow) -> ErrorShape:
    """Format of a row's error."""
    return "plain" if row.kind in ("plain", "pooled") else "openai"


def answer_name(row: Row | EncodedRow) -> str | int:
    """End of the id of a row's answer."""
    return row.index if row.request_id is None else row.request_id
