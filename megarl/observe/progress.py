"""The live display of a run: its last steps, its progress, and what every process is doing or
waiting for.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.base.rollout_types import WARNING
from megarl.evaluation.scores import MISSED, VERSION_KEY
from megarl.observe.agreement import RULES, advisories
from megarl.observe.metrics import METRICS_FILE, MetricsTail, Row
from megarl.observe.samples import FailuresTail, escape, one_line
from megarl.observe.status import Status, duration, read_statuses
from megarl.rewards.score import (
    describe_failed_episodes,
    describe_failures,
    failure_label,
    of_episode,
)

STEPS_SHOWN = 10
_SOURCE_PROMPTS = re.compile("source/(.*)/prompts")
HELD_OUT_SHOWN = 2  # most evaluations shown
PROCESSES_SHOWN = 8  # most processes shown of each role
REFRESH_S = 0.25
ETA_STEPS = 20  # recent steps from which the remaining time is estimated
HEADER_EVERY = 20  # plain output repeats its header after this many lines
WARM_START_EVERY = 20  # plain output prints one in this many steps of a warm start
LEGEND = "stale: mean/max versions behind; times in s; t.wait, g.wait: of trainer, engines"
LINE = 80  # columns that printed lines fit into
PRINTED_BYTES = 4096  # bytes read from the end of an engine's log, for its last line
SILENCE_S = 30.0  # without a new step for this long, plain output says what every process is doing


def _shown(value: float, form: str) -> str:
    """A metric may have no value in a step: then a dash."""
    return "–" if math.isnan(value) else format(value, form)


def _one(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: _shown(row[key], form) if key in row else ""


def _number(key: str, digits: int) -> Callable[[Row], str]:
    """A cell of at most six characters for numbers up to 99,999.

    Larger numbers have fewer digits.
    """

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        size = abs(row[key])
        form = ".0f"
        if size < 10:
            form = f".{digits}f"
        elif size < 100:
            form = ".2f"
        elif size < 1000:
            form = ".1f"
        return _shown(row[key], form)

    return cell


def _staleness(row: Row) -> str:
    if "staleness/mean" not in row:
        return ""
    mean = row["staleness/mean"]
    most = row["staleness/max"]
    return f"{_shown(mean, '.1f' if most < 100 else '.0f')}/{_shown(most, '.0f')}"


def _loss(row: Row) -> str:
    if "loss" not in row:
        return ""
    size = abs(row["loss"])
    form = "+.3g"
    if size < 10:
        form = "+.4f"
    elif size < 100:
        form = "+.3f"
    return _shown(row["loss"], form)


# Heading -> (key, cell). A column is shown only if the row has its key. All columns together fit
# LINE.
COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "step": ("step", _one("step", "d")),
    "reward": ("reward/mean", _number("reward/mean", 3)),
    "dropped": ("prompts/dropped", _one("prompts/dropped", ".0f")),
    "stale": ("staleness/mean", _staleness),
    "loss": ("loss", _loss),
    "accuracy": ("accuracy", _one("accuracy", ".3f")),
    "held-out": ("eval/accuracy", _one("eval/accuracy", ".3f")),
    "smp/s": ("samples_per_s", _one("samples_per_s", ".0f")),
    "train": ("time/train_s", _number("time/train_s", 2)),
    "gen": ("time/generate_s", _number("time/generate_s", 2)),
    "sync": ("time/sync_s", _number("time/sync_s", 3)),
    "t.wait": ("time/trainer_wait_s", _number("time/trainer_wait_s", 2)),
    "g.wait": ("time/generator_wait_s", _number("time/generator_wait_s", 2)),
}


def columns_of(row: Row) -> list[str]:
    return [heading for heading, (key, _) in COLUMNS.items() if key in row]


class Progress:
    """Shows the progress of `run_dir`.

    It is used in the process that starts the run's other processes. Create it before they start,
    and call `poll` a few times a second.

    On a terminal it keeps one table up to date. Elsewhere it prints a line per step.
    """

    def __init__(self, run_dir: Path | str, total_steps: int, console: Console | None = None):
        self.run_dir = Path(run_dir)
        self.total_steps = total_steps
        # in a notebook too, it prints lines
        self.console = console or Console(force_terminal=sys.stdout.isatty(), force_jupyter=False)
        self._tail = MetricsTail(self.run_dir / METRICS_FILE)
        self._tail.poll()  # takes in the steps before this start
        self._started = self._refreshed = self._news_at = time.monotonic()
        self._arrivals: deque[float] = deque(maxlen=ETA_STEPS + 1)
        self._printed = 0
        self._headings = list[str]()
        self._engines: float | None = None  # engines that served at the last printed row
        self._advised: set[Callable[[Sequence[Row]], str]] = set()
        self._failures = FailuresTail(self.run_dir, from_end=True)
        self._failed = set[tuple[str, str]]()
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()

    def poll(self) -> None:
        """Shows what has changed since the last call. Cheap if nothing has."""
        new = self._tail.poll()
        now = time.monotonic()
        self._tell_failures()
        self._arrivals.extend([now] * new)
        if self._live is None:
            self._print_plain(new, now)
        elif new or now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._live.update(self._render(), refresh=True)

    def _tell_failures(self) -> None:
        """Reports each new kind of failure at once, since a step may take long."""
        for failure in self._failures.poll():
            if failure.kind == WARNING:
                self.warn(one_line(failure.reason))
                continue
            name = (failure.part, failure.kind)
            if name not in self._failed:
                self._failed.add(name)
                subject = "an episode" if of_episode(failure) else "scoring"
                self._line(
                    f"! prompt {failure.ordinal}: {subject} failed ({failure_label(failure)}): "
                    f"{one_line(failure.reason)}"
                )

    def warn(self, text: str) -> None:
        """Prints a warning that no metric shows."""
        self._line(f"! {text}")

    def close(self) -> None:
        """Shows the last state and releases the terminal."""
        self.poll()
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _finished_steps(self) -> int:
        if self._tail.rows:
            return self._tail.rows[-1]["step"] + 1
        return 0

    def _remaining_s(self) -> float | None:
        if len(self._arrivals) < 2 or self._arrivals[-1] == self._arrivals[0]:
            return None
        pace_s = (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)
        return pace_s * max(0, self.total_steps - self._finished_steps())

    def _render(self) -> RenderableType:
        statuses = read_statuses(self.run_dir)
        parts: list[RenderableType] = [self._bar()]
        rows = self._tail.rows
        recent = rows[-STEPS_SHOWN:]
        if recent:
            parts.insert(0, self._table(recent))
            for line in failure_lines(recent, self._failures, f" in the last {len(recent)} steps"):
                parts.insert(1, Text(line, style="yellow"))
            for line in (source_line(recent[-1]), *held_out_lines(rows)[-HELD_OUT_SHOWN:]):
                if line:
                    parts.append(Text(line, style="dim"))
            for text in advisories(rows):
                parts.append(Text(f"! {text}", style="bold yellow"))
        parts += _status_lines(statuses) or [Text("starting the processes", style="dim")]
        if not _serves(statuses):
            for line in _starting_lines(self.run_dir)[:PROCESSES_SHOWN]:
                parts.append(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _table(self, rows: list[Row]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
        headings = columns_of(rows[-1])
        table.caption = LEGEND if "t.wait" in headings else None
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                *(COLUMNS[heading][1](row) for heading in headings),
                style="bold" if row is rows[-1] else "dim",
            )
        return table

    def _bar(self) -> Table:
        remaining_s = self._remaining_s()
        line = Table.grid(padding=(0, 2))
        elapsed = duration(time.monotonic() - self._started)
        remaining = "" if remaining_s is None else f", {duration(remaining_s)} to go"
        line.add_row(
            ProgressBar(total=max(1, self.total_steps), completed=self._finished_steps(), width=30),
            f"{self._finished_steps()} of {self.total_steps} steps, {elapsed} elapsed{remaining}",
        )
        return line

    def _print_plain(self, new: int, now: float) -> None:
        for row in self._tail.rows[len(self._tail.rows) - new :]:
            self._print_row(row)
            self._news_at = now
        if new:
            self._print_advisories()
        if now - self._news_at >= SILENCE_S:
            self._news_at = now
            for line in doings(self.run_dir):
                self._line(f"  {line}")

    def _print_row(self, row: Row) -> None:
        last = row["step"] + 1 == self.total_steps
        if "reward/mean" not in row and row["step"] % WARM_START_EVERY and not last:
            return
        headings = columns_of(row)
        # headings may change: a critic's first steps have no loss
        if self._printed % HEADER_EVERY == 0 or headings != self._headings:
            self._headings = headings
            self._printed = 0
            self._line(" ".join(f"{heading:>{_width(heading)}}" for heading in headings))
        self._printed += 1
        engines = self._engines
        self._engines = row.get("engines/serving", self._engines)
        if engines is not None and engines != self._engines:
            self._line(
                f"  {self._engines:.0f} engines serve from step {row['step']} on, {engines:.0f} "
                "before"
            )
        self._line(
            " ".join(f"{COLUMNS[heading][1](row):>{_width(heading)}}" for heading in headings)
        )
        for failed in failure_lines([row], self._failures):
            self._line(f"  step {row['step']}: {failed}")
        for line in (*held_out_lines([row]), *missed_lines([row])):
            self._line(f"  {line}")

    def _print_advisories(self) -> None:
        """Prints each kind of advice when it begins to hold, but not again when only its numbers
        change.
        """
        advice = {rule: rule(self._tail.rows) for rule in RULES}
        for rule, text in advice.items():
            if text and rule not in self._advised:
                self._line(f"! {text}")
        self._advised = {rule for rule, text in advice.items() if text}

    def _line(self, text: str) -> None:
        for line in wrapped(text):
            self.console.print(Text(line), soft_wrap=True)


class Doings:
    """Prints on stderr every half minute what each process is doing, for commands without steps.

    Call `poll` a few times a second.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._printed_at = time.monotonic()

    def poll(self) -> None:
        if time.monotonic() - self._printed_at >= SILENCE_S:
            self._printed_at = time.monotonic()
            for line in doings(self._run_dir):
                print(*wrapped(f"  {line}"), sep="\n", file=sys.stderr, flush=True)


