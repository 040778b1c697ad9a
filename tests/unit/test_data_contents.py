"""A resumed run compares the contents that it learns from, wherever they are."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from json_files import write_json_lines

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.data.check import check_data, digests_of
from megarl.data.contents import FILE, compare_contents, contents_of, own_code, read_contents
from megarl.launch.commands import sft
from megarl.plan.resolve import resolve
from megarl.plan.weights import with_date

TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"
ROWS = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(3)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture
def run_dir(tmp_path: Path, model: Path) -> Path:
    """The folder of a run that began with ROWS."""
    assert run_with(tmp_path, ROWS, resumed=False) == []
    return tmp_path / "run"


def written(folder: Path, rows: list[dict[str, str]], suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_json_lines(path, rows)
    return path


def run_with(
    folder: Path,
    rows: list[dict[str, str]],
    *overrides: str,
    suffix: str = ".jsonl",
    resumed: bool = True,
) -> list[str]:
    """The lines of a run that begins or resumes with `rows` in a file."""
    file = folder / "run.yaml"
    file.write_text(
        f"model: {{path: {folder}/model}}\ndata: {{train: {{source: "
        f"{written(folder, rows, suffix)}}}}}\n"
    )
    config = load_config(file, overrides)
    config = with_date(config, "train")
    contents = contents_of(config, digests_of(check_data(config, None, "train")), rewarded=True)
    accept = config.checkpoint.accept_changed_data
    lines = []
    if resumed:
        earlier = read_contents(folder / "run")
        lines = compare_contents(earlier, contents, accept, "the run", "use another run_dir")
    contents.write(folder / "run")
    return lines


def refusal(folder: Path, rows: list[dict[str, str]], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_with(folder, rows, *overrides)
    return caught.value.problems[0].partition(". ")[0]


def test_same_rows_elsewhere_resume(run_dir: Path) -> None:
    for suffix in (".jsonl", ".parquet"):
        assert run_with(run_dir.parent, ROWS, suffix=suffix) == []


def test_same_rows_in_arrow_resume_under_an_own_reward(run_dir: Path) -> None:
    folder = run_dir.parent
    rows = [
        {"question": "1", "answer": "2", "tools": [{"name": "a", "city": "Rome"}]},
        {"answer": "3", "question": "2", "tools": [{"name": "b", "zone": "+1"}]},
    ]
    grader = folder / "grading_of_arrow_rows.py"
    grader.write_text("def grade(response, row):\n    return 1.0\n", encoding="utf-8")
    run_with(folder, rows, f"reward.name={grader}:grade", resumed=False)
    assert run_with(folder, rows, f"reward.name={grader}:grade", suffix=".parquet") == []


def test_changed_rows_are_refused_with_the_change(run_dir: Path) -> None:
    new_row = {"question": "7+1=", "answer": "8"}
    folder = run_dir.parent
    assert (
        refusal(folder, [new_row, *ROWS])
        == "data.train: row 0 is the first that differs; 1 row more"
    )
    assert refusal(folder, [*ROWS, new_row, new_row]) == "data.train: 2 rows more at the end"
    assert refusal(folder, ROWS[:2]) == "data.train: 1 row fewer at the end"
    assert (
        refusal(folder, [ROWS[0], new_row, ROWS[2]])
        == "data.train: row 1 is the first that differs"
    )
    assert (
        refusal(folder, [ROWS[0], ROWS[2], ROWS[1]])
        == "data.train: row 1 is the first that differs"
    )
    assert (
        refusal(folder, ROWS, "data.train.prompt_template='Q: {prompt}'")
        == "data.train: row 0 is the first that differs"
    )


def test_accepted_changed_rows_are_reported_once(run_dir: Path) -> None:
    folder = run_dir.parent
    (line,) = run_with(folder, ROWS[1:], "checkpoint.accept_changed_data=true")
    assert line.startswith("Data: data.train: row 0 is the first that differs; 1 row fewer")
    assert run_with(folder, ROWS[1:]) == []


def test_changed_template_tokenizer_and_reward_are_named(run_dir: Path, model: Path) -> None:
    folder = run_dir.parent
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert refusal(folder, ROWS) == "the chat template or its date differs"
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "0"}))
    assert refusal(folder, ROWS) == "the tokenizer differs"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    grader = folder / "own_grader.py"
    grader.write_text("def score(response, answer):\n    return 1.0\n")
    assert "reward.name: what it names differs" in refusal(
        folder, ROWS, f"reward.name={grader}:score"
    )
    name = [f"reward.name={grader}:score"]
    run_with(folder, ROWS, *name, "checkpoint.accept_changed_data=true")
    assert run_with(folder, ROWS, *name) == []
    grader.write_text("def score(response, answer):\n    return 0.0\n")
    assert "a file of your own code" in refusal(folder, ROWS, *name)


def test_run_of_an_earlier_version_resumes_with_a_note(run_dir: Path) -> None:
    (run_dir / FILE).unlink()
    (line,) = run_with(run_dir.parent, [*ROWS, ROWS[0]])
    assert "it is not known" in line and (run_dir / FILE).exists()


def test_synthetic_task_of_another_seed_or_kind_is_refused(run_dir: Path) -> None:
    folder = run_dir.parent
    task = ["data.train.source=synthetic:chain"]
    run_with(folder, ROWS, *task, resumed=False)
    assert run_with(folder, ROWS, *task) == []
    assert (
        refusal(folder, ROWS, "data.train.source=synthetic:summary")
        == "data.train: row 0 is the first that differs"
    )
    assert refusal(folder, ROWS, *task, "seed=1").startswith("data.train: row ")


def test_changed_helper_of_own_code_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_dir.parent
    monkeypatch.setattr(sys, "path", [*sys.path])
    grader = folder / "grader_with_helpers.py"
    grader.write_text(
        "def grade(response, answer):\n    from helpers_of_grader.sums import total\n    return "
        "total(answer)\n"
    )
    package = folder / "helpers_of_grader"
    package.mkdir()
    (package / "sums.py").write_text(
        "from . import digits\ndef total(answer):\n    return digits.ONE\n"
    )
    (package / "digits.py").write_text("import os, json, torch\nONE = 1.0\n")
    (package / "unused.py").write_text("")
    reward = [f"reward.name={grader}:grade"]
    run_with(folder, ROWS, *reward, resumed=False)
    (package / "unused.py").write_text("x = 1\n")
    assert run_with(folder, ROWS, *reward) == []
    (package / "digits.py").write_text("ONE = 2.0\n")
    assert (
        refusal(folder, ROWS, *reward)
        == "reward.name: what it names differs, or a file of your own code behind it"
    )


def test_own_code_of_a_package_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_graders"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import *\nimport numpy, megarl.cli\n")
    (package / "inner.py").write_text(
        "def grade(response):\n    import missing_module\n    from ...above import nothing\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    files = own_code(importlib.import_module("package_of_graders"))
    assert sorted(path.name for path in files) == ["__init__.py", "inner.py"]


def test_changed_rollout_and_algorithm_are_refused(run_dir: Path) -> None:
    folder = run_dir.parent
    module = folder / "own_rollout_and_rule.py"
    module.write_text("def play(): ...\ndef rule(): ...\n")
    names = [f"rollout.name={module}:play", f"algorithm.name={module}:rule"]
    run_with(folder, ROWS, *names, resumed=False)
    module.write_text("def play(): ...\ndef rule(): pass\n")
    with pytest.raises(ConfigError) as caught:
        run_with(folder, ROWS, *names)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "algorithm.name",
        "rollout.name",
    ]


def test_run_keeps_its_first_date(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a template that prints the date, as Llama 3's does."""
    folder = run_dir.parent
    template = (
        "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content "
        "}}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    chat = "data.train.prompt_template=chat"
    run_with(folder, ROWS, chat, "model.chat_template.date=2024-07-26", resumed=False)
    assert run_with(folder, ROWS, chat, "model.chat_template.date=2024-07-26") == []
    with pytest.raises(ConfigError) as caught:
        run_with(folder, ROWS, chat, "model.chat_template.date=2024-07-27")
    assert [problem.partition(".")[0] for problem in caught.value.problems] == [
        "the chat template or its date differs",
        "data",
    ]


def test_finished_warm_start_is_refused_if_its_rows_changed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "warm"
    output.mkdir()
    (output / "config.json").write_text("{}")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {model}, random_init: true, dtype: float32}}\n"
        f"run_dir: {tmp_path}/run\n"
        f"data: {{train: {{source: {tmp_path}/rows.jsonl}}}}\n"
        f"sft: {{steps: 1, batch_size: 1, output: {output}}}\n"
        "rollout: {max_tokens: 8}\n"
        "cluster: {gpu: cpu}\n"
    )

    def warm_start(rows: list[dict[str, str]], *overrides: str) -> str:
        written(tmp_path, rows, ".jsonl")
        sft(resolve(load_config(file, overrides), "sft"))
        return capsys.readouterr().out

    assert "it is not known" in warm_start(ROWS)
    config = load_config(file)
    digests = digests_of(check_data(config, None, "sft"))
    contents_of(config, digests, rewarded=False).write(output)
    assert (
        warm_start(ROWS)
        == f"{output} is there already: nothing to do. Remove it to train it again.\n"
    )
    with pytest.raises(ConfigError) as caught:
        warm_start(ROWS[1:])
    assert caught.value.problems == [
        "data.train: row 0 is the first that differs; 1 row fewer. The warm start in "
        f"sft.output={output} began otherwise: restore that, remove it to train it again, or set "
        "checkpoint.accept_changed_data=true: some prompts are then trained twice or never"
    ]
    accepted = warm_start(ROWS[1:], "checkpoint.accept_changed_data=true")
    assert accepted.startswith("Data: data.train: row 0 is the first that differs; 1 row fewer")
