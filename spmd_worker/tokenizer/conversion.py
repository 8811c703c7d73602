"""Conversion of the files of other tokenizers to a tokenizer.json: nothing is downloaded, no code of the folder is
executed, and nothing is written.

tiktoken's ranks and Mistral's tekken.json are converted here. `vocab.json` with `merges.txt` and SentencePiece models
are by transformers' own converter, if transformers is installed; it goes by the class that the folder names, not by a
SentencePiece model's own fields, so its result is compared with the model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from spmd_worker.base import files
from spmd_worker.base.config.extras import package_fault
from spmd_worker.base.errors import TokenizerError
from spmd_worker.tokenizer.encoder import is_failure
from spmd_worker.tokenizer.tekken_file import NAMED, TEKKEN_FILE, tokenizer_of_tekken
from spmd_worker.tokenizer.tiktoken_file import TIKTOKEN_FILES, Settings, tokenizer_of_tiktoken

_SENTENCEPIECE: Final = "tokenizer.model"
_OF_ENCODERS: Final = ("spiece.model", "sentencepiece.bpe.model", "spm.model")
"""SentencePiece models of T5, Pegasus, mBART, NLLB and DeBERTa, whose classes number the pieces anew."""
_PAIRS: Final = (("vocab.json", "source.spm", "target.spm"), ("vocab.json", "sentencepiece.bpe.model"))
"""Files of Marian and M2M100, of which transformers makes no tokenizer.json."""
_ALONE: Final = (*_OF_ENCODERS, *TIKTOKEN_FILES)
_KINDS: Final = (
    *((TEKKEN_FILE,), ("vocab.json", "merges.txt"), (_SENTENCEPIECE,), *_PAIRS),
    *[(each,) for each in _ALONE],
)
_MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a file of ranks: tekken.json has up to 20 MiB."""
_MODELS: Final = {1: "Unigram", 2: "BPE"}
"""SentencePiece's numbers (`TrainerSpec.ModelType`) -> the names in a tokenizer.json."""
_TEXTS: Final = (
    *("hello world", "two  spaces, three   here", "trailing ", "tab\tx", "a\nb\n\nc", "na\u00efve caf\u00e9 2026"),
    *("\u4f60\u597d \u4e16\u754c \U0001f600", "\uff21\uff22 \u00bd \ufb01ne", "x = [1, 2];", "Hello, World!"),
)
"""Texts on which SentencePiece models differ: prefixes, spaces, compatibility characters, bytes, digits. None begins
with a space, of which transformers keeps one fewer than SentencePiece.
"""


def older_files(folder: Path) -> tuple[str, ...]:
    """File names of a tokenizer without a tokenizer.json in the folder, () for none."""
    return next((names for names in _KINDS if all((folder / name).is_file() for name in names)), ())


@dataclass(frozen=True, slots=True)
class Converted:
    """A tokenizer.json, and the file `path` that it was made from. `named`: special tokens by the names that its models
    have for them, where tokenizer_config.json has none. `is_of_ranks`: it was made here, not by transformers.
    """

    path: Path
    content: bytes
    named: Mapping[str, str] = field(default_factory=dict)
    is_of_ranks: bool = False


def converted(folder: Path, config: Mapping[str, Any], model: Settings) -> Converted | None:
    """The tokenizer.json of the older files of `folder`; None if there are none. `config` is its tokenizer_config.json.
    Raises TokenizerError.
    """
    names = older_files(folder)
    if not names:
        return None
    path = folder / names[0]
    if names == (TEKKEN_FILE,):
        content = tokenizer_of_tekken(str(path), _read(path))
        return Converted(path, content, NAMED, is_of_ranks=True)
    if path.name in TIKTOKEN_FILES:
        return Converted(path, tokenizer_of_tiktoken(path, _read(path), config, model), is_of_ranks=True)
    return Converted(path, _by_transformers(folder, names))


def _read(path: Path) -> bytes:
    try:
        return files.read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _by_transformers(folder: Path, names: tuple[str, ...]) -> bytes:
    missing = f"{folder} has {' and '.join(names)} but no tokenizer.json, and"
    if names in _PAIRS:
        raise TokenizerError(
            f"{missing} transformers cannot make one of them: encode texts with "
            f"transformers.AutoTokenizer.from_pretrained('{folder}'), give their ids as prompt_token_ids, and the "
            f"target language, if there is one, as ids of decoder_prompt; it decodes the token_ids of the answers"
        )
    made = f"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')"
    try:
        from transformers import AutoTokenizer

        if names[0] in (_SENTENCEPIECE, *_OF_ENCODERS):
            import sentencepiece.sentencepiece_model_pb2  # noqa: F401  # reported by its name if it is not installed
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        text = str(tokenizer.backend_tokenizer.to_str())
        difference = _difference(text, folder / _SENTENCEPIECE) if _SENTENCEPIECE in names else None
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        package, module = ("protobuf", str(error.name)) if package == "google" else (package, package)
        why = f"{package}, which converts it, {package_fault(package, None, error, module).reason}"
    except BaseException as error:  # a converter for every kind of file raises whatever its libraries do
        if not is_failure(error):
            raise
        why = f"transformers cannot convert it here ({type(error).__name__}: {str(error)[:200].partition(chr(10))[0]})"
    else:
        if difference is None:
            return text.encode()
        raise TokenizerError(
            f"{missing} by tokenizer_config.json transformers makes {difference}: set tokenizer_class there to the "
            f"model's own class, or give a tokenizer.json"
        )
    raise TokenizerError(f'{missing} {why}: text prompts need one, made with python -c "{made}"')


def _difference(text: str, path: Path) -> str | None:
    """The first difference between the tokenizer.json `text` and the model of `path`; None if there is none, or if the
    file is of another kind than SentencePiece's, which only the converter knows.
    """
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        return None
    messages: Any = sentencepiece_model_pb2  # generated at import, so untyped
    proto = messages.ModelProto()
    proto.ParseFromString(path.read_bytes())
    kind, theirs = json.loads(text)["model"]["type"], _MODELS.get(proto.trainer_spec.model_type)
    if kind != theirs:
        return f"a {kind} model from one of another kind ({theirs or 'unknown'})"
    tokenizer = Tokenizer.from_str(text)
    for each in _TEXTS:
        ids, wanted = tokenizer.encode(each, add_special_tokens=False).ids, model.encode(each)
        if ids != wanted:
            return f"one that encodes {each!r} as {ids[:8]}, while {path.name} itself gives {wanted[:8]}"
    return None
