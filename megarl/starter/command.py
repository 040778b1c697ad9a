"""`megarl init`: writes a folder with a first run.

It trains as it is. The lines that users change for their own runs are marked.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from megarl.base.files import folder_problems
from megarl.config.errors import ConfigError
from megarl.data.synthetic import Chain

DESCRIPTION = (
    "write a folder for a first run: a commented run.yaml, a reward function, some rows "
    "and a small model"
)
EXAMPLES = ["megarl init first"]
FILES = Path(__file__).parent / "files"
ROWS = {"train": 2000, "eval": 128}

FIRST_STEPS = """\
{folder}: {listed}

First steps, about five minutes on two cores:
  megarl run {run}  # a supervised warm start, because the model has no weights yet; then RL with the reward in graders.py
  megarl report {run_dir}  # one page of curves, times and samples
  megarl eval {run} --best  # the held-out score of the best checkpoint
Then change the lines marked OWN in {run}: your model, your data, your reward (docs/first_hour.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="where to write; existing files are never changed"
    )


def run(arguments: argparse.Namespace) -> None:
    """Writes the folder.

    Raises ConfigError before anything is written, if a file already exists or the folder cannot be
    written to.
    """
    folder = Path(arguments.folder)
    texts: dict[str, str] = {}
    for path in sorted(FILES.rglob("*.*")):
        name = str(path.relative_to(FILES))
        if "__" not in name:  # no __init__.py, no __pycache__
            texts[name] = path.read_text(encoding="utf-8")
    for split in ROWS:
        texts[f"{split}.jsonl"] = "".join(f"{json.dumps(row)}\n" for row in rows(split))
    problems = list(folder_problems("FOLDER ", arguments.folder))
    if problems:
        raise ConfigError(problems)
    for name in texts:
        if (folder / name).exists():
            problems.append(
                f"{folder / name}: is there already, and is not overwritten; remove it, or name "
                "another folder"
            )
    if problems:
        raise ConfigError(problems)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "x", encoding="utf-8") as file:
            file.write(text)
    files = ["run.yaml", "graders.py"]
    files += [f"{split}.jsonl ({count} rows)" for split, count in ROWS.items()]
    files.append("model/ (0.8 million parameters, no weights yet)")
    text = FIRST_STEPS.format(
        folder=folder,
        listed=", ".join(files),
        run=shlex.quote(str(folder / "run.yaml")),
        run_dir=shlex.quote(str(folder / "runs/first")),
    )
    print(text)


def rows(split: str) -> Iterator[dict[str, str]]:
    """Expressions of the synthetic task `chain`, with all running totals as the answer."""
    noisy = Chain(split, seed=0)
    right = Chain(split, seed=0, clamp_probability=0.0)
    for index in range(ROWS[split]):
        answer = str(right[index].demonstration)
        demonstration = str(noisy[index].demonstration)
        yield {"prompt": right[index].prompt, "answer": answer, "demonstration": demonstration}
