"""What a verifier is told about a response and returns; what a user's own function may ask for and return."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import reprlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from megarl.config.errors import ConfigError
from megarl.config.schema import MAX_REWARD
from megarl.types import Failure

CORRECT = 1.0  # the lowest reward that counts as right
SCORE = "score"  # in a result with named parts, the key or field that is the reward
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200


class ScoreRequest(msgspec.Struct, frozen=True):
    """A response and all that is known about it. A user's own function gets the fields that its parameters name."""

    response: str  # the policy's text in its last turn; also called `text`
    answer: str  # the reference answer
    prompt: str = ""  # as the model saw it
    row: dict[str, Any] = {}  # the prompt's whole row of the data set
    prompt_token_ids: list[int] = []
    token_ids: Sequence[int] = ()  # the response's, all turns, including end-of-text
    version: int = -1  # newest weight version among its tokens: how many steps had been done
    sample_index: int = 0  # the sample's number within its prompt, from 0
    truncated: bool = False  # it was cut at the maximum length
    source: str = ""  # the prompt's, in data.train.sources or eval.suites


_FIELDS = {"text": "response", **{name: name for name in ScoreRequest.__struct_fields__}}
# What verl's functions are given, of rows in verl's format.
_OF_VERL: dict[str, Callable[[ScoreRequest], Any]] = {
    "solution_str": lambda request: request.response,
    "ground_truth": lambda request: _inner(request.row, "reward_model", "ground_truth", request.answer),
    "data_source": lambda request: request.row.get("data_source", request.source),
    "extra_info": lambda request: request.row.get("extra_info"),
}
_OF_TRL = {"prompts": "prompt", "completions": "response", "completion_ids": "token_ids"}
_FROM_TRL = (
    "it has TRL's parameters, lists of all responses of a batch; here a function scores one response, and returns one number. prompts[i] "
    "is prompt, completions[i] is response, completion_ids[i] is token_ids, a column is row[its name]. This calls it: def reward({takes}): "
    "return {name}({given})[0]"
)


class Score(msgspec.Struct, frozen=True):
    """A response's reward. With `failures`, it is a substitute score, or has some in it."""

    reward: float
    parts: dict[str, float] = {}
    failures: list[Failure] = []


def parameters_of(function: Callable[..., Any], setting: str) -> list[str]:
    """Names of the fields that `function` asks for, in its order; all fields if it takes **kwargs. Args: setting: its "key=value".

    Raises ConfigError for parameters that name no field, or that cannot be passed by name.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if {"prompts", "completions"} & {*names}:
        raise ConfigError(f"{setting}: {_from_trl(function)}")
    unknown = [name for name in names if name not in _FIELDS and name not in _OF_VERL]
    problems = [f"{setting}: its parameter {name} is none of {', '.join(_FIELDS)}{_near(name)}" for name in unknown]
    unnamed = ["*" * (p.kind is p.VAR_POSITIONAL) + p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    problems += [f"{setting}: its parameter {shown} must be one that can be passed by name" for shown in unnamed]
    if problems:
        raise ConfigError(problems)
    rest = [name for name in _FIELDS if name not in names] if any(p.kind is p.VAR_KEYWORD for p in parameters) else []
    return names + rest


def _from_trl(function: Callable[..., Any]) -> str:
    """How a function for TRL, which passes all by name, and as **kwargs the row's other columns, is called from one for a response."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.name in _OF_TRL]
    columns = [p.name for p in parameters if p.name not in _OF_TRL and p.kind is not p.VAR_KEYWORD and p.default is p.empty]
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = [f"{name}=[{_OF_TRL[name]}]" for name in known]
    given += ["**{key: [value] for key, value in row.items()}"] if rest else [f"{name}=[row[{name!r}]]" for name in columns]
    takes = [*(_OF_TRL[name] for name in known), *["row"] * bool(rest or columns)]
    return _FROM_TRL.format(takes=", ".join(takes), name=getattr(function, "__name__", "it"), given=", ".join(given))


def arguments_of(request: ScoreRequest, parameters: Sequence[str]) -> list[Any]:
    """The values of `parameters`; arrays as lists."""
    values = [_OF_VERL[name](request) if name in _OF_VERL else getattr(request, _FIELDS[name]) for name in parameters]
    return [value.tolist() if isinstance(value, array) else value for value in values]


def score_of(found: Any) -> Score:
    """The Score of a function's result: a number, or a dict or dataclass of numbers with one named "score". Raises TypeError for
    anything else."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    if not isinstance(found, dict):
        return Score(_number(found, "a number, or a dict with a score and its parts"))
    if SCORE not in found:
        raise TypeError(f"it must give a dict with the key {SCORE!r}, not {_shown(found)}")
    parts = {str(name): _number(value, f"a number as {name!r}") for name, value in found.items() if name != SCORE}
    return Score(_number(found[SCORE], f"a number as {SCORE!r}"), parts)


def _number(value: Any, wanted: str) -> float:
    """Accepts truth values and scalars of NumPy and torch, but no text, not even "1"."""
    scalar = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if not isinstance(scalar, numbers.Real):
        raise TypeError(f"it must give {wanted}, not {_shown(value)}")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        raise TypeError(f"it must give {wanted}, finite and at most {MAX_REWARD:g} in size, not {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python does not write integers of so many digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"one of {type(value).__name__}"


def _inner(row: dict[str, Any], column: str, field: str, otherwise: Any) -> Any:
    inner = row.get(column)
    return inner.get(field, otherwise) if isinstance(inner, dict) else otherwise


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"; did you mean {near[0]}?" if near else ""
