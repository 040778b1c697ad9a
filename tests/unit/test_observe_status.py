"""One status line per process: it has a fixed size, is never read half-written, and is restored
after a wait.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.observe.status import RECORD_BYTES, StatusBoard, clear_statuses, read_statuses

WRITE_FAST = """
import sys
from megarl.observe.status import StatusBoard
board = StatusBoard(sys.argv[1], "writer.0")
for number in range(10**9):
    board.set("abcdefghij"[number % 10] * (1 + 37 * number % 200))
"""


def texts(run_dir: Path) -> dict[str, str]:
    return {status.name: status.text for status in read_statuses(run_dir)}


def test_last_line_of_each_process_is_read_in_rank_order(tmp_path: Path) -> None:
    assert read_statuses(tmp_path) == []
    for rank in (10, 2):
        StatusBoard(tmp_path, f"trainer.{rank}").set(f"training step {rank}")
    StatusBoard(tmp_path, "generator.0")
    expected = [
        ("generator.0", "starting"),
        ("trainer.2", "training step 2"),
        ("trainer.10", "training step 10"),
    ]
    assert list(texts(tmp_path).items()) == expected
    clear_statuses(tmp_path)
    assert read_statuses(tmp_path) == []


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"x" * RECORD_BYTES,
        b"\xff" * RECORD_BYTES,
        bytes(RECORD_BYTES),
        b"000000000001 x" + b" 000000000001\n",
    ],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, record: bytes) -> None:
    StatusBoard(tmp_path, "trainer.0")
    (tmp_path / "status/trainer.1").write_bytes(record.rjust(RECORD_BYTES) if record else b"")
    (tmp_path / "status/trainer.2").mkdir()
    assert list(texts(tmp_path)) == ["trainer.0"]


def test_a_wait_says_for_whom_and_what_and_ends_also_by_an_error(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path, "trainer.0")
    board.set("training step 7")
    with pytest.raises(TimeoutError), board.waiting("generator.0", "batch 8"):
        assert texts(tmp_path)["trainer.0"] == "waiting for batch 8 from generator.0"
        raise TimeoutError
    assert texts(tmp_path)["trainer.0"] == "training step 7"


@pytest.mark.parametrize(
    "text",
    ["", "two\nlines\tand  spaces", "é" * 300, "語" * 300, "\ud800 lone surrogate", "x" * 1000],
)
def test_any_text_fits_the_record(tmp_path: Path, text: str) -> None:
    before_s = time.time()
    board = StatusBoard(tmp_path, "trainer.0")
    board.set("longer than what follows " * 5)
    board.set(text)
    assert (tmp_path / "status" / "trainer.0").stat().st_size == RECORD_BYTES
    (status,) = read_statuses(tmp_path)
    one_line = " ".join(text.replace("\ud800", "?").split())
    assert one_line.startswith(status.text)
    assert (len(one_line) < 60) <= (status.text == one_line)
    assert before_s - 1 < status.since_s < time.time() + 1
    assert status.age_s < 60


def test_a_reader_never_sees_half_a_write(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITE_FAST, str(tmp_path)])
    try:
        deadline = time.monotonic() + 30
        sequences = set()
        while len(sequences) < 100 and time.monotonic() < deadline:
            for status in read_statuses(tmp_path):
                assert status.text == "starting" or len(set(status.text)) == 1, status.text
                sequences.add(status.sequence)
        assert len(sequences) == 100
    finally:
        writer.kill()
        writer.wait()


def test_mixture_of_two_records_is_rejected(tmp_path: Path) -> None:
    """A reader may overtake a writer, and read the old end after the new middle."""
    file = tmp_path / "status/trainer.0"
    records = []
    board = StatusBoard(tmp_path, "trainer.0")
    for text in ("aaaa" * 50, "bbbb" * 50):
        board.set(text)
        records.append(file.read_bytes())
    old, new = records
    for begin, end in itertools.combinations(range(0, RECORD_BYTES + 1, 5), 2):
        mixed = old[:begin] + new[begin:end] + old[end:]
        file.write_bytes(mixed)
        assert mixed in records or read_statuses(tmp_path) == []
