"""Model folders whose tokenizer files are damaged or mean harm: written ones by name, and drawn ones by seed."""

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizer_folders import write_byte_level, write_llama_style, write_metaspace
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

Values = dict[str, Any]


def write_wordpiece(folder: Path) -> Path:
    """BERT's post-processor."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdehlortuw", *(f"##{each}" for each in "abcdehlortuw"), "hello"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "cls_token": "[CLS]"}))
    return folder


WRITERS = (write_byte_level, write_llama_style, write_metaspace, write_wordpiece)


def replace(pattern: Any, content: str) -> Values:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> Values:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(key: str, steps: list[Values]) -> Values:
    return {"type": "Sequence", key: steps}


def nested(key: str, depth: int) -> Values:
    step: Values = {"type": "Lowercase"}
    for _ in range(depth):
        step = sequence(key, [step])
    return step


def template(single: list[Any], special: Values | None = None) -> Values:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special or {}}


def text(name: str) -> Values:
    return {"Sequence": {"id": name, "type_id": 0}}


def charsmap(content: bytes) -> Values:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


PIECES_AND_SPACES: list[Values] = [
    {"type": "FixedLength", "length": 1},
    {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"},
]
DOUBLED = sequence("normalizers", [replace({"String": "a"}, "aa")] * 30)
STRIP = {"type": "Strip", "content": "a", "start": 1, "stop": 3}

COMPONENTS: dict[str, Values] = {
    "growing normalizer": {"normalizer": DOUBLED},
    "growing normalizer of one step": {"normalizer": replace({"String": "a"}, "a" * 100_000)},
    "empty pattern": {"normalizer": replace({"String": ""}, "xx")},
    "growing expression": {"normalizer": sequence("normalizers", [replace({"Regex": "(.)"}, "bb")] * 30)},
    "many steps": {"normalizer": sequence("normalizers", [{"type": "NFKD"}] * 1000)},
    "nested steps": {"normalizer": nested("normalizers", 40)},
    "long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 1_000_000}},
    "short charsmap": {"normalizer": charsmap(b"")},
    "charsmap without an array": {"normalizer": charsmap(b"\xff\xff\xff\x7f")},
    "charsmap that points outside": {"normalizer": charsmap(b"\x04\0\0\0" + b"\xff" * 4)},
    "charsmap that is no text": {"normalizer": charsmap(b"\x04\0\0\0" + b"\0" * 4 + b"\xff\xfe")},
    "charsmap that is not base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!!"}},
    "catastrophic expression": {"pre_tokenizer": split("(a+)+$")},
    "expression of square time": {"pre_tokenizer": split(r"a+$")},
    "expression that fills memory": {"pre_tokenizer": split("((((a{1,1000}){1,1000}){1,1000}){1,1000})+")},
    "broken expression": {"pre_tokenizer": split("(")},
    "back reference": {"pre_tokenizer": split(r"(a*)*\1b")},
    "pieces of no characters": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "spaces everywhere": {"pre_tokenizer": sequence("pretokenizers", PIECES_AND_SPACES * 12)},
    "text a thousand times": {"post_processor": template([text("A")] * 1000)},
    "text left out": {"post_processor": template([{"SpecialToken": {"id": "<s>", "type_id": 0}}])},
    "second text in the first": {"post_processor": template([text("B")])},
    "special token of many ids": {
        "post_processor": template(
            [{"SpecialToken": {"id": "x", "type_id": 0}}, text("A")],
            {"x": {"id": "x", "ids": [0] * 100_000, "tokens": ["x"] * 100_000}},
        )
    },
    "special token of another length": {
        "post_processor": template(
            [{"SpecialToken": {"id": "x", "type_id": 0}}, text("A")], {"x": {"id": "x", "ids": [0, 1], "tokens": ["x"]}}
        )
    },
    "special token that is missing": {
        "post_processor": template([{"SpecialToken": {"id": "none", "type_id": 0}}, text("A")])
    },
    "stripping decoder": {"decoder": STRIP},
    "growing decoder": {"decoder": sequence("decoders", [replace({"String": "a"}, "aa")] * 30)},
    "catastrophic decoder": {"decoder": replace({"Regex": "(a+)+$"}, "")},
    "truncation": {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 9}},
    "padding": {
        "padding": {
            "strategy": {"Fixed": 2**62},
            "direction": "Right",
            "pad_to_multiple_of": 0,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    },
    "added tokens of one id": {"added_tokens": [added | {"id": 7} for added in ({"content": "x"}, {"content": "y"})]},
    "negative id": {"added_tokens": [{"id": -1, "content": "x"}]},
    "largest id": {"added_tokens": [{"id": 2**32 - 1, "content": "x"}]},
    "component of no type": {"pre_tokenizer": {"type": "Unheard"}},
    "no model": {"model": None},
}
MODELS: dict[str, Values] = {
    "random dropout": {"dropout": 0.5},
    "dropout that is no number": {"dropout": "x"},
    "dropout beyond one": {"dropout": 7.5},
    "one id of all": {"vocab": {"a": 0, "b": 0}, "merges": []},
    "negative ids": {"vocab": {"a": -1}, "merges": []},
    "huge ids": {"vocab": {"a": 2**31}, "merges": []},
    "fractional ids": {"vocab": {"a": 1.5}, "merges": []},
    "long token": {"vocab": {"a" * 100_000: 0}, "merges": []},
    "merges of nothing": {"merges": [["zz", "yy"]]},
    "merges of three": {"merges": ["a b c"]},
    "prefix that is longer": {
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "##",
    },
    "unknown unk": {"unk_token": "nowhere"},
    "list for a vocabulary": {"vocab": [["a", 0.0]] * 3},
    "unigram without scores": {"type": "Unigram", "vocab": [["a"]], "unk_id": 0},
    "unigram with an empty piece": {"type": "Unigram", "vocab": [["", 0.0], ["a", 0.0]], "unk_id": 0},
    "unigram with an unknown far away": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9},
    "unigram without an unknown": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None},
    "unigram of a long piece": {"type": "Unigram", "vocab": [["u", 0.0], ["a" * 5000, 0.0]], "unk_id": 0},
    "words without a limit": {
        "type": "WordPiece",
        "vocab": {"u": 0, "a": 1},
        "unk_token": "u",
        "continuing_subword_prefix": "",
        "max_input_chars_per_word": 2**40,
    },
}
JUNK: tuple[Any, ...] = (None, -1, 2**64, 1.5, True, "", "x" * 300, [], {}, [[]], [1] * 50, {"type": "NFC"}, "\ud83d")


def write_named(folder: Path, name: str) -> Path:
    """A folder with the fault `name` of `COMPONENTS` or `MODELS`, beside a byte-level vocabulary."""
    write_byte_level(folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    if name in COMPONENTS:
        values |= COMPONENTS[name]
    else:
        values["model"] |= MODELS[name]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder


def write_drawn(folder: Path, seed: int) -> Path:
    """A folder with one to three faults that the seed decides."""
    chance = random.Random(seed)
    chance.choice(WRITERS)(folder)
    for _ in range(chance.randint(1, 3)):
        chance.choice(FAULTS)(folder, chance)
    return folder


def _change_values(folder: Path, chance: random.Random) -> None:
    """A value somewhere in tokenizer.json."""
    path = folder / "tokenizer.json"
    values = _parsed(path)
    places = list(_places(values))
    if places:
        # As often in the small parts as in the vocabulary.
        groups = sorted({place[0] for place in places}, key=str)
        group = chance.choice(groups)
        place = chance.choice([each for each in places if each[0] == group])
        holder = values
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = chance.choice(JUNK)
        path.write_text(json.dumps(values))


def _take_component(folder: Path, chance: random.Random) -> None:
    path = folder / "tokenizer.json"
    values = _parsed(path)
    if isinstance(values, dict):
        path.write_text(json.dumps(values | COMPONENTS[chance.choice(sorted(COMPONENTS))]))


def _take_model(folder: Path, chance: random.Random) -> None:
    path = folder / "tokenizer.json"
    values = _parsed(path)
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        values["model"] |= MODELS[chance.choice(sorted(MODELS))]
        path.write_text(json.dumps(values))


def _damage_bytes(folder: Path, chance: random.Random) -> None:
    path = folder / chance.choice(["tokenizer.json", "tokenizer_config.json"])
    content = bytearray(path.read_bytes())
    if not content:
        return
    place = chance.randrange(len(content))
    kind = chance.randrange(4)
    if kind == 0:
        del content[place:]
    elif kind == 1:
        content[place] ^= 1 << chance.randrange(8)
    elif kind == 2:
        content[place:place] = b"[" * chance.randint(1, 200_000)
    else:
        content[place:place] = content[max(0, place - 50) : place]
    path.write_bytes(content)


def _change_config(folder: Path, chance: random.Random) -> None:
    keys = [
        *("bos_token", "eos_token", "pad_token", "added_tokens_decoder", "additional_special_tokens"),
        *("extra_special_tokens", "chat_template", "model_max_length", "tokenizer_class", "add_bos_token"),
        *("sp_model_kwargs", "clean_up_tokenization_spaces", "auto_map", "model_input_names", "x_token"),
    ]
    listed = {
        "5": {"content": "x" * chance.choice([0, 1, 100_000]), "lstrip": chance.choice(JUNK)},
        "y": {"content": 3},
    }
    values = {chance.choice(keys): chance.choice([*JUNK, listed, {"content": "x" * 50_000}]) for _ in range(3)}
    name = chance.choice(["tokenizer_config.json", "special_tokens_map.json"])
    (folder / name).write_text(json.dumps(values))


FAULTS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(_change_values, _change_values, _take_component, _take_model, _damage_bytes, _change_config),
)


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for key, item in items for each in [(*place, key), *_places(item, (*place, key))]]
