"""Writes the generated pages of docs/reference, and the types of the keywords of `LLM(...)`, from the code's records:

docs/reference/configuration.md, every key; docs/reference/models.md, the supported models;
docs/reference/vllm_names.md, vLLM's names; and spmd_worker/compat/llm_keywords.py.

python scripts/reference_pages.py [FOLDER]
"""

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from spmd_worker import ABSENT, OFFERED
from spmd_worker.base.config.options import Key, command_text, groups_of, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.config.speculation import METHODS, REJECTED_METHODS
from spmd_worker.compat.keywords import KEYWORDS, Effect, Keyword
from spmd_worker.compat.methods import (
    ENGINE_ABSENT,
    ENGINE_METHODS,
    EXECUTOR_NAMES,
    LLM_ABSENT,
    LLM_METHODS,
    WORKER_NAMES,
)
from spmd_worker.compat.speculative_words import KEYS_WITHOUT_EFFECT, METHOD_ALIASES, REJECTED_KEYS
from spmd_worker.model_config.families.listing import describe_families
from spmd_worker.model_config.quantization import READ_METHODS
from spmd_worker.replica.sequence.sampling_params import DIFFERENT_FIELDS, REJECTED, SAMPLING_KEYS, WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "<!-- Written by `python scripts/reference_pages.py`: do not edit. -->\n"

CONFIGURATION_HEAD = f"""# Configuration

{GENERATED}
Every configuration key, with its default and its keyword in `LLM(...)`, for people who run jobs, scripts or the server.

| to | write |
| --- | --- |
| set a key | `GROUP.KEY=VALUE` on the command line of `launch.py`, `spmd-worker` or `python -m spmd_worker.serve` |
| set a key from Python | `LLM(model, KEYWORD=value)`, where the table has a keyword; vLLM's other names are in brackets |
| apply a named set of values | `GROUP=NAME`, from `conf/GROUP/NAME.yaml`: `parallel=tp2`, `sampling=greedy` |
| apply a complete named run | `experiment=NAME`, from `conf/experiment/NAME.yaml`: `experiment=demo` |
| add sets of your own | `--config-dir DIR`, which has `GROUP/NAME.yaml` |
| print the keys and their values | `--help` (the keys in **bold**), `--help=all` (every key), `--cfg job` (YAML) |
| set input and output | `--input PATH` and `--output PATH`, the same as `job.input=PATH` and `job.output=PATH` |

[Hydra](https://hydra.cc) composes the configuration. A misspelled key is an error that names similar keys. Paths are
taken as the shell passes them, with any characters; `~` is the home folder.
"""  # noqa: E501  # rows of tables

MODELS_HEAD = f"""# Supported models

{GENERATED}
Architectures, checkpoint formats and quantised weights that this runtime loads, for people who choose a model.
`spmd-worker families` (`python launch.py families`) prints the tables of this page. `plan=true` says for one model
whether it runs and how much memory it takes, from its `config.json` alone: see [Memory](../guides/memory.md).

## Model folder

`model.path` is a folder in Hugging Face's format, or a name on the hub such as `Qwen/Qwen3-0.6B`. A name is looked up
in the local cache and downloaded if it is not there (`pip install 'spmd-worker[hub]'`); so is a folder in a bucket
(`s3://...`: [Remote files](../guides/remote.md)).

| file | |
| --- | --- |
| `config.json` | required; its `architectures` must be in a table below |
| `*.safetensors` | required: one file, or several with their index |
| `tokenizer.json` | or `tekken.json` (Mistral), `tiktoken.model` (Kimi, Moonlight), `hy.tiktoken` (Hunyuan), `qwen.tiktoken`, from which one is made; or `vocab.json` and `merges.txt`, `tokenizer.model`, `spiece.model` or `sentencepiece.bpe.model`, which transformers converts, those of SentencePiece with sentencepiece and protobuf. Rows of token ids need no tokenizer |
| `generation_config.json` | optional: defaults of sampling, and end-of-sequence tokens |
| `hf_quant_config.json` | optional: how ModelOpt quantised the weights, if config.json does not say it |
| `tokenizer_config.json`, `chat_template.jinja`, `additional_chat_templates/` | optional: the chat template, for chat rows |
| `modules.json`, `config_sentence_transformers.json` | optional: pooling as in sentence-transformers, see [Pooling](../guides/pooling.md) |
| `artifact.metadata` | optional: settings of ColBERT's authors, see [Late interaction](../guides/late_interaction.md) |

Nothing in the folder is executed. Pickled weights (`.bin`, `.pt`, `.pth`) are rejected. `auto_map` is ignored where
the architecture is supported; where it is not, the model is rejected, whatever `trust_remote_code` says.
"""  # noqa: E501  # rows of tables

