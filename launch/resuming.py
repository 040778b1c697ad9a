"""Finds the checkpoint that a run resumes from, and checks that it is usable before anything
starts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.plan.checkpoints import (
    CheckpointError,
    check_checkpoint_files,
    checkpoint_path,
    complete_checkpoints,
)
from megarl.rollouts.buffer import Ledger

# folder in run_dir for an export's links and logs; users may export to run_dir/export
EXPORTING = "exporting"
_LINKED_AGAIN = 5  # attempts, since the run may remove checkpoints meanwhile


@dataclass(frozen=True)
class Resume:
    """The point that a run resumes from."""

    step: int = 0
    checkpoint: str = ""  # folder; empty for a fresh run


def latest_checkpoint(run_dir: Path | str) -> Resume:
    found = complete_checkpoints(run_dir)
    return Resume(found[-1][0], str(found[-1][1])) if found else Resume()


def check_resume_point(run_dir: Path | str, resume: Resume) -> None:
    """Raises ConfigError if a file of the checkpoint is missing or visibly damaged.

    The message names the file and says what to do.
    """
    if not resume.checkpoint:
        return
    if problem := _damage(Path(resume.checkpoint)):
        older = [path for step, path in complete_checkpoints(run_dir) if step < resume.step]
        then = (
            f"{older[-1].name} serves then"
            if older
            else "there is no older one, so the run begins anew then"
        )
        raise ConfigError(
            f"{checkpoint_path(run_dir, resume.step)}: {problem}. Move this folder away: {then}"
        )


def _damage(folder: Path) -> str:
    """A problem with the checkpoint; empty if there is none.

    Contents of tensor files are not checked: they are hashed when they are read.
    """
    try:
        check_checkpoint_files(folder)
        Ledger.load(folder)
    except CheckpointError as error:
        return error.problem
    except RuntimeError as error:
        return f"the ledger of prompts is damaged or missing ({error.__cause__})"
    return ""


@contextlib.contextmanager
def held_checkpoint(run_dir: Path, step: int | None) -> Iterator[Resume]:
    """Holds a checkpoint (the newest, or that of `step`) as a folder of hard links to its files.

    So it stays complete while it is read, even if its run removes it. Raises ConfigError if there
    is none.

    On a file system without hard links, yields the checkpoint itself, which may be removed
    meanwhile, and prints a warning.
    """
    for left in (run_dir / EXPORTING).glob("step_*"):  # left by a killed export
        shutil.rmtree(left)
    held = _linked(run_dir, step)
    try:
        yield held
    finally:
        shutil.rmtree(_links(run_dir, held.step), ignore_errors=True)


def _links(run_dir: Path, step: int) -> Path:
    return run_dir / EXPORTING / checkpoint_path(run_dir, step).name


def _linked(run_dir: Path, step: int | None) -> Resume:
    for _ in range(_LINKED_AGAIN):
        found = dict(complete_checkpoints(run_dir))
        if not found or (step is not None and step not in found):
            there = (
                f"there are those of steps {', '.join(map(str, found))}"
                if found
                else "there is none at all"
            )
            raise ConfigError(
                f"run_dir={run_dir}: no checkpoint{'' if step is None else f' of step {step}'}; "
                f"{there}"
            )
        chosen = max(found) if step is None else step
        links = _links(run_dir, chosen)
        links.mkdir(parents=True)
        try:
            for file in found[chosen].rglob("*"):
                link = links / file.relative_to(found[chosen])
                link.mkdir() if file.is_dir() else os.link(file, link)
        except FileNotFoundError:  # the run has removed the checkpoint meanwhile
            shutil.rmtree(links)
            continue
        except OSError as error:
            unsafe = (
                f"hard links cannot be made there ({error.strerror}), so a run that removes "
                "it now would spoil the export"
            )
            print(f"{found[chosen]}: {unsafe}", flush=True)
            return Resume(chosen, str(found[chosen]))
        return Resume(chosen, str(links))
    raise ConfigError(
        f"run_dir={run_dir}: its checkpoints come and go faster than they can be held; stop the "
        "run, or raise checkpoint.keep"
    )
