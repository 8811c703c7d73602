"""lm-evaluation-harness with our model and with its own `hf` on the same checkpoint: the same scores, under any layout.

The tasks are local files: choices (log-likelihoods), sums (generation), texts (rolling log-likelihoods, longer than the
model's length).
"""

import json
from pathlib import Path

import pytest
import ranks
from adapter_folders import write_adapter

RUNNER = Path(__file__).with_name("lm_eval_runner.py")
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
LIMIT_S = 280.0
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


def evaluate(folder: Path, tasks: Path, num_ranks: int, evaluations: dict[str, dict]) -> dict[str, dict]:
    """By name of an evaluation: what the first rank reports; every other rank has nothing to add to it.

    All in the same processes: to import the harness takes longer than to evaluate.
    """
    for name in evaluations:
        (folder / name).mkdir()
    words = [RUNNER, tasks, folder, json.dumps(evaluations)]
    environment = {"HF_HOME": str(folder / "huggingface")}
    if num_ranks > 1:
        done = ranks.run_forked(words, num_ranks, LIMIT_S, environment)
    else:
        done = ranks.run_script(words, LIMIT_S, environment)
    assert done.returncode == 0, done.stderr
    for name in evaluations:
        files = sorted(path.name for path in (folder / name).iterdir())
        assert files == [f"rank{rank}.json" for rank in range(num_ranks)]
    return {name: json.loads((folder / name / "rank0.json").read_text()) for name in evaluations}


def ours(**more: object) -> dict[str, object]:
    return {"model": "spmd_worker", "arguments": arguments(num_blocks=64, **more)}


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
def alone(folder: Path, tasks: Path) -> dict[str, dict]:
    """One process's, of both models."""
    its_own = {"model": "hf", "arguments": arguments()}
    return evaluate(folder, tasks, 1, {"hf": its_own, "one rank": ours(), "short": ours(max_length=100)})


@pytest.fixture(scope="module")
def others(folder: Path, tasks: Path) -> dict[str, dict]:
    """The same of adapters and chats."""
    adapter, other = (str(write_adapter(folder / f"adapter{seed}", MODEL, seed, scale=0.1)) for seed in (1, 2))
    evaluations = {
        "hf chat": {"model": "hf", "arguments": arguments(), "chat": True},
        "chat": {**ours(), "chat": True},
        "peft": {"model": "hf", "arguments": arguments(peft=adapter)},
        "adapter": ours(lora_local_path=adapter),
        "adapter after another": {**ours(enable_lora=True), "adapters": (other, None, adapter)},
        "none after an adapter": {**ours(enable_lora=True), "adapters": (adapter, None)},
    }
    return evaluate(folder, tasks, 1, evaluations)


@pytest.fixture(scope="module")
def of_two_ranks(folder: Path, tasks: Path) -> dict[str, dict]:
    return evaluate(folder, tasks, 2, {name: ours(**{f"{name}_parallel_size": 2}) for name in ("tensor", "data")})


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


@pytest.mark.gate("one rank")
@pytest.mark.guarantee("lm-evaluation-harness scores as its own model")
@pytest.mark.parametrize("layout", ["one rank", "tensor", "data"])
def test_three_tasks_score_like_the_harness_own_model(alone: dict, layout: str, request: pytest.FixtureRequest):
    reference = alone["hf"]
    found = (alone if layout == "one rank" else request.getfixturevalue("of_two_ranks"))[layout]
    assert differences(found, reference) == []
    assert found["results"]["local_choice"]["acc,none"] == reference["results"]["local_choice"]["acc,none"]
    assert found["results"]["local_sums"]["exact_match,none"] == reference["results"]["local_sums"]["exact_match,none"]


@pytest.mark.control("lm-evaluation-harness scores as its own model")
def test_comparison_detects_another_model(alone: dict):
    """The control: with a shorter window the long text scores otherwise."""
    assert [each for each in differences(alone["short"], alone["hf"]) if each.startswith("local_text")]


@pytest.mark.stress
@pytest.mark.parametrize("name", ["adapter", "adapter after another"])
def test_adapter_scores_like_peft_in_the_harness(alone: dict, others: dict, name: str):
    assert differences(others[name], others["peft"]) == []
    assert others[name] == others["adapter"]
    # Negative control: the adapter matters.
    assert len(differences(others[name], alone["hf"])) > 10
    assert others["none after an adapter"] == alone["one rank"]


@pytest.mark.stress
def test_chat_template_is_applied_like_in_transformers(others: dict):
    expected, found = others["hf chat"], others["chat"]
    prompts = [sample[2] for sample in found["samples"]["local_sums"]]
    assert prompts == [sample[2] for sample in expected["samples"]["local_sums"]]
    assert "<|im_start|>user" in str(prompts[0])
    assert differences(found, expected) == []


COMMAND = """
import runpy
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

evaluator.add_env_info = lambda _results: None
index = TaskManager.__init__
TaskManager.__init__ = lambda self, *given, **named: index(self, *given, **{**named, "include_defaults": False})
runpy.run_module("spmd_worker.integrations.lm_eval_model", run_name="__main__", alter_sys=True)
"""
"""The harness reads the thousands of its own tasks, and describes the machine by running pip: both take long."""


def test_module_is_the_harness_command_with_this_model(tasks: Path, folder: Path):
    out, script = folder / "command", folder / "command.py"
    script.write_text(COMMAND)
    command = [
        *(script, "run", "--model", "spmd_worker"),
        *("--model_args", arguments(num_blocks=64), "--tasks", "local_sums", "--include_path", tasks),
        # Without a device, which is cuda:0 for the harness's command.
        *("--output_path", out),
    ]
    environment = {"HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = ranks.run_script(command, LIMIT_S, environment)
    assert done.returncode == 0, done.stderr
    assert "|local_sums|" in done.stdout
    assert list(out.rglob("results*.json"))
