"""The report page in a real browser: it shows the files' values, a run's text cannot execute, and
everyone can use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import browser
import numpy as np
import pytest
from json_files import json_lines, write_json_lines
from report_runs import HOSTILE, group, metrics, summary, texts, write_run

from megarl.cli import main
from megarl.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megarl.observe.samples import SamplesWriter, TokensWriter
from megarl.report.reading import RunReader

pytestmark = pytest.mark.skipif(browser.find() is None, reason=browser.MISSING)
STEPS = 60
# A chart is drawn once the browser reports that it is near the view. That is late on a busy
# machine, and always late in these tests.
LATE = """window.IntersectionObserver = class extends IntersectionObserver {
  constructor(then, options) { super((entries, self) => setTimeout(() => then(entries, self), 100), options); } };"""
PLACE = """((key) => { const r = document.querySelector(`[data-key="${key}"] .u-over`).getBoundingClientRect();
  return [r.left, r.top, r.width, r.height]; })"""
FILTER = """((key, value) => { const box = document.querySelector(`[data-filter="${key}"]`); box.value = value;
  box.dispatchEvent(new Event("input")); })"""
UNNAMED = """[...document.querySelectorAll('button, input, select, canvas.lanes, [role=img], [tabindex="0"]')]
  .filter((n) => !(n.innerText || n.getAttribute("aria-label") || n.labels?.length)).map((n) => n.outerHTML.slice(0, 80))"""
CONTRAST = """((selector) => { const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255);
  const light = (color) => { const [r, g, b] = rgb(color).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ink = getComputedStyle(document.querySelector(selector)).color,
    paper = getComputedStyle(document.querySelector(".card")).backgroundColor;
  const [a, b] = [light(ink), light(paper)].sort(); return (b + 0.05) / (a + 0.05); })"""


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Browser]:
    with browser.Browser() as opened:
        opened.send("Page.addScriptToEvaluateOnNewDocument", source=LATE)
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "a-run", STEPS, faults=True)


def url(*runs: Path) -> str:
    output = runs[0].parent / f"{runs[0].name}-{len(runs)}.html"
    assert main(["report", *map(str, runs), "--output", str(output)]) == 0
    return output.as_uri()


def shows(tab: browser.Browser, selector: str) -> str:
    return tab.js(f"document.querySelector({selector!r}).innerText")


def place_of(tab: browser.Browser, key: str) -> list[float]:
    """Scrolls to a chart, waits until it is drawn, and returns its left, top, width and height."""
    chart = f"document.querySelector('[data-key=\"{key}\"]')"
    tab.js(f"{chart}.scrollIntoView({{block: 'center'}})")
    tab.until(f"{chart}.querySelector('.u-over')")
    return tab.js(f"{PLACE}({key!r})")


def tab_to(tab: browser.Browser, element: str, most: int = 200) -> None:
    """Presses Tab until the element has the focus, whatever this browser focuses before."""
    passed = []
    while (focused := tab.js("document.activeElement.id")) != element:
        passed.append(focused)
        assert len(passed) <= most, f"the Tab key never reaches {element}: {passed}"
        tab.press("Tab")


def test_hovering_shows_the_values_of_the_file(tab: browser.Browser, run: Path) -> None:
    tab.open(url(run))
    rows = read_metrics(run / METRICS_FILE)
    for key in ("reward/mean", "grad_norm", "entropy/mean"):
        place = place_of(tab, key)
        for share in (0.1, 0.5, 0.93):
            tab.mouse("mouseMoved", place[0] + share * place[2], place[1] + place[3] / 2)
            readout = shows(tab, f'[data-key="{key}"] .readout').split()
            step = int(readout[1])
            value = float(readout[-1])
            assert step == pytest.approx(share * (STEPS - 1), abs=1)
            assert value == pytest.approx(rows[step][key], rel=1e-8)
    assert tab.messages == []


def test_every_value_of_every_metric_reaches_the_page(tab: browser.Browser, run: Path) -> None:
    tab.open(url(run))
    shown = tab.js("JSON.stringify([view.runs[0].steps, view.runs[0].metrics])")
    steps, columns = json.loads(shown)
    for row in read_metrics(run / METRICS_FILE):
        place = steps.index(row["step"])
        assert {
            key: column[place] for key, column in columns.items() if column[place] is not None
        } == {key: value for key, value in row.items() if key != "step"}


def test_zoom_smoothing_and_several_runs_over_each_other(
    tab: browser.Browser, run: Path, tmp_path: Path
) -> None:
    second_run = write_run(tmp_path / "another-run", 40, seed=1)
    tab.open(url(run, second_run))
    series = "[...view.charts].find((c) => c.title === 'Reward').u.series.length"
    place = place_of(tab, "reward/mean")
    tab.until("[...view.charts].filter((c) => c.u).length > 3")
    assert tab.js(series) == 3
    assert tab.js("[...view.charts].find((c) => c.title === 'Reward').u.data[0].length") == STEPS
    tab.mouse(
        "mousePressed", place[0] + 0.25 * place[2], place[1] + 50, button="left", clickCount=1
    )
    tab.mouse("mouseMoved", place[0] + 0.5 * place[2], place[1] + 50, button="left", buttons=1)
    tab.mouse(
        "mouseReleased", place[0] + 0.5 * place[2], place[1] + 50, button="left", clickCount=1
    )
    tab.until("view.range")
    low, high = tab.js("view.range")
    assert (low, high) == (
        pytest.approx(0.25 * (STEPS - 1), abs=1),
        pytest.approx(0.5 * (STEPS - 1), abs=1),
    )
    ranges = tab.js(
        "[...view.charts].filter((c) => c.u).map((c) => [c.u.scales.x.min, c.u.scales.x.max])"
    )
    assert len(ranges) > 3
    assert all(limits == [low, high] for limits in ranges)
    tab.js("document.querySelector('#unzoom').click()")
    assert tab.js("view.range") is None
    tab.js(
        "(() => { const node = document.querySelector('#smoothing'); node.value = 0.9; "
        "node.dispatchEvent(new Event('input')); })()"
    )
    assert tab.js(series) == 5
    smoothed = []
    mean = 0.0
    total = 0.0
    for row in read_metrics(run / METRICS_FILE):
        mean = 0.9 * mean + 0.1 * row["reward/mean"]
        total = 0.9 * total + 0.1
        smoothed.append(mean / total)
    assert tab.js("[...view.charts].find((c) => c.title === 'Reward').u.data[2]") == pytest.approx(
        smoothed
    )
    tab.js("document.querySelectorAll('.run')[1].click()")
    assert tab.js(series) == 3
    assert tab.messages == []


def test_times_weights_and_faults_equal_the_trace(tab: browser.Browser, run: Path) -> None:
    tab.open(url(run))
    tab.js("choose('time')")
    table = {
        cells[0]: cells[1:]
        for cells in tab.js(
            "[...document.querySelectorAll('.splits tbody tr')].map((r) => [...r.cells].map((c) "
            "=> c.innerText))"
        )
    }
    assert table["a step"][:2] == ["2 s", "1.9 s"]
    assert table["training"][:2] == ["1.1 s", "1 s"]
    assert table["trainer rank 0"][:2] == ["20.5 GiB", "21 GiB"]
    assert table["the GPU of rank 0, all processes"][:2] == ["40 GiB", ""]
    assert "a worker of an engine" not in table, "without an audit there is no mark"
    assert "decoding at full concurrency" in shows(tab, "#panel-time")
    assert "generation binds" in shows(tab, "#panel-time")
    lanes = dict(tab.js("timelines[0].totals"))
    assert lanes.keys() == {
        "trainer.0",
        "trainer.1",
        "generator.0",
        "generator.0 weights",
        "engine.0",
        "engine.1",
    }
    assert lanes["trainer.1"]["train"] == pytest.approx(STEPS * 1.1)
    assert lanes["trainer.0"]["wait for a batch"] == pytest.approx(STEPS * 0.8)
    assert lanes["engine.1"]["away"] == pytest.approx(10)
    assert lanes["engine.0"]["pause"] == pytest.approx(STEPS * 0.05)
    run_s = 2 * STEPS + 1
    # no time between two starts
    assert lanes["engine.0"]["serve"] + lanes["engine.0"]["pause"] == pytest.approx(
        run_s - 2 - 0.5, abs=0.2
    )
    faults = tab.js("[...document.querySelectorAll('.faults tbody tr')].map((r) => r.innerText)")
    assert len(faults) == 4
    assert "engine.1 lost: the connection broke" in faults[0]
    assert "trainer.1 was killed by signal 9" in faults[2]
    assert tab.js("mfu(view.runs[0])[5]") == pytest.approx(4.2e14 / (1.1 * 2 * 989e12))
    tab.js("choose('weights')")
    updates = tab.js(
        "[...document.querySelectorAll('.updates tbody tr')].map((r) => [...r.cells].map((c) => "
        "c.innerText))"
    )
    assert len(updates) == STEPS
    assert updates[0] == [
        str(STEPS),
        "2:00",
        "3.07 MiB",
        "10 ms",
        "20 ms",
        "50 ms",
        "equal bit for bit",
        "0, 1",
    ]
    heat = tab.js(
        "[...document.querySelectorAll('.heat tbody tr')].map((r) => [...r.cells].map((c) => "
        "c.innerText))"
    )
    assert heat == [
        ["trainer.0", "785 KiB", "785 KiB", "1.53 MiB"],
        ["trainer.1", "785 KiB", "785 KiB", "1.53 MiB"],
    ]
    assert "of 60" in shows(tab, "#panel-weights") or tab.js("audits(view.runs[0])") == [
        STEPS,
        STEPS,
    ]
    assert tab.messages == []


def test_the_first_hour_of_a_run_is_shown_as_what_it_is(
    tab: browser.Browser, tmp_path: Path
) -> None:
    """The critic warms up, engines compile, the user stops the run, and there is only the first
    evaluation.
    """
    folder = write_run(tmp_path / "young-run", 30)
    rng = np.random.default_rng(0)
    writer = MetricsWriter(folder)
    for step in range(30):
        row = {
            "value/loss": 0.5 / (step + 1),
            "value/mean": 0.1,
            "returns": 0.2,
            **metrics(step, rng),
        }
        row |= {
            "time/step_s": 60.0 if step == 0 else 2.0 + step / 100,
            "rollout/failed_fraction": 0.25,
            "rollout/failed_exit": 0.25,
        }
        writer.write(
            step,
            {
                key: value
                for key, value in row.items()
                if step >= 3 or key not in ("loss", "grad_norm", "entropy/mean")
            },
        )
    writer.close()
    trace = folder / "trace/launcher.0.jsonl"
    trace.write_text(trace.read_text().replace('"finished"', '"stopped by Ctrl-C"'))
    tab.open(url(folder))
    place_of(tab, "value/loss")
    facts = dict(
        tab.js(
            "[...document.querySelectorAll('.fact')].map((f) => "
            "[f.querySelector('span').innerText, f.className])"
        )
    )
    assert facts["faults and restarts"] == "fact"
    assert "held-out pass@1, before training" in facts
    assert "25% of the episodes failed (25% exit) in the last 5 steps" in shows(tab, "#top")
    assert "not finite" not in tab.js("document.body.innerText")
    last = read_metrics(folder / METRICS_FILE)[-1]["reward/mean"]
    assert shows(tab, '[data-key="reward/mean"] .readout') == f"{last:.5g}"
    tab.js("choose('time')")
    place_of(tab, "time/step_s")
    assert tab.js("[...view.charts].find((c) => c.title === 'Step time').u.scales.y.max") < 3
    assert "the first step, 60 s, is above the chart" in shows(tab, '[data-key="time/step_s"]')
    assert tab.js("[...document.querySelectorAll('.faults td.soft')].map((c) => c.innerText)") == [
        "ended: stopped by Ctrl-C"
    ]
    tab.js("choose('samples')")
    text = json.loads((folder / "rollouts/samples.jsonl").read_text().splitlines()[-1])["samples"][
        0
    ]["text"]
    tab.until("document.querySelector('.line .begins')")
    assert " ".join(text[:60].split()) in tab.js(
        "[...document.querySelectorAll('.line .begins')].map((c) => c.textContent)"
    )
    assert tab.messages == []


def test_repeated_update_of_a_resumed_run_has_its_own_times(
    tab: browser.Browser, tmp_path: Path
) -> None:
    """A clock that is far off hides nothing, and delays nothing."""
    folder = write_run(tmp_path / "resumed", 6)
    shift_us = 100e6
    for name, kinds in (
        ("trainer.0", {"write weights 6": 5.0, "wait for engines": 7.0}),
        ("generator.0", {"pause for weights 6": 3.0}),
    ):
        path = folder / "trace" / f"{name}.jsonl"
        events = json_lines(path)
        repeated = [
            {**event, "ts": event["ts"] + shift_us, "dur": event["dur"] * times}
            for event in events
            for kind, times in kinds.items()
            if event["name"].startswith(kind) and event["name"].endswith(" 6")
        ]
        write_json_lines(path, [*events, *repeated])
    with open(folder / "trace" / "trainer.1.jsonl", "a") as file:
        for ts in (1.0, 1e30):
            file.write(
                json.dumps({"name": "train step 6", "track": "main", "ts": ts, "dur": 2e6}) + "\n"
            )
    tab.open(url(folder))
    tab.js("choose('weights')")
    updates = tab.js(
        "[...document.querySelectorAll('.updates tbody tr')].map((r) => [...r.cells].map((c) => "
        "c.innerText))"
    )
    assert [cells[0] for cells in updates[:2]] == ["6", "6"]
    assert [cells[3:6] for cells in updates[:2]] == [
        ["70 ms", "100 ms", "150 ms"],
        ["10 ms", "20 ms", "50 ms"],
    ]
    tab.js("choose('time')")
    # a time of 1e30 leaves no span
    assert dict(tab.js("timelines[0].totals"))["trainer.1"]["train"] == pytest.approx(6 * 1.1 + 2)
    assert tab.messages == []


def test_samples_are_found_sorted_and_coloured(tab: browser.Browser, run: Path) -> None:
    tab.open(url(run) + "#samples")
    index = RunReader(run, 1 << 26).read()["samples"]["index"]
    assert shows(tab, "#panel-samples p[aria-live]") == f"{STEPS * 8} of {STEPS * 8} samples"
    tab.js(
        "[...document.querySelectorAll('.heads button')].find((b) => b.innerText === "
        "'length').click()"
    )
    first = tab.js("[...document.querySelector('.rows .line').children].map((c) => c.innerText)")
    assert int(first[4]) == max(index["tokens"])
    for key, value in (("reward-0", 1), ("tokens-1", 20), ("step-0", 30)):
        tab.js(f"{FILTER}({key!r}, {value})")
    filtered = [
        i
        for i in range(len(index["step"]))
        if index["reward"][i] >= 1 and index["tokens"][i] <= 20 and index["step"][i] >= 30
    ]
    assert sorted(tab.js("table.order")) == filtered
    assert shows(tab, "#panel-samples p[aria-live]").startswith(f"{len(filtered)} of ")
    # only lines in view exist
    assert tab.js("document.querySelectorAll('.rows .line').length") < 80
    two_turns = next(i for i in filtered if index["sample"][i] == 1)
    tab.js(f"table.choose({two_turns})")
    tab.until("document.querySelectorAll('.sample .text.env').length === 1")
    line = next(
        record
        for record in map(json.loads, (run / "rollouts" / "samples.jsonl").open())
        if record["ordinal"] == index["ordinal"][two_turns]
    )
    sample = line["samples"][1]
    start, end = sample["environment"][0]
    blocks = tab.js(
        "[...document.querySelectorAll('.sample .text')].map((n) => [n.className, n.textContent])"
    )
    assert [text for _, text in blocks] == [
        line["prompt"],
        line["answer"],
        sample["text"][:start],
        sample["text"][start:end],
        sample["text"][end:],
    ]
    assert [name for name, _ in blocks][2:] == ["text policy", "text env", "text policy"]
    numbers = next(
        record
        for record in map(json.loads, (run / "rollouts" / "tokens.1.jsonl").open())
        if (record["ordinal"], record["sample"]) == (line["ordinal"], 1)
    )
    for mode in ("diff", "ratio", "advantage", "version"):
        tab.js(f"document.querySelector('[data-mode=\"{mode}\"]').click()")
        assert tab.js("document.querySelectorAll('.sample .tok').length") == len(numbers["ids"])
        assert (
            tab.js(
                "[...document.querySelectorAll('.sample .policy')].map((n) => "
                "n.textContent).join('')"
            )
            == sample["text"][:start] + sample["text"][end:]
        )
    tab.js("document.querySelector('[data-mode=diff]').click()")
    strongest = int(np.argmax(np.abs(numbers["diff"])))
    tab.js(
        f"document.querySelectorAll('.sample .tok')[{strongest}].dispatchEvent(new "
        f"PointerEvent('pointerover', {{bubbles: true}}))"
    )
    readout = tab.js("[...document.querySelectorAll('.sample .readout')].at(-1).innerText").split(
        "\n"
    )
    assert f"difference {numbers['diff'][strongest]:g}".split()[1][:5] in " ".join(readout)
    colour = tab.js(f"document.querySelectorAll('.sample .tok')[{strongest}].style.background")
    assert ("var(--hot)" in colour) == (numbers["diff"][strongest] > 0)
    assert ("var(--cold)" in colour) == (numbers["diff"][strongest] < 0)
    assert tab.messages == []


def test_hostile_text_is_shown_and_does_nothing(tab: browser.Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<img src=x onerror=document.title='owned'>", 3, faults=True)
    rng = np.random.default_rng(0)
    samples = SamplesWriter(folder)
    tokens = TokensWriter(folder, 0, lambda token: HOSTILE[token % len(HOSTILE)])
    for number, text in enumerate(HOSTILE):
        hostile_group = group(number, 0, 2, rng, text=text)
        samples.write(0, [(summary(hostile_group), texts(hostile_group))])
        zeros = np.zeros(4, np.float32)
        tokens.write(
            0,
            number,
            0,
            SimpleNamespace(
                ids=np.arange(4),
                positions=np.arange(6, 10),
                logprobs=zeros,
                mu_logprobs=zeros,
                advantages=zeros,
            ),
        )
    writer = MetricsWriter(folder, resume_step=1)
    names = {
        "constructor": 1.0,
        "__proto__": 1.0,
        HOSTILE[0]: 1.0,
        "eval/" + HOSTILE[0] + "/pass@1": 1.0,
    }
    writer.write(1, {**metrics(1, rng), **names})
    writer.close()
    trace = folder / "trace" / "launcher.0.jsonl"
    trace.write_text(
        trace.read_text().replace("finished", "failed: " + json.dumps(HOSTILE[0])[1:-1])
    )
    address = url(folder)
    title = tab.open(address) and tab.js("document.title")
    for name in ("learning", "right", "time", "weights", "samples"):
        tab.js(f"choose({name!r})")
    for number in range(len(HOSTILE)):
        for mode in ("text", "diff"):
            tab.js(
                f"(view_.mode = {mode!r}, "
                f"table.choose([...view.runs[0].index_.ordinal].lastIndexOf({number}) - 1))"
            )
            tab.until(
                f"view_.group && view_.group.ordinal === {number} && "
                "document.querySelectorAll('.sample .text').length >= 3"
            )
    plain = "".join(character for character in HOSTILE[0])
    tab.js(
        "(view_.mode = 'text', table.choose([...view.runs[0].index_.ordinal.keys()].findLast((i) "
        "=> view.runs[0].index_.ordinal[i] === 0)))"
    )
    tab.until("view_.group.ordinal === 0 && view_.group.answer.startsWith('</script>')")
    assert shows(tab, ".sample .text") == plain
    tab.js(
        "table.choose([...view.runs[0].index_.ordinal.keys()].findLast((i) => "
        "view.runs[0].index_.ordinal[i] === 1))"
    )
    tab.until("view_.group.ordinal === 1")
    shown = tab.js("document.querySelector('.sample .text').textContent")
    assert "U+202E" in shown
    assert "U+200B" in shown
    assert "U+001B" in shown
    assert "U+0000" in shown
    assert not {"\u202e", "\u200b", "\x1b", "\x00", "\u2066"} & set(shown)
    assert tab.js("document.title") == title
    assert "owned" not in title.replace("document.title='owned'", "")
    assert tab.js("document.querySelectorAll('img, main style, main script, iframe').length") == 0
    assert [request for request in tab.requests if not request.startswith(("file:", "data:"))] == []
    assert tab.messages == []


def test_a_page_without_a_mouse(tab: browser.Browser, run: Path) -> None:
    tab.open(url(run))
    tab_to(tab, "tab-learning")
    tab.press("ArrowLeft")
    assert tab.js("document.activeElement.id") == "tab-samples"
    assert tab.js("view.tab") == "samples"
    tab.js("table.body.focus()")
    tab.press("ArrowDown", "ArrowDown", "End", "ArrowUp")
    assert tab.js("table.at") == STEPS * 8 - 2
    assert tab.js("document.querySelectorAll('.line[aria-selected=true]').length") == 1
    tab.until("view_.group && document.querySelector('.sample .text')")
    tab.js("choose('learning')")
    place_of(tab, "reward/mean")
    tab.js("document.querySelector('[data-key=\"reward/mean\"] .plot').focus()")
    tab.press("ArrowLeft", "ArrowLeft")
    assert shows(tab, '[data-key="reward/mean"] .readout').startswith(f"step {STEPS - 3}")
    tab.press("+")
    assert tab.js("view.range") is not None
    tab.press("0")
    assert tab.js("view.range") is None
    assert tab.js(UNNAMED) == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_screen_and_the_dark(tab: browser.Browser, run: Path, dark: bool) -> None:
    tab.open(url(run), width=360, height=740, dark=dark)
    for name in ("learning", "right", "time", "weights", "samples"):
        tab.js(f"choose({name!r})")
        tab.js("new Promise((done) => setTimeout(done, 200))")
        assert tab.js("document.documentElement.scrollWidth") <= 360, name
        assert tab.js(f"{CONTRAST}('h3')") > 7
        assert tab.js(f"{CONTRAST}('.lead')") > 4.5
    assert tab.messages == []


def test_a_served_page_follows_a_run_that_goes_on(tab: browser.Browser, tmp_path: Path) -> None:
    import threading

    from megarl.report.command import ReportServer

    folder = write_run(tmp_path / "live", 5)
    with ReportServer([folder], 1 << 26, 0, lambda: "now") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tab.open(server.url)
        rng = np.random.default_rng(5)
        writer = MetricsWriter(folder, resume_step=5)
        for step in range(5, 9):
            writer.write(
                step,
                metrics(step, rng)
                | {
                    "source/maths/reward": 0.1 * step,
                    "source/<b>/reward": 0.5,
                    "prompts/rested": 3,
                },
            )
        tab.until("view.runs[0].steps.length === 9")
        tab.until("[...view.charts].find((c) => c.title === 'Reward').u?.data[0].length === 9")
        titles = tab.js(
            "[...document.querySelectorAll('#panel-learning h3')].map((n) => n.textContent)"
        )
        assert titles[-2:] == ["Reward by source", "Prompts at rest"], (
            "charts of metrics that have come since"
        )
        shown = tab.js("[...view.charts].find((c) => c.title === 'Reward by source').keys")
        assert shown == [["source/<b>/reward", "<b>"], ["source/maths/reward", "maths"]]
        writer.close()
        MetricsWriter(folder, resume_step=2).close()  # a run that was resumed from a checkpoint
        tab.until("view.runs[0].steps.length === 2")
        assert tab.messages == []
        server.shutdown()
        thread.join(30)


def test_page_of_an_empty_run_says_that_it_is_empty(tab: browser.Browser, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / METRICS_FILE).write_text("")
    tab.open(url(folder))
    for name in ("learning", "right", "time", "weights", "samples"):
        tab.js(f"choose({name!r})")
    assert "kept no samples" in shows(tab, "main")
    assert tab.messages == []