def wrapped(text: str) -> list[str]:
    indent = " " * (2 + len(text) - len(text.lstrip()))
    return textwrap.wrap(text, LINE, subsequent_indent=indent, break_on_hyphens=False) or [""]


def doings(run_dir: Path) -> list[str]:
    statuses = read_statuses(run_dir)
    lines = list(map(str, statuses))
    if not _serves(statuses):
        lines += _starting_lines(run_dir)
    return lines


def _width(heading: str) -> int:
    return max(7 if heading in ("stale", "loss", "dropped") else 6, len(heading))


def _starting_lines(run_dir: Path) -> list[str]:
    """The last line of each engine's log: what it loads or compiles, and how much is left."""
    starting_lines = []
    for log in sorted((run_dir / "logs").glob("*.log")):
        if log.name.startswith(("trainer.", "generator.", "evaluator.", "reward.", "tracker.")):
            continue
        if log.stat().st_size == 0:
            continue
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - PRINTED_BYTES))
            end = file.read().decode(errors="replace")
        lines = map(str.strip, escape(re.sub(r"[\r\n]+", "\n", end)).splitlines())
        lines = [line for line in lines if line and "warn" not in line.lower()]
        starting_lines.append(f"{log.stem}: starting: {lines[-1] if lines else ''}")
    return starting_lines


