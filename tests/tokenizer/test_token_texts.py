"""Texts and bytes of tokens: put together they are the text that the decoder makes of the sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tokenizer_folders import write_byte_level, write_llama_style, write_metaspace

from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import Tokenizer

WRITERS = {"byte_level": write_byte_level, "llama": write_llama_style, "metaspace": write_metaspace}
SMILEY = "😀"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: Tokenizer.open(write(tmp_path_factory.mktemp(name))) for name, write in WRITERS.items()}


def character_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of the bytes of a text, each a token."""
    table = {tokenizer.level_bytes(i): i for i in range(4, 260)}
    return [3 + byte if tokenizer.fallback_byte(3 + byte) else table[bytes([byte])] for byte in text.encode()]


@pytest.mark.finding(number="A8")
@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_tokens_of_a_character_have_its_bytes(tokenizers: dict[str, Tokenizer], name: str):
    tokenizer = tokenizers[name]
    prompt = tokenizer.encode("a")
    ids = [*character_ids(tokenizer, SMILEY), tokenizer.encode("a a")[-1]]
    found = [each for (each,) in TokenTexts(tokenizer, prompt, True).decode([[i] for i in ids], is_last=True)]
    assert [each.text for each in found] == ["", "", "", SMILEY, " a"]
    assert [each.own_bytes for each in found] == [b"\xf0", b"\x9f", b"\x98", b"\x80", b" a"]
    # An alternative is what it would add in that place.
    again = TokenTexts(tokenizer, prompt, True)
    positions = [[i, *character_ids(tokenizer, "\x80b\xc3"[:1])] for i in ids]
    assert [each.text for each, *_ in again.decode(positions, is_last=True)] == ["", "", "", SMILEY, " a"]


@pytest.mark.finding(number="A8")
def test_skipped_special_token_has_only_its_name(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("hello</s> a")
    for skips in (True, False):
        found = [each for (each,) in TokenTexts(tokenizer, [], skips).decode([[i] for i in ids], is_last=True)]
        end = next(each for each, token_id in zip(found, ids, strict=True) if token_id == 1)
        assert end == ("</s>", b"" if skips else b"</s>")
        assert b"".join(each.own_bytes for each in found).decode() == tokenizer.decode(ids, skips)


NUM_IDS = {"byte_level": 330, "llama": 290, "metaspace": 8}


@pytest.mark.finding(number="A8")
@examples(200)
@given(data=st.data(), name=st.sampled_from(sorted(WRITERS)), skips=st.booleans())
def test_token_texts_join_to_the_decoded_text(
    tokenizers: dict[str, Tokenizer], data: st.DataObject, name: str, skips: bool
):
    tokenizer = tokenizers[name]
    known = [] if name == "metaspace" else character_ids(tokenizer, f"{SMILEY}€éa")
    one = st.one_of(st.integers(0, NUM_IDS[name]), st.sampled_from(known or [1]))
    prompt, ids = data.draw(st.lists(one, max_size=8)), data.draw(st.lists(one, max_size=24))
    text = IncrementalDecoder(tokenizer, prompt, skips).finish(ids)
    found = [each for (each,) in TokenTexts(tokenizer, prompt, skips).decode([[i] for i in ids], is_last=True)]
    shown = [each.text if each.own_bytes else "" for each in found]
    joined = "".join(shown)
    # What no token completes comes at the end of the text.
    assert text.startswith(joined), (text, found)
    assert set(text[len(joined) :]) <= {"\ufffd"}
    joined_bytes = b"".join(each.own_bytes for each in found)
    if "\ufffd" not in text and not prompt:
        assert joined_bytes.decode() == text
    # In pieces, as a stream has them, they are the same, where all bytes are valid.
    texts, streamed = TokenTexts(tokenizer, prompt, skips), []
    for number, token_id in enumerate(ids):
        (position,) = texts.decode([[token_id, *ids[:3]]], is_last=number == len(ids) - 1)
        streamed.append(position[0])
    if "\ufffd" not in text or name == "byte_level":
        assert streamed == found
