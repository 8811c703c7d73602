"""The bound by characters never refuses a text whose tokens would have fit: the encoder itself is the oracle."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import write_byte_level, write_llama_style, write_metaspace
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from spmd_worker.tokenizer.encoder import is_failure
from spmd_worker.tokenizer.token_bound import Counted, token_bound
from spmd_worker.tokenizer.tokenizer import Tokenizer

ALPHABET = "ab cAé\u0301\u1100\u1161\u11a8#-1\n\r\u3000\u0600你😀\u2581'\u00a0ß\ufb01\u0390"
BYTES = {f"<0x{value:02X}>": 1000 + value for value in range(256)}
NORMALIZERS = [
    *(normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase()),
    *(normalizers.Strip(), normalizers.StripAccents(), normalizers.Nmt(), normalizers.BertNormalizer()),
    *(normalizers.Prepend("▁"), normalizers.Prepend("a"), normalizers.Replace(" ", "▁")),
    *(normalizers.Replace("a", ""), normalizers.Replace("ab", "c"), normalizers.Replace("b", "\u0301")),
    *(normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("a+"), "")),
    *(normalizers.Replace("--", "#"), normalizers.Replace("a b", "abab"), normalizers.ByteLevel()),
]
PRE_TOKENIZERS = [
    *(pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel(use_regex=False)),
    *(pre_tokenizers.Metaspace(), pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()),
    *(pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(), pre_tokenizers.UnicodeScripts()),
    *(pre_tokenizers.Punctuation(), pre_tokenizers.Punctuation("removed"), pre_tokenizers.CharDelimiterSplit("a")),
    *(pre_tokenizers.CharDelimiterSplit("-"), pre_tokenizers.Split("a", "removed"), pre_tokenizers.FixedLength(3)),
    *(pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex("[^a]"), "removed")),
    *(pre_tokenizers.Split(Regex(r"\w+|[^\w\s]+"), "removed", invert=True), pre_tokenizers.Split(" ", "isolated")),
    pre_tokenizers.Split(Regex("a"), "removed", invert=True),
]
PIECES = ["a", "b", "ab", "abab", "c", "A", "▁", "▁a", "▁▁", "Ġ", "Ġa", "1", "-", "#", "aaaa", "e", "  "]
ADDED = [
    *("<m>", "a b", "ab"),
    *(AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True, normalized=False)),
    *(AddedToken("c", single_word=True), AddedToken("é#", normalized=True), AddedToken("\u3000", normalized=False)),
]


def bpe(pieces, has_bytes, **options):
    vocab = {"<unk>": 0, **{piece: 1 + i for i, piece in enumerate(dict.fromkeys(pieces))}}
    merges = [(piece[:i], piece[i:]) for piece in vocab for i in range(1, len(piece))]
    merges = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    return models.BPE(vocab | BYTES if has_bytes else vocab, merges, **options)


@st.composite
def backends(draw):
    """Tokenizers of components that models have, and of some that none has."""
    alphabet = draw(st.sampled_from([[], pre_tokenizers.ByteLevel.alphabet(), list("ab▁Ġ"), list(ALPHABET)]))
    pieces = [*draw(st.lists(st.sampled_from(PIECES))), *alphabet]
    kind = draw(st.sampled_from(["BPE", "BPE", "BPE", "Unigram", "WordPiece", "WordLevel"]))
    if kind == "BPE":
        options = {"fuse_unk": draw(st.booleans()), "ignore_merges": draw(st.booleans())}
        options["unk_token"] = draw(st.sampled_from([None, "<unk>"]))
        model = bpe(pieces, draw(st.booleans()), byte_fallback=draw(st.booleans()), **options)
    elif kind == "Unigram":
        scores = [("<unk>", 0.0), *((piece, -1.0 - len(piece) / 2) for piece in dict.fromkeys(pieces))]
        model = models.Unigram(scores, unk_id=0)
    else:
        vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["[UNK]", *pieces, *("##" + p for p in pieces)]))}
        limit = {"max_input_chars_per_word": 5} if kind == "WordPiece" else {}
        model = getattr(models, kind)(vocab, unk_token="[UNK]", **limit)
    backend = Backend(model)
    steps = draw(st.lists(st.sampled_from(NORMALIZERS), max_size=3))
    backend.normalizer = normalizers.Sequence(steps) if steps else None
    steps = draw(st.lists(st.sampled_from(PRE_TOKENIZERS), max_size=2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if steps else None
    backend.add_tokens(draw(st.lists(st.sampled_from(ADDED), max_size=3)))
    return backend


TEXTS = st.one_of(
    st.text(ALPHABET, max_size=40),
    st.lists(st.sampled_from([*PIECES, *ALPHABET, "<m>", "<l>", "<r>", "a b", "   "]), max_size=30).map("".join),
    st.tuples(st.sampled_from([*PIECES, *ALPHABET]), st.integers(1, 60)).map(lambda each: each[0] * each[1]),
)


@pytest.mark.finding(number="B1")
@settings(max_examples=100, deadline=None)
@given(backend=backends(), texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_token_bound_never_exceeds_the_encoder_count(backend, texts):
    bound = token_bound(backend)
    for text in texts:
        try:
            num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
        except BaseException as error:  # of a vocabulary without the unknown token, or a panic of the library's
            if not is_failure(error):
                raise
            continue
        assert bound.min_num_tokens(text) <= num_tokens, (bound, text)


@pytest.mark.finding(number="B1")
@pytest.mark.stress
@settings(max_examples=5_000, deadline=None)
@given(backend=backends(), texts=st.lists(TEXTS, min_size=1, max_size=20))
def test_token_bound_never_exceeds_other_encoder_counts(backend, texts):
    test_token_bound_never_exceeds_the_encoder_count.hypothesis.inner_test(backend, texts)


@pytest.mark.gate("write_llama_style-*")
@pytest.mark.finding(number="B1")
@pytest.mark.parametrize(
    ("write", "least"), [(write_byte_level, 40_000), (write_llama_style, 100_000), (write_metaspace, 50_000)]
)
def test_token_bound_rejects_a_megabyte(tmp_path, write, least):
    tokenizer = Tokenizer.open(write(tmp_path))
    text = "abc " * 250_000
    assert least < tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_wordpiece_bound_counts_words():
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    assert token_bound(backend).min_num_tokens("x" * 1_000_000) == 0
    assert token_bound(backend).min_num_tokens(" hello" * 1000) == 1000


def test_token_bound_is_none_for_text_dropping_template():
    backend = Backend(bpe(pre_tokenizers.ByteLevel.alphabet(), False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert token_bound(backend).counted is Counted.BYTES
    backend.post_processor = processors.TemplateProcessing(single="<m>", special_tokens=[("<m>", 0)])
    assert len(backend.encode("a" * 1000).ids) == 1
    assert token_bound(backend).counted is Counted.NONE


@pytest.mark.parametrize("write", [write_byte_level, write_llama_style, write_metaspace])
def test_long_text_ids_equal_the_short_path(tmp_path, monkeypatch, write):
    """A longer text takes a call of the library of its own."""
    tokenizer = Tokenizer.open(write(tmp_path))
    text = "hello wörld 😀 <s>abc  " * 1000
    expected = tokenizer._backend.encode(text).ids
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert tokenizer.encode(text) == expected


def test_token_bound_accepts_invalid_unicode(tmp_path):
    assert Tokenizer.open(write_byte_level(tmp_path)).min_num_tokens("\ud800" * 100) > 0


def test_token_bound_check_detects_a_short_longest_token(tmp_path):
    """The negative control."""
    tokenizer = Tokenizer.open(write_byte_level(tmp_path))
    bound = tokenizer._files.bound
    assert bound == token_bound(tokenizer._backend)
    longest = max(tokenizer.vocabulary(), key=len)
    text = tokenizer.decode([tokenizer.vocabulary()[longest]] * 100, skip_special_tokens=False)
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert bound.min_num_tokens(text) == num_tokens == 100
    assert replace(bound, longest=bound.longest - 1).min_num_tokens(text) > num_tokens