ROPE_NOTE = """## Rotary embeddings that depend on the length

A row's answer depends on the row alone with these too. With `rope_type=dynamic` the tokens of the prompt use the base
for the prompt's length, and each later token the base for the length it reaches. With `longrope` a row uses the long
factors for all of its tokens if prompt and `max_tokens` together exceed the original length.
"""

QUANTISED_NOTE = f"""## Quantised checkpoints

Weights quantised by {", ".join(f"`{name}`" for name in READ_METHODS)}
(`quantization_config` of `config.json`) give the bits of their dequantised weights in the run's dtype (`model.dtype`).
Some stay in memory [as the file has them](#weights-as-files-store-them), the others are dequantised at load and take
that dtype's memory. Scales of activations and of the KV cache are not used. Modules that the checkpoint excludes are
read as they are. Other methods (torchao and others) are rejected with the way out. [GGUF](../guides/gguf.md) has files
of its own.

* `bitsandbytes`: NF4 and FP4, with and without double quantisation, and 8 bits. Files say themselves which weights
  are quantised; `llm_int8_skip_modules` and `llm_int8_threshold` change none. Values are rounded once, from float32,
  and are those of bitsandbytes 0.50 in the same dtype, bit for bit. (Its CPU kernel misreads weights whose inputs are
  no multiple of the block size; its other code does not.)
* `modelopt` (NVIDIA's ModelOpt): NVFP4, also of weights alone (`W4A16_NVFP4`), FP8 with a scale a tensor, row or block,
  and `MIXED_PRECISION` of these; with none, as of a quantised KV cache alone, weights are plain.
  `hf_quant_config.json` counts if config.json says nothing. Algorithms that scale inputs too (AWQ, SVD) are rejected.
  Values of NVFP4 are those of ModelOpt 0.47.
* `fp8` with `expert_dtype` "fp4" (DeepSeek V4): matrices of routed experts in MXFP4, an exponent for 32 inputs.
* `compressed-tensors`: integers of 4 and 8 bits, FP8, and NVFP4 (`nvfp4-pack-quantized`).

`model.quantization=int8` quantises the weights of any checkpoint at load, on the CPU: see
[Memory](../guides/memory.md).

### Weights as files store them

On CPUs with the compiled kernels, in bfloat16, weights of 4 bits and FP8 stay so, and products expand them as they read
them: an 8B model takes 5.9 or 9.1 GB instead of 16. On GPUs [experts in MXFP4 and FP8](../guides/gpus.md) stay.

| file | weights that stay on CPUs |
| --- | --- |
| GPTQ, AWQ, compressed-tensors' W4A16 (pack-quantized), without act-order | attention, feed-forward, experts |
| NF4 (`bitsandbytes`) in blocks of 64 | the same |
| MXFP4 | routed experts |
| FP8 with a scale a tensor, a row or a block, in any of the formats above | attention, feed-forward, experts |
| GGUF, most types: [which, and how many bits each takes](../guides/gguf.md#memory) | the same |

* Where config.json says float16, as most such files do, `model.dtype=auto` is bfloat16 on CPUs, whose numbers have 8
  bits instead of 11; `model.dtype=float32` is more exact, and dequantises.
* The log and `plan=true` say so with the first reason if a weight is dequantised: groups of inputs are no multiple of
  32; a rank's outputs are no multiple of 16 (gates and ups together: 32); its inputs do not begin and end where groups
  do; matrices that are multiplied together, such as queries, keys and values, have several formats (types of GGUF may
  differ: one format holds them all exactly);
  `model.allow_nonfinite`; `model.lora_merge`, which adds to weights.
* Few rows are computed faster so, as they wait for memory; steps of many rows take up to a tenth longer, without AMX up
  to a quarter at about 16 rows in FP8 ([times](../lab/stored_weights.md)). `model.dequantize_weights=true` is faster
  there, if the memory suffices.
* Latent attention and other mixers, attention to an encoder's rows, towers, heads of drafts and the token head are
  dequantised.
* Weights that a file has otherwise than its config.json says, mostly plain ones that it does not list, are dequantised
  too, with those they are multiplied with, or all experts of the layer; a plan, which reads config.json alone, counts
  them as it says.
* Such weights are replaced by quantised files alone (`reload_weights`): `update_weights` and changes in `apply_model`
  are refused. `model.dequantize_weights=true` dequantises them when they are loaded, for trainers. LoRA adapters work,
  and saved models have the dequantised weights.
"""

