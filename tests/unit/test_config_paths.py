"""Relative paths in a configuration: ./ is relative to the YAML, and others to the working
directory. Ambiguous paths are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.keys import settings
from megarl.config.limits import attribute, find_callable
from megarl.config.load import dump_config, load_config

NEEDED = "model: {path: %s}\ndata: {train: {source: %s}}\n"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch) -> tuple[Path, Path]:
    """The folder of run.yaml, and another one: the working directory."""
    beside = tmp_path / "beside"
    here = tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    return beside, here


def config(beside: Path, text: str, *overrides: str):
    (beside / "run.yaml").write_text(text)
    return load_config(beside / "run.yaml", overrides)


def problem(beside: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(beside, text, *overrides)
    (only,) = caught.value.problems
    return only


def test_a_path_with_a_dot_is_relative_to_its_file_and_any_other_to_the_working_directory(
    folders,
) -> None:
    beside, here = folders
    more = "run_dir: ../runs/a\nreward: {name: './graders.py:f'}\n"
    more += "roles: {t: {role: teacher, path: ./t, sft: {model.path: ./m, sft.steps: 3}}}\n"
    more += (
        "rollout: {name: tool_calls, args: {tool: './tools.py:g', open: ./}}\nsft: {data: "
        "{source: ./a.jsonl}}\n"
    )
    found = config(
        beside,
        NEEDED % ("./model", "data/train.jsonl") + more,
        "model.tokenizer=./tokenizer",
        "sft.output=../out",
    )
    assert found.model.path == f"{beside}/model" and found.data.train.source == "data/train.jsonl"
    assert (
        found.run_dir == f"{beside.parent}/runs/a" and found.reward.name == f"{beside}/graders.py:f"
    )
    assert found.roles["t"].path == f"{beside}/t" and found.roles["t"].sft == {
        "model.path": f"{beside}/m",
        "sft.steps": 3,
    }
    assert found.rollout.args == {"tool": f"{beside}/tools.py:g", "open": "./"}, (
        "an argument that is no path of MegaRL stays unchanged"
    )
    assert found.sft.data.source == f"{beside}/a.jsonl"
    assert found.model.tokenizer == f"{here}/tokenizer" and found.sft.output == f"{here.parent}/out"


def test_the_paths_of_a_program_are_too_and_its_command_is_not(folders) -> None:
    beside, _ = folders
    args = "command: [./agent], folder: ./agents, readable: [./data, ../more, /usr, other]"
    found = config(
        beside,
        NEEDED % ("./model", "synthetic:chain") + f"rollout: {{name: program, args: {{{args}}}}}\n",
    ).rollout.args
    assert found["folder"] == f"{beside}/agents" and found["command"] == ["./agent"], (
        "the program starts in its folder"
    )
    assert found["readable"] == [f"{beside}/data", f"{beside.parent}/more", "/usr", "other"]


def test_the_record_of_a_run_means_the_same_wherever_it_is_read(folders) -> None:
    beside, here = folders
    first = config(beside, NEEDED % ("./model", "synthetic:chain") + "run_dir: ./run\n")
    (here / "config.yaml").write_text(dump_config(first))
    assert load_config(here / "config.yaml") == first and first.sft.output == f"{beside}/run/sft/hf"


def test_what_only_the_other_folder_has_is_refused(folders) -> None:
    beside, here = folders
    (beside / "train.jsonl").touch()
    assert problem(beside, NEEDED % ("m", "train.jsonl")) == (
        f"data.train.source=train.jsonl: there is none in the working directory {here}; for the "
        "one beside run.yaml write ./train.jsonl"
    )
    (here / "model").mkdir()
    assert problem(beside, NEEDED % ("./model", "synthetic:chain")) == (
        f"model.path=./model: there is none at {beside}/model, as ./ is the folder of run.yaml; "
        "for the one in the working directory "
        "write model"
    )


def test_what_both_folders_have_is_refused_unless_it_is_the_same(folders) -> None:
    beside, here = folders
    for folder in folders:
        (folder / "train.jsonl").touch()
    text = NEEDED % ("m", "train.jsonl")
    assert problem(beside, text) == (
        "data.train.source=train.jsonl: there is one in the working directory and another beside "
        "run.yaml: write ./train.jsonl for the "
        f"latter, or {here}/train.jsonl"
    )
    assert (
        config(beside, text.replace("train.jsonl", "./train.jsonl")).data.train.source
        == f"{beside}/train.jsonl"
    )
    assert (
        config(beside, NEEDED % ("m", "x.jsonl"), "data.train.source=train.jsonl").data.train.source
        == "train.jsonl"
    )
    (here / "train.jsonl").unlink()
    (here / "train.jsonl").symlink_to(beside / "train.jsonl")
    assert config(beside, text).data.train.source == "train.jsonl"


def test_so_are_modules(folders, monkeypatch) -> None:
    beside, here = folders
    monkeypatch.setattr("sys.path", ["/", *__import__("sys").path])
    (beside / "paths_graders.py").write_text("def f(text): return 1\n")
    text = NEEDED % ("m", "synthetic:chain") + "reward: {name: 'paths_graders:f'}\n"
    assert problem(beside, text) == (
        "reward.name=paths_graders:f: there is none in the working directory; for the one beside "
        "run.yaml write ./paths_graders.py:f"
    )
    (here / "paths_graders.py").write_text("def f(text): return 0\n")
    assert (
        f"another module of this name, {here}/paths_graders.py; for the one beside run.yaml write "
        "./paths_graders.py:f" in problem(beside, text)
    )
    assert (
        config(beside, text.replace("paths_graders:", "./paths_graders.py:")).reward.name
        == f"{beside}/paths_graders.py:f"
    )


def test_a_file_of_python_may_import_its_neighbours_and_is_never_taken_for_another(folders) -> None:
    beside, here = folders
    (beside / "paths_neighbour.py").write_text("VALUE = 7\n")
    (beside / "paths_own.py").write_text(
        "from paths_neighbour import VALUE\ndef f(): return VALUE\n"
    )
    assert (
        find_callable(f"{beside}/paths_own.py:f", "s=v")()
        == attribute(f"{beside}/paths_own.py:f")()
        == 7
    )
    (here / "paths_own.py").write_text("def f(): return 8\n")
    with pytest.raises(
        ConfigError, match="Python finds another module of that name, .*beside/paths_own.py; rename"
    ):
        find_callable(f"{here}/paths_own.py:f", "s=v")
    with pytest.raises(ConfigError, match="s=v: cannot be imported: no such file"):
        find_callable(f"{here}/paths_none.py:f", "s=v")


def test_every_setting_that_speaks_of_a_folder_or_file_is_known_as_a_path() -> None:
    speaking = {
        key
        for key, each in settings().items()
        if each.type is str and each.meaning.startswith(("folder", "HF checkpoint", "config.json"))
    }
    sources = {key for key in settings() if key.endswith(".source")}
    assert all(settings()[key].path in ("input", "output") for key in speaking | sources)
    assert {json.dumps(each.path) for each in settings().values()} == {
        '""',
        '"input"',
        '"output"',
        '"module"',
    }
