"""The demo folder keeps its promises: size, shape, held-out prompts, right answers, and a scorer that can fail."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
MODEL = DEMO / "model"
MAX_FOLDER_BYTES = 4_000_000


@pytest.fixture(autouse=True)
def demo_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's scripts import each other as they do when run: from their own folder."""
    monkeypatch.syspath_prepend(str(DEMO))


def demo_module(name: str) -> ModuleType:
    module = import_module(name)
    assert Path(str(module.__file__)).parent == DEMO, module.__file__
    return module


def read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_of(row: dict[str, Any]) -> str:
    prompt = row["prompt"] if "prompt" in row else row["messages"][0]["content"]
    assert isinstance(prompt, str)
    return prompt


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    template = read_json(MODEL / "tokenizer_config.json")["chat_template"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=add_generation_prompt)


def output_row(answer: dict[str, Any], index: int) -> dict[str, Any]:
    """A right output row, as the runtime writes plain rows."""
    output = {
        "index": 0,
        "text": f" {answer['answer']}",
        "token_ids": [1],
        "finish_reason": "stop",
        "stop_reason": None,
    }
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    return {"custom_id": answer["custom_id"], "index": index, "outputs": [output], "usage": usage, "error": None}


def right_output_rows() -> list[dict[str, Any]]:
    return [output_row(answer, index) for index, answer in enumerate(read_rows(DEMO / "answers.jsonl"))]


def score(folder: Path, rows: list[dict[str, Any]], *options: str) -> int:
    path = folder / "output.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    exit_code = demo_module("score").main([str(path), *options])
    assert isinstance(exit_code, int)
    return exit_code


def test_folder_is_at_most_four_megabytes() -> None:
    sizes = {
        path: path.stat().st_size for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert sum(sizes.values()) <= MAX_FOLDER_BYTES, sizes


def test_model_config_divides_by_four_ranks_and_stages() -> None:
    config = read_json(MODEL / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (4, 8, 4)
    assert (config["hidden_size"], config["head_dim"], config["intermediate_size"]) == (128, 16, 256)
    assert config["vocab_size"] % 4 == 0
    assert config["max_position_embeddings"] == 256


def test_weights_are_float32_and_match_the_config() -> None:
    config = read_json(MODEL / "config.json")
    with safe_open(MODEL / "model.safetensors", framework="numpy") as weights:
        names = list(weights.keys())
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in names}
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"F32"}
    assert config["dtype"] == "float32"
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (64, 128)
    assert "lm_head.weight" not in shapes
    assert config["tie_word_embeddings"] is True


def test_generation_ends_at_either_end_token() -> None:
    tokenizer = load_tokenizer()
    end_ids = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")]
    config = read_json(MODEL / "generation_config.json")
    assert config["eos_token_id"] == end_ids
    assert config["do_sample"] is False


def test_every_id_of_model_is_a_token() -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.get_vocab_size() == read_json(MODEL / "config.json")["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))


def test_shipped_tokenizer_equals_the_scripts() -> None:
    made = demo_module("demo_tokenizer").build_tokenizer()
    assert json.loads(made.to_str()) == read_json(MODEL / "tokenizer.json")


def test_repeated_words_are_single_tokens_other_text_bytes() -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.encode("reverse a d d =").tokens == ["reverse", "Ġ", "a", "Ġ", "d", "Ġ", "d", "Ġ", "="]
    assert len(tokenizer.encode("日本").ids) == 6


@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_renders_a_conversation() -> None:
    messages = [{"role": "system", "content": "Be right."}, {"role": "user", "content": "add 100 + 200 ="}]
    assert render_chat(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe right.<|im_end|>\n<|im_start|>user\nadd 100 + 200 =<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_renders_the_training_prompt() -> None:
    rendered = render_chat([{"role": "user", "content": "copy a b c ="}], add_generation_prompt=True)
    assert rendered == demo_module("demo_tokenizer").chat_prompt("copy a b c =")


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("add 374 + 158 =", "532"),
        ("add 999 + 999 =", "1998"),
        ("sort 71 30 95 12 =", "12 30 71 95"),
        ("reverse k d w a =", "a w d k"),
        ("copy k d w a =", "k d w a"),
    ],
)
def test_tasks_know_the_right_answer(prompt: str, answer: str) -> None:
    assert demo_module("tasks").answer_prompt(prompt) == answer


