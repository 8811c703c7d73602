"""The report page: whole HTML, nothing from outside, every preemption marked, words that say what happened."""

import re
from html.parser import HTMLParser
from random import Random
from typing import Any

import pytest
from step_runs import QUIET, pressed_steps, quiet_steps

from spmd_worker.metrics.report.page import report_page
from spmd_worker.metrics.report.svg import LEFT, PLOT_WIDTH, WIDTH
from spmd_worker.metrics.step_stats import StepStats

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
SVG_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
MAX_PAGE_BYTES = 1_000_000


class Page(HTMLParser):
    """What is on a page: tags (which must close), texts, tables' rows, marks and their titles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.paths_of_marks: list[str] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self._is_in_marks = False
        self.feed(page)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "g":
            self._is_in_marks = ("class", "marks") in attributes
        if tag == "path" and self._is_in_marks:
            self.paths_of_marks.append(dict(attributes)["d"] or "")
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
        if tag == "g":
            self._is_in_marks = False

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        if self.open[-2:] == ["path", "title"] and self._is_in_marks:
            self.titles.append(data)
        elif self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def outside_references(page: str) -> list[str]:
    """Whatever a browser would fetch, or run."""
    return re.findall(r"https?:|\bsrc\s*=|\bhref\s*=|@import|url\(|<script|<link", page.replace(SVG_NAMESPACE, ""))


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
def test_every_run_makes_a_whole_page_that_needs_nothing_from_outside(name: str, metrics: dict[str, Any] | None):
    page = report_page(name, STRANGE_RUNS[name], metrics)
    assert Page(page).tags[0][0] == "html"
    assert outside_references(page) == []
    assert "nan" not in page.lower()


@pytest.mark.parametrize(
    "planted",
    ['<script src="x.js"></script>', '<img src="x.png">', "<style>@import 'x.css'</style>", '<a href="x">', "http://x"],
)
def test_something_from_outside_would_be_found(planted: str):
    assert outside_references(report_page("x", pressed_steps(), METRICS) + planted) != []


def test_a_tag_that_is_not_closed_would_be_found():
    with pytest.raises(AssertionError, match="closes something else"):
        Page(report_page("x", pressed_steps(), METRICS).replace("</section>", "", 1))


def test_each_preemption_return_and_cache_hit_is_marked_with_step_time_and_count():
    page = Page(report_page("x", pressed_steps(), METRICS))
    assert page.titles == [
        "step 3 (20.0 ms): 2 sequences",
        "step 4 (30.0 ms): 1 sequence",
        "step 5 (40.0 ms): 2 sequences",
        "step 2 (10.0 ms): 256 tokens",
    ]
    for label in ("preempted by swap", "preempted by recompute", "back from the host", "cache hit"):
        assert label in page.words, label
    assert "2 sequences in 1 step" in page.words


def test_a_long_run_condenses_marks_and_loses_none():
    steps = many_steps(3_000)
    titles = Page(report_page("x", steps, METRICS)).titles
    assert len(titles) < 3_000 / 2
    for unit, fields in (("sequence", ("num_swapped_out", "num_recomputed")), ("token", ("num_cached_tokens",))):
        counts = [re.fullmatch(rf".*: ([\d,]+) {unit}s?", title) for title in titles]
        total = sum(int(match[1].replace(",", "")) for match in counts if match)
        assert total == sum(getattr(stats, field) for stats in steps for field in fields), unit


def test_what_never_happened_has_no_lane_and_what_happened_to_none_no_chart():
    quiet = Page(report_page("x", quiet_steps(3), METRICS)).text
    assert "Preemptions, returns and cache hits" not in quiet
    assert "KV cache in host memory" not in quiet
    hits = [stats._replace(num_cached_tokens=16) for stats in quiet_steps(3)]
    told = Page(report_page("x", hits, METRICS)).text
    assert "Never in this run: preempted by swap, preempted by recompute, back from the host." in told


def test_marks_lie_inside_the_plot_also_the_last_and_narrowest():
    steps = [*quiet_steps(2, every_us=1_000_000), QUIET._replace(step=3, start_us=2_000_000, num_recomputed=1)]
    (path,) = Page(report_page("x", steps, METRICS)).paths_of_marks
    x, width = map(float, re.fullmatch(r"M([\d.]+) [\d.]+h([\d.]+)v.*", path).groups())
    assert width >= 2
    assert x >= LEFT
    assert x + width <= LEFT + PLOT_WIDTH


@pytest.mark.parametrize("name", STRANGE_RUNS)
def test_no_text_of_a_chart_is_cut_off(name: str):
    page = report_page(name, STRANGE_RUNS[name], None)
    texts = re.findall(
        r'<text x="([\d.]+)" .*?font-size="([\d.]+)".*?anchor="(\w+)"( font-weight.*?)?>(.*?)</text>', page
    )
    assert bool(texts) == bool(STRANGE_RUNS[name])
    for x, size, anchor, bold, words in texts:
        # DejaVu Sans, wider than what most systems have.
        width = float(size) * len(words) * (0.68 if bold else 0.6)
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0, words
        assert left + width <= WIDTH, words


def test_a_run_of_many_steps_stays_a_small_page():
    assert len(report_page("x", many_steps(20_000), METRICS).encode()) < MAX_PAGE_BYTES


def test_the_page_of_a_killed_run_says_so_and_that_of_another_does_not():
    said = "There is no metrics.json: the run was killed, or is still running."
    assert said in Page(report_page("x", pressed_steps(), None)).text
    assert said in Page(report_page("x", [], None)).text
    assert said not in Page(report_page("x", pressed_steps(), METRICS)).text
    assert said not in Page(report_page("x", pressed_steps(), {})).text


def test_figures_come_from_the_metrics():
    text = Page(report_page("x", pressed_steps(), METRICS)).text
    for words in (
        "12 rows 2 error rows",
        "300 output tokens 100 tokens per second",
        "3.00 s to generate after 1.50 s to load",
        "950 µs a step (median) 6 steps",
        "10 blocks in use at the peak 100 % of 10; 5 on the host",
        "25 % of prompts from the cache 250 of 1,000 tokens",
        "3 preemptions 2 by swap, 1 by recompute",
        "5.0 % computed again 55 of 1,100 tokens computed",
    ):
        assert words in text, words


def test_figures_of_a_killed_run_come_from_its_steps():
    text = Page(report_page("x", pressed_steps(), None)).text
    for words in (
        "1 request ended as far as the steps tell",
        "12 output tokens 236 tokens per second",
        "51.0 ms to generate from the first step to the last",
        "81 % of prompts from the cache 256 of 316 tokens",
        "not known computed again of 72 tokens computed",
    ):
        assert words in text, words


@pytest.mark.parametrize("value", [None, "many", [], {}, True, float("nan"), float("inf"), -1, 0, 10**30])
def test_metrics_of_any_kind_or_missing_do_not_stop_the_page(value: Any):
    for key in METRICS:
        Page(report_page("x", pressed_steps(), METRICS | {key: value}))
        Page(report_page("x", pressed_steps(), {other: METRICS[other] for other in METRICS if other != key}))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            pressed_steps(),
            "The cache of 10 blocks was too small for all sequences at once: 59 % of the time at least 90 % of it was "
            "in use, and sequences had to give way 3 times. Twice their blocks were copied to host memory; once what "
            "they had computed was dropped and had to be computed again (55 tokens, 5.0 % of all that was computed).",
        ),
        (
            [QUIET._replace(num_swapped_out=1)],
            "sequences had to give way once. Once their blocks were copied to host memory, so that nothing was "
            "computed twice.",
        ),
        (
            [QUIET._replace(num_recomputed=1)],
            "had to give way once. Once what they had computed was dropped and had to be computed again (55 tokens",
        ),
        (
            quiet_steps(2),
            "The cache of 10 blocks was large enough: at most 40 % of it was in use, and no sequence had to give way.",
        ),
        (
            [QUIET._replace(num_blocks_used=7)],
            "was large enough: at most 54 % of it was in use",
        ),
        (
            [QUIET._replace(num_blocks_used=10, num_blocks_cached=0, num_blocks_free=0)],
            "was just large enough: 100 % of the time at least 90 % of it was in use, but no sequence had to give way.",
        ),
    ],
)
def test_the_verdict_says_what_the_cache_did_to_the_run(steps: list[StepStats], words: str):
    text = Page(report_page("x", steps, METRICS)).text
    assert words in text, text[:700]
    assert "25 % of the prompt tokens were found in the prefix cache" in text


def test_the_slowest_steps_are_listed_with_reason_and_events():
    rows = Page(report_page("x", pressed_steps(), METRICS)).rows
    assert rows[0][1:5] == ["step", "began at", "took", "× median"]
    assert rows[1] == [
        *("1", "4", "30.0 ms", "9.8 ms", "10.3", "2", "agreeing with other ranks, or waiting for them (92 %)"),
        "1 preempted by recompute",
    ]
    assert rows[2][6:] == ["computing 10 prompt and 2 decode tokens (63 %)", ""]
    assert [row[1] for row in rows[1:]] == ["4", "1", "2", "3", "5", "6"]


def test_the_chart_of_durations_numbers_the_slowest_steps_as_the_table_does():
    page = report_page("x", pressed_steps(), METRICS)
    numbers = re.findall(r"<g><title>(step [^<]*)</title><circle.*?>(\d+)</text></g>", page)
    assert sorted(numbers, key=lambda number: int(number[1]))[:2] == [("step 4: 9.8 ms", "1"), ("step 1: 950 µs", "2")]


def test_a_step_far_slower_than_all_others_is_said_to_go_on_above_the_chart():
    steps = quiet_steps(100, every_us=1_000_000)
    assert "goes on" not in report_page("x", steps, METRICS)
    steps[70] = steps[70]._replace(execute_us=876_543)
    assert "goes on, up to 877 ms" in report_page("x", steps, METRICS)


def test_a_runs_name_is_text_not_markup():
    page = report_page('<img src="x">&', pressed_steps(), METRICS)
    assert "<h1>Run &lt;img src=&quot;x&quot;&gt;&amp;</h1>" in page
    assert ("img", {"src": "x"}) not in Page(page).tags


def test_two_pages_of_one_run_are_equal():
    assert report_page("x", many_steps(700), METRICS) == report_page("x", many_steps(700), METRICS)
