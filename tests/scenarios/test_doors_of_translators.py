"""Texts for an encoder through every door, calls, rows and requests: transformers' tokens."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from jobs_of_rows import answers_of_job, openai_row
from serving import ServedHere
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import M2M100Config, M2M100ForConditionalGeneration

from spmd_worker import LLM, SamplingParams

SPECIAL = ("</s>", "<pad>", "eng_Latn", "fra_Latn")
END, PAD, ENGLISH, FRENCH = range(4)
TEXTS = ("Hello there.", "A text that is somewhat longer than the first.")
SAMPLING: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder() -> Path:
    """A translator as NLLB: each text ends with the source's token and the end, each answer begins with its own."""
    found = Path(mkdtemp(prefix="translator-"))
    pieces = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="eng_Latn $A </s>", special_tokens=[("eng_Latn", ENGLISH), ("</s>", END)]
    )
    tokenizer.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer"}')
    config = M2M100Config(
        vocab_size=260,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        decoder_start_token_id=END,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=PAD,
    )
    torch.manual_seed(3)
    model = M2M100ForConditionalGeneration(config)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.2)
        # Without it an answer to the end's token is that token.
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight *= 4
    model.generation_config.max_length = None
    model.save_pretrained(found)
    return found


def theirs(folder: Path, text: str, first: int | None, source: str = "eng_Latn") -> list[int]:
    """transformers' greedy answer, without the prompt."""
    model = M2M100ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(source), *tokenizer.encode(text).ids[1:]]
    num_more = 0 if first is None else 1
    (found,) = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=8 + num_more, forced_bos_token_id=first
    ).tolist()
    return found[1 + num_more :]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[list[int]]]:
    return {
        "plain": [theirs(folder, each, None) for each in TEXTS],
        "french": [theirs(folder, each, FRENCH) for each in TEXTS],
        "from french": [theirs(folder, each, None, source="fra_Latn") for each in TEXTS],
    }


