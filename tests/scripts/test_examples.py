"""Every file of examples/ runs, and prints what a reader is told to expect."""

import ast
import re

import pytest
from ranks import REPOSITORY, run_forked, run_script
from waiting import LIMIT_S

FOLDER = REPOSITORY / "examples"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))
PRINTED = {
    "batch_job.py": (
        "sum: add 123 + 456 = 579\n"
        "numbers: sort 42 17 99 = 17 42 99\n"
        "letters: reverse a b c = c b a\n"
        "bad: error invalid_value\n"
        "4 rows, 1 error row\n"
    ),
    "chat.py": (
        r"add 123 \+ 456 = 579 \(4 tokens, stop\)\n"
        r"sort 42 17 99 = 17 42 99 \(9 tokens, stop\)\n"
        r"copy a b c = a b c \(6 tokens, stop\)\n"
        r"three samples: \['\d+', '\d+', '\d+'\]\n"
    ),
    "structured_outputs.py": (
        r"choice: add 123 \+ 456 = 579\n"
        r"regex: sort 42 17 99 = 17 42 99\n"
        r'json: copy 1 2 3 =\{"digits":\[\d,\d,\d\]\}\n'
        r"parsed: \{'digits': \[\d, \d, \d\]\}\n"
    ),
    "embeddings.py": (
        r"3 vectors of 128 numbers, lengths \[1\. 1\. 1\.\]\n"
        r"sort 42 17 98 = is nearest to sort 42 17 99 = \(0\.9\d\d\)\n"
        r"copy x y w = is nearest to copy x y z = \(0\.9\d\d\)\n"
        r"add 500 \+ 401 = is nearest to add 500 \+ 400 = \(0\.9\d\d\)\n"
    ),
    "adapters.py": (
        r"base: add 123 \+ 456 =' 579'\none: add 123 \+ 456 ='.*'\ntwo: add 123 \+ 456 ='.*'\n"
        r"each as alone: \[True, True, True\]\n"
    ),
    "scores.py": (
        r"sort 42 17 99 = and sort 42 17 98 = 0\.9\d\d\n"
        r"(sort 42 17 99 = and .* 0\.[0-8]\d\d\n){2}"
        r"add 123 \+ 456 = 579 has log-probability -0\.0\d\n"
        r"(add 123 \+ 456 = \d+ has log-probability -\d\d\.\d\d\n){2}"
    ),
    "server_client.py": r"completion: 579\nstreamed: 17 42 99\nserver ended with 0\n",
    "datasets_pipeline.py": (
        r"\['prompt', 'expected', 'answer'\]\n9[4-6] of 96 answers are right, such as add 100 \+ 999 = 1099\n"
    ),
}
"""Expressions that match all of the output; the first is literal."""
TRAINED = (
    r"step 0: add 123 \+ 456 = 579, loss 1\d\.\d{3}\n(step [12]: .*\n){2}step 3: add 123 \+ 456 = 42, loss 0\.0\d\d\n"
)


def printed(name: str, num_ranks: int = 1) -> str:
    """Standard output of the example, started as its docstring says."""
    script = FOLDER / name
    if num_ranks == 1:
        done = run_script([script], LIMIT_S)
    else:
        done = run_forked([script], num_ranks, LIMIT_S)
    assert done.returncode == 0, done.output
    return done.stdout


def lines_of_ranks(output: str) -> list[str]:
    """Lines of several ranks, sorted: one rank's text may stand between another's text and its end of line."""
    return sorted(re.findall(r"(?:rank \d|shared).*?(?=rank \d|shared|\n|\Z)", output))


def test_lines_of_ranks_may_run_together():
    assert lines_of_ranks("rank 1, turn 0: crank 0, turn 0: a\n\nshared: brank 1, turn 1: d\n\n") == [
        *("rank 0, turn 0: a", "rank 1, turn 0: c", "rank 1, turn 1: d", "shared: b"),
    ]


@pytest.mark.gate(
    "scores.py",
    "datasets_pipeline.py",
    "chat.py",
    "structured_outputs.py",
    "adapters.py",
    "embeddings.py",
)
@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_the_right_answers(name: str):
    expected = re.escape(PRINTED[name]) if name == "batch_job.py" else PRINTED[name]
    output = printed(name)
    assert re.fullmatch(expected, output), output


def test_ranks_share_prompts_and_bring_own():
    assert lines_of_ranks(printed("torchrun_two_ranks.py", 2)) == [
        "rank 0 of 2: add 100 + 200 = 300",
        "rank 1 of 2: add 100 + 201 = 301",
        "rank 1 of 2: add 101 + 201 = 302",
        "shared: [' 579', ' 17 42 99']",
    ]


@pytest.mark.stress
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tool_loops_answer_on_each_rank(num_ranks: int):
    lines = lines_of_ranks(printed("tools_loop.py", num_ranks))
    turns = [re.fullmatch(r"(rank \d, turn \d): add (\d+) \+ (\d+) = (\d+)", line) for line in lines]
    assert [turn[1] for turn in turns] == ["rank 0, turn 0", "rank 1, turn 0", "rank 1, turn 1"][: 2 * num_ranks - 1]
    assert [int(turn[2]) + int(turn[3]) for turn in turns] == [int(turn[4]) for turn in turns]


@pytest.mark.stress
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_trained_weights_change_the_answer(num_ranks: int):
    output = printed("trainer_weight_updates.py", num_ranks)
    assert re.fullmatch(TRAINED, output), output


def test_every_example_is_in_the_table():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \[(\w+\.py)\]\((\w+\.py)\) \| .+ \| `(.+)` \|$", table)
    assert sorted(row[0] for row in rows) == FILES
    for name, link, command in rows:
        assert link == name
        docstring = ast.get_docstring(ast.parse((FOLDER / name).read_text(encoding="utf-8")))
        assert f"    {command} [MODEL]\n" in docstring
