"""Supported and unsupported architectures, for people: the text of `spmd-worker families`, the tables of
docs/reference/models.md.
"""

from collections.abc import Iterator, Sequence

from spmd_worker.model_config.families.audio_rows import AUDIO_ROWS
from spmd_worker.model_config.families.encoder_decoder_rows import ENCODER_DECODER_ROWS, classifying_of
from spmd_worker.model_config.families.encoder_rows import ENCODERS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES, UNSUPPORTED
from spmd_worker.model_config.families.vision_rows import VIDEO_ROWS
from spmd_worker.model_config.pooling import CLASSIFIER, COLBERT_ENCODERS
from spmd_worker.model_config.quantization import READ_METHODS


def describe_families() -> str:
    """Tables in Markdown: architectures that run, encoders, and known ones that do not, with the reason."""
    runs = [(name, family.models, _input(family), _unsupported_values(family)) for name, family in FAMILIES.items()]
    encoders = [(name, family.models, _unsupported_values(family)) for name, family in ENCODERS.items()]
    of_names = ((name, name.removesuffix("ForConditionalGeneration")) for name in ENCODER_DECODER_ROWS)
    classifying = [base for name, base in of_names if classifying_of(f"{base}{CLASSIFIER}") == name]
    unsupported = [(", ".join(names), reason) for reason, names in UNSUPPORTED.items()]
    return "\n".join(
        [
            *_table(("architecture", "models", "input", "rejected if config.json has"), runs),
            "",
            *_table(("encoder, which pools", "models", "rejected if config.json has"), encoders),
            "",
            "Encoders run with the heads ForSequenceClassification and ForTokenClassification, and without a head "
            "as ForMaskedLM and ForPreTraining.",
            f"HF_ColBERT runs for the model types {', '.join(COLBERT_ENCODERS)}; its folders, and those of PyLate and "
            "of sentence-transformers' MultiVectorEncoder with any of these encoders, score by late interaction.",
            f"Encoder-decoder models that classify: {', '.join(f'{each}{CLASSIFIER}' for each in classifying)}.",
            "",
            *_table(("not run", "because"), unsupported),
            "",
            "Any other architecture is rejected by name. Weights that are quantised by "
            f"{', '.join(READ_METHODS)} (quantization_config) run, as if dequantised.",
            "Code in a model folder is never run: auto_map of an architecture that runs is ignored.",
        ]
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _input(family: Family) -> str:
    if family.encoder_part is not None:
        return "audio to text" if family.encoder_part.mel_bins_key else "text to text"
    if family.audio:
        videos = ", videos" * (family.vision in VIDEO_ROWS)
        return f"text, images{videos} and audio"
    if family.vision in VIDEO_ROWS:
        return "text, images and videos"
    media = "audio" if family.vision in AUDIO_ROWS else "images"
    return f"text and {media}" if family.vision else "text"


def _unsupported_values(family: Family) -> str:
    # Keys that distinguish variants may have either value.
    either = {key for variant in family.variants for key in variant.keys}
    found = [
        f"{key} other than {'null' if value is None else str(value).lower()}"
        for key, value in family.required.items()
        if key not in either
    ]
    together = {key for variant in family.variants if len(variant.keys) > 1 for key in variant.keys}
    if combined := [key for key in family.required if key in together]:
        found.append(f"other combinations of {', '.join(combined)} than released models have")
    kinds = {} if family.text is None else family.text.families
    texts = [FAMILIES[name] for name in dict.fromkeys(kinds.values())] or [family]
    if any(each.rope is not None and not each.rope.may_be_partial for each in texts):
        found.append("partial_rotary_factor other than 1")
    return ", ".join(found) or "-"
