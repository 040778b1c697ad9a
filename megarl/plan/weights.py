"""Finds the weights that a command begins with: those of model.path, or the warm start that megarl
sft made from them.

A finished warm start of the same model.path is used, since a user who runs `megarl sft` before
`megarl train` wants that. The folder itself records what it was made from, since sft.output may
belong to another run. A run keeps the weights it began with as its reference model
(algorithm.kl_coef, algorithm.beta), even if another warm start is made meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.algorithms import recipes
from megarl.base.files import write_whole
from megarl.config.errors import ConfigError
from megarl.config.keys import general, keys_of, value_at
from megarl.config.schema import ModelConfig, RunConfig
from megarl.data import contents
from megarl.plan.checkpoints import check_names, complete_checkpoints, value_before
from megarl.roles.settings import JUDGE, REFERENCE, REWARD_MODEL, RoleConfig, role_of

WARM_START = "warm_start.json"  # in sft.output: the settings with which megarl sft made the weights
WARM = "warm"  # the command that only lets engines compile, for which any weights will do
LABEL_SETTINGS = "settings.json"  # in label.output: what megarl label has made the labels with
_DATE = "model.chat_template.date"
BEGUN_WITH = "begun_with.json"  # in run_dir: the weights that the run began with


@dataclass(frozen=True)
class WeightsSource:
    """An HF checkpoint that a command begins with."""

    path: str  # a folder, or a hub name
    warm_start: bool = False  # whether megarl sft made it
    are_gone: bool = False  # whether the weights are gone, but also not needed
    remark: str = ""  # why these weights are used instead of others that the user may expect
    checkpoint: str = ""  # the checkpoint of a run whose export this is
    fingerprint: str = ""  # of the weights that a run began with; empty if not computed

    @property
    def are_there(self) -> bool:
        """Whether the weights are on this machine.

        A hub name counts as present: the hub is asked when the weights are read.
        """
        return holds_weights(self.path) or (not self.warm_start and not Path(self.path).is_dir())

    @property
    def scored(self) -> str:
        """What megarl eval calls them: a folder, or a hub name."""
        return self.checkpoint or self.path

    def __str__(self) -> str:
        if self.checkpoint:
            return f"the checkpoint {self.checkpoint}"
        name = f"model.path={self.path}"
        if self.warm_start:
            name = f"the warm start in sft.output={self.path}"
        return f"{name}; {self.remark}" if self.remark else name


def with_date(config: RunConfig, command: str | None) -> RunConfig:
    """The config with the date for chat templates, of the policy and of roles: the date that is
    set, else the one with which the job in run_dir began, else today's.
    """
    date = (
        config.model.chat_template.date
        or _first_date(config, command)
        or datetime.date.today().isoformat()
    )

    def dated[C: (ModelConfig, RoleConfig)](settings: C) -> C:
        template = settings.chat_template
        return replace(settings, chat_template=replace(template, date=template.date or date))

    roles = dict(config.roles)
    for name, role in roles.items():
        if role and role_of(name, role) in (REWARD_MODEL, JUDGE):
            roles[name] = dated(role)
    return replace(config, model=dated(config.model), roles=roles)


def _first_date(config: RunConfig, command: str | None) -> str | None:
    if command == "label":
        return (_read(Path(config.label.output) / LABEL_SETTINGS, _DATE) or {}).get(_DATE)
    if command != "sft":
        return value_before(config, _DATE)
    checkpoints = complete_checkpoints(Path(config.run_dir) / "sft")
    folder = str(checkpoints[-1][1]) if checkpoints else config.sft.output
    with contextlib.suppress(ConfigError):  # a check reports it
        return (read_warm_start(folder) or {}).get(_DATE)
    return None


def find_weights(config: RunConfig, command: str | None) -> WeightsSource:
    """The weights that `command` begins with. None: those of a new run."""
    model = WeightsSource(config.model.path)
    if command == WARM:
        return WeightsSource(config.model.path, are_gone=True)
    # these do not use the result of megarl sft
    if command == "sft" or (command == "export" and not config.lora.rank):
        return model
    if command not in ("train", "dry-run", "export") or not complete_checkpoints(config.run_dir):
        return _weights_of_new_run(config)
    first_weights = read_begun_with(config) or _weights_of_new_run(config)
    if first_weights.are_there or needs_first_weights(config):
        return first_weights
    return WeightsSource(config.model.path, are_gone=True)


def of_the_run(config: RunConfig) -> bool:
    """Whether `run_dir` has checkpoints of a run that began from this `model.path`.

    Without the run's settings they count as its own.
    """
    before = value_before(config, "model.path")
    return bool(complete_checkpoints(config.run_dir)) and (
        before is None or _same_folder(before, config.model.path)
    )


def scores_checkpoint(config: RunConfig, step: int | None, best: bool) -> bool:
    """Whether megarl eval, asked for a `step` or the `best` checkpoint, scores a checkpoint of the
    run, which it first exports.
    """
    if step is not None:
        return step != 0
    return best or of_the_run(config)


def _weights_of_new_run(config: RunConfig) -> WeightsSource:
    path = config.model.path
    output = config.sft.output
    if not WeightsSource(path).are_there:
        return WeightsSource(output, warm_start=True)
    if path == output:
        return WeightsSource(path)
    if not holds_weights(output):
        if not config.sft.steps:
            return WeightsSource(path)
        return WeightsSource(
            path,
            remark=f"sft.steps={config.sft.steps}, but there is no warm start in "
            f"sft.output={output}: megarl sft makes it",
        )
    made_by = read_warm_start(output)
    if made_by is None:
        return WeightsSource(
            path,
            remark=f"sft.output={output} is not used: it has no {WARM_START}, which megarl sft "
            "writes beside its weights",
        )
    if not _same_folder(made_by["model.path"], path):
        return WeightsSource(
            path,
            remark=f"the warm start in sft.output={output} is not used: it was made from "
            f"{made_by['model.path']}",
        )
    return WeightsSource(
        output, warm_start=True, remark=f"megarl sft made it from model.path={path}"
    )


def missing_weights(config: RunConfig, command: str | None) -> Iterable[str]:
    """Yields a problem if `command` needs weights that are missing."""
    weights = find_weights(config, command)
    reads_weights = command in ("sft", "reward-model", "label", "train", "eval", "dry-run")
    if command == "export" and config.lora.rank:
        reads_weights = True
    if weights.are_there or weights.are_gone or not reads_weights:
        return
    none = f"model.path={config.model.path}: holds no weights (*.safetensors)"
    hint = "" if config.model.random_init else convert_hint(Path(config.model.path))
    if hint:
        yield none + hint
        return
    if command in ("sft", "reward-model"):
        if not config.model.random_init:
            yield f"{none}; set model.random_init=true to start from random ones"
    elif command not in ("eval", "label") and complete_checkpoints(config.run_dir):
        yield (
            f"{why_first_weights(config)} what the run began with, but {weights.path} holds no "
            "weights any more"
        )
    elif not (command == "dry-run" and config.model.random_init and config.sft.steps > 0):
        # megarl sft will make the weights first
        yield f"{none}, and neither does sft.output={config.sft.output}: run megarl sft first"


OTHER_FORMATS = (
    "pytorch_model*.bin",
    "consolidated*.pt*",
    "*.gguf",
    "model*.ckpt",
    "tf_model*.h5",
    "flax_model*.msgpack",
)


def convert_hint(folder: Path) -> str:
    """What to do if a checkpoint's weights are in another format than safetensors; empty if there
    are none in another.
    """
    names = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
    if not names:
        return ""
    option = f", gguf_file={names[0]!r}" if names[0].endswith(".gguf") else ""
    load = f"M.from_pretrained({str(folder)!r}, dtype='auto'{option})"
    conversion = f"{load}.save_pretrained({f'{folder}-safetensors'!r})"
    command = f'python -c "from transformers import AutoModelForCausalLM as M; {conversion}"'
    return f", but {names[0]}: convert it, and copy the tokenizer's files: {command}"


def needs_reference(config: RunConfig) -> bool:
    """Whether a run needs a reference model, which is the weights that it began with."""
    for name, settings in config.roles.items():
        if settings and role_of(name, settings) == REFERENCE:
            return False  # the run has another
    return recipes.needs_reference(config.algorithm) is not None


def needs_first_weights(config: RunConfig) -> bool:
    """Whether a resumed run needs the weights that it began with."""
    return needs_reference(config) or bool(config.lora.rank)


def why_first_weights(config: RunConfig) -> str:
    """The beginning of a message about the first weights."""
    if config.lora.rank:
        return f"lora.rank={config.lora.rank}: the weights that its adapters belong to are"
    return f"{recipes.needs_reference(config.algorithm)}: its reference model is"


def warm_start_due(config: RunConfig) -> bool:
    """Whether megarl run begins with megarl sft, which does nothing if its work is done."""
    return config.sft.steps > 0 and not complete_checkpoints(config.run_dir)


def holds_weights(path: str) -> bool:
    return any(Path(path).glob("*.safetensors"))


def warm_start_record(config: RunConfig) -> str:
    """The content of WARM_START: every setting that the weights of `megarl sft` depend on."""
    data = "sft.data." if config.sft.data else "data.train."
    adapted = config.lora.rank if config.sft.adapters else None
    prefixes = ("model.", "sft.optimizer.", data, "sft.steps", "sft.batch_size", "seed")
    if adapted:
        prefixes += ("lora.",)
    if config.sft.eval:
        prefixes += ("sft.eval.", "sft.every", "sft.keep")
    record = {}
    for key in keys_of(config):
        if key.startswith(prefixes) and key != "model.spec":
            record[key] = value_at(config, key)
    return json.dumps(record | {"lora.rank": adapted}, indent=2)


def check_warm_start(config: RunConfig) -> Iterable[str]:
    """Problems if the finished warm start in `sft.output` is not the one that `config`
    describes.
    """
    output = config.sft.output
    made_by = read_warm_start(config.sft.output)
    instead = "remove it to train it anew, or name another folder"
    if made_by is None and holds_weights(config.model.path):
        yield (
            f"sft.output={output}: is there already, and was not made by megarl sft (it has no "
            f"{WARM_START}); {instead}"
        )
    if made_by is None:
        return
    for key, now, then in _differences(made_by, config, Path(output)):
        yield f"{key}={now}: the warm start in sft.output={output} was made with {then}; {instead}"


def check_begun_warm_start(config: RunConfig) -> Iterable[str]:
    """Problems with resuming an interrupted warm start, if there is one."""
    yield from check_names(Path(config.run_dir) / "sft")
    checkpoints = complete_checkpoints(Path(config.run_dir) / "sft")
    if not checkpoints:
        return
    folder = checkpoints[-1][1]
    made_by = read_warm_start(str(folder)) or {}
    for key, now, then in _differences(made_by, config, Path(config.run_dir) / "sft"):
        yield (
            f"{key}={now}: the warm start that was interrupted had {then}; keep that, or "
            f"remove {folder.parent} to begin anew"
        )


def _differences(
    made_by: Mapping[str, Any], config: RunConfig, folder: Path
) -> Iterable[tuple[str, str, str]]:
    """(key, value now, value then) of the settings that a warm start depends on.

    If `folder` has the contents that it learned from, these are compared instead of where they are
    (compare_contents).
    """
    compared = {_DATE}
    if (folder / contents.FILE).is_file():
        compared.update(contents.KEYS)
    for key, now in json.loads(warm_start_record(config)).items():
        then = made_by.get(key)
        is_equal = then == now
        if key == "model.path" and then:
            is_equal = _same_folder(then, now)
        if not is_equal and general(key) not in compared:
            yield key, json.dumps(now), json.dumps(then)


def read_warm_start(output: str) -> Mapping[str, Any] | None:
    """The settings that made the warm start at `output`; None if megarl sft made none there.

    Raises ConfigError if unreadable.
    """
    return _read(Path(output) / WARM_START, "model.path")


def begin_with(config: RunConfig, weights: WeightsSource, fingerprint: str) -> None:
    """Records the weights in the folder of the run, for resumed runs."""
    record = {"path": weights.path, "warm_start": weights.warm_start, "fingerprint": fingerprint}
    write_whole(Path(config.run_dir) / BEGUN_WITH, json.dumps(record))


def read_begun_with(config: RunConfig) -> WeightsSource | None:
    """The weights the run began with; None if an earlier version of MegaRL began it.

    Raises ConfigError if the record is unreadable.
    """
    record = _read(Path(config.run_dir) / BEGUN_WITH, "path")
    if record is None:
        return None
    return WeightsSource(
        record["path"], record.get("warm_start", False), fingerprint=record.get("fingerprint", "")
    )


def _read(path: Path, needed: str) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values[needed], str):
            raise TypeError(f"{needed} is no text")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is damaged ({error}); remove it, and the run decides by its other files"
        ) from error
    return values


def _same_folder(path: str, other_path: str) -> bool:
    """Whether both are the same folder, or the same hub name."""
    return path == other_path or Path(path).resolve() == Path(other_path).resolve()
