"""A tokenizer.json out of the files that older tokenizers have: `vocab.json` with `merges.txt`, or `tokenizer.model`.

transformers' own converter makes it, where transformers is installed; nothing is downloaded, no code of the folder is
executed, and nothing is written.
"""

from pathlib import Path
from typing import Any, Final

from spmd_worker.errors import TokenizerError

_KINDS: Final = (("vocab.json", "merges.txt"), ("tokenizer.model",))


def older_files(folder: Path) -> tuple[str, ...]:
    """Those of a tokenizer that the folder has, () for none."""
    return next((names for names in _KINDS if all((folder / name).is_file() for name in names)), ())


def converted(folder: Path) -> bytes | None:
    """The text of a tokenizer.json that does what the older files of `folder` say; None for a folder that has none.
    Raises TokenizerError where it cannot be made, with the command that makes it elsewhere.
    """
    names = older_files(folder)
    if not names:
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except ModuleNotFoundError as error:
        why = f"{error.name}, which converts it, is not installed"
    except Exception as error:  # a converter for every kind of file raises whatever its libraries do
        why = f"transformers cannot convert it here ({type(error).__name__}: {str(error)[:200].partition(chr(10))[0]})"
    raise TokenizerError(
        f"{folder} has {' and '.join(names)} and no tokenizer.json, and {why}: text prompts need one, made with python "
        f"-c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
