"""Studies that compare whole runs: they refuse results of other settings, and signals end their
processes.
"""

from __future__ import annotations

import errno
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation, broken
from offpolicy import Study
from whole_runs import check_settings, note_settings

from megarl.config.errors import ConfigError
from megarl.config.load import load_config

CHAIN = "configs/offpolicy/chain.yaml"
GOLD = "configs/offpolicy/gold.yaml"

STUDY = """
import sys
import runpy
from pathlib import Path
sys.path.insert(0, "tests/studies")
import offpolicy as study

class Quick(study.Study):
    def prepare(self, cells):
        return []

study.Study = Quick
main = runpy.run_path("tests/studies/__main__.py")["main"]
raise SystemExit(main(["offpolicy", sys.argv[1], "--parts", "lags", "--seeds", "1", "--lanes", "2", "--runs", sys.argv[2]]))
"""

# Replaces the program: it stays until it gets a signal to stop, and records the number of signals.
PROGRAM = """
import signal, sys, time
from pathlib import Path
folder = Path([each for each in sys.argv if each.startswith("run_dir=")][0].removeprefix("run_dir="))
signal.signal(signal.SIGTERM, lambda *_: (folder / "told").open("a").write("SIGTERM\\n"))
signal.signal(signal.SIGINT, lambda *_: (folder / "told").open("a").write("SIGINT\\n"))
(folder / "begun").touch()
while not (folder / "told").exists():
    time.sleep(0.02)
sys.exit(143)
"""


def test_runs_with_other_settings_are_not_taken_for_a_studys(tmp_path: Path):
    check_settings(tmp_path, load_config(CHAIN))  # the folder is empty
    with pytest.raises(
        ConfigError, match=r"--runs configs/offpolicy/chain\.yaml: is a file, must be a folder"
    ):
        check_settings(Path(CHAIN), load_config(CHAIN))
    note_settings(tmp_path, load_config(CHAIN))
    check_settings(
        tmp_path,
        load_config(CHAIN, ["timeouts.weights_s=7", "run_dir=elsewhere", "checkpoint.every=3"]),
    )
    with pytest.raises(
        ConfigError,
        match=r"--runs \S+: the runs there were made with sft\.steps=400; name another folder",
    ):
        check_settings(tmp_path, load_config(CHAIN, ["sft.steps=4"]))
    with pytest.raises(
        ConfigError, match=r"data\.train\.source=synthetic:chain, .*name another folder"
    ):
        Study(GOLD, [], tmp_path, learned=True).prepare([])


def test_each_task_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch):
    import offpolicy as study

    folders = []
    main = runpy.run_path("tests/studies/__main__.py")["main"]
    monkeypatch.setattr(
        study, "run", lambda config, overrides, runs, **options: folders.append(runs)
    )
    for config in (CHAIN, GOLD):
        assert main(["offpolicy", config]) == 0
    assert folders == [Path("runs/offpolicy/chain"), Path("runs/offpolicy/gold")]


def test_mistakes_end_with_2_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    study = runpy.run_path("tests/studies/__main__.py")
    arguments = study["parse"](["staleness", "C", "--seeds", "1", "a=1"])
    assert (arguments.config, arguments.overrides, arguments.seeds) == ("C", ["a=1"], 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    for command, message in (
        (
            f"faults --keep {tmp_path}/full",
            f"--keep {tmp_path}/full: is there already, and is not empty; remove it, or name "
            "another",
        ),
        ("faults --minutes 0", "--minutes 0: must be above 0"),
        (f"staleness {CHAIN} --seeds 0", "--seeds 0: must be at least 1"),
        (f"offpolicy {CHAIN} --picture a.gif", "--picture a.gif: must end in .svg or .png"),
    ):
        assert study["main"](command.split()) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_still_applies(mutation: Mutation):
    text = Path(mutation.file).read_text()
    assert broken(mutation, text) != text
    with pytest.raises(RuntimeError, match=r"0 times, must have it once"):
        broken(mutation, text.replace(mutation.now, ""))
    assert all(Path("tests", name).is_file() for name in mutation.tests)


def test_a_damaged_result_is_named(tmp_path: Path):
    from offpolicy import Cell

    cell = Cell("rloo")
    study = Study(CHAIN, [], tmp_path, learned=False)
    study.folder(cell).mkdir()
    (study.folder(cell) / "result.json").write_text('{"curve": [')
    with pytest.raises(
        RuntimeError,
        match=r"rloo\S+/result\.json: is damaged \(.*\); remove \S+rloo\S+ to make it again",
    ):
        study.result(cell)


def test_a_full_disk_ends_no_study_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import offpolicy as study

    def full(*_: object) -> dict:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(study.Study, "prepare", lambda *_: [])
    monkeypatch.setattr(study.Study, "result", full)
    message = (
        r"^10 runs failed; the same command tries them again\naipo-\S+: \[Errno 28\] No space "
        r"left on device\n"
    )
    with pytest.raises(RuntimeError, match=message):
        study.run(CHAIN, [], tmp_path, ["lags"], 1, 1, False, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_runs_each_once_and_begins_no_others(
    number: signal.Signals, tmp_path: Path
):
    package = tmp_path / "path" / "megarl_program.py"
    package.parent.mkdir()
    package.write_text(PROGRAM)
    script = STUDY.replace(
        "import offpolicy as study\n",
        "import offpolicy as study\nimport whole_runs as runs\nruns.PROGRAM = "
        f"[{str(package)!r}]\n",
        1,
    )
    command = [sys.executable, "-c", script, str(Path(CHAIN).resolve()), str(tmp_path / "runs")]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        started = lambda: list((tmp_path / "runs").glob("*/begun"))  # noqa: E731
        deadline = time.monotonic() + 120
        while len(started()) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, number)  # like a terminal, to the whole process group
        assert process.wait(60) == (130 if number == signal.SIGINT else 143)
    finally:
        process.kill()
    assert len(started()) == 2
    assert [(mark.parent / "told").read_text() for mark in started()] == ["SIGTERM\n"] * 2