VLLM_HEAD = f"""# Names of vLLM

{GENERATED}
Every keyword, field, method and import of vLLM 0.34, and what it does here, for people who move a script over. Replace
the import by `from spmd_worker import LLM, SamplingParams`: each name works as this page says, or raises an error with
the sentence of this page.

## `LLM(...)` and `EngineArgs(...)`

An unknown keyword is a TypeError that names the nearest one. A keyword that sets a configuration key has the default of
the [key](configuration.md).
"""

TITLES = {
    Effect.SAME: "Keywords with the same meaning",
    Effect.RENAMED: "Keywords with another name here",
    Effect.OURS: "Keywords that exist only here",
    Effect.REJECTED: "Rejected keywords (an error unless the value is vLLM's default or null)",
    Effect.NONE: "Keywords without effect (logged once, at debug level)",
}

PYTHONIC = {"null": "None", "true": "True", "false": "False"}

TYPES_HEAD = '''"""Types of the keywords of `LLM(...)` and `EngineArgs(...)`, for type checkers and editors.

Written by `python scripts/reference_pages.py`; do not edit it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

# fmt: off
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="the repository to write to")
    folder = parser.parse_args().folder
    for path, text in documents().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def documents() -> dict[str, str]:
    """Path in the repository -> content, of every file that is written."""
    return {
        "docs/reference/configuration.md": configuration_page(),
        "docs/reference/models.md": models_page(),
        "docs/reference/vllm_names.md": vllm_page(),
        "spmd_worker/compat/llm_keywords.py": keyword_types(KEYWORDS),
    }


def configuration_page() -> str:
    """Every key, group by group."""
    keys = keys_of(RunConfig).values()
    groups = {name: inspect.getdoc(kind) or "" for name, kind in groups_of(RunConfig).items()}
    parts = [key_table(name, words, [key for key in keys if key.group == name]) for name, words in groups.items()]
    top = key_table("", "", [key for key in keys if not key.group])
    return "\n".join([CONFIGURATION_HEAD, *parts, top])


def key_table(group: str, words: str, keys: list[Key]) -> str:
    """A group's keys."""
    with_keywords = any(keyword_cell(key) for key in keys)
    names = ["key", "default", *(["`LLM(...)`"] if with_keywords else []), "meaning"]
    head = [f"## `{group}`", "", words, ""] if group else ["## Keys without a group", ""]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for key in keys:
        name = f"**`{key.name}`**" if key.option.is_common else f"`{key.name}`"
        cells = [name, command_text(key.default), *([keyword_cell(key)] if with_keywords else []), key.option.meaning]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*head, *lines, ""])


def keyword_cell(key: Key) -> str:
    """The keyword of `LLM` and vLLM's other names for it."""
    if key.name == "model.path":
        return "`model`"
    names = " ".join(map(code, key.option.vllm_names))
    return code(key.keyword) + (f" ({names})" if names else "") if key.keyword else ""


def models_page() -> str:
    """The text of `spmd-worker families`, after a section on model folders."""
    generating, encoders, heads, unsupported, closing = describe_families().split("\n\n")
    return "\n".join(
        [
            MODELS_HEAD,
            f"## Models that generate text\n\n{generating}\n",
            f"## Encoders\n\n{encoders}\n\n{heads}\n",
            f"## Architectures that are not supported\n\n{unsupported}\n\n{wrapped(closing)}\n",
            QUANTISED_NOTE,
            ROPE_NOTE,
        ]
    )


def keyword_types(table: Mapping[str, Keyword]) -> str:
    """A module with the TypedDict of all keywords: those with an effect by their types, the others alone by name."""
    names = [f'"{row.name}":Any' for row in table.values() if row.effect in (Effect.NONE, Effect.REJECTED)]
    others = textwrap.fill(", ".join(names), 112, initial_indent="    ", subsequent_indent="    ").replace(":", ": ")
    typed = [row for row in table.values() if row.effect not in (Effect.NONE, Effect.REJECTED)]
    lines = [
        '_Others = TypedDict("_Others", {  # noqa: UP013  # one name a line otherwise',
        f"{others},",
        "}, total=False)",
    ]
    lines += ["# fmt: on", "", "", "class LLMKeywords(_Others, total=False):"]
    lines += ['    """Keywords of `LLM(...)`; docs/reference/vllm_names.md says what each means."""', ""]
    lines += [f"    {row.name}: {annotation_text(row)}" for row in typed]
    return TYPES_HEAD + "\n".join([*lines, ""])


def annotation_text(row: Keyword) -> str:
    """A keyword's type in the names that the module imports."""
    return re.sub(r"(collections\.abc|pathlib|typing)\.", "", inspect.formatannotation(row.annotation))


def vllm_page() -> str:
    """Every name of vLLM's."""
    sections = [section(effect, KEYWORDS.values()) for effect in TITLES]
    return "\n".join([VLLM_HEAD, *sections, speculation(), sampling_section(), methods(), offered()])


def section(effect: Effect, rows: Iterable[Keyword]) -> str:
    """One effect's rows."""
    words = {row.name: words_of(row) for row in rows if row.effect is effect}
    return "\n".join([f"### {TITLES[effect]}", "", *table("keyword", words), ""])


def table(title: str, words: Mapping[str, str]) -> list[str]:
    """Lines of a table from name to meaning; names with the same meaning share a row."""
    names: dict[str, list[str]] = {}
    for name, meaning in words.items():
        names.setdefault(meaning, []).append(code(name))
    return [f"| {title} | here |", "| --- | --- |", *(f"| {' '.join(each)} | {key} |" for key, each in names.items())]


def speculation() -> str:
    """The methods and keys of `speculative_config` that are not those of our group."""
    others = {name: f"the same as `{method}`" for name, method in METHOD_ALIASES.items()}
    words = others | {name: f"rejected: {reason}" for name, reason in REJECTED_METHODS.items()}
    keys = {name: f"without effect: {reason}" for name, reason in KEYS_WITHOUT_EFFECT.items()}
    keys |= {name: f"rejected: {reason}" for name, reason in REJECTED_KEYS.items()}
    head = wrapped(
        "Methods: " + ", ".join(map(code, METHODS)) + ". Keys: those of [Configuration](configuration.md), and these."
    )
    return "\n".join(
        ["## `speculative_config`", "", head, "", *table("method", words), "", *table("other key", keys), ""]
    )


def sampling_section() -> str:
    """The fields of `SamplingParams`."""
    same = wrapped("Fields with vLLM's meaning: " + ", ".join(map(code, SAMPLING_KEYS)) + ".")
    words = {
        **DIFFERENT_FIELDS,
        **{name: f"without effect: {reason}" for name, reason in WITHOUT_EFFECT.items()},
        **{name: f"rejected: {reason}" for name, reason in REJECTED.items()},
    }
    return "\n".join(["## `SamplingParams`", "", same, "", *table("field", words), ""])


def methods() -> str:
    """The methods of `LLM`, `LLMEngine`, the executor and its workers."""
    tables = {
        "method of `LLM`": with_absent(LLM_METHODS, LLM_ABSENT),
        "method of `LLMEngine`": with_absent(ENGINE_METHODS, ENGINE_ABSENT),
        "name of the executor, `llm.llm_engine.model_executor`": with_absent(EXECUTOR_NAMES, {}),
        "name of a worker, by `collective_rpc` or `driver_worker`": with_absent(WORKER_NAMES, {}),
    }
    return "\n".join(
        ["## Methods", "", *(line for title, words in tables.items() for line in (*table(title, words), ""))]
    )


def with_absent(here: Mapping[str, str], absent: Mapping[str, str]) -> dict[str, str]:
    """Name -> meaning, of vLLM's names that exist here and that do not."""
    meanings = {name: words or "the same" for name, words in here.items()}
    return meanings | {name: f"not here: {words}" for name, words in absent.items()}


def offered() -> str:
    """Table of the names that `spmd_worker` offers."""
    names = wrapped("`spmd_worker` offers " + ", ".join(map(code, sorted(OFFERED))) + ".")
    return "\n".join(["## Imports", "", names, "", *table("name of `vllm`", with_absent({}, ABSENT)), ""])


def wrapped(text: str) -> str:
    """Lines of at most 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def code(name: str) -> str:
    return f"`{name}`"


def words_of(row: Keyword) -> str:
    """The second column of a row."""
    values = ", ".join([f"{theirs} is {ours}" for theirs, ours in row.values.items() if theirs])
    renamed = f"`{row.ours}`" if row.effect is Effect.RENAMED else ""
    # The sentence of a key is in a command line's words.
    words = re.sub(r"\b(null|true|false)\b", lambda found: PYTHONIC[found[0]], row.words) if row.ours else row.words
    return "; ".join([part for part in (renamed, words, values) if part])


if __name__ == "__main__":
    main()
