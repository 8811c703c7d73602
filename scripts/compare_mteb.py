"""Whether mteb's scores of a model folder are the same through this runtime as through sentence-transformers.

    python scripts/compare_mteb.py FOLDER [--pairs 200]

Needs mteb and sentence-transformers, which nothing else here does, and no network: two tasks of mteb's own kinds (STS
and classification) are made here with texts from a seed. In float32. Both scores are printed; the exit code is 1 where
they are further apart than 1e-6. The last line is JSON.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOLERANCE = 1e-6
TEXT = (
    "the cache holds blocks of tokens that a scheduler gives to rows while other rows wait for room and a rank that "
    "is slow keeps none of them from its answer because every step is agreed on before it runs"
)
WORDS = TEXT.split()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--pairs", type=int, default=200, help="of the STS task; default 200")
    options = parser.parse_args(arguments)
    import mteb
    from sentence_transformers import SentenceTransformer

    from spmd_worker.integrations.mteb_model import SpmdWorkerEncoder

    try:
        ours = SpmdWorkerEncoder(options.folder, device="cpu", dtype="float32")
    except ValueError as error:
        parser.error(str(error))
    theirs = SentenceTransformer(options.folder, device="cpu", model_kwargs={"dtype": "float32"})
    scores: dict[str, list[float]] = {}
    for make in tasks(options.pairs):
        for model in (ours, theirs):
            found = mteb.evaluate(model, make(), cache=None, co2_tracker=False, show_progress_bar=False)
            (result,) = found.task_results
            scores.setdefault(result.task_name, []).append(float(result.get_score()))
    for name, (own, other) in scores.items():
        print(f"{name:<24} ours {own:.8f}   sentence-transformers {other:.8f}   apart {abs(own - other):.1e}")
    print(json.dumps({"mteb": mteb.__version__, "scores": scores}))
    return int(any(abs(own - other) > TOLERANCE for own, other in scores.values()))


def tasks(num_pairs: int) -> list[Any]:
    """Classes of the two tasks, with what they are evaluated on."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.classification import AbsTaskClassification
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    about = {
        "description": "Texts from a seed.",
        "reference": None,
        "dataset": {"path": "local/drawn", "revision": "1"},
        "category": "t2t",
        "modalities": ["text"],
        "eval_splits": ["test"],
        "eval_langs": ["eng-Latn"],
        "date": ("2026-01-01", "2026-01-01"),
        "domains": ["Written"],
        "task_subtypes": [],
        "license": "cc0-1.0",
        "annotations_creators": "derived",
        "dialect": [],
        "sample_creation": "created",
        "bibtex_citation": "",
    }

    def dataset_of(**splits: dict[str, list[Any]]) -> Any:
        return DatasetDict({name: Dataset.from_dict(columns) for name, columns in splits.items()})

    class DrawnPairs(AbsTaskSTS):  # type: ignore[misc]  # of a package that may not be there
        metadata = TaskMetadata(type="STS", name="DrawnPairs", main_score="cosine_spearman", **about)
        min_score, max_score = 0, 1

        def load_data(self, num_proc: int | None = None, **options: Any) -> None:
            self.dataset, self.data_loaded = dataset_of(test=drawn_pairs(num_pairs)), True

    class DrawnKinds(AbsTaskClassification):  # type: ignore[misc]  # as above
        metadata = TaskMetadata(
            type="Classification", name="DrawnKinds", main_score="accuracy", **{**about, "category": "t2c"}
        )

        def load_data(self, num_proc: int | None = None, **options: Any) -> None:
            self.dataset, self.data_loaded = dataset_of(train=drawn_kinds(60, 1), test=drawn_kinds(60, 2)), True

    return [DrawnPairs, DrawnKinds]


def drawn_pairs(count: int) -> dict[str, list[Any]]:
    """Pairs that share some of their words, and how many."""
    chance = random.Random(0)
    found: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "score": []}
    for _ in range(count):
        words = chance.choices(WORDS, k=chance.randint(4, 20))
        kept = chance.randint(0, len(words))
        other = [*words[:kept], *chance.choices(WORDS, k=len(words) - kept)]
        for name, value in (("sentence1", " ".join(words)), ("sentence2", " ".join(other))):
            found[name].append(value)
        found["score"].append(kept / len(words))
    return found


def drawn_kinds(count: int, seed: int) -> dict[str, list[Any]]:
    """Texts of three kinds, each with words that are likelier than in the others."""
    chance = random.Random(seed)
    labels = [index % 3 for index in range(count)]
    texts = [
        " ".join(chance.choices(WORDS, weights=[4 if place % 3 == label else 1 for place in range(len(WORDS))], k=12))
        for label in labels
    ]
    return {"text": texts, "label": labels}


if __name__ == "__main__":
    sys.exit(main())
