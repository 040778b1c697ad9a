"""Finds, names and removes the checkpoints of a run.

Needs no torch, since the launcher uses it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megarl.config import algorithms
from megarl.config.errors import ConfigError, RunError
from megarl.config.keys import general, keys_of, settings, value_at, yaml_text
from megarl.config.limits import did_you_mean, similar_names
from megarl.config.load import load_config
from megarl.config.schema import DROP, RunConfig
from megarl.data import contents
from megarl.data.rows import held_out, held_out_samples
from megarl.rewards.score import parts_in_evaluation

# file in a checkpoint with the step after which it was saved, among other values
STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")


def checkpoint_path(run_dir: Path | str, step: int) -> Path:
    """The folder of the checkpoint after `step` steps, which has weight version `step`."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def export_path(run_dir: Path | str, step: int) -> Path:
    """The folder of the weights after `step` steps as an HF checkpoint (checkpoint.hf_every)."""
    return Path(run_dir) / "hf" / checkpoint_path(run_dir, step).name


def scored_path(config: RunConfig, step: int) -> str:
    """The folder of a warm start's weights that are to be evaluated (sft.score_every)."""
    return f"{config.run_dir}/sft/scored/{checkpoint_path('', step).name}"


def complete_checkpoints(run_dir: Path | str) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, oldest first.

    A checkpoint gets its name by a rename after its last byte is written, so a folder with this
    name is complete. Folders with the content of another step are left out: see `check_names`.
    """
    return sorted(
        (step, path)
        for step, path in _named_checkpoints(run_dir)
        if _saved_step(path) in (step, None)
    )


def check_names(run_dir: Path | str) -> Iterable[str]:
    """Problems with checkpoints that were copied or renamed, so that their names differ from the
    steps after which they were saved. A run that resumes from one would count steps that it never
    made, and train on prompts twice.
    """
    checkpoints = complete_checkpoints(run_dir)
    for step, path in sorted(_named_checkpoints(run_dir)):
        saved_step = _saved_step(path)
        if saved_step not in (step, None):
            result = "there is no other"
            if checkpoints:
                result = f"{checkpoints[-1][1].name} is the newest then"
            yield (
                f"{path}: was saved after step {saved_step}, not {step} ({STATE}), so it was "
                f"copied or renamed. Move this folder away: {result}"
            )


def _named_checkpoints(run_dir: Path | str) -> Iterator[tuple[int, Path]]:
    return _step_folders(Path(run_dir) / "checkpoints")


def _step_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match:
            yield int(match[1]), path


def _saved_step(path: Path) -> int | None:
    """The step after which a checkpoint was saved.

    None if it cannot be read: later reads will report the damage.
    """
    try:
        return int(json.loads((path / STATE).read_bytes())["state"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def exported_steps(run_dir: Path | str) -> set[int]:
    return {step for step, _ in _step_folders(Path(run_dir) / "hf")}


def remove_leftovers(run_dir: Path | str) -> None:
    """Removes half-written and half-removed checkpoints and exports of dead processes.

    Call it while no process of the run is running.
    """
    for folder, ending in itertools.product(("checkpoints", "hf"), ("partial", "removing", "old")):
        for path in Path(run_dir).glob(f"{folder}/step_*.{ending}"):
            shutil.rmtree(path)


def make_room(run_dir: Path | str, spared: Collection[int] = ()) -> None:
    """If the disk has no room for another checkpoint of the newest one's size, removes old
    checkpoints. Keeps the newest, and those of the steps `spared`.
    """
    complete = complete_checkpoints(run_dir)
    if not complete:
        return
    newest = complete[-1][1]
    needed_bytes = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    for step, path in complete[:-1]:
        if step in spared:
            continue
        free_bytes = shutil.disk_usage(newest).free
        if free_bytes >= needed_bytes:
            return
        print(
            f"{free_bytes} bytes are free for a checkpoint of {needed_bytes}: {path} is removed "
            "first",
            flush=True,
        )
        remove_whole(path)


def prune_checkpoints(run_dir: Path | str, keep: int, spared: Collection[int] = ()) -> None:
    """Removes all checkpoints but the newest `keep` and those of the steps `spared`.

    If one cannot be removed (on NFS, an open file leaves a remnant), prints that; the next launch
    tries again.
    """
    checkpoints = complete_checkpoints(run_dir)
    for step, path in checkpoints[: max(0, len(checkpoints) - keep)]:
        if step not in spared:
            remove_whole(path)


def remove_whole(path: Path) -> None:
    """Removes a checkpoint or an export, if it exists. A failure is printed."""
    doomed = path.with_name(path.name + ".removing")  # a half-removed folder must not look complete
    try:
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        print(f"{path} could not be removed: {error}", flush=True)


INDEX_FILE = "index.msgpack"
CRITIC = "critic"  # folder of the critic's checkpoint, inside the policy's
FORMAT = 1
_DIGEST_BYTES = 32


class CheckpointError(RunError):
    """A checkpoint is damaged or missing.

    The message names the checkpoint and the file, and says what to do. `problem`: its middle part.
    """

    def __init__(self, message: str, problem: str = ""):
        super().__init__(message)
        self.problem = problem


def unusable(folder: Path | str, problem: str) -> CheckpointError:
    """The error about a checkpoint.

    A critic's folder inside a checkpoint must not be moved away alone, so the error names the outer
    one.
    """
    folder = Path(folder)
    if folder.name == CRITIC:
        folder = folder.parent
        problem = f"in {CRITIC}/: {problem}"
    return CheckpointError(
        f"checkpoint {folder} cannot be used: {problem}. Move it away to use the one before it",
        problem,
    )


class StoredBox(msgspec.Struct, frozen=True, array_like=True):
    """The elements of a tensor's box (`start`, `shape`), stored row by row at `offset` in file
    number `file`.
    """

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    share: int  # its share of the tensor's hash


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str  # "float32" | "bfloat16" | "uint8"
    shape: tuple[int, ...]
    boxes: list[StoredBox]  # of all ranks; together they have every element once

    @property
    def elements(self) -> int:
        return sum(math.prod(box.shape) for box in self.boxes)

    @property
    def hash(self) -> int:
        return sum(box.share for box in self.boxes) % 2**64


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size_bytes: int
    digest: bytes = b""  # of the whole file; empty if it consists of boxes


class _Head(msgspec.Struct):
    """The part of the index that every version has."""

    format: int


class Index(msgspec.Struct, frozen=True):
    """The index of a checkpoint folder (index.msgpack), which distinguishes complete files from
    damaged ones.

    It is written last. It lists every other file with its size. For small files it has a digest.
    For files with tensors it has the place of each box, and the box's share in its tensor's hash
    (kernels/audit.py). It begins with a digest of its own content. So every byte of a checkpoint is
    covered.
    """

    format: int
    dtype: str  # of the model that was trained
    files: list[StoredFile]
    tensors: dict[str, StoredTensor]
    # name with the kind `live` -> hash of the logical tensor in the model's own dtype
    live: dict[str, int]

    def write(self, folder: Path) -> None:
        body = msgspec.msgpack.encode(self)
        write_durably(folder / INDEX_FILE, digest(body) + body)

    @classmethod
    def read(cls, folder: Path | str) -> Index:
        """Reads the index of `folder`. Raises CheckpointError if it is missing or damaged."""
        path = Path(folder) / INDEX_FILE
        if not path.exists():
            cause = "it is not complete"
            if (path.parent / ".metadata").exists():
                cause = "it was written by an earlier version of MegaRL"
            raise unusable(folder, f"{cause}: {INDEX_FILE} is missing")
        content = _content(path, folder)
        body = content[_DIGEST_BYTES:]
        if digest(body) != content[:_DIGEST_BYTES]:
            raise unusable(folder, f"{INDEX_FILE} is damaged")
        format = msgspec.msgpack.decode(body, type=_Head).format
        if format != FORMAT:
            raise unusable(
                folder,
                f"{INDEX_FILE} has format {format}; this version of MegaRL reads format {FORMAT}",
            )
        return msgspec.msgpack.decode(body, type=cls)

    def check(self, folder: Path | str, files: Iterable[StoredFile] | None = None) -> None:
        """Checks that `files` (by default all) exist with the right sizes, and that small ones have
        the right contents.

        Raises CheckpointError that names a wrong file.
        """
        if files is None:
            files = self.files
        problems = list(filter(None, (_problem(Path(folder), file) for file in files)))
        if problems:
            raise unusable(folder, "; ".join(problems))

    def content(self, folder: Path | str, name: str) -> bytes:
        """The content of a small file. Raises CheckpointError if it is missing or damaged."""
        file = next((file for file in self.files if file.name == name and file.digest), None)
        if file is None:
            raise unusable(folder, f"{name} is not among its files")
        self.check(folder, [file])
        return _content(Path(folder) / name, folder)


def check_checkpoint_files(folder: Path | str) -> None:
    """Makes all checks that do not read tensors. Raises CheckpointError."""
    folder = Path(folder)
    Index.read(folder).check(folder)
    if (folder / CRITIC / INDEX_FILE).exists():
        Index.read(folder / CRITIC).check(folder / CRITIC)


def small_file(folder: Path, name: str, content: bytes) -> StoredFile:
    """Writes a small file, and returns its entry in the index."""
    write_durably(folder / name, content)
    return StoredFile(name, len(content), digest(content))


def listed_file(folder: Path, name: str) -> StoredFile:
    """The index entry of an existing small file."""
    content = (folder / name).read_bytes()
    return StoredFile(name, len(content), digest(content))


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file, and returns when its content is on disk.

    The file's name is durable only after the folder is synchronised too.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _problem(folder: Path, file: StoredFile) -> str | None:
    path = folder / file.name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if size != file.size_bytes:
        return f"{file.name} is damaged: it has {size} bytes instead of {file.size_bytes}"
    if file.digest and digest(_content(path, folder)) != file.digest:
        return f"{file.name} is damaged: its bytes are not those that were written"
    return None


def _content(path: Path, folder: Path | str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unusable(folder, f"{path.name} cannot be read: {error.strerror}") from error


def scores_to_choose_by(config: RunConfig) -> list[str]:
    """The keys in metrics.jsonl of held-out scores that are better when higher, so that they can
    decide which checkpoint of a run is the best (checkpoint.keep_best).
    """
    keys: list[str] = []
    for name, _, _, suite in held_out(config):
        # if so, no answer counts as right or wrong
        graded = any(part.role is not None for part in parts_in_evaluation(config, name))
        samples = held_out_samples(config, suite)
        scores = ["reward/mean"]
        if not graded and samples > 1:
            scores = [f"pass@{samples}", f"avg@{samples}", *scores]
        if not graded:
            scores = ["pass@1", *scores]
        if config.eval.win_rate is not None and not (suite and suite.benchmark):
            scores.append("win_rate")
        keys += ["/".join(("eval", *name.split(), score)) for score in scores]
    return keys


def check_best(config: RunConfig) -> Iterable[str]:
    """Problems with checkpoint.keep_best.

    A version can only be kept if it is both evaluated and saved.
    """
    key = config.checkpoint.keep_best
    keys = scores_to_choose_by(config)
    if key is None:
        return
    if key not in keys:
        allowed = "null without a held-out set"
        if keys:
            allowed = f"one of {', '.join(keys)}{did_you_mean(similar_names(key, keys))}"
        yield f"checkpoint.keep_best={key}: must be {allowed}"
    every = config.eval.every
    saved = config.checkpoint.every
    if every == 0 or saved == 0 or every % saved:
        yield (
            f"checkpoint.keep_best={key}: needs eval.every={every} to be a multiple of "
            f"checkpoint.every={saved}, and neither to be 0"
        )


_TASKS = tuple(
    f"data.train.sources.NAME.{section}." for section in ("reward", "rollout", "algorithm")
)
# Checkpoints, the order of prompts and the meaning of the reward depend on these settings. Parallel
# sizes may change.
FIXED_KEYS = (
    "model.path",
    "model.tokenizer",
    "model.dtype",
    "trainer.mtp",
    *(f"lora.{key}" for key in ("rank", "alpha", "targets", "experts", "init")),
    *(
        key
        for key in settings()
        if key.startswith(("data.train.", "data.curriculum.")) and not key.startswith(_TASKS)
    ),
    "data.shuffle",
    "data.bad_rows",
    "algorithm.name",
    "algorithm.distill.over",
    "algorithm.distill.top_k",
    "rollout.prompts_per_step",
    "rollout.n",
    *(
        f"{section}{key}"
        for section in ("", "data.train.sources.NAME.")
        for key in (
            "reward.name",
            "reward.parts.NAME.name",
            "reward.parts.NAME.weight",
            "rollout.name",
        )
    ),
    "roles.NAME.role",
    "roles.NAME.path",
    "roles.NAME.on",
    "seed",
)
# Samples and scores depend on these settings too.
SCORING_KEYS = (
    "rollout.args",
    "data.train.sources.NAME.rollout.args",
    *(
        f"roles.NAME.{key}"
        for key in (
            "template",
            "chat",
            "chat_template.name",
            "chat_template.arguments",
            "mode",
            "verdict",
            "verdict_scores",
            "verdict_range",
            "opponents",
            "scores",
            "step_separator",
        )
    ),
)
# With data.bad_rows=drop, these settings also decide which rows are left out, and so the order of
# the others.
_ROOM_KEYS = (
    "data.max_prompt_tokens",
    "rollout.max_tokens",
    "data.train.sources.NAME.rollout.max_tokens",
    "generator.kv_cache_tokens",
    "generator.groups.NAME.kv_cache_tokens",
)


def check_resume(config: RunConfig) -> Iterable[str]:
    """Problems with resuming from `config.run_dir`; none if it has no checkpoint yet."""
    yield from check_names(config.run_dir)
    try:
        before = _earlier(config)
    except ConfigError as error:
        yield (
            f"run_dir={config.run_dir}: its config.yaml cannot be read ({error.problems[0]}); "
            "use another run_dir"
        )
        return
    fixed = {*FIXED_KEYS, *(_ROOM_KEYS if config.data.bad_rows == DROP else ())}
    if algorithms.CRITIC in (before.get("algorithm.advantage"), config.algorithm.advantage):
        fixed.add("algorithm.advantage")  # checkpoints have a critic or not
    if (Path(config.run_dir) / contents.FILE).is_file():
        fixed -= {*contents.KEYS}  # the launcher compares what they lead to
    yield from _changed_settings(before, config, fixed)
    names = _source_names(before)
    names_now = _source_names(keys_of(config))
    if names != names_now and sorted(names) == sorted(names_now):
        yield (
            f"data.train.sources: {', '.join(names_now)}: the run in run_dir={config.run_dir} began "
            f"with the order {', '.join(names)}, which decides the prompts; keep that, or use "
            "another run_dir"
        )
    if not config.checkpoint.accept_changed_data:
        yield from _changed_settings(
            before, config, SCORING_KEYS, f", or set {contents.ACCEPT}=true"
        )


def _source_names(keys: Iterable[str]) -> list[str]:
    sources = [key for key in keys if general(key) == "data.train.sources.NAME.source"]
    return [key.split(".")[3] for key in sources]


def check_exported(config: RunConfig) -> Iterable[str]:
    """Problems if an export would lack the layer for multi-token prediction though its checkpoint
    has it.
    """
    yield from check_names(config.run_dir)
    # a checkpoint can be exported without the run's settings
    with contextlib.suppress(ConfigError):
        yield from _changed_settings(_earlier(config), config, ("trainer.mtp",))


def _changed_settings(
    before: Mapping[str, Any], config: RunConfig, fixed: Collection[str], alternative: str = ""
) -> Iterable[str]:
    for key, value in differences(before, config).items():
        if general(key) in fixed:
            yield (
                f"{key}={yaml_text(value_at(config, key))}: the run in run_dir={config.run_dir} "
                f"began with {yaml_text(value)}; keep that, or use another run_dir{alternative}"
            )


def changes(config: RunConfig) -> list[str]:
    """One line for each setting of a resumed run that has changed since its last start."""
    if not _settings_before(config).is_file():
        return [f"it is not known which, since {_settings_before(config)} is gone"]
    changes = []
    for key, value in differences(_earlier(config), config).items():
        changes.append(f"{key}={yaml_text(value_at(config, key))}, was {yaml_text(value)}")
    return changes


def differences(before: Mapping[str, Any], now: RunConfig) -> dict[str, Any]:
    """Setting -> its value in `before`, for all settings that have changed.

    The value is None for settings under new names.
    """
    keys = dict.fromkeys((*before, *keys_of(now))) if before else ()
    return {key: before.get(key) for key in keys if before.get(key) != value_at(now, key)}


def _earlier(config: RunConfig) -> Mapping[str, Any]:
    """The earlier settings of the run in `config.run_dir`; empty if there is no checkpoint to
    resume from. Raises ConfigError.
    """
    written = _settings_before(config)
    if not written.is_file() or not complete_checkpoints(config.run_dir):
        return {}
    earlier = load_config(written)
    return {key: value_at(earlier, key) for key in keys_of(earlier)}


def value_before(config: RunConfig, key: str) -> Any:
    """A setting of the run in `config.run_dir`; None if no run has left a checkpoint there, or its
    settings cannot be read.
    """
    with contextlib.suppress(ConfigError):
        return _earlier(config).get(key)
    return None


def _settings_before(config: RunConfig) -> Path:
    return Path(config.run_dir) / "config.yaml"