def failure_lines(rows: Sequence[Row], failures: FailuresTail, when: str = "") -> list[str]:
    """Lines about the episodes and scores that failed in `rows`, with the reason of the last
    failure; none if nothing failed.
    """
    lines = []
    for text, episodes in (
        (describe_failed_episodes(rows), True),
        (describe_failures(rows), False),
    ):
        if text:
            lines.append(f"{text}{when}{failures.reason(episodes)}")
    return lines


def source_line(row: Row) -> str:
    """A line with the prompts and mean reward of each source, and the prompts that the curriculum
    left out; empty without either.
    """
    names = [match[1] for match in map(_SOURCE_PROMPTS.fullmatch, row) if match]
    parts = []
    for name in names:
        part = f"{escape(name)} {row[f'source/{name}/prompts']:.0f}"
        if f"source/{name}/reward" in row:
            part += f" (reward {_shown(row[f'source/{name}/reward'], '.3f')})"
        parts.append(part)
    if row.get("prompts/rested"):
        parts.append(f"{row['prompts/rested']:.0f} at rest")
    if not parts:
        return ""
    line = f"prompts, step {row['step']}: {', '.join(parts)}"
    if len(line) <= LINE:
        return line
    return line[: LINE - 1] + "…"


def held_out_lines(rows: Sequence[Row]) -> list[str]:
    """One line per row that has held-out scores: pass@1 (with several samples also pass@k) and mean
    reward of each set.
    """
    lines = []
    for row in rows:
        if VERSION_KEY in row:
            lines.append(f"held-out, version {row[VERSION_KEY]:.0f}: {', '.join(_scores(row))}")
    return lines


