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
EXPORT_FOLDER = "exporting"
_LINK_ATTEMPTS = 5  # attempts, since the run may remove checkpoints meanwhile


@dataclass(frozen=True)
class Resume:
    """The point that a run resumes from."""

    step: int = 0
    checkpoint: str = ""  # folder; empty for a fresh run


def latest_checkpoint(run_dir: Path | str) -> Resume:
    checkpoints = complete_checkpoints(run_dir)
    if checkpoints:
        return Resume(checkpoints[-1][0], str(checkpoints[-1][1]))
    return Resume()


def check_resume_point(run_dir: Path | str, resume: Resume) -> None:
    """Raises ConfigError if a file of the checkpoint is missing or visibly damaged.

    The message names the file and says what to do.
    """
    if not resume.checkpoint:
        return
    problem = _damage(Path(resume.checkpoint))
    if problem:
        older = [path for step, path in complete_checkpoints(run_dir) if step < resume.step]
        result = "there is no older one, so the run begins anew then"
        if older:
            result = f"{older[-1].name} serves then"
        raise ConfigError(
            f"{checkpoint_path(run_dir, resume.step)}: {problem}. Move this folder away: {result}"
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
def linked_checkpoint(run_dir: Path, step: int | None) -> Iterator[Resume]:
    """Holds a checkpoint (the newest, or that of `step`) as a folder of hard links to its files.

    So it stays complete while it is read, even if its run removes it. Raises ConfigError if there
    is none.

    On a file system without hard links, yields the checkpoint itself, which may be removed
    meanwhile, and prints a warning.
    """
    for leftover in (run_dir / EXPORT_FOLDER).glob("step_*"):  # left by a killed export
        shutil.rmtree(leftover)
    resume = _link_checkpoint(run_dir, step)
    try:
        yield resume
    finally:
        shutil.rmtree(_links(run_dir, resume.step), ignore_errors=True)


def _links(run_dir: Path, step: int) -> Path:
    return run_dir / EXPORT_FOLDER / checkpoint_path(run_dir, step).name


def _link_checkpoint(run_dir: Path, step: int | None) -> Resume:
    for _ in range(_LINK_ATTEMPTS):
        checkpoints = dict(complete_checkpoints(run_dir))
        if not checkpoints or (step is not None and step not in checkpoints):
            alternatives = "there is none at all"
            if checkpoints:
                alternatives = f"there are those of steps {', '.join(map(str, checkpoints))}"
            raise ConfigError(
                f"run_dir={run_dir}: no checkpoint{'' if step is None else f' of step {step}'}; "
                f"{alternatives}"
            )
        chosen_step = max(checkpoints) if step is None else step
        links = _links(run_dir, chosen_step)
        links.mkdir(parents=True)
        try:
            for file in checkpoints[chosen_step].rglob("*"):
                link = links / file.relative_to(checkpoints[chosen_step])
                link.mkdir() if file.is_dir() else os.link(file, link)
        except FileNotFoundError:  # the run has removed the checkpoint meanwhile
            shutil.rmtree(links)
            continue
        except OSError as error:
            unsafe = (
                f"hard links cannot be made there ({error.strerror}), so a run that removes "
                "it now would spoil the export"
            )
            print(f"{checkpoints[chosen_step]}: {unsafe}", flush=True)
            return Resume(chosen_step, str(checkpoints[chosen_step]))
        return Resume(chosen_step, str(links))
    raise ConfigError(
        f"run_dir={run_dir}: its checkpoints come and go faster than they can be held; stop the "
        "run, or raise checkpoint.keep"
    )
