"""Runs the documents' commands that train.

Each is unchanged, but followed by overrides that make it short (tests/documented.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import FIRST_DAY, FIRST_HOUR, LONG, OPENENV, OWN_RUN, ROOT, checkout, run, snippets
from json_files import write_json_lines
from run_tools import make_model, rows

pytestmark = pytest.mark.timeout(900)
# Runs in a user's own process.
WITH_TRANSFORMERS = (
    "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained('{}')"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("docs") / "megarl")


def printed_by(commands: dict[str, str], folder: Path) -> str:
    """Runs the commands one after another, and returns all that they print."""
    printed = ""
    for text, suffix in commands.items():
        completed = run(f"{text} {suffix}", folder)
        assert completed.returncode == 0, (
            f"{text} {suffix}\n{printed}{completed.stdout}\n{completed.stderr}"
        )
        printed += completed.stdout
    return printed


@pytest.mark.long
def test_what_a_newcomer_does_first(folder: Path) -> None:
    printed = printed_by(FIRST_DAY, folder)
    assert (
        "runs/quickstart: 2 steps" in printed
        and "weight audits           2 of 2 equal bit for bit" in printed
    )
    assert (
        "runs/quickstart/sft/hf is there already: nothing to do" in printed
        and "runs/quickstart is complete: 2 of 2 steps" in printed
    )
    assert "held-out scores of the checkpoint runs/quickstart/checkpoints/" in printed
    printed_by({f'python -c "{WITH_TRANSFORMERS.format("runs/quickstart/export")}"': ""}, folder)


@pytest.mark.long
def test_the_first_hour(folder: Path) -> None:
    """The commands run in order.

    The document's own files are there from the beginning, with a small model and rows in its
    alphabet.
    """
    begin = "megarl init first"
    printed_by({begin: FIRST_HOUR[begin]}, folder)
    make_model(folder / "first/my-model", max_position_embeddings=2048)
    [settings] = snippets("first_hour.md", "yaml")
    [graders] = snippets("first_hour.md", "python")
    for text in (settings, graders):
        (folder / text.split(maxsplit=2)[1].rstrip(";")).write_text(text)
    for name in ("questions", "held_out"):
        data = [{"question": f"{n}+{n}=", "solution": str(2 * n % 10)} for n in range(10)]
        write_json_lines(folder / f"first/{name}.jsonl", data)
    printed = printed_by(
        {text: suffix for text, suffix in FIRST_HOUR.items() if text != begin}, folder
    )
    for run_dir, steps in (("first", 2), ("first", 3), ("own", 2)):
        assert f"{folder}/first/runs/{run_dir}: {steps} steps" in printed
    assert (
        printed.count("best checkpoint ") == 3 and printed.count("the best by eval/pass@1: ") == 4
    )
    for exported in ("first/exported", "first/own-exported"):
        printed_by({f'python -c "{WITH_TRANSFORMERS.format(exported)}"': ""}, folder)
    assert all(
        (folder / f"first/runs/{name}/report.html").stat().st_size > 0 for name in ("first", "own")
    )


@pytest.mark.long
@pytest.mark.skipif(
    not (ROOT / "envs/openenv").is_dir(), reason="no interpreter with openenv (docs/agents.md)"
)
def test_an_environment_of_openenv(folder: Path) -> None:
    (folder / "envs").mkdir()
    (folder / "envs/openenv").symlink_to(ROOT / "envs/openenv")
    printed = printed_by(OPENENV, folder)
    assert "train.jsonl: 10000 rows" in printed and "runs/openenv: 2 steps" in printed
    assert all(
        row["rollout/env_steps"] > 0 and not row["rollout/failed_environment"]
        for row in rows(folder / "runs/openenv")
    )


@pytest.mark.matrix
def test_a_run_of_ones_own(folder: Path) -> None:
    """Uses the files of docs/own_run.md with a small model; then the document's other reward
    function.
    """
    make_model(folder / "checkpoints/my-model", max_position_embeddings=2048)
    [settings] = snippets("own_run.md", "yaml")
    [graders, graded] = snippets("own_run.md", "python")
    (folder / "run.yaml").write_text(settings)
    (folder / "graders.py").write_text(graders)
    (folder / "graded.py").write_text(graded)
    answers = [f"{n},{2 * n % 10}" for n in range(10)]
    data = [
        {"prompt": f"{n}+{n}=", "target": answers[n], "answer": answers[n], "weight": 0.5}
        for n in range(10)
    ]
    for name in ("train", "eval", "hard"):
        write_json_lines(folder / f"{name}.jsonl", data)
    printed_by(OWN_RUN, folder)
    assert [row["step"] for row in rows(folder / "runs/own")] == [0, 1, 2]
    printed_by(
        {
            "megarl train run.yaml run_dir=runs/graded reward.name=graded:graded": OWN_RUN[
                "megarl train run.yaml"
            ]
        },
        folder,
    )
    assert all("reward/right/mean" in row for row in rows(folder / "runs/graded"))
    printed_by({f'python -c "{WITH_TRANSFORMERS.format("runs/own/export")}"': ""}, folder)


@pytest.mark.matrix
def test_a_rollout_of_ones_own(folder: Path) -> None:
    """Uses the file of docs/environments.md with the quickstart's model and prompts."""
    [games] = [code for code in snippets("environments.md", "python") if "higher_or_lower" in code]
    (folder / "games.py").write_text(games)
    model = make_model(folder / "checkpoints/player")
    rollout = (
        f"model.path={model} run_dir=runs/game rollout.name=games:higher_or_lower "
        "rollout.args.max_guesses=7"
    )
    printed_by(
        {
            f"megarl train configs/quickstart.yaml {rollout}": LONG[
                "megarl train configs/calculator.yaml"
            ]
        },
        folder,
    )
    assert all(1 <= row["rollout/guesses"] <= 7 for row in rows(folder / "runs/game"))


@pytest.mark.matrix
def test_extensions_of_ones_own(folder: Path) -> None:
    """Uses all five files of docs/extending.md in one run, with a model of their family."""
    for text in snippets("extending.md", "python"):
        (folder / text.split(maxsplit=2)[1]).write_text(text)
    model = make_model(folder / "checkpoints/iquest_coder")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("LlamaForCausalLM", "IQuestCoderForCausalLM"))
    settings = [
        f"model.path={model}",
        "model.family=my_family",
        "run_dir=runs/own_parts",
        "weights.transport=my_transport:FileTransport",
    ]
    settings += [
        "algorithm.name=my_rule:soft",
        "rollout.name=my_rollout:second_try",
        "reward.name=my_reward:ends_well",
    ]
    printed_by(
        {
            f"megarl train configs/quickstart.yaml {' '.join(settings)}": LONG[
                "megarl train configs/calculator.yaml"
            ]
        },
        folder,
    )
    table = rows(folder / "runs/own_parts")
    assert len(table) == 2 and all(
        row["sync/audit_ok"] and row["rollout/tries"] >= 1 and "reward/right/mean" in row
        for row in table
    )


@pytest.mark.matrix
@pytest.mark.parametrize("command", LONG)
def test_what_takes_long(command: str, folder: Path) -> None:
    if "runs/quickstart/sft/hf" in command and not (folder / "runs/quickstart/sft/hf").exists():
        printed_by({"make quickstart": FIRST_DAY["make quickstart"]}, folder)
    printed_by({command: LONG[command]}, folder)
