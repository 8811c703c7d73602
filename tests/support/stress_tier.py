"""Order, time limits and report of the stress tier.

`scripts/test.sh --stress` makes two runs: all tests but the timed ones, three at a time and each by itself wherever a
process is free; then the timed ones, one after the other. Each says the figures that its tests printed and how long
each file took.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest

LIMIT_S = 1200
"""Time limit of one test."""
LONGEST = (
    "scenarios/test_power_loss.py",
    "scenarios/test_thousand_kills.py",
    "scenarios/test_fault_matrix.py",
    "ops/kernels/test_triton.py",
    "scripts/test_gpu_check.py",
    "engine/test_sleep_orders.py",
    "scenarios/test_growth.py",
    "scenarios/test_fuzzed_calls.py",
    "scenarios/test_kill_resume.py",
    "scenarios/test_faults_below.py",
    "tokenizer/test_many_templates.py",
    "scenarios/test_constrained_corpora.py",
    "replica/lockstep/test_divergence.py",
    "frontends/batch/test_fuzz.py",
    "frontends/batch/test_many_rows.py",
    "ranks/test_shared_memory.py",
    "scenarios/test_hit_verification.py",
    "scenarios/test_leaves_on_ranks.py",
    "native/test_thread_pool.py",
)
"""Files of tests/ whose stress tests take minutes each: those begin first, so that none is left alone at the end."""
_FIGURE = re.compile(r"[A-Z]{3,}( [A-Z]+)* \S")


def is_stress_run(config: pytest.Config) -> bool:
    """Whether the requested tests are those of the tier."""
    return config.option.markexpr.startswith("stress")


def place_of(path: Path, tests: Path) -> int:
    """Sort key of a file's stress tests: the longest first."""
    name = path.relative_to(tests).as_posix() if path.is_relative_to(tests) else ""
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def share(items: list[pytest.Item], *, is_complete: bool) -> None:
    """Make stress tests of all cases of a test that its mark `gate("CASE", ...)` does not name.

    `*` in a name stands for any text. Raises pytest.UsageError where no case of a test would stay in the gate, if the
    items are `is_complete`: all of their files.
    """
    kept: dict[str, bool] = {}
    for item in items:
        mark = item.get_closest_marker("gate")
        if mark is None:
            continue
        test, _, case = item.nodeid.partition("[")
        stays = any(_stands_for(name, case.removesuffix("]")) for name in mark.args)
        kept[test] = kept.get(test, False) or (stays and not item.get_closest_marker("stress"))
        if not stays:
            item.add_marker(pytest.mark.stress)
    if is_complete and (empty := [test for test, has_cases in kept.items() if not has_cases]):
        raise pytest.UsageError(f"{', '.join(empty)}: the names of @pytest.mark.gate are those of no case")


def _stands_for(name: str, case: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, name.split("*"))), case, re.DOTALL) is not None


def limit(items: list[pytest.Item]) -> None:
    """Stress tests that say nothing else may take `LIMIT_S` seconds."""
    for item in items:
        if item.get_closest_marker("stress") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def figures_of(reports: list[pytest.TestReport]) -> list[str]:
    """The lines that begin with a word in capitals, of all that the tests printed, in order and each once."""
    printed = [text for report in reports for name, text in report.sections if name.startswith("Captured stdout")]
    return list(dict.fromkeys(line for text in printed for line in text.splitlines() if _FIGURE.match(line)))


def seconds_of_files(reports: list[pytest.TestReport]) -> list[tuple[float, int, str]]:
    """Seconds, number of tests and name of every file, the longest first."""
    seconds, tests = defaultdict[str, float](float), defaultdict[str, dict[str, None]](dict)
    for report in reports:
        name = report.nodeid.partition("::")[0]
        seconds[name] += report.duration
        tests[name][report.nodeid] = None
    return sorted(((seconds[name], len(tests[name]), name) for name in seconds), reverse=True)


def say(reporter: pytest.TerminalReporter) -> None:
    """Report at the end of a run of the tier."""
    stats = reporter.stats.values()
    reports = [report for each in stats for report in each if isinstance(report, pytest.TestReport)]
    if figures := figures_of(reports):
        reporter.write_sep("=", "figures")
        reporter.write_line("\n".join(figures))
    reporter.write_sep("=", "seconds of each file, and its tests")
    for seconds, count, name in seconds_of_files(reports):
        reporter.write_line(f"{seconds:8.1f}  {count:4}  {name}")
