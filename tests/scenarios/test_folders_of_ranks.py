"""Jobs on folders with a file of ranks and no tokenizer.json, as they are downloaded."""

from pathlib import Path
from typing import Any

from jobs_of_rows import answers_of_job
from rank_folders import NUM_SPECIAL, ids_of_ranks, tokens, write_ranks
from reference_models import CheckpointSpec, write_checkpoint
from transformers import LlamaConfig

from spmd_worker.tokenizer.tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}{% for each in messages %}[INST]{{ each.content }}[/INST]{% endfor %}"
FORM = {"choice": ["hello 你好", "hello world"]}
ROWS: list[dict[str, Any]] = [
    {"prompt": "hello 你好 123", "max_tokens": 5},
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
    {"prompt": "hello", "max_tokens": 12, "structured_outputs": FORM, "logprobs": 1},
    {"prompt_token_ids": [1, 40, 50], "max_tokens": 5, "stop": [" "], "bad_words": ["hello"]},
]


def test_job_of_mistrals_own_files(tmp_path: Path):
    """Its folder on the hub was run without a tokenizer: each row of text was an error."""
    spec = CheckpointSpec(LlamaConfig, {"vocab_size": NUM_SPECIAL + len(tokens())})
    model = write_checkpoint(tmp_path / "model", spec)
    write_ranks(tmp_path / "model", "tekken")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    rows = [{"temperature": 0, **row} for row in ROWS]
    options = {"chat_template": str(tmp_path / "own.jinja")}
    answers = answers_of_job(tmp_path, model, rows, options=options)
    assert [each["error"] for each in answers] == [None] * len(ROWS)
    tokenizer = Tokenizer.open(model)
    prompts = ["<s>hello 你好 123", "<s>[INST]hello[/INST]", "<s>hello"]
    for answer, prompt in zip(answers, prompts, strict=False):
        assert answer["usage"]["prompt_tokens"] == len(ids_of_ranks("tekken", tokens(), prompt))
    for answer in answers:
        (output,) = answer["outputs"]
        assert output["text"].startswith(tokenizer.decode(output["token_ids"])[: len(output["text"])])
    assert answers[2]["outputs"][0]["text"] in FORM["choice"]
