"""Relative paths in a configuration: ./ is relative to the YAML, and others to the working
directory. Ambiguous paths are refused.
"""

from __future__ import annotations

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
    working = tmp_path / "working"
    for folder in (beside, working):
        folder.mkdir()
    monkeypatch.chdir(working)
    return beside, working


def config(beside: Path, text: str, *overrides: str):
    (beside / "run.yaml").write_text(text)
    return load_config(beside / "run.yaml", overrides)


def problem(beside: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(beside, text, *overrides)
    (only,) = caught.value.problems
    return only


def test_dotted_path_is_relative_to_its_file(folders) -> None:
    """Any other path is relative to the working directory."""
    beside, working = folders
    optional = "run_dir: ../runs/a\nreward: {name: './graders.py:f'}\n"
    optional += "roles: {t: {role: teacher, path: ./t, sft: {model.path: ./m, sft.steps: 3}}}\n"
    optional += (
        "rollout: {name: tool_calls, args: {tool: './tools.py:g', open: ./}}\nsft: {data: "
        "{source: ./a.jsonl}}\n"
    )
    resolved = config(
        beside,
        NEEDED % ("./model", "data/train.jsonl") + optional,
        "model.tokenizer=./tokenizer",
        "sft.output=../out",
    )
    assert resolved.model.path == f"{beside}/model"
    assert resolved.data.train.source == "data/train.jsonl"
    assert resolved.run_dir == f"{beside.parent}/runs/a"
    assert resolved.reward.name == f"{beside}/graders.py:f"
    assert resolved.roles["t"].path == f"{beside}/t"
    assert resolved.roles["t"].sft == {"model.path": f"{beside}/m", "sft.steps": 3}
    # an argument that is no path of MegaRL stays unchanged
    assert resolved.rollout.args == {"tool": f"{beside}/tools.py:g", "open": "./"}
    assert resolved.sft.data.source == f"{beside}/a.jsonl"
    assert resolved.model.tokenizer == f"{working}/tokenizer"
    assert resolved.sft.output == f"{working.parent}/out"


def test_dotted_paths_of_a_program_but_not_its_command(folders) -> None:
    beside, _ = folders
    args = "command: [./agent], folder: ./agents, readable: [./data, ../more, /usr, other]"
    text = NEEDED % ("./model", "synthetic:chain")
    text += f"rollout: {{name: program, args: {{{args}}}}}\n"
    resolved = config(beside, text).rollout.args
    assert resolved["folder"] == f"{beside}/agents"
    assert resolved["command"] == ["./agent"], "the program starts in its folder"
    assert resolved["readable"] == [f"{beside}/data", f"{beside.parent}/more", "/usr", "other"]


def test_recorded_config_reads_alike_in_any_folder(folders) -> None:
    beside, working = folders
    first = config(beside, NEEDED % ("./model", "synthetic:chain") + "run_dir: ./run\n")
    (working / "config.yaml").write_text(dump_config(first))
    assert load_config(working / "config.yaml") == first
    assert first.sft.output == f"{beside}/run/sft/hf"


def test_input_in_the_wrong_folder_is_refused(folders) -> None:
    beside, working = folders
    (beside / "train.jsonl").touch()
    assert problem(beside, NEEDED % ("m", "train.jsonl")) == (
        f"data.train.source=train.jsonl: there is none in the working directory {working}; for the "
        "one beside run.yaml write ./train.jsonl"
    )
    (working / "model").mkdir()
    assert problem(beside, NEEDED % ("./model", "synthetic:chain")) == (
        f"model.path=./model: there is none at {beside}/model, as ./ is the folder of run.yaml; "
        "for the one in the working directory "
        "write model"
    )


def test_input_in_both_folders_is_refused(folders) -> None:
    """Unless it is the same file."""
    beside, working = folders
    for folder in folders:
        (folder / "train.jsonl").touch()
    text = NEEDED % ("m", "train.jsonl")
    assert problem(beside, text) == (
        "data.train.source=train.jsonl: there is one in the working directory and another beside "
        "run.yaml: write ./train.jsonl for the "
        f"latter, or {working}/train.jsonl"
    )
    assert (
        config(beside, text.replace("train.jsonl", "./train.jsonl")).data.train.source
        == f"{beside}/train.jsonl"
    )
    assert (
        config(beside, NEEDED % ("m", "x.jsonl"), "data.train.source=train.jsonl").data.train.source
        == "train.jsonl"
    )
    (working / "train.jsonl").unlink()
    (working / "train.jsonl").symlink_to(beside / "train.jsonl")
    assert config(beside, text).data.train.source == "train.jsonl"


def test_module_in_the_wrong_folder_or_both_is_refused(folders, monkeypatch) -> None:
    beside, working = folders
    monkeypatch.setattr("sys.path", ["/", *__import__("sys").path])
    (beside / "paths_graders.py").write_text("def f(text): return 1\n")
    text = NEEDED % ("m", "synthetic:chain") + "reward: {name: 'paths_graders:f'}\n"
    assert problem(beside, text) == (
        "reward.name=paths_graders:f: there is none in the working directory; for the one beside "
        "run.yaml write ./paths_graders.py:f"
    )
    (working / "paths_graders.py").write_text("def f(text): return 0\n")
    assert (
        f"another module of this name, {working}/paths_graders.py; for the one beside run.yaml "
        "write ./paths_graders.py:f" in problem(beside, text)
    )
    assert (
        config(beside, text.replace("paths_graders:", "./paths_graders.py:")).reward.name
        == f"{beside}/paths_graders.py:f"
    )


def test_python_file_imports_neighbours_and_keeps_its_name(folders) -> None:
    """A second file of the same name is refused, as Python would import the first again."""
    beside, working = folders
    (beside / "paths_neighbour.py").write_text("VALUE = 7\n")
    (beside / "paths_own.py").write_text(
        "from paths_neighbour import VALUE\ndef f(): return VALUE\n"
    )
    assert (
        find_callable(f"{beside}/paths_own.py:f", "s=v")()
        == attribute(f"{beside}/paths_own.py:f")()
        == 7
    )
    (working / "paths_own.py").write_text("def f(): return 8\n")
    with pytest.raises(
        ConfigError, match="Python finds another module of that name, .*beside/paths_own.py; rename"
    ):
        find_callable(f"{working}/paths_own.py:f", "s=v")
    with pytest.raises(ConfigError, match="s=v: cannot be imported: no such file"):
        find_callable(f"{working}/paths_none.py:f", "s=v")


def test_settings_that_name_files_are_paths() -> None:
    for key, setting in settings().items():
        assert setting.path in ("", "input", "output", "module")
        names_file = setting.meaning.startswith(("folder", "HF checkpoint", "config.json"))
        if key.endswith(".source") or (setting.type is str and names_file):
            assert setting.path in ("input", "output"), key
