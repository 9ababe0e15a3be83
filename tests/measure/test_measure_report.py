"""The report is one whole page that loads nothing, and its curves are those of the run."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_builders import NS, make_row, make_run, random_run, refused_row

from shoal.core import SLO
from shoal.measure import Event, Panel, Sample, Series, ServiceSample, report_html, verdict
from shoal.measure.curves import cdf, first_panels, panels
from shoal.measure.html_report import failures_grid, slowest_grid
from shoal.measure.plots import Limit, Marks
from shoal.measure.svg import COLOURS, inline_svg
from shoal.measure.time_axis import downsample

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects what a page is made of, and sees that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.count, self.attributes = [], [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, *attribute) for attribute in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip())


@pytest.fixture(scope="module")
def page():
    return report_html(random_run())


def test_the_page_has_every_part(page):
    parsed = Page(page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert parsed.count["figure"] == page.count("<figure") == len(panels(random_run()))
    for words in (
        "Three services on two engines",
        verdict(random_run()).text,
        "azure-conversation.csv",
        "End-to-end latency (E2E)",
        "KV pool in use",
        "Waiting requests",
        "Slowest requests",
        "Not answered",
    ):
        assert words in parsed.words


def test_the_page_loads_nothing(page):
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe"} & set(parsed.count)
    for _, name, value in parsed.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#")
    references = {value[1:] for _, name, value in parsed.attributes if name == "href"}
    assert references <= set(parsed.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(parsed.ids)


def test_colours_are_the_style_sheets(page):
    svg = page[page.index("<svg") : page.rindex("</svg>")]
    assert "var(--series-0)" in svg
    assert "#fe0" not in svg
    for variable in set(re.findall(r"var\((--[a-z0-9-]+)\)", page)):
        assert page.count(f"{variable}:") == 2  # light and dark


def test_the_title_says_what_was_run():
    run = make_run([make_row()], title="a file", subject="llama on 2 a100-80, 20 requests/s")
    text = report_html(run)
    assert "<title>llama on 2 a100-80, 20 requests/s</title>" in text
    words = Page(text).words
    heading = len(words) - words[::-1].index(run.subject) - 1
    assert words.index("a file") < heading < words.index(verdict(run).text)


def test_pictures_come_before_tables(page):
    assert page.index("<h1") < page.index('class="verdict') < page.index("<figure") < page.index("<table")


def test_lines_and_areas_differ_by_more_than_their_colours(page):
    """Each line of a panel has its own dashes, and each area its own hatch."""
    lines = [Series(f"s{n}", [0, 1], [n, n], line=True, colour=n) for n in range(COLOURS)]
    svg = inline_svg(Panel(title="t", x_label="x", y_label="y", series=lines), "one")
    dashes = re.findall(r'clip-path="[^"]*" style="([^"]*stroke: var\(--series-\d\)[^"]*)"', svg)
    assert len({re.sub(r"stroke: [^;]*;", "", style) for style in dashes}) == COLOURS
    stacked = inline_svg(Panel(title="t", x_label="x", y_label="y", series=lines, stacked=True), "two")
    assert set(re.findall(r"url\(#(hatch-\d)\)", stacked)) == {f"hatch-{n}" for n in range(COLOURS)}
    turns = re.findall(r'<pattern id="(hatch-\d)"', page)
    assert turns == [f"hatch-{n}" for n in range(COLOURS)]


def test_goals_are_lines_in_the_distributions():
    slow, fast = SLO(ttft_s=2.0, mtpot_s=0.5, e2e_s=9.0), SLO(ttft_s=1.0)
    rows = [make_row(f"a{n}", service="a", slo=slow, largest_gap_ns=NS) for n in range(4)]
    alone = {panel.title: panel.limits for panel in panels(make_run(rows))}
    assert alone["Largest gap between tokens (MTPOT)"] == [Limit("goal: 500 ms", 0.5, 0)]
    assert alone["Time to first token (TTFT)"] == [Limit("goal: 2.00 s", 2.0, 0)]
    assert alone["End-to-end latency (E2E)"] == [Limit("goal: 9.00 s", 9.0, 0)]
    rows += [make_row(f"b{n}", service="b", slo=fast) for n in range(4)]
    ttft, tpot, e2e = first_panels(make_run(rows))[:3]
    assert ttft.limits == [Limit("goal of a: 2.00 s", 2.0, 0), Limit("goal of b: 1.00 s", 1.0, 1)]
    assert (tpot.limits, e2e.limits) == ([], [Limit("goal of a: 9.00 s", 9.0, 0)])
    both = [make_row(f"{n}", service=name, slo=slow) for n in range(4) for name in "ab"]
    assert first_panels(make_run(both))[0].limits == [Limit("goal of each: 2.00 s", 2.0, 9)]


def test_goals_that_differ_within_a_service_or_are_out_of_sight_are_not_drawn():
    for goals in ((1.0, 2.0), (1000.0, 1000.0)):
        rows = [make_row(f"{n}", slo=SLO(ttft_s=goal)) for n, goal in enumerate(goals)]
        assert first_panels(make_run(rows))[0].limits == []


def sampled(*states, engine=0):
    """A sample each second; states: by service (waiting, running, KV)."""
    found = []
    for second, state in enumerate(states):
        waiting, running, used = (sum(each[place] for each in state.values()) for place in range(3))
        services = {name: ServiceSample(*each) for name, each in state.items()}
        found.append(Sample(second * NS, engine, waiting, running, used, 1.0, services))
    return found


def test_state_is_stacked_by_service_over_all_engines():
    one = sampled({"a": (0, 2, 0.2)}, {"a": (1, 2, 0.4), "b": (4, 1, 0.2)}, {})
    two = sampled({"a": (0, 3, 0.6)}, {"b": (0, 1, 0.4)}, {"b": (0, 1, 0.4)}, engine=1)
    samples = sorted([*one, *two], key=lambda sample: sample.time_ns)
    run = make_run([make_row(service="b")], samples=samples)
    drawn = {panel.title: panel for panel in first_panels(run)}
    areas = {title: {each.label: each.y for each in drawn[title].series} for title in drawn}
    assert areas["Running requests"] == {"a": [5, 2, 0], "b": [0, 2, 1]}
    assert areas["Waiting requests"] == {"a": [0, 1, 0], "b": [0, 4, 0]}
    assert areas["KV pool in use"]["a"] == pytest.approx([0.4, 0.2, 0])
    assert areas["KV pool in use"]["b"] == pytest.approx([0, 0.3, 0.2])
    assert drawn["KV pool in use"].stacked
    assert drawn["Running requests"].series[0].x == [0, 1, 2]


def test_many_services_are_stacked_as_the_busiest_and_the_others():
    names = [f"s{n:02}" for n in range(12)]
    counts = {name: 20 - place for place, name in enumerate(names)}
    rows = [make_row(f"{name}-{n}", service=name) for name in names for n in range(counts[name])]
    run = make_run(rows, samples=sampled(dict.fromkeys(names, (0, 1, 0.01))))
    areas = {series.label: series.y for series in first_panels(run)[3].series}
    assert areas == {**{name: [1] for name in names[:8]}, "4 others": [4]}


def test_a_client_sees_requests_that_wait_and_requests_that_are_answered():
    rows = [make_row("a", first=4, end=8), make_row("b", arrival=2, first=4, end=6, service="code")]
    panels_of = {panel.title: panel for panel in first_panels(make_run(rows, engines=()))}
    waiting, receiving = panels_of["Waiting for the first token"], panels_of["Receiving tokens"]
    at = lambda panel, time: [np.interp(time, each.x, each.y) for each in panel.series]  # noqa: E731
    assert [at(waiting, 1), at(waiting, 3), at(waiting, 5)] == [[1, 0], [1, 1], [0, 0]]
    assert [at(receiving, 3), at(receiving, 5), at(receiving, 7)] == [[0, 0], [1, 1], [1, 0]]


def test_events_are_marked_on_the_time_axis():
    events = [Event(5 * NS, 0, "preempted", 3), Event(5 * NS + 1, 1, "preempted"), Event(8 * NS, 0, "moved")]
    run = make_run([make_row(end=10)], samples=sampled({"chat": (0, 1, 0.1)}), events=events)
    for panel in first_panels(run)[3:]:
        preempted, moved = panel.marks
        assert (preempted.label, preempted.shape) == ("preemptions (4)", "v")
        assert preempted.x == pytest.approx([5], abs=0.2)
        assert moved == Marks("requests moved (1)", pytest.approx([8], abs=0.2), "D")
    assert "preemptions (4)" in Page(report_html(run)).words


def test_names_are_written_as_they_are():
    name = "<script>alert('x')</script>&"
    run = make_run([make_row(name, service=name), refused_row(service=name)], title=name, facts={name: name})
    text = report_html(run)
    assert name not in text
    assert "script" not in Page(text).count
    assert Page(text).words.count(name) >= 5


@pytest.mark.parametrize(
    "run",
    [
        make_run(engines=()),
        make_run([refused_row()]),
        make_run([make_row(first=0, end=0, output=1)]),
        make_run([make_row(output=1)], samples=[Sample(0, 0, 0, 0, 0.0, 0.0)]),
    ],
)
def test_pages_of_almost_empty_runs(run):
    text = report_html(run)
    Page(text)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower()


def test_many_services_and_engines_are_shown_by_the_busiest_and_the_mean():
    run = random_run(requests=600, engines=12, services=tuple(f"service {n:02}" for n in range(14)))
    drawn = {panel.title: panel for panel in panels(run)}
    labels = [series.label for series in drawn["End-to-end latency (E2E)"].series]
    assert len(labels) == 9
    assert labels[-1] == "all"
    assert labels[:3] == ["service 00", "service 01", "service 02"]
    (line,) = drawn["KV pool in use"].series
    assert line.label == "mean of 12 engines"
    by_time = {}
    for sample in run.samples:
        by_time.setdefault(sample.time_ns, []).append(sample.kv_used)
    assert line.y == pytest.approx([np.mean(values) for values in by_time.values()])
    assert line.band[1] == pytest.approx([max(values) for values in by_time.values()])
    assert "14" not in labels


@given(st.lists(st.floats(0, 100), min_size=1, max_size=80), st.integers(2, 90))
def test_a_distribution_is_the_share_at_most_each_value(values, points):
    x, y = cdf(values, points)
    assert len(x) == len(y) <= max(points, 2)
    assert (x[0], x[-1], y[-1]) == (min(values), max(values), 1.0)
    assert x == sorted(x)
    for value, height in zip(x, y, strict=True):
        below, at_most = (sum(other < value for other in values), sum(other <= value for other in values))
        assert below / len(values) < height <= at_most / len(values)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(-5, 5)), min_size=1, max_size=60), st.integers(1, 30)
)
def test_stretches_hold_every_value(pairs, points):
    pairs.sort()
    times, values = np.array(pairs, dtype=float).T
    x, lowest, mean, highest = downsample(times, values, points)
    assert 1 <= len(x) <= points
    assert (np.diff(x) > 0).all()
    assert (lowest <= mean + 1e-9).all()
    assert (mean <= highest + 1e-9).all()
    assert (lowest.min(), highest.max()) == (values.min(), values.max())
    if points >= len(set(times)):
        assert x == pytest.approx(np.unique(times))
        assert mean == pytest.approx([values[times == time].mean() for time in np.unique(times)])


def test_rates_count_every_request():
    run = random_run()
    rates = next(panel for panel in panels(run) if panel.title == "Arrivals, answers and goodput")
    first = min(row.arrival_ns for row in run.requests)
    width_s = (run.end_ns - first) / NS / len(rates.series[0].x)
    totals = {series.label.split()[0]: sum(series.y) * width_s for series in rates.series}
    assert totals["arrivals"] == pytest.approx(len(run.requests))
    assert totals["answered"] == pytest.approx(sum(row.answered for row in run.requests))
    assert 0 < totals["goodput"] < totals["answered"]


def test_wide_times_get_a_logarithmic_axis_and_short_ones_milliseconds():
    wide = make_run([make_row(f"r{n}", first=0.1 * 1.2**n, end=1e4) for n in range(40)])
    narrow = make_run([make_row(f"r{n}", first=0.1 + n / 1000) for n in range(40)])
    panel_of = lambda run: panels(run)[0]  # noqa: E731
    assert (panel_of(wide).log_x, panel_of(wide).x_label) == (True, "seconds")
    assert (panel_of(narrow).log_x, panel_of(narrow).x_label) == (False, "milliseconds")
    assert panel_of(narrow).series[0].x[-1] == pytest.approx(139)


def test_the_slowest_come_first():
    run = random_run(requests=200)
    slowest = sorted((row for row in run.requests if row.answered), key=lambda row: -row.e2e_s)[:20]
    assert [row[0] for row in slowest_grid(run).rows] == [row.request_id for row in slowest]
    goals = make_run([make_row("late", slo=SLO(e2e_s=1.0)), make_row("free", end=2)])
    assert [row[-1] for row in slowest_grid(goals).rows] == ["missed", "-"]


def test_failures_are_counted_by_reason():
    rows = [refused_row("a"), refused_row("b"), make_row("c", finish="error", error="broken"), make_row("d")]
    assert failures_grid(make_run(rows)).rows == [
        ["refused", "chat", "needs 9,000 blocks, the pool has 100", "2"],
        ["error", "chat", "broken", "1"],
    ]


def test_bands_and_shares_are_drawn():
    band = Series("line", [0, 1, 2], [0.1, 0.2, 0.3], line=True, band=([0, 0.1, 0.2], [0.2, 0.3, 0.4]))
    panel = Panel(title='a "title" <', x_label="x", y_label="y", series=[band], share=True)
    svg = inline_svg(panel, "one")
    assert 'aria-label="a &quot;title&quot; &lt;"' in svg
    assert "100%" in svg
    assert "opacity: 0.2" in svg
    assert svg == inline_svg(panel, "one") != inline_svg(panel, "two")


def test_importing_the_room_imports_no_plotting_library():
    code = "import sys, shoal.measure; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
