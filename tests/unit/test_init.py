"""The files of megarl init are complete, their rows and reward are correct, and existing files stay
unchanged.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from json_files import json_lines

ROOT = Path(__file__).parents[2]
WRITTEN = {
    "run.yaml",
    "graders.py",
    "train.jsonl",
    "eval.jsonl",
    "model/config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch, printed) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    # Another test's folder may also have a graders.py, but a process has only one module of a name.
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if not Path(entry, "graders.py").exists()]
    )
    sys.modules.pop("graders", None)
    assert "megarl run 'deep/my first/run.yaml' " in printed("init", "deep/my first")
    yield tmp_path / "deep/my first"
    sys.modules.pop("graders", None)


def test_init_writes_all_files_of_a_run(folder: Path, printed) -> None:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == WRITTEN
    out = printed("train", "deep/my first/run.yaml", "--dry-run")
    assert f"2,000 rows of {folder}/train.jsonl, all read" in out
    assert "all prompts leave room" in out


def test_rows_of_init_are_right_and_held_out(folder: Path) -> None:
    train, held_out = (json_lines(folder / name) for name in ("train.jsonl", "eval.jsonl"))
    for row in train + held_out:
        expression = row["prompt"].removesuffix("=")
        totals = [eval(expression[:end]) % 10 for end in range(1, len(expression) + 1, 2)]
        assert row["answer"] == ",".join(map(str, totals))
    held_out_prompts = {row["prompt"] for row in held_out}
    assert len(held_out_prompts) == 128
    assert not held_out_prompts & {row["prompt"] for row in train}
    # otherwise reinforcement learning would have nothing to learn
    wrong = sum(row["demonstration"] != row["answer"] for row in train)
    assert 0.6 < wrong / len(train) < 0.8


def test_reward_of_init_is_the_share_of_right_totals(folder: Path) -> None:
    share_right = runpy.run_path(str(folder / "graders.py"))["share_right"]
    assert share_right("7,7,6,7,2", "7,7,6,7,2") == {"score": 1.0, "all_right": True}
    assert share_right(" 7,7,9\n", "7,7,6,7,2") == {"score": 0.4, "all_right": False}
    assert share_right("7,7,6,7,2,0,0,0,0,0", "7,7,6,7,2")["score"] == 0.5, (
        "more numbers than asked for must not pay"
    )
    assert share_right("", "7,7,6,7,2")["score"] == 0


def test_init_overwrites_nothing(tmp_path: Path, monkeypatch, refusal) -> None:
    (tmp_path / "graders.py").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert (
        refusal("init", ".")
        == "megarl: graders.py: is there already, and is not overwritten; remove it, or name "
        "another folder\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["graders.py"]
    assert (tmp_path / "graders.py").read_text() == "mine"
    assert "is a file, must be a folder" in refusal("init", "graders.py/first")


def test_model_of_init_is_that_of_the_quickstart() -> None:
    for path in (ROOT / "megarl/starter/files/model").iterdir():
        assert path.read_bytes() == (ROOT / "configs/models/tiny-llama" / path.name).read_bytes()
