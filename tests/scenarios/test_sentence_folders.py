"""Folders of sentence-transformers: the results of its installed release, for any files and layout, and errors with
file and key for unsupported ones.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from encoder_models import ENCODERS, encoder_folder
from json_files import edit
from pooling_models import DENSE_SIZE, SIZES, pooling_folder, write_modules
from run_folder import made_once
from torch import nn
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from spmd_worker import LLM, PoolingParams
from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow, encode_pooled
from spmd_worker.frontends.openai.row import Row
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.model_config.sentence_folder import outputs_token_types
from spmd_worker.replica.sequence.sampling_params import SamplingParams

PAIRS = [("hello world", "the cache"), ("naïve café", "hello " * 30), ("a text about the scheduler " * 9, "x")]
TEXTS = ["hello world", "the cache of blocks", "a text about the scheduler " * 12, "x"]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
FLAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ tail }}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %} end of it{% endfor %}"
)


@cache
def library() -> SimpleNamespace:
    """Classes of sentence_transformers, whose import takes a second: all processes collect this file, one runs it."""
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from sentence_transformers.sentence_transformer.modules import Dropout, Pooling

    names = (CrossEncoder, SentenceTransformer, Dense, Normalize, Transformer, LogitScore, Dropout, Pooling)
    return SimpleNamespace(**{each.__name__: each for each in names})


def saved(name: str, make: Callable[[Path], Any]) -> Path:
    """The folder that `save_pretrained` of the installed release makes of `make(folder)`, once a run."""

    def write(folder: Path) -> None:
        make(folder).save_pretrained(str(folder))
        shutil.rmtree(folder / "source", ignore_errors=True)

    return made_once(f"sentence-{name}", write)


def copied(folder: Path, model: Path, **options: Any) -> str:
    """`model` inside `folder`, where it is no longer when it is saved."""
    shutil.copytree(model, folder / "source")
    template = options.pop("template", "")
    if template:
        (folder / "source" / "chat_template.jinja").write_text(template)
    edit(folder / "source" / "tokenizer_config.json", **{"pad_token": "<s>", **options})
    return str(folder / "source")


def cross(name: str, **options: Any) -> Callable[[Path], Any]:
    activation = options.pop("activation_fn", None)

    def make(folder: Path) -> Any:
        model = encoder_folder(name) if name in ENCODERS else pooling_folder(name)
        return library().CrossEncoder(copied(folder, model, **options), device="cpu", activation_fn=activation)

    return make


def logits(*tokens: int | None, **options: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        activation = options.get("activation_fn")
        inner = {key: value for key, value in options.items() if key in ("template",)}
        transformer = library().Transformer(
            copied(folder, pooling_folder("causal"), **inner),
            transformer_task="text-generation",
            processing_kwargs=options.get("processing_kwargs"),
        )
        return library().CrossEncoder(
            modules=[transformer, library().LogitScore(*tokens)], device="cpu", activation_fn=activation
        )

    return make


def scored_by_dense(folder: Path) -> Any:
    size, transformer = SIZES["hidden_size"], library().Transformer(copied(folder, encoder_folder("bert")))
    torch.manual_seed(3)
    layers = [library().Dense(size, DENSE_SIZE, activation_function=nn.GELU())]
    layers += [library().Dense(DENSE_SIZE, 1, activation_function=nn.Identity(), module_output_name="scores")]
    return library().CrossEncoder(modules=[transformer, library().Pooling(size, "cls"), *layers], device="cpu")


CROSS: dict[str, Callable[[Path], Any]] = {
    "identity": cross("bert_pairs", activation_fn=nn.Identity()),
    "default": cross("bert_pairs"),
    "short": cross("bert_pairs", model_max_length=24),
    "left": cross("bert_pairs", model_max_length=24, truncation_side="left"),
    "untyped": cross("bert_pairs", model_input_names=["input_ids", "attention_mask"]),
    "unnamed": cross("bert_pairs", model_input_names=...),
    "labels": cross("bert_labels"),
    "softmax": cross("bert_labels", activation_fn=nn.Softmax()),
    "modern": cross("modern_pairs"),
    "gte pairs": cross("gte_pairs"),
    "distil pairs": cross("distil_pairs"),
    "deberta pairs": cross("deberta_pairs"),
    "electra pairs": cross("electra_pairs", model_input_names=...),
    "decoder": cross("reward"),
    "dense": scored_by_dense,
    "logits": logits(70, 75, template=FLAT),
    "logits of text": logits(70, 75, activation_fn=nn.Identity()),
    "one logit": logits(70, template=PARTS, processing_kwargs={"chat_template": {"add_generation_prompt": True}}),
}


def predicted(folder: Path, pairs: list[tuple[str, str]] = PAIRS) -> np.ndarray[Any, Any]:
    """One by one: padding changes no number that is compared here, and no length."""
    model = library().CrossEncoder(str(folder), device="cpu")
    model.double()
    return np.stack([np.asarray(model.predict([pair])[0]) for pair in pairs])


def scored(folder: Path, pairs: list[tuple[str, str]] = PAIRS, **options: Any) -> list[float]:
    firsts, seconds = [list(each) for each in zip(*pairs, strict=True)]
    with LLM(folder, **SETTINGS, **options) as llm:
        outputs = llm.score(firsts, seconds, truncate_prompt_tokens=-1, use_tqdm=False)
    return [output.outputs.score for output in outputs]


def in_gate(names: Iterable[str], *quick: str) -> list[Any]:
    """The other ones are of the stress tier."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.stress) for name in names]


