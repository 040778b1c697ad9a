"""Finds, names and removes a run's checkpoints. Needs no torch, since the launcher uses it too."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

STATE = "state.json"  # in a checkpoint: among others the step that it was saved after
_NAME = re.compile(r"step_(\d{6,})")


def checkpoint_path(run_dir: Path | str, step: int) -> Path:
    """The folder of the checkpoint after `step` steps, which is of weight version `step`."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def export_path(run_dir: Path | str, step: int) -> Path:
    """The folder of the weights after `step` steps as an HF checkpoint (checkpoint.hf_every)."""
    return Path(run_dir) / "hf" / checkpoint_path(run_dir, step).name


def complete_checkpoints(run_dir: Path | str) -> list[tuple[int, Path]]:
    """(step, folder) of every whole checkpoint, oldest first.

    A checkpoint gets its name by a rename after its last byte is written, so a folder of this name is whole. Folders with another step's
    content are left out: see `check_names`.
    """
    return sorted((step, path) for step, path in _named_checkpoints(run_dir) if _saved_step(path) in (step, None))


def check_names(run_dir: Path | str) -> Iterable[str]:
    """Problems with checkpoints that were copied or renamed: their names are not the steps that they were saved after. A run that went on
    from one would count steps that it never made, and train on prompts twice."""
    found = complete_checkpoints(run_dir)
    for step, path in sorted(_named_checkpoints(run_dir)):
        if (saved := _saved_step(path)) not in (step, None):
            then = f"{found[-1][1].name} is the newest then" if found else "there is no other"
            yield f"{path}: was saved after step {saved}, not {step} ({STATE}), so it was copied or renamed. Move this folder away: {then}"


def _named_checkpoints(run_dir: Path | str) -> Iterator[tuple[int, Path]]:
    folder = Path(run_dir) / "checkpoints"
    return ((int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name)))


def _saved_step(path: Path) -> int | None:
    """The step that a checkpoint was saved after; None if it cannot be read: whoever reads the rest will say that it is damaged."""
    try:
        return int(json.loads((path / STATE).read_bytes())["state"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def exported_steps(run_dir: Path | str) -> set[int]:
    return {int(match[1]) for path in (Path(run_dir) / "hf").glob("step_*") if (match := _NAME.fullmatch(path.name))}


def remove_leftovers(run_dir: Path | str) -> None:
    """Removes half-written and half-removed checkpoints and exports that dead processes of the run have left. Call it while none runs."""
    for folder, ending in itertools.product(("checkpoints", "hf"), ("partial", "removing", "old")):
        for path in Path(run_dir).glob(f"{folder}/step_*.{ending}"):
            shutil.rmtree(path)


def make_room(run_dir: Path | str, spared: Collection[int] = ()) -> None:
    """Removes old checkpoints, but neither the newest nor those of the steps `spared`, if the disk has no room for one more of the newest
    one's size."""
    complete = complete_checkpoints(run_dir)
    if not complete:
        return
    newest = complete[-1][1]
    needed_bytes = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    for path in (path for step, path in complete[:-1] if step not in spared):
        if (free_bytes := shutil.disk_usage(newest).free) >= needed_bytes:
            return
        print(f"{free_bytes} bytes are free for a checkpoint of {needed_bytes}: {path} is removed first", flush=True)
        remove_whole(path)


def prune_checkpoints(run_dir: Path | str, keep: int, spared: Collection[int] = ()) -> None:
    """Removes all checkpoints but the newest `keep` and those of the steps `spared`. If one cannot be removed (on NFS a file that is still
    open leaves a remnant), that is printed and left to the next launch, because it is no reason to end a run."""
    found = complete_checkpoints(run_dir)
    for step, path in found[: max(0, len(found) - keep)]:
        if step not in spared:
            remove_whole(path)


def remove_whole(path: Path) -> None:
    """Removes a checkpoint or an export, if it exists. A failure is printed."""
    doomed = path.with_name(path.name + ".removing")  # a half-removed folder must not look whole
    try:
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        print(f"{path} could not be removed: {error}", flush=True)
