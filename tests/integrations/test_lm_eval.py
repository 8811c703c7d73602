"""lm-evaluation-harness with our model and with its own `hf` on the same checkpoint: the same scores, under any layout.

The tasks are local files: choices (log-likelihoods), sums (generation), texts (rolling log-likelihoods, longer than the
model's length).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

RUNNER = Path(__file__).with_name("lm_eval_runner.py")
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
LIMIT_S = 200.0
pytestmark = pytest.mark.matrix
TOLERANCE = 1e-3

YAML = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "local_sums": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n", "9"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
    "local_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
}


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    docs = {
        "local_choice": [
            {
                "question": f"add {index} {7 * index % 10} =",
                "choices": [f" {answer}" for answer in range(index, index + 4)],
            }
            | {"answer": 7 * index % 10 % 4}
            for index in range(12)
        ]
        + [{"question": "", "choices": [" copy a", " add 1"], "answer": 0}],
        "local_sums": [
            {"question": f"add {index} {index + 3} =", "answer": f" {2 * index + 3}"} for index in range(10)
        ],
        "local_text": [
            {"text": "".join(f"add {number} {7 * number} = {8 * number} " for number in range(count))}
            for count in (1, 5, 50)
        ],
    }
    for name, rows in docs.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / name}.jsonl\n"
            f"test_split: test\n{YAML[name]}"
        )
    return folder


def command(out: Path, tasks: Path, model: str, arguments: str, chat: str) -> list[str]:
    out.mkdir()
    return [str(RUNNER), model, arguments, str(tasks), str(out), chat]


def evaluate(folder: Path, tasks: Path, model: str, arguments: str, num_ranks: int = 1, chat: str = "plain") -> dict:
    """What the first rank reports; every other rank has nothing to add to it."""
    words, environment = command(folder, tasks, model, arguments, chat), {"HF_HOME": str(folder.parent / "huggingface")}
    if num_ranks > 1:
        done = ranks.run_forked(words, num_ranks, LIMIT_S, environment)
    else:
        done = ranks.run_script(words, LIMIT_S, environment)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == [f"rank{rank}.json" for rank in range(num_ranks)]
    return json.loads((folder / "rank0.json").read_text())


def arguments(**more: object) -> str:
    given = {"pretrained": MODEL, "dtype": "float32", "max_length": 250, **more}
    return ",".join(f"{key}={value}" for key, value in given.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm_eval")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Path:
    return write_tasks(folder / "tasks")


@pytest.fixture(scope="module")
def reference(folder: Path, tasks: Path) -> dict:
    return evaluate(folder / "hf", tasks, "hf", arguments())


def differences(found: dict, expected: dict) -> list[str]:
    """Answers and metrics that differ by more than the tolerance."""
    wrong = []
    for name, samples in expected["samples"].items():
        assert len(found["samples"][name]) == len(samples)
        for own, other in zip(found["samples"][name], samples, strict=True):
            assert own[0] == other[0]
            if not all(is_alike(a, b) for a, b in zip(flat(own[1]), flat(other[1]), strict=True)):
                wrong.append(f"{name} {own[0]}: {own[1]} and {other[1]}")
    for name, metrics in expected["results"].items():
        for key, value in metrics.items():
            # Perplexities are exponentials: of them the same share.
            if isinstance(value, float) and not is_alike(found["results"][name][key], value, abs(value)):
                wrong.append(f"{name} {key}: {found['results'][name][key]} and {value}")
    return wrong


def flat(value: object) -> list[object]:
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def is_alike(own: object, other: object, scale: float = 1.0) -> bool:
    try:
        return abs(float(str(own)) - float(str(other))) <= TOLERANCE * max(scale, 1.0)
    except ValueError:
        return own == other


LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "DP2": (2, {"data_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "one rank" else pytest.mark.matrix) for name in LAYOUTS]
)
def test_three_tasks_score_as_with_the_harness_own_model(folder: Path, tasks: Path, reference: dict, layout: str):
    num_ranks, more = LAYOUTS[layout]
    found = evaluate(folder / layout, tasks, "spmd_worker", arguments(num_blocks=64, **more), num_ranks)
    assert differences(found, reference) == []
    assert found["results"]["local_choice"]["acc,none"] == reference["results"]["local_choice"]["acc,none"]
    assert found["results"]["local_sums"]["exact_match,none"] == reference["results"]["local_sums"]["exact_match,none"]


@pytest.mark.matrix
def test_the_comparison_sees_another_model(folder: Path, tasks: Path, reference: dict):
    """The control: with a shorter window the long text scores otherwise."""
    found = evaluate(folder / "short", tasks, "spmd_worker", arguments(num_blocks=64, max_length=100))
    assert [each for each in differences(found, reference) if each.startswith("local_text")]


@pytest.mark.matrix
def test_the_chat_template_is_applied_as_transformers_applies_it(folder: Path, tasks: Path):
    expected = evaluate(folder / "hf chat", tasks, "hf", arguments(), chat="chat")
    found = evaluate(folder / "chat", tasks, "spmd_worker", arguments(num_blocks=64), chat="chat")
    prompts = [sample[2] for sample in found["samples"]["local_sums"]]
    assert prompts == [sample[2] for sample in expected["samples"]["local_sums"]]
    assert "<|im_start|>user" in str(prompts[0])
    assert differences(found, expected) == []


@pytest.mark.matrix
def test_the_module_is_the_harness_own_command_with_this_model(tasks: Path, folder: Path):
    out = folder / "command"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spmd_worker.integrations.lm_eval_model", "run", "--model", "spmd_worker"),
            *("--model_args", arguments(num_blocks=64), "--tasks", "local_sums", "--include_path", str(tasks)),
            *("--output_path", str(out), "--device", "cpu"),
        ],
        env={**os.environ, "HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        | {"PYTHONPATH": str(ranks.REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "|local_sums|" in done.stdout
    assert list(out.rglob("results*.json"))