def missed_lines(rows: Sequence[Row]) -> list[str]:
    """One line per row in which the number of missed evaluations has changed."""
    lines = []
    for row in rows:
        counts = [f"{row[f'eval/{kind}']:.0f} {kind}" for kind in MISSED if f"eval/{kind}" in row]
        if counts:
            lines.append(f"evaluations by step {row['step']}: {', '.join(counts)}")
    return lines


def _scores(row: Row) -> Iterator[str]:
    for key in row:
        set_name, _, score = key.rpartition("/")
        if set_name.startswith("eval") and score.startswith("pass@"):
            yield (
                f"{set_name.removeprefix('eval').removeprefix('/')} {score} "
                f"{_shown(row[key], '.3f')}"
            ).lstrip()
        elif set_name.startswith("eval") and key.endswith("/reward/mean"):
            yield f"reward {_shown(row[key], '.3f')}"
        elif set_name.startswith("eval") and score in ("win_rate", "perplexity"):
            yield f"{score} {_shown(row[key], '.3f')}"


def _serves(statuses: Sequence[Status]) -> bool:
    """Whether the generator has found the engines and now reports on them.

    Also true without engines.
    """
    names = {status.name.rpartition(".")[0] for status in statuses}
    return not names & {"generator", "evaluate"} or bool(names & {"engine", "evaluation"})


def _status_lines(statuses: Sequence[Status]) -> list[RenderableType]:
    """A line for each process.

    If a role has many, those with the oldest status are shown, since a stuck process is among them.
    """
    lines: list[RenderableType] = []
    for role, members in groupby(statuses, key=lambda status: status.name.rpartition(".")[0]):
        role_statuses = list(members)
        oldest = sorted(role_statuses, key=lambda status: status.since_s)[:PROCESSES_SHOWN]
        lines += [_status_line(status) for status in role_statuses if status in oldest]
        hidden = len(role_statuses) - len(oldest)
        if hidden:
            text = f"{role:<14}… and {hidden} more, whose lines are newer"
            lines.append(Text(text, style="dim"))
    return lines


def _status_line(status: Status) -> Text:
    waiting = status.text.startswith("waiting ")
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{status.name:<14}", style="cyan")
    return line.append(status.text, style="yellow" if waiting else "").append(
        f"  {status.age_s:.0f} s", style="dim"
    )
