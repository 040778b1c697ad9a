"""The live display: one line per step without a terminal; on a terminal, a table that shows which
part waits for which.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

from rich.console import Console

from megarl.observe.metrics import MetricsWriter
from megarl.observe.progress import COLUMNS, Progress, source_line
from megarl.observe.status import StatusBoard, duration, read_statuses, work


def values(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 100,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "loss": -0.25,
        "samples_per_s": 321.0,
        "time/train_s": 0.17,
        "time/generate_s": 0.07,
        "time/sync_s": 0.021,
        "time/trainer_wait_s": 0.03,
        "time/generator_wait_s": 0.11,
    }


def run_steps(run_dir: Path, first: int, last: int, make=values) -> None:
    writer = MetricsWriter(run_dir, resume_step=first)
    for step in range(first, last):
        writer.write(step, make(step))
    writer.close()


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width)


def test_plain_output_has_a_line_a_step_and_a_header_every_20(tmp_path: Path) -> None:
    console = plain()
    progress = Progress(tmp_path, 45, console)
    for step in range(0, 45, 5):
        run_steps(tmp_path, step, step + 5)
        progress.poll()
    progress.close()
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    headers = [number for number, line in enumerate(lines) if line[0] == "step"]
    assert headers == [0, 21, 42]
    steps = [line for line in lines if line[0] != "step"]
    assert [int(line[0]) for line in steps] == list(range(45))
    assert steps[7] == [
        "7",
        "0.070",
        "0.5/1",
        "-0.2500",
        "321",
        "0.17",
        "0.07",
        "0.021",
        "0.03",
        "0.11",
    ]


def test_a_resumed_run_is_continued_not_printed_again(tmp_path: Path) -> None:
    run_steps(tmp_path, 0, 8)
    console = plain()
    progress = Progress(tmp_path, 10, console)
    MetricsWriter(tmp_path, resume_step=6).close()
    progress.poll()
    run_steps(tmp_path, 6, 10)
    progress.close()
    assert [line.split()[0] for line in console.file.getvalue().splitlines()] == [
        "step",
        "6",
        "7",
        "8",
        "9",
    ]


def test_a_warm_start_prints_few_of_its_many_steps_and_the_last(tmp_path: Path) -> None:
    console = plain()
    progress = Progress(tmp_path, 50, console)
    run_steps(tmp_path, 0, 50, make=lambda step: {"loss": 1.0, "samples_per_s": 2.0})
    progress.close()
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[0] == ["step", "loss", "smp/s"]
    assert [line[0] for line in lines[1:]] == [
        "0",
        "20",
        "40",
        "49",
    ]


def test_terminal_shows_last_steps_progress_and_waits(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = Progress(tmp_path, 40, console)
    board = StatusBoard(tmp_path, "trainer.0")
    run_steps(tmp_path, 0, 30)
    with board.waiting("generator.0", "batch 30"):
        progress.poll()
        shown = console.file.getvalue()
    progress.close()
    assert "30 of 40 steps" in shown
    assert "0.290" in shown
    assert "0.200" in shown
    assert "0.190" not in shown
    assert "waiting for batch 30 from generator.0" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is back


def test_held_out_scores_and_advisories_are_printed_once(tmp_path: Path) -> None:
    def equal(step: int) -> dict[str, float]:
        scored = (
            {
                "eval/version": step,
                "eval/pass@1": 0.5,
                "eval/reward/mean": 0.25,
                "eval/hard/pass@4": 0.125,
            }
            if step == 4
            else {}
        )
        return (
            values(step)
            | {
                "reward/mean": 0.0,
                "reward/std": 0.0,
                "zero_advantage_fraction": 1.0 if 2 <= step < 9 else 0.5,
            }
            | scored
        )

    console = plain()
    progress = Progress(tmp_path, 20, console)
    for step in range(12):
        run_steps(tmp_path, step, step + 1, equal)
        progress.poll()
    progress.close()
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if "held-out" in line] == [
        "  held-out, version 4: pass@1 0.500, reward 0.250, hard pass@4 0.125"
    ]
    (advisory_line,) = [number for number, line in enumerate(lines) if line.startswith("!")]
    assert "all rewards have been equal (0) for 5 steps" in lines[advisory_line]
    assert lines[advisory_line - 1].split()[0] == "6"
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    run_steps(tmp_path, 8, 9, equal)
    progress = Progress(tmp_path, 20, console)
    progress.close()
    shown = console.file.getvalue()
    assert "held-out, version 4" in shown
    assert "all rewards have been equal (0) for 7 steps" in shown


def test_the_sources_of_a_mixture_and_prompts_at_rest_fit_a_line() -> None:
    row = {
        "step": 3,
        "source/maths/prompts": 16,
        "source/maths/reward": 0.25,
        "source/chat/prompts": 0,
    }
    assert (
        source_line(row | {"prompts/rested": 5})
        == "prompts, step 3: maths 16 (reward 0.250), chat 0, 5 at rest"
    )
    assert source_line({"step": 3, "prompts/rested": 0}) == ""
    assert (
        len(
            source_line({"step": 3} | {f"source/{name}/prompts": 8 for name in "abcdefghijklmnopq"})
        )
        == 80
    )


def test_of_many_engines_the_longest_waiting_are_shown(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = Progress(tmp_path, 40, console)
    boards = [StatusBoard(tmp_path, f"engine.{index}") for index in range(20)]
    for index in [*range(7), *range(8, 20)]:
        boards[index].set("serves")
    progress.close()
    shown = console.file.getvalue()
    assert "engine.7" in shown
    assert "12 more" in shown
    assert "engine.19" not in shown


def test_plain_output_fits_80_columns(tmp_path: Path) -> None:
    """With all columns, large numbers, and all other messages."""
    long = {
        "prompts/dropped": 99999,
        "loss": -123.4567,
        "staleness/mean": 99.9,
        "staleness/max": 120,
        "samples_per_s": 123456.0,
    }
    times = {key: 98765.4 for key in values(0) if key.startswith("time/")}
    console = plain(width=200)
    progress = Progress(tmp_path, 200_000, console)
    run_steps(
        tmp_path,
        123_450,
        123_460,
        make=lambda step: (
            values(step) | long | times | {"zero_advantage_fraction": 1.0, "reward/std": 0.0}
        ),
    )
    StatusBoard(tmp_path, "generator.0").set("waiting for " + "a very long answer of somebody " * 6)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.0.log").write_text(
        "loading\n\x1b[31mCapturing batches (bs=8):  40%|\rCapturing batches (bs=4):  60%| 3/5 "
        "[00:12<00:08]"
    )
    progress._news_at -= 100
    progress.close()
    output = console.file.getvalue()
    assert max(map(len, output.splitlines())) <= 80
    assert output.splitlines()[0].split() == [
        "step",
        "reward",
        "dropped",
        "stale",
        "loss",
        "smp/s",
        "train",
        "gen",
        "sync",
        "t.wait",
        "g.wait",
    ]
    assert all(len(line.split()) == 11 for line in output.splitlines()[1:11])
    assert "! all rewards have been equal" in output
    assert len(COLUMNS) == 13


def test_starting_engines_show_the_last_line_of_their_logs(tmp_path: Path) -> None:
    console = plain()
    progress = Progress(tmp_path, 5, console)
    board = StatusBoard(tmp_path, "generator.0")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.0.log").write_text(
        "loading\nCapturing batches (bs=8):  40%|\rCapturing batches (bs=4):  60%| 3/5 "
        "[00:12<00:08]"
    )
    (tmp_path / "logs" / "trainer.0.log").write_text("not this")
    progress._news_at -= 100
    progress.poll()
    output = " ".join(console.file.getvalue().split())
    assert "engine.0: starting: Capturing batches (bs=4): 60%| 3/5 [00:12<00:08]" in output
    assert "not this" not in output
    StatusBoard(tmp_path, "engine.0").set("serves weights version 0")
    progress._news_at -= 100
    progress.close()
    assert console.file.getvalue().count("starting: Cap") == 1
    assert board.text == "starting"


def test_long_work_says_how_far_it_is_and_what_is_left(tmp_path: Path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("megarl.observe.status.time.monotonic", lambda: now[0])
    board = StatusBoard(tmp_path, "trainer.3").for_work()
    board.set("step 7")
    with work("loading weights", 40) as advance:
        for _ in range(10):
            now[0] += 1
            advance(1)
        assert board.text == "loading weights: 10 of 40, 0:30 to go"
    assert board.text == "step 7"
    with work("writing", 4, line="saving") as advance:
        now[0] += 2
        advance(1)
        assert {status.name: status.text for status in read_statuses(tmp_path)} == {
            "saving.3": "writing: 1 of 4, 0:06 to go",
            "trainer.3": "step 7",
        }
    assert [status.name for status in read_statuses(tmp_path)] == ["trainer.3"]


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.9, 61, 3600, 86399)] == [
        "0:00",
        "0:59",
        "1:01",
        "1:00:00",
        "23:59:59",
    ]


def test_cell_without_a_value_is_a_dash(tmp_path: Path):
    console = plain()
    progress = Progress(tmp_path, 1, console)
    row = {
        **{key: math.nan for key, _ in COLUMNS.values() if key != "step"},
        "staleness/max": math.nan,
        "source/a/prompts": 1.0,
        "source/a/reward": math.nan,
        "eval/version": 1.0,
        "eval/pass@1": math.nan,
        "eval/reward/mean": math.nan,
    }
    run_steps(tmp_path, 0, 1, lambda step: row)
    progress.close()
    text = console.file.getvalue()
    assert "nan" not in text
    assert "held-out, version 1: pass@1 –, reward –" in text
    (line,) = (line for line in text.splitlines() if line.split()[0] == "0")
    assert {*line.split()} == {"0", "–", "–/–"}
    assert source_line({"step": 0, **row}) == "prompts, step 0: a 1 (reward –)"


def test_steps_without_a_loss_have_headings_of_their_own(tmp_path: Path):
    """Such as steps that train only the critic."""
    console = plain()
    progress = Progress(tmp_path, 4, console)
    run_steps(
        tmp_path,
        0,
        4,
        lambda step: {
            key: value for key, value in values(step).items() if step > 1 or key != "loss"
        },
    )
    progress.close()
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "0", "1", "step", "2", "3"]
    assert ["loss" in line for line in lines if "step" in line] == [
        False,
        True,
    ]
    assert "nan" not in console.file.getvalue()
