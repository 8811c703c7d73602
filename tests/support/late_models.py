"""Small random models whose tokens' vectors are compared (late interaction), in the forms of ColBERT's authors, of
PyLate and of sentence-transformers. Knows nothing of the runtime under test.
"""

import json
import shutil
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from encoder_models import written
from json_files import edit
from pooling_models import SIZES, pooling_folder
from run_folder import made_once
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, XLMRobertaConfig, XLMRobertaModel

SIZE = 24
"""Numbers of a token."""
_COMMON: dict[str, Any] = {
    "vocab_size": 330,
    "hidden_size": SIZES["hidden_size"],
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
# Queries of 24 tokens have expansion tokens whose window of 6 tokens has nothing of the query.
_MODERN = {**_COMMON, "local_attention": 12, "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2}
IDENTITY = "torch.nn.modules.linear.Identity"
PYLATE: dict[str, Any] = {
    "prompts": {},
    "default_prompt_name": None,
    "similarity_fn_name": "MaxSim",
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 24,
    "document_length": 40,
    "attend_to_expansion_tokens": False,
    "skiplist_words": [".", ",", "!"],
    "do_query_expansion": True,
}


def matrix(num_outputs: int, num_inputs: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5


def add_tokens(folder: Path, *tokens: str) -> None:
    """Add special tokens to the vocabulary, and name the mask token."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in tokens])
    tokenizer.save(path)
    edit(folder / "tokenizer_config.json", mask_token="<mask>")


def write_dense(folder: Path, num_inputs: int, num_outputs: int = SIZE, *, has_residual: bool = False) -> None:
    folder.mkdir()
    settings = {"in_features": num_inputs, "out_features": num_outputs, "bias": False, "activation_function": IDENTITY}
    (folder / "config.json").write_text(json.dumps({**settings, **({"use_residual": True} if has_residual else {})}))
    tensors = {"linear.weight": matrix(num_outputs, num_inputs, 3)}
    if has_residual and num_inputs != num_outputs:
        tensors["residual.weight"] = matrix(num_outputs, num_inputs, 4)
    save_file(tensors, folder / "model.safetensors")


def _write_artifact(folder: Path, prefix: str) -> None:
    """The matrix beside the backbone's tensors, and the settings of ColBERT's authors."""
    tensors = {f"{prefix}.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": matrix(SIZE, 64, 3)}, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 20, "doc_maxlen": 40}
    more = {"dim": SIZE, "mask_punctuation": True, "attend_to_mask_tokens": False, "similarity": "cosine"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata | more))


def _stanford(folder: Path) -> None:
    written("bert", BertModel, BertConfig, _COMMON)(folder)
    _write_artifact(folder, "bert")
    _write_word_pieces(folder)


def _stanford_xlm(folder: Path) -> None:
    written("xlm", XLMRobertaModel, XLMRobertaConfig, {**_COMMON, "type_vocab_size": 1})(folder)
    _write_artifact(folder, "roberta")
    add_tokens(folder, "[unused0]", "[unused1]")


def _write_word_pieces(folder: Path) -> None:
    """BERT's tokenizer, with markers that are plain entries of the vocabulary."""
    special = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [f"{before}{each}" for each in string.ascii_lowercase for before in ("", "##")]
    vocabulary = [
        *special,
        *string.punctuation,
        *string.digits,
        *pieces,
        "the",
        "hello",
        "world",
        "text",
        "cache",
        "##ing",
    ]
    tokenizer = Tokenizer(models.WordPiece({each: i for i, each in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = [(each, vocabulary.index(each)) for each in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=marks)
    tokenizer.add_special_tokens([each for each in special if "unused" not in each])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    named = dict(zip(names, [each for each in special if "unused" not in each], strict=True))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 128, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_pylate(folder: Path, *denses: str, **settings: Any) -> None:
    """PyLate's files beside a backbone's."""
    modules = [
        ("", "sentence_transformers.models.Transformer"),
        *[(each, "pylate.models.Dense.Dense") for each in denses],
    ]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 39, "do_lower_case": False}))
    edit(folder / "config_sentence_transformers.json", **{**PYLATE, **settings})


def _pylate(folder: Path) -> None:
    written("modern", ModernBertModel, ModernBertConfig, _MODERN)(folder)
    add_tokens(folder, "[Q] ", "[D] ")
    write_dense(folder / "1_Dense", 64, has_residual=True)
    write_dense(folder / "2_Dense", SIZE, has_residual=True)
    write_pylate(folder, "1_Dense", "2_Dense", prompts={"query": "find: "}, model_type="ColBERT")


def _native(folder: Path) -> None:
    """Saved by sentence-transformers: expansion to a least length, attended; words left out of queries too; means."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    source = folder / "source"
    source.mkdir(parents=True)
    written("xlm", XLMRobertaModel, XLMRobertaConfig, {**_COMMON, "type_vocab_size": 1})(source)
    add_tokens(source)
    expansion = {"strategy": "min", "attend": True, "length": 12}
    transformer = Transformer(str(source), query_length=30, document_length=40, query_expansion=expansion)
    names = {"module_input_name": "token_embeddings"}
    modules = [
        transformer,
        Dense(64, SIZE, bias=True, activation_function=torch.nn.Tanh(), init_weight=matrix(SIZE, 64, 3), **names),
        MultiVectorMask(skiplist_words=["e", "s"], skiplist_tasks=["query", "document"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "query: ", "document": "passage: "}
    MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name="meanmaxsim").save_pretrained(str(folder))
    shutil.rmtree(source)


def _decoder(folder: Path) -> None:
    shutil.copytree(pooling_folder("cls"), folder, dirs_exist_ok=True)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_dense(folder / "1_Dense", 64)
    # The library pads.
    edit(folder / "tokenizer_config.json", pad_token="</s>")
    write_pylate(folder, "1_Dense", do_query_expansion=False)


LATE: dict[str, Callable[[Path], None]] = {
    "stanford": _stanford,
    "stanford_xlm": _stanford_xlm,
    "pylate": _pylate,
    "native": _native,
    "decoder": _decoder,
}


def late_folder(name: str) -> Path:
    """The folder of this name, written once a run."""
    return made_once(f"late-{name}", LATE[name])


@cache
def library_model(name: str) -> Any:
    """sentence-transformers' model of the folder."""
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(str(late_folder(name)), device="cpu")
