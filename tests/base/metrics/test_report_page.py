"""The report page: whole HTML, nothing from outside, every preemption marked, words that say what happened."""

import re
from html.parser import HTMLParser
from random import Random
from typing import Any

import pytest
from step_runs import QUIET, pressed_steps, quiet_steps

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.timeline import MARKS
from spmd_worker.frontends.report.charts import Chart, Frame, make_charts
from spmd_worker.frontends.report.data import make_totals, slowest_steps
from spmd_worker.frontends.report.page import NO_CHARTS, report_page
from spmd_worker.frontends.report.text import compact

METRICS: dict[str, Any] = {
    "rows": 12,
    "error_rows": 2,
    "prompt_tokens": 1_000,
    "cached_prompt_tokens": 250,
    "output_tokens": 300,
    "computed_tokens": 1_100,
    "recomputed_tokens": 55,
    "load_s": 1.5,
    "generate_s": 3.0,
}
NAMESPACE = re.compile(r'xmlns(:xlink)?="http://www.w3.org/(2000/svg|1999/xlink)"')
MAX_PAGE_BYTES = 1_000_000


class Page(HTMLParser):
    """What is on a page: tags (which must close), texts, tables' rows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(steps: list[StepStats], metrics: dict[str, Any] | None = METRICS, name: str = "x") -> str:
    """Without pictures, which take long to draw and are tested in test_report_drawing.py."""
    return report_page(name, steps, metrics, has_charts=False)


def charts_of(steps: list[StepStats], max_columns: int = 400) -> tuple[Frame, list[Chart]]:
    frame = Frame.of(steps, make_totals(steps), max_columns)
    return frame, make_charts(frame, slowest_steps(steps, 10))


def outside_references(page: str) -> list[str]:
    """Whatever a browser would fetch, or run."""
    outside = r"https?:|\bsrc\s*=|\bhref\s*=(?!\"#)|@import|url\((?!#)|<script|<link"
    return re.findall(outside, NAMESPACE.sub("", page))


def many_steps(num_steps: int) -> list[StepStats]:
    """Every 97th of them slow, each with some event."""
    random = Random(1)
    return [
        stats._replace(
            num_swapped_out=int(random.random() < 0.05),
            num_recomputed=2 * int(random.random() < 0.02),
            num_cached_tokens=64 * random.randint(0, 3),
            num_swapped=random.randint(0, 1),
            num_host_blocks_used=random.randint(0, 5),
            num_blocks_used=(used := random.randint(0, 7)),
            num_blocks_free=7 - used,
            execute_us=random.choice((500, 700)) if index % 97 else 100_000,
        )
        for index, stats in enumerate(quiet_steps(num_steps, every_us=101_000))
    ]


STRANGE_RUNS = {
    "none": [],
    "one": [QUIET],
    "no time": [QUIET._replace(schedule_us=0, lockstep_us=0, execute_us=0, apply_us=0)],
    "no blocks": [QUIET._replace(num_blocks_used=0, num_blocks_cached=0, num_blocks_free=0)],
    "nothing computed": [QUIET._replace(num_tokens=0, num_decode_tokens=0, num_rows=0, num_waiting=0)],
    "pressed": pressed_steps(),
    "long": many_steps(3_000),
    "large numbers": [
        QUIET._replace(
            **{field: 99_999 for field in QUIET._fields if field.startswith("num_")},
            start_us=10**11 * index,
            step=1_000_000 + index,
            execute_us=10**10,
        )
        for index in range(1, 60)
    ],
}


@pytest.mark.parametrize("name", STRANGE_RUNS)
@pytest.mark.parametrize("metrics", [None, METRICS], ids=["killed", "ended"])
def test_report_page_is_complete_without_external_references(name: str, metrics: dict[str, Any] | None):
    page = page_of(STRANGE_RUNS[name], metrics)
    assert Page(page).tags[0][0] == "html"
    assert outside_references(page) == []
    assert "nan" not in page.lower()


@pytest.mark.parametrize(
    "planted",
    ['<script src="x.js"></script>', '<img src="x.png">', "<style>@import 'x.css'</style>", '<a href="x">', "http://x"],
)
def test_external_reference_check_detects_references(planted: str):
    assert outside_references(page_of(pressed_steps(), METRICS) + planted) != []


def test_page_parser_detects_unclosed_tags():
    with pytest.raises(AssertionError, match="closes something else"):
        Page(page_of(pressed_steps(), METRICS).replace("</section>", "", 1))


def test_event_table_lists_step_time_and_counts():
    page = Page(page_of(pressed_steps()))
    heads = ["step", "began at", *(f"{label}, number" for _, label in MARKS)]
    first = page.rows.index(heads) + 1
    assert page.rows[first : first + 4] == [
        ["2", "10.0 ms", "0", "0", "0", "256"],
        ["3", "20.0 ms", "2", "0", "0", "0"],
        ["4", "30.0 ms", "0", "1", "0", "0"],
        ["5", "40.0 ms", "0", "0", "2", "0"],
    ]


@pytest.mark.parametrize("max_columns", [400, 150, 24])
def test_condensed_events_keep_their_sums(max_columns: int):
    steps = many_steps(3_000)
    (lanes,) = (chart for chart in charts_of(steps, max_columns)[1] if chart.kind == "lanes")
    for (field, label), series in zip(MARKS[:2] + MARKS[3:], lanes.series):
        assert series.label == label
        assert len(series.values) <= max_columns
        assert sum(series.values) == sum(getattr(stats, field) for stats in steps) > 0, label
        assert series.note.startswith(f"{compact(int(sum(series.values)))} ")


def test_absent_events_have_no_lane_and_no_chart():
    quiet = Page(page_of(quiet_steps(3))).text
    assert "Preemptions, returns and cache hits" not in quiet
    assert "KV cache in host memory" not in quiet
    hits = [stats._replace(num_cached_tokens=16) for stats in quiet_steps(3)]
    told = Page(page_of(hits)).text
    assert "Never in this run: preempted by swap, preempted by recompute, back from the host." in told


def drafting_steps() -> list[StepStats]:
    steps = quiet_steps(6, every_us=10_000)
    return [
        each._replace(num_tokens=14, num_decode_tokens=12, num_drafted_tokens=10, num_accepted_tokens=7)
        for each in steps
    ]


def test_report_page_shows_drafts_by_position():
    record = {"mean_length": 4.5, "drafted_by_position": [20, 20, 20], "accepted_by_position": [18, 14, 10]}
    page = page_of(drafting_steps(), METRICS | {"speculation": record})
    assert "4.50 tokens" in page
    assert "accepted 42 of 60 drafts" in page
    rows = [row for row in Page(page).rows if row[0] == "2" and row[-1] == ""]
    assert rows == [["2", "20", "14", "70 %", ""]]
    (tokens,) = (chart for chart in charts_of(drafting_steps())[1] if chart.title == "Tokens of each step")
    assert {each.label: each.values[0] for each in tokens.series if "draft" in each.label} == {"rejected drafts": 3.0}
    assert sum(each.values[0] for each in tokens.series) == 14


def test_report_page_without_drafts_has_nothing_of_them():
    assert "draft" not in page_of(quiet_steps(6), METRICS)


@pytest.mark.parametrize("record", [None, 3, {}, {"drafted_by_position": 3}, {"mean_length": "x"}])
def test_report_page_survives_odd_draft_metrics(record: Any):
    Page(page_of(drafting_steps(), METRICS | {"speculation": record}))


def test_report_page_says_when_metrics_are_missing():
    """A run that was killed or still runs has none."""
    said = "There is no metrics.json: the run was killed, or is still running."
    assert said in Page(page_of(pressed_steps(), None)).text
    assert said in Page(page_of([], None)).text
    assert said not in Page(page_of(pressed_steps(), METRICS)).text
    assert said not in Page(page_of(pressed_steps(), {})).text


def test_report_figures_come_from_the_metrics():
    text = Page(page_of(pressed_steps(), METRICS)).text
    for words in (
        "12 rows 2 error rows",
        "300 output tokens 100 tokens per second",
        "3.00 s to generate after 1.50 s to load",
        "950 µs a step (median) 6 steps",
        "10 blocks in use at the peak 100 % of 10; 5 on the host",
        "25 % of prompts from the cache 250 of 1,000 tokens",
        "3 preemptions 2 by swap, 1 by recompute",
        "5.0 % recomputed 55 of 1,100 tokens computed",
    ):
        assert words in text, words


def test_report_figures_of_killed_run_come_from_steps():
    text = Page(page_of(pressed_steps(), None)).text
    for words in (
        "1 request ended according to the steps",
        "12 output tokens 236 tokens per second",
        "51.0 ms to generate from the first step to the last",
        "81 % of prompts from the cache 256 of 316 tokens",
        "unknown recomputed of 72 tokens computed",
    ):
        assert words in text, words


@pytest.mark.gate("None", "many", "nan", "value2", "True")
@pytest.mark.parametrize("value", [None, "many", [], {}, True, float("nan"), float("inf"), -1, 0, 10**30])
def test_report_page_survives_odd_or_missing_metrics(value: Any):
    for key in METRICS:
        Page(page_of(pressed_steps(), METRICS | {key: value}))
        Page(page_of(pressed_steps(), {other: METRICS[other] for other in METRICS if other != key}))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            pressed_steps(),
            "The cache of 10 blocks was too small for all sequences at once: 59 % of the time at least 90 % of it was "
            "in use. 2 preemptions by swap copied blocks to host memory; 1 preemption by recompute dropped tokens that "
            "had to be recomputed (55 tokens, 5.0 % of all computed tokens).",
        ),
        (
            [QUIET._replace(num_swapped_out=1)],
            "it was in use. 1 preemption by swap copied blocks to host memory. 25 %",
        ),
        (
            [QUIET._replace(num_recomputed=1)],
            "it was in use. 1 preemption by recompute dropped tokens that had to be recomputed (55 tokens",
        ),
        (
            quiet_steps(2),
            "The cache of 10 blocks was large enough: at most 40 % of it was in use, and no sequence was preempted.",
        ),
        (
            [QUIET._replace(num_verified_hits=3)],
            "no sequence was preempted. 3 prefix-cache hits computed again for comparison: all equal. 25 %",
        ),
        (
            [QUIET._replace(num_blocks_used=7)],
            "was large enough: at most 54 % of it was in use",
        ),
        (
            [QUIET._replace(num_blocks_used=10, num_blocks_cached=0, num_blocks_free=0)],
            "was just large enough: 100 % of the time at least 90 % of it was in use, but no sequence was preempted.",
        ),
    ],
)
def test_report_diagnosis_explains_the_cache_pressure(steps: list[StepStats], words: str):
    text = Page(page_of(steps, METRICS)).text
    assert words in text, text[:700]
    assert "25 % of the prompt tokens were found in the prefix cache" in text
    few = {**METRICS, "cached_prompt_tokens": 1, "prompt_tokens": 100_000}
    assert ". Under 0.1 % of the prompt tokens were found" in Page(page_of(steps, few)).text


def test_slowest_steps_scroll_sideways_on_phones():
    """Narrow columns made a row five lines high."""
    assert "section > .scroll > table { min-width: 860px; }" in page_of(pressed_steps(), METRICS)


def test_slowest_steps_are_listed_with_reason_and_events():
    rows = Page(page_of(pressed_steps(), METRICS)).rows[-7:]
    assert rows[0][1:5] == ["step", "began at", "took", "× median"]
    assert rows[1] == [
        *("1", "4", "30.0 ms", "9.8 ms", "10.3", "2", "agreeing with other ranks, or waiting for them (92 %)"),
        "1 preempted by recompute",
    ]
    assert rows[2][6:] == ["computing 10 prompt tokens and 2 decode tokens (63 %)", ""]
    assert [row[1] for row in rows[1:]] == ["4", "1", "2", "3", "5", "6"]


def test_run_name_is_escaped_in_the_page():
    page = page_of(pressed_steps(), name='<img src="x">&')
    assert "<h1>Run &lt;img src=&quot;x&quot;&gt;&amp;</h1>" in page
    assert ("img", {"src": "x"}) not in Page(page).tags


def test_page_without_charts_names_the_extra():
    assert NO_CHARTS in Page(page_of(pressed_steps())).text
    assert "pip install 'spmd-worker[report]'" in NO_CHARTS
