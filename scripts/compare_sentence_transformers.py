"""How far the vectors and scores of model folders are from those that sentence-transformers gives on this machine.

    python scripts/compare_sentence_transformers.py FOLDER ...

Folders of classifiers are compared with its CrossEncoder,
the others with its SentenceTransformer, in float32, texts beyond the model's length cut by both. The last line is JSON.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from spmd_worker import LLM, PoolingParams

TEXTS: Final = (
    "hello world",
    "the cache",
    "naïve café 你好",
    "a text about the scheduler " * 3,
    "x",
    "a long one " * 2000,
)


def largest_difference(ours: Sequence[Sequence[float]], theirs: Any) -> float:
    """Between numbers of the same rows."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(x - float(y)) for row, their in pairs for x, y in zip(row, their, strict=True))


def embedded(folder: Path, theirs: Any) -> float:
    """The largest difference of vectors."""
    model = theirs.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    expected = model.encode(list(TEXTS), batch_size=2)
    with LLM(folder, device="cpu", dtype="float32", runner="pooling") as llm:
        outputs = llm.embed(list(TEXTS), truncate_prompt_tokens=-1, use_tqdm=False)
    return largest_difference([each.outputs.embedding for each in outputs], expected)


def scored(folder: Path, theirs: Any) -> float:
    """The largest difference of scores, after the activation that the folder names and before it."""
    model = theirs.CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    pairs = [(TEXTS[0], text) for text in TEXTS]
    identity = importlib.import_module("torch").nn.Identity()
    found = []
    with LLM(folder, device="cpu", dtype="float32") as llm:
        for activates, options in ((True, {}), (False, {"activation_fn": identity})):
            outputs = llm.score(
                [first for first, _ in pairs],
                [second for _, second in pairs],
                pooling_params=PoolingParams(use_activation=activates),
                truncate_prompt_tokens=-1,
                use_tqdm=False,
            )
            expected = model.predict(pairs, batch_size=2, **options)
            found.append(largest_difference([[each.outputs.score] for each in outputs], expected.reshape(-1, 1)))
    return max(found)


def main(arguments: Sequence[str]) -> None:
    """Compare each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path)
    folders = parser.parse_args(arguments).folder
    theirs, found = importlib.import_module("sentence_transformers"), {}
    for folder in folders:
        (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
        compare = scored if architecture.endswith("ForSequenceClassification") else embedded
        found[folder.name] = compare(folder, theirs)
        print(f"{folder.name}: {architecture}, at most {found[folder.name]:.2e} apart")
    print(json.dumps({"largest_differences": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