@pytest.mark.guarantee("Texts of encoders by every form: transformers' tokens", is_control_inside=True)
def test_calls_have_the_tokens_of_transformers(folder: Path, expected: dict[str, list[list[int]]]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    params = SamplingParams(**SAMPLING)
    plain: list[Any] = [
        lambda text: text,
        lambda text: {"prompt": text},
        lambda text: tokenizer.encode(text).ids,
        lambda text: {"prompt_token_ids": tokenizer.encode(text).ids},
        lambda text: {"encoder_prompt": text, "decoder_prompt": None},
        lambda text: {"encoder_prompt": {"prompt": text}, "decoder_prompt": [END]},
        lambda text: {"encoder_prompt": {"prompt_token_ids": tokenizer.encode(text).ids}, "decoder_prompt": "</s>"},
    ]
    french: list[Any] = [
        lambda text: {"prompt": text, "target_language": "fra_Latn"},
        lambda text: {"encoder_prompt": text, "decoder_prompt": "fra_Latn"},
        lambda text: {"encoder_prompt": text, "decoder_prompt": {"prompt_token_ids": [END, FRENCH]}},
    ]
    from_french: list[Any] = [
        lambda text: {"prompt": text, "source_language": "fra_Latn"},
        lambda text: {"encoder_prompt": {"prompt": text}, "decoder_prompt": None, "source_language": "fra_Latn"},
    ]
    bad = {
        "goes with the encoder's text": {"prompt_token_ids": [5], "source_language": "fra_Latn"},
        "source_language='xx'": {"prompt": "a", "source_language": "xx"},
        "source_language=5": {"prompt": "a", "source_language": 5},
        "the prompt has images": {"prompt": "a", "images": []},
        "reads text": {"prompt": "a", "multi_modal_data": {"audio": b""}},
        "not a language": {"prompt": "a", "target_language": "klingon"},
        "goes without": {"encoder_prompt": "a", "decoder_prompt": "b", "target_language": "fra_Latn"},
        "max_encoder_len": "a" * 200,
    }
    with LLM(str(folder), dtype="float32", num_blocks=128, device="cpu") as llm:
        for kind, forms in (("plain", plain), ("from french", from_french), ("french", french)):
            for form in forms:
                outputs = llm.generate([form(each) for each in TEXTS], params, use_tqdm=False)
                assert [each.outputs[0].token_ids for each in outputs] == expected[kind]
        assert outputs[0].encoder_prompt == TEXTS[0]
        assert (outputs[0].prompt, outputs[0].prompt_token_ids) == (None, [END, FRENCH])
        errors = [each.error or "" for each in llm.generate([*bad.values()], params, use_tqdm=False, on_error="row")]
        cut = SamplingParams(**SAMPLING, truncate_prompt_tokens=2)
        with pytest.raises(ValueError, match="truncate_prompt_tokens is not supported"):
            llm.generate("a", cut, use_tqdm=False)
        with pytest.raises(ValueError, match="has no conversations"):
            llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
    for said, wanted in zip(errors, bad):
        assert wanted in said
    # Negative control: the languages decide.
    assert expected["plain"] != expected["french"]
    assert expected["plain"] != expected["from french"]


def test_rows_have_the_tokens_of_transformers(
    folder: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    rows: list[Any] = [
        *[{"prompt": each, **SAMPLING} for each in TEXTS],
        *[{"encoder_prompt": each, "decoder_prompt": [END], **SAMPLING} for each in TEXTS],
        *[{"prompt": each, "target_language": "fra_Latn", **SAMPLING} for each in TEXTS],
        *[{"encoder_prompt": each, "decoder_prompt": "fra_Latn", **SAMPLING} for each in TEXTS],
        *[{"prompt": each, "source_language": "fra_Latn", **SAMPLING} for each in TEXTS],
        openai_row("french", "/v1/completions", {"prompt": TEXTS[0], "target_language": "fra_Latn", **SAMPLING}),
        openai_row("openai", "/v1/completions", {"prompt": TEXTS[0], **SAMPLING}),
        {"prompt": "a", "source_language": "klingon"},
        {"prompt_token_ids": [5], "source_language": "fra_Latn"},
        {"audio": "a.wav"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "decoder_prompt": "b", "target_language": "fra_Latn"},
        {"prompt": "a", "target_language": "klingon"},
        {"prompt": "a", "truncate_prompt_tokens": 2},
        {"prompt_embeds": "AAAA", "decoder_prompt": "b"},
        {"prompt": "a" * 200},
    ]
    answers = answers_of_job(tmp_path, folder, rows)
    ids = [each["outputs"][0]["token_ids"] for each in answers[:10]]
    assert ids == [*expected["plain"] * 2, *expected["french"] * 2, *expected["from french"]]
    bodies = [each["response"]["body"] for each in answers[10:12]]
    assert bodies[0]["choices"][0]["text"] == answers[4]["outputs"][0]["text"]
    body = bodies[1]
    assert body["choices"][0]["text"] == answers[0]["outputs"][0]["text"]
    assert answers[0]["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"] == len(TEXTS[0]) + 3
    assert [each["error"]["code"] for each in answers[12:]] == [
        "invalid_value",
        "conflicting_keys",
        "audio_unsupported",
        "chat_template_missing",
        "conflicting_keys",
        "invalid_value",
        "conflicting_keys",
        "conflicting_keys",
        "prompt_too_long",
    ]
    with ServedHere(model=folder) as server:
        status, served, _ = server.client.ask("/v1/completions", {"prompt": TEXTS[0], **SAMPLING})
        assert (status, served["choices"], served["usage"]) == (200, body["choices"], body["usage"])
        streamed = server.client.stream("/v1/completions", {"prompt": TEXTS[0], **SAMPLING})
        assert "".join([each["choices"][0]["text"] for each in streamed]) == body["choices"][0]["text"]


def test_model_without_an_encoder_refuses_its_rows(tmp_path: Path) -> None:
    from serving import MODEL

    rows: list[Any] = [
        {"audio": "a.wav"},
        {"encoder_prompt": "a"},
        {"prompt": "a", "decoder_prompt": "b"},
        openai_row("a", "/v1/audio/transcriptions", {"file": "a.wav"}),
    ]
    codes = [each["error"]["code"] for each in answers_of_job(tmp_path, MODEL, rows, num_blocks=64)]
    assert codes == ["audio_unsupported", "encoder_unsupported", "encoder_unsupported", "audio_unsupported"]
