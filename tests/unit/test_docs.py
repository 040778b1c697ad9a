"""The documents' commands and links.

A test runs each command unchanged, or tests/documented.py lists it with the reason.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from documented import (
    DOCUMENTS,
    FENCE,
    LISTED,
    QUICK,
    ROOT,
    Printed,
    checkout,
    commands,
    commands_of,
    first_stale,
    printed,
    run,
    snippets,
)

from megarl.cli import EXAMPLES, main
from megarl.config.schema import AsyncConfig

pytestmark = pytest.mark.usefixtures("hub_offline")  # dry runs would read the hub's rows

COMMANDS = {command.text: command.location for command in commands()}
# the examples in megarl --help
HELP = [text for examples in EXAMPLES.values() for text in examples]
COMPUTING = [
    text
    for text in dict.fromkeys((*COMMANDS, *HELP))
    if text not in LISTED and QUICK.fullmatch(text)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("docs") / "megarl")


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    unlisted = [
        f"{place}: {text}"
        for text, place in COMMANDS.items()
        if text not in LISTED and not QUICK.fullmatch(text)
    ]
    assert not unlisted, (
        f"say in tests/documented.py how these are run, or why they are not: {unlisted}"
    )
    assert [text for text in LISTED if text not in COMMANDS] == [], "in no document any more"


@pytest.mark.parametrize("command", COMPUTING)
def test_documented_command_succeeds(command: str, folder: Path, monkeypatch, capsys) -> None:
    """Runs megarl's own commands in this process, which saves their imports.

    None of them starts another process.
    """
    program, *arguments = shlex.split(command)
    if program == "megarl":
        monkeypatch.chdir(folder)
        try:
            status = main(arguments)
        except SystemExit as end:  # --help
            status = end.code
        assert status == 0, f"{COMMANDS.get(command, 'megarl --help')}: {capsys.readouterr().err}"
    else:
        completed = run(command, folder)
        assert completed.returncode == 0, f"{COMMANDS[command]}: {completed.stderr}"
    picture = re.search(r"--picture (\S+)", command)
    if picture:
        assert (folder / picture[1]).stat().st_size > 0


PRINTED = list(printed())


@pytest.mark.parametrize("block", PRINTED, ids=lambda block: block.location)
def test_printed_plan_equals_the_output(block: Printed, folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    main(shlex.split(block.command)[1:])
    stale = first_stale(block.lines, capsys.readouterr().out.splitlines())
    assert stale is None, f"{block.location}: `{block.command}` does not print there: {stale}"


def test_printed_plans_are_compared_by_lines() -> None:
    assert {block.location.split(":")[0] for block in PRINTED} >= {"cluster.md"}
    output = ["a", "b", "c", "d"]
    for lines in (["a", "…"], ["…", "c", "d"], ["a", "…", "d"], output):
        assert first_stale(lines, output) is None
    assert first_stale(["a", "c", "…"], output) == "c"
    assert first_stale(["…", "d", "…", "b"], output) == "b"
    assert first_stale(["…", "c"], output) == "the end, before 'd'"


def test_program_is_always_called_by_the_same_name() -> None:
    """Only README.md says, once, that the program is in .venv/bin, and how to activate it."""
    lines = [
        f"{path.name}: {line}"
        for path in DOCUMENTS
        for line in path.read_text().splitlines()
        if ".venv/bin/megarl" in line
    ]
    assert len(lines) == 1 and lines[0].startswith("README.md")


def test_readme_names_the_commands_of_ci() -> None:
    """`make test` stands beside `make quickstart`, in the README's first block of commands."""
    readme = (ROOT / "README.md").read_text()
    first = FENCE.search(readme[readme.index("```sh") :])
    assert first is not None
    assert {"make quickstart", "make test"} <= {
        command.text for command in commands_of("README.md", first[0])
    }
    called = re.findall(r"make [\w-]+", (ROOT / ".ci/run").read_text())
    assert called == ["make check", "make test"]
    assert all(f"`{command}`" in readme for command in called)


def test_documents_begin_with_the_default_asynchrony() -> None:
    defaults = AsyncConfig()
    text = (ROOT / "docs/asynchrony.md").read_text()
    assert (
        f"Begin with the defaults, `capacity: {defaults.capacity}` and `partial_rollout: "
        f"{defaults.partial_rollout}`." in text
    )


def test_commands_of_blocks_and_of_prose() -> None:
    text = """
```sh
# Only said.
megarl  plan x.yaml   # why
cd somewhere
```
Call `make quickstart` or `megarl plan
y.yaml`, not `megarl plan` or `megarl`; see `plan.gpus`.
```
megarl sft z.yaml
4 GiB
```
"""
    assert [(command.text, command.location) for command in commands_of("a.md", text)] == [
        ("megarl plan x.yaml", "a.md:4"),
        ("cd somewhere", "a.md:5"),
        ("megarl sft z.yaml", "a.md:10"),
        ("make quickstart", "a.md:7"),
        ("megarl plan y.yaml", "a.md:7"),
    ]


def test_ten_lines_of_the_readme_pass_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed
) -> None:
    """With the overrides for one GPU, a node and Slurm, on a machine without GPUs and without the
    model. Its shape is in configs/models.
    """
    readme = (ROOT / "README.md").read_text()
    [settings] = snippets("../README.md", "yaml")
    assert len([line for line in settings.splitlines() if not line.startswith("#")]) == 10
    ways = re.findall(
        r"^(?:megarl train|sbatch .* slurm/run.sbatch) run\.yaml(?! --dry-run)(.*)$",
        readme,
        re.MULTILINE,
    )
    assert len(ways) == 3
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(settings)
    shape = f"model.spec={ROOT}/configs/models/qwen2.5-1.5b"
    for overrides in ways:
        out = printed("train", "run.yaml", *overrides.split(), "--dry-run", shape)
        assert "fits       yes" in out and "data.train: openai/gsm8k, on the hub" in out
    assert main(["plan", "run.yaml", "--search", "--gpus", "8", shape]) == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", document.read_text()
    ):
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
            }, f"{document.name}: {target}#{anchor}"
