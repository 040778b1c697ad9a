"""IFEval (arXiv:2311.07911): grades whether a response follows its prompt's instructions, by the
authors' code in lm-eval.
"""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError

NAME = "ifeval"  # as reward.name
MEASURES = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")
_PACKAGES = ("lm_eval", "langdetect", "immutabledict", "nltk")
_SENTENCES = "tokenizers/punkt_tab/english"


class _Graders(NamedTuple):
    measures: ModuleType  # lm_eval.tasks.ifeval.utils
    instructions: dict[str, Any]  # id, such as "punctuation:no_comma" -> class of the instruction


def check_installed(setting: str) -> None:
    """Raises ConfigError that names missing packages and the command that installs them.

    Args: setting: the "key=value" that needs them.
    """
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"{setting}: needs the packages of the extra ifeval ({', '.join(absent)} not found): "
            "pip install -e '.[ifeval]'"
        )
    import nltk

    try:
        nltk.data.find(_SENTENCES)
    except LookupError as error:
        reason = "NLTK_DATA names another folder than nltk's own"
        command = "python -m nltk.downloader punkt_tab"
        raise ConfigError(
            f"{setting}: needs nltk's data punkt_tab, which splits sentences: {command} ({reason})"
        ) from error


@cache
def _graders() -> _Graders:
    """lm-eval's folder for IFEval, imported without the packages around it.

    Those would load datasets, pandas and more, which the graders do not use, for five seconds and
    most of a worker's memory. Seeds the language detection, which is random by default.
    """
    check_installed(f"reward.name={NAME}")
    (root,) = find_spec("lm_eval").submodule_search_locations  # type: ignore[union-attr, misc]
    hollow = []
    for name, folder in (("lm_eval", root), ("lm_eval.tasks", f"{root}/tasks")):
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [folder]
            hollow.append(name)
    try:
        registry = import_module("lm_eval.tasks.ifeval.instructions_registry")
        measures = import_module("lm_eval.tasks.ifeval.utils")
    finally:
        for name in hollow:
            del sys.modules[name]
    import langdetect

    langdetect.DetectorFactory.seed = 0
    return _Graders(measures, registry.INSTRUCTION_DICT)


def reference(answer: str) -> str:
    """Checks the instructions of a row.

    Returns JSON of an object with instruction_id_list and kwargs. Drops nulls, which rows from the
    hub have for the arguments of all other instructions. Raises ValueError.
    """
    row = json.loads(answer)
    if not isinstance(row, dict):
        row = {}
    names = row.get("instruction_id_list")
    arguments = row.get("kwargs")
    if (
        not isinstance(names, list)
        or not isinstance(arguments, list)
        or not 0 < len(names) == len(arguments)
    ):
        raise ValueError(
            "must be an object with instruction_id_list and kwargs, two lists of one length"
        )
    checked = list(map(_arguments, names, arguments))
    return json.dumps({"instruction_id_list": names, "kwargs": checked})


def _arguments(name: Any, kwargs: Any) -> dict[str, Any]:
    """The checked arguments of an instruction.

    All must be given, since the library would choose missing ones at random.
    """
    registry = _graders().instructions
    if name not in registry:
        raise ValueError(
            f"{name!r} is none of the {len(registry)} instructions: {', '.join(registry)}"
        )
    if not isinstance(kwargs, dict):
        raise ValueError(f"kwargs of {name} must be an object, not {kwargs!r}")
    arguments = {key: _whole(value) for key, value in kwargs.items() if value is not None}
    instruction = registry[name](name)
    keys = instruction.get_instruction_args_keys()
    if set(arguments) != set(keys) or not all(arguments.values()):
        takes = (
            f"needs {', '.join(keys)}, none of them 0 or empty," if keys else "takes no arguments,"
        )
        raise ValueError(f"{name} {takes} not {arguments}")
    try:
        instruction.build_description(**arguments)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{name} cannot take {arguments}: {error}") from error
    return arguments


def _whole(value: Any) -> Any:
    """`value` as an int if it is whole.

    A column with nulls may have turned integers into floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def instructions(answer: str) -> int:
    """How many instructions a row has."""
    return len(json.loads(answer)["instruction_id_list"])


def ifeval_reward(text: str, answer: str) -> dict[str, float]:
    """1 if the response follows all instructions of `answer` (see `reference`) strictly, else 0.

    Also gives MEASURES: whether all are followed, and which share of them, both strictly and
    loosely (ignoring the first line, the last line, or asterisks).

    Two of the data set's 541 rows ask for a "letter" that is not one (# and !). For those the
    authors' code chooses a letter at random; here it is always the same one.
    """
    measures = _graders().measures
    row = json.loads(answer)
    example = measures.InputExample(key=0, prompt="", **row)
    measured = {}
    for level in ("strict", "loose"):
        random.seed(answer)
        followed = getattr(measures, f"test_instruction_following_{level}")(
            example, text
        ).follow_instruction_list
        measured |= {
            f"prompt_{level}": float(all(followed)),
            f"instruction_{level}": fmean(followed),
        }
    return {"score": measured["prompt_strict"], **measured}