def near(ours: Any, theirs: Any, bound: float = 2e-5) -> bool:
    return bool(np.abs(np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)).max() < bound)


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize(
    "name",
    in_gate([name for name in CROSS if name not in ("labels", "softmax")], "identity", "short", "logits", "dense"),
)
def test_scores_are_those_of_predict(name: str) -> None:
    folder = saved(name, CROSS[name])
    assert near(scored(folder), predicted(folder))


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize("name", in_gate(["labels", "softmax"], "labels"))
def test_classes_are_those_of_predict(name: str) -> None:
    folder = saved(name, CROSS[name])
    model = library().CrossEncoder(str(folder), device="cpu")
    model.double()
    with LLM(folder, **SETTINGS) as llm:
        outputs = llm.classify(TEXTS, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    for output, text in zip(outputs, TEXTS, strict=True):
        features = model.preprocess([text])
        with torch.no_grad():
            assert near(output.outputs.probs, model.activation_fn(model(features)["scores"])[0])


def embedder(name: str, *rest: Any, **options: Any) -> Callable[[Path], Any]:
    """Its Transformer, then `rest`: modules, or functions from the size of a vector to a module."""
    inner = {key: options.pop(key) for key in ("processing_kwargs", "max_seq_length") if key in options}
    own = {key: options.pop(key) for key in ("prompts", "default_prompt_name", "truncate_dim") if key in options}
    own |= {"similarity_fn_name": options.pop("similarity")} if "similarity" in options else {}

    def make(folder: Path) -> Any:
        model = encoder_folder(name) if name in ENCODERS else pooling_folder(name)
        transformer = library().Transformer(copied(folder, model, **options), **inner)
        torch.manual_seed(3)
        return library().SentenceTransformer(modules=[transformer, *(each() for each in rest)], device="cpu", **own)

    return make


def pool(mode: str) -> Callable[[], Any]:
    return lambda: library().Pooling(SIZES["hidden_size"], mode)


def normalize() -> Any:
    return library().Normalize()


def dense() -> Any:
    return library().Dense(SIZES["hidden_size"], DENSE_SIZE, activation_function=nn.SiLU())


def plain_dense() -> Any:
    """Dense as sentence-t5 has it."""
    return library().Dense(SIZES["hidden_size"], DENSE_SIZE, bias=False, activation_function=nn.Identity())


MARKED = {"prompts": {"ask": "to find: ", "query": "kept: "}, "default_prompt_name": "ask"}
EMBED: dict[str, Callable[[Path], Any]] = {
    "plain": embedder("bert", pool("mean")),
    "length": embedder("bert", pool("cls"), normalize, max_seq_length=20),
    "cut": embedder("xlm", pool("mean"), dense, normalize, truncate_dim=10),
    "prompt": embedder("bert", pool("mean"), lambda: library().Dropout(0.5), normalize, **MARKED),
    "mpnet": embedder("mpnet", pool("mean"), normalize, max_seq_length=100),
    "t5": embedder("t5", pool("mean"), plain_dense, normalize, max_seq_length=100),
    "dot": embedder("bert", pool("mean"), similarity="dot"),
    "manhattan": embedder("bert", pool("mean"), similarity="manhattan"),
    "distil": embedder("distil", pool("cls"), normalize),
    "electra": embedder("electra", pool("mean"), normalize),
    "nomic": embedder("nomic", pool("mean"), normalize),
    "gte": embedder("gte", pool("cls"), normalize),
    "euro": embedder("euro", pool("mean"), normalize),
    "albert": embedder("albert", pool("mean"), normalize),
    "last": embedder("causal", pool("lasttoken"), normalize, max_seq_length=40),
    "flat": embedder("causal", pool("lasttoken"), template=FLAT, model_max_length=60),
    "flat prompt": embedder(
        "causal",
        pool("mean"),
        template=FLAT,
        max_seq_length=50,
        processing_kwargs={"chat_template": {"add_generation_prompt": True, "tail": "!"}},
        **MARKED,
    ),
    "parts": embedder("causal", pool("lasttoken"), normalize, template=PARTS, max_seq_length=30, **MARKED),
    "no suffix": embedder(
        "causal",
        pool("lasttoken"),
        template=PARTS,
        processing_kwargs={"chat_template": {"restore_suffix": False}, "text": {"max_length": 44}},
    ),
}


def encoded(folder: Path, texts: list[str] = TEXTS, **options: Any) -> np.ndarray[Any, Any]:
    model = library().SentenceTransformer(str(folder), device="cpu")
    model.double()
    return np.stack([np.asarray(model.encode([text], **options)[0]) for text in texts])


def embedded(folder: Path, texts: list[str] = TEXTS, **options: Any) -> list[list[float]]:
    with LLM(folder, **SETTINGS, **options) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.gate("prompt", "parts", "cut")
@pytest.mark.finding(number="A5")
@pytest.mark.parametrize("name", in_gate(EMBED, "length", "cut", "prompt", "flat prompt", "parts"))
def test_vectors_are_those_of_encode(name: str) -> None:
    folder = saved(name, EMBED[name])
    assert near(embedded(folder), encoded(folder))


@pytest.mark.finding(number="A5")
def test_named_or_empty_prompt_is_prepended_to_texts() -> None:
    folder = saved("prompt", EMBED["prompt"])
    for name in ("query", "document", ""):
        ours = embedded(folder, TEXTS[:2], default_prompt_name=name)
        theirs = encoded(folder, TEXTS[:2], **({"prompt_name": name} if name else {"prompt": ""}))
        assert near(ours, theirs), name
    # The control: the folder's own prompt counts.
    assert not near(ours, encoded(folder, TEXTS[:2]), 1e-3)
    with pytest.raises(ConfigError, match=r"^default_prompt_name=other .*not .*\(query, "):
        LLM(folder, default_prompt_name="other", **SETTINGS)


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize("name", in_gate(["dot", "manhattan", "plain"], "dot"))
def test_similarity_is_the_folders(name: str) -> None:
    folder = saved(name, EMBED[name])
    model = library().SentenceTransformer(str(folder), device="cpu")
    firsts, seconds = [list(each) for each in zip(*PAIRS[:2], strict=True)]
    theirs = model.similarity_pairwise(model.encode(firsts), model.encode(seconds))
    assert np.allclose(scored(folder, PAIRS[:2]), np.asarray(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.finding(number="A5")
def test_rows_of_old_layouts_are_read_as_before(tmp_path: Path) -> None:
    """Releases before 5: names of `models`, flags for modes, settings of the Transformer in a file of another name."""
    folder = tmp_path / "old"
    shutil.copytree(encoder_folder("xlm"), folder)
    write_modules(folder, {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}, "Dense", "Normalize")
    (folder / "sentence_bert_config.json").unlink()
    settings = {"max_seq_length": 30, "do_lower_case": False, "model_args": {"torch_dtype": "float32"}}
    (folder / "sentence_xlm-roberta_config.json").write_text(json.dumps(settings))
    assert near(embedded(folder), encoded(folder))
    with LLM(folder, **SETTINGS) as llm, pytest.raises(ValueError, match="tokens but max_model_len is 30"):
        llm.embed(TEXTS[2], use_tqdm=False)


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
    ],
)
def test_lower_case_of_a_lowercasing_tokenizer_changes_nothing(normalizer: Mapping[str, Any], tmp_path: Path) -> None:
    """The setting of bge's English folders; and the old releases' name of the length."""
    folder = tmp_path / "lower"
    shutil.copytree(saved("plain", EMBED["plain"]), folder)
    edit(folder / "tokenizer.json", normalizer=normalizer)
    edit(folder / "tokenizer_config.json", model_max_length=..., max_len=9)
    edit(folder / SENTENCE, do_lower_case=True, max_seq_length=..., processing_kwargs=...)
    texts = ["HELLO World", "hello world " * 20]
    assert near(embedded(folder, texts), encoded(folder, texts))


def body(url: str, **given: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": given}).encode()


@pytest.mark.finding(number="A5")
def test_rows_have_the_tokens_of_calls() -> None:
    """A job and the server accept the same settings."""
    limits = RowLimits()
    for name, line in (
        ("flat prompt", body("/v1/embeddings", input=TEXTS, truncate_prompt_tokens=-1)),
        ("logits", body("/v1/score", text_1="hello world", text_2=TEXTS, truncate_prompt_tokens=-1)),
        ("untyped", body("/v1/rerank", query="hello world", documents=TEXTS, truncate_prompt_tokens=-1)),
    ):
        folder = saved(name, {**EMBED, **CROSS}[name])
        with LLM(folder, **SETTINGS) as llm:
            engine = llm.llm_engine
            row = parse_row(0, line, SamplingParams(), limits)
            assert isinstance(row, Row), row
            made = encode_pooled(row, RowContext(engine.tokenizer, engine.limits, limits))
            assert isinstance(made, EncodedPooledRow), made
            call = llm.embed if name in EMBED else lambda texts, **options: llm.score("hello world", texts, **options)
            outputs = call(TEXTS, truncate_prompt_tokens=-1, use_tqdm=False)
            assert [list(each.token_ids) for each in made.texts] == [output.prompt_token_ids for output in outputs]
            assert all(each.pooling.num_first_tokens is None for each in made.texts)
            # Workers of other processes get all of it.
            assert decode_value(encode_value(engine.limits.pooling)) == engine.limits.pooling


def test_folder_of_encoder_decoder_names_its_encoder(tmp_path: Path) -> None:
    """The library pools T5's encoder, whatever architectures says."""
    folder = tmp_path / "model"
    shutil.copytree(saved("t5", EMBED["t5"]), folder)
    edit(folder / "config.json", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration, .* or name T5EncoderModel in architectures"):
        LLM(folder, **SETTINGS)


def modules(folder: Path, *types: str) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    own = [
        {"idx": number, "name": str(number), "path": "" if not number else each["path"], "type": kind}
        for number, (each, kind) in enumerate(zip([*listed, *listed], types))
    ]
    (folder / "modules.json").write_text(json.dumps(own))


SENTENCE, TOP, MODULES = "sentence_bert_config.json", "config_sentence_transformers.json", "modules.json"
BASE = "sentence_transformers.base.modules"


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize(
    ("name", "file", "changes", "words"),
    [
        ("identity", TOP, {"activation_fn": "mine.Identity"}, "activation_fn='mine.Identity' is not supported"),
        ("identity", TOP, {"model_type": "SparseEncoder"}, "model_type='SparseEncoder' .* save it again"),
        ("identity", TOP, {"model_type": "SentenceTransformer"}, "modules Transformer are not supported"),
        ("plain", TOP, {"similarity_fn_name": "maxsim"}, "similarity_fn_name='maxsim' is not supported"),
        ("plain", TOP, {"default_prompt_name": "mine"}, "default_prompt_name='mine'"),
        ("plain", TOP, {"truncate_dim": "many"}, "truncate_dim='many' must be a whole number"),
        ("plain", SENTENCE, {"transformer_task": "fill-mask"}, "transformer_task='fill-mask' is not supported"),
        ("plain", SENTENCE, {"module_output_name": "other"}, "module_output_name='other' is not supported"),
        (
            "plain",
            SENTENCE,
            {"config_args": {"num_hidden_layers": 2}},
            "config_args.num_hidden_layers=2 is not supported",
        ),
        ("plain", SENTENCE, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens=False"),
        ("plain", SENTENCE, {"modality_config": {"image": {}}}, "modality_config=.* has no text"),
        ("plain", SENTENCE, {"modality_config": {"image": None}}, "modality_config.image=None must be an object"),
        ("plain", SENTENCE, {"new_setting": 3}, "new_setting=3 is unknown"),
        ("plain", SENTENCE, {"do_lower_case": True}, "do_lower_case=True"),
        ("plain", "1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling mode .* is not supported"),
        ("cut", "2_Dense/config.json", {"use_residual": 3}, "use_residual=3 must be true or false"),
        ("cut", "2_Dense/config.json", {"activation_function": "torch.nn.Mish"}, "torch.nn.Mish' is not supported"),
        ("cut", "2_Dense/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("cut", "3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("logits", "1_LogitScore/config.json", {"true_token_id": "yes"}, "true_token_id='yes'"),
        ("logits", "1_LogitScore/config.json", {"true_token_id": 10**5}, "logit of token 100000"),
    ],
)
def test_settings_that_are_not_run_are_refused(
    name: str, file: str, changes: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved(name, {**EMBED, **CROSS}[name]), folder)
    edit(folder / file, **changes)
    with pytest.raises((ModelConfigError, ConfigError), match=words):
        LLM(folder, **SETTINGS)


@pytest.mark.finding(number="A5")
@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([f"{BASE}.Transformer", "mine.Pooling"], "module 'mine.Pooling' is code of the folder"),
        ([f"{BASE}.Router"], "modules Router are not supported"),
        (
            [f"{BASE}.Transformer", "sentence_transformers.models.WordWeights"],
            "Transformer, WordWeights are not supported",
        ),
        (["sentence_transformers.models.StaticEmbedding"], "modules StaticEmbedding are not supported"),
    ],
)
def test_modules_of_other_kinds_are_refused(kinds: list[str], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("plain", EMBED["plain"]), folder)
    modules(folder, *kinds)
    with pytest.raises(ModelConfigError, match=words):
        read_model_files(folder)


@pytest.mark.finding(number="A5")
def test_pairs_are_refused_by_templates_that_lose_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("logits", CROSS["logits"]), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with (
        LLM(folder, **SETTINGS) as llm,
        pytest.raises(ValueError, match=r"ignores .*query .*document, "),
    ):
        llm.score("a", "b", use_tqdm=False)


NAMES: dict[str, Any] = {"absent": ..., "with": ["input_ids", "token_type_ids"], "without": ["input_ids"]}


def wordpiece(folder: Path) -> None:
    """The model of the encoders' tests with a tokenizer that every class of transformers can open."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    shutil.copytree(encoder_folder("bert_pairs"), folder, dirs_exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "hello", "world", "the"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "mask_token": "[MASK]"}))


CLASSES = {
    "PreTrainedTokenizerFast": "tokenizer_config.json",
    "TokenizersBackend": "tokenizer_config.json",
    "BertTokenizer": "tokenizer_config.json",
    "BertTokenizerFast": "tokenizer_config.json",
    "ElectraTokenizerFast": "config.json",
    "NoSuchTokenizer": "tokenizer_config.json",
    "": "config.json",
}


@pytest.mark.finding(number="A4")
@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.parametrize("names", in_gate(NAMES, "absent", "without"))
def test_token_types_are_given_where_autotokenizer_gives_them(named: str, names: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(made_once("wordpiece", wordpiece), folder)
    edit(folder / "tokenizer_config.json", model_input_names=NAMES[names])
    edit(folder / CLASSES[named], tokenizer_class=named or ...)
    theirs = AutoTokenizer.from_pretrained(folder)("hello", "the world")
    assert outputs_token_types(folder, json.loads((folder / "config.json").read_text())) == ("token_type_ids" in theirs)


@pytest.mark.finding(number="A4")
@pytest.mark.parametrize(
    "changes", [{}, {"tokenizer_class": "TokenizersBackend"}, {"model_input_names": ["input_ids"]}]
)
def test_pair_scores_take_the_types_that_crossencoder_takes(changes: Mapping[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(made_once("wordpiece", wordpiece), folder)
    edit(folder / "tokenizer_config.json", **changes)
    pairs = [("hello world", "the world"), ("abc", "hello")]
    ours = scored(folder, pairs)
    assert near(ours, predicted(folder, pairs))
    with LLM(folder, **SETTINGS) as llm:
        single = llm.classify(["hello world"], use_tqdm=False)[0].outputs.probs
        ids = llm.score(*pairs[0], use_tqdm=False)[0].prompt_token_ids
        # With ids the caller says what is of which type.
        params = PoolingParams(num_first_tokens=4)
        typed = llm.classify([{"prompt_token_ids": ids}], pooling_params=params, use_tqdm=False)
    model = library().CrossEncoder(str(folder), device="cpu")
    with torch.no_grad():
        assert near(single, model(model.preprocess(["hello world"]))["scores"].sigmoid()[0])
    # The control: types count in this model.
    assert (abs(typed[0].outputs.probs[0] - ours[0]) < 1e-7) == (not changes)


@pytest.mark.finding(number="A4")
def test_classes_with_token_types_are_those_of_transformers() -> None:
    from spmd_worker.model_config.sentence_folder import _TYPED_TOKENIZERS

    found = {
        name: tokenizer_class_from_name(name) for name in (*_TYPED_TOKENIZERS, "RobertaTokenizer", "GPT2Tokenizer")
    }
    typed = [name for name, kind in found.items() if kind is not None and "token_type_ids" in kind.model_input_names]
    assert typed == list(_TYPED_TOKENIZERS)