def test_generator_gives_the_published_numbers() -> None:
    """The first outputs of SplitMix64 from seed 1234567, as its reference implementation prints them."""
    generator = demo_module("tasks").SplitMix64(1234567)
    assert [generator.below(1 << 64) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_samples_keep_to_their_side_of_split() -> None:
    tasks = demo_module("tasks")
    for held_out in (False, True):
        generator = tasks.SplitMix64(5)
        drawn = [tasks.draw_instance(generator, "add", held_out=held_out) for _ in range(200)]
        assert all(tasks.is_held_out(instance.prompt) == held_out for instance in drawn)


def test_shipped_prompts_are_held_out_distinct_and_answered() -> None:
    tasks = demo_module("tasks")
    requests, answers = read_rows(DEMO / "prompts.jsonl"), read_rows(DEMO / "answers.jsonl")
    assert [row["custom_id"] for row in requests] == [row["custom_id"] for row in answers]
    assert len({prompt_of(row) for row in requests}) == len({row["custom_id"] for row in requests}) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert tasks.is_held_out(prompt_of(request)), request
        assert tasks.answer_prompt(prompt_of(request)) == answer["answer"], request
        assert request["custom_id"].split("-")[0] == prompt_of(request).split(" ")[0] == answer["task"]


def test_shipped_rows_equal_the_scripts() -> None:
    requests, answers = demo_module("make_prompts").demo_rows()
    assert requests == read_rows(DEMO / "prompts.jsonl")
    assert answers == read_rows(DEMO / "answers.jsonl")


def test_shipped_prompts_mix_tasks_shapes_and_lengths() -> None:
    tokenizer = load_tokenizer()
    requests, answers = read_rows(DEMO / "prompts.jsonl"), read_rows(DEMO / "answers.jsonl")
    assert len(requests) >= 400
    for task in demo_module("tasks").TASK_NAMES:
        rows = [row for row in requests if row["custom_id"].startswith(task)]
        assert len(rows) == 120
        assert sum("messages" in row for row in rows) == 15
    texts = [row.get("prompt") or render_chat(row["messages"], True) for row in requests]
    lengths = [len(tokenizer.encode(text).ids) for text in texts]
    assert min(lengths) < 12
    assert max(lengths) > 55
    assert all(len(tokenizer.encode(f" {row['answer']}").ids) < 64 for row in answers)


def test_score_counts_right_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"rows": 480, "output_tokens": 9000, "generate_s": 4.5, "load_s": 0.5, "wall_s": 6.0}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    assert score(tmp_path, right_output_rows(), "--metrics", str(tmp_path / "metrics.json"), "--at-least", "1") == 0
    printed = capsys.readouterr().out
    assert "total         480    480   100.00" in printed
    assert "2000 tokens/s" in printed
    assert "wrong:" not in printed


def test_score_counts_a_corrupted_row_as_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = right_output_rows()
    rows[7]["outputs"][0]["text"] += "0"
    assert score(tmp_path, rows, "--at-least", "1") == 1
    printed = capsys.readouterr()
    assert "total         480    479    99.79" in printed.out
    assert printed.out.count("wrong:") == 1
    assert f"wrong: {rows[7]['custom_id']}" in printed.out
    assert "99.79 % right is below the 100.00 % of --at-least" in printed.err


def test_score_allows_few_wrong_rows_and_shows_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = right_output_rows()
    for row in rows[:4]:
        row.update(outputs=[], error={"code": "invalid_request", "message": "too long"})
    assert score(tmp_path, rows, "--at-least", "0.99") == 0
    printed = capsys.readouterr().out
    assert printed.count("wrong:") == 3
    assert "too long" in printed


def test_score_rejects_missing_unknown_and_repeated_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = right_output_rows()
    assert score(tmp_path, rows[:-2]) == 1
    assert "2 of 480 rows are missing" in capsys.readouterr().err
    assert score(tmp_path, [*rows, {**rows[0], "custom_id": "add-9999"}]) == 1
    assert "1 output rows have no answer to compare with: add-9999" in capsys.readouterr().err
    assert score(tmp_path, [*rows, rows[0]]) == 1
    assert f"repeats custom_id {rows[0]['custom_id']}" in capsys.readouterr().err


def test_score_names_the_malformed_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "output.jsonl"
    path.write_text('{"custom_id": "add-0001"}\n{"custom_id": \n', encoding="utf-8")
    assert demo_module("score").main([str(path)]) == 1
    assert f"{path}:2: not JSON" in capsys.readouterr().err


def test_shipped_model_answers_held_out_prompts() -> None:
    evaluate, examples, tasks = (demo_module(name) for name in ("evaluate", "encoded_examples", "tasks"))
    tokenizer = load_tokenizer()
    model = evaluate.load_model(MODEL, "float32")
    asked = [
        examples.encode_example(
            tokenizer,
            tasks.Instance(row["custom_id"].split("-")[0], prompt_of(row), tasks.answer_prompt(prompt_of(row))),
            is_chat="messages" in row,
        )
        for row in read_rows(DEMO / "prompts.jsonl")[:64]
    ]
    right = evaluate.right_by_generation(model, tokenizer, asked)
    assert len(right) == 64
    assert sum(right) / len(right) >= 0.99, evaluate.accuracy_line(asked, right)
