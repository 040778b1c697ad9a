"""Reads rows from JSONL or parquet files, the hub, or synthetic tasks, in the shape of GSM8K or MATH."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.data import DatasetConfig, PreferenceConfig, SourceConfig
from megarl.config.errors import ConfigError
from megarl.config.schema import UNSCORED, RunConfig
from megarl.data.chat import CHAT, Render, load_chat_template
from megarl.data.rows import Answers, Pair, Row, Rows
from megarl.data.synthetic import PREFIX, synthetic_pairs, synthetic_rows
from megarl.hub import unreachable
from megarl.rewards.extract import MAX_ANSWER_CHARS, clean, marked_answer
from megarl.rewards.parts import Part, parts_in_evaluation, parts_of

T = TypeVar("T")
_MAX_PROBLEMS = 10  # shown at once
_MISSING = object()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that stands for a character with its neighbour alone
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".jsonl", ".parquet")
_OTHER_FILES = (".csv", ".tsv", ".json", ".txt", ".gz", ".zst", ".arrow")  # a file, not a hub name


class _Problem(Exception):
    """A problem with one row."""


def load_rows(config: DatasetConfig, key: str, seed: int, answers: Answers = "final", tokenizer: str = "") -> Rows:
    """All rows of a dataset.

    The final answer is what the answer column marks: \\boxed{} (MATH), "####" (GSM8K), else the whole text.
    Args: key: config section such as "data.train", for messages; seed: for synthetic tasks; answers: what to take from the answer column;
    tokenizer: folder or hub name whose chat template prompt_template="chat" uses.
    Raises ConfigError that lists all problems with file and line: malformed lines, missing or empty fields, wrong types, answers that
    cannot be found, no rows at all.
    """
    return read_rows(config, key, seed, answers, tokenizer)[0]


def read_rows(config: DatasetConfig, key: str, seed: int, answers: Answers, tokenizer: str, kept: int | None = None) -> tuple[Rows, int]:
    """Like `load_rows`, checks all rows, but returns only the first `kept` of them, and the number of all rows."""
    if config.source.startswith(PREFIX):
        return _synthetic(synthetic_rows(config.source, config.split, seed, key), config, kept)
    chat = _template(config, key, tokenizer)
    return _checked_rows(config, key, lambda where, record: _row(where, record, config, key, answers, chat), kept)


def read_pairs(config: PreferenceConfig, key: str, seed: int, tokenizer: str, kept: int | None = None) -> tuple[Sequence[Pair], int]:
    """As `read_rows`, of pairs of responses."""
    if config.source.startswith(PREFIX):
        return _synthetic(synthetic_pairs(config.source, config.split, seed, key), config, kept)
    chat = _template(config, key, tokenizer)
    return _checked_rows(config, key, lambda where, record: _pair(where, record, config, key, chat), kept)


def _template(config: SourceConfig, key: str, tokenizer: str) -> Render | None:
    if "{prompt}" not in config.prompt_template and config.prompt_template != CHAT:
        raise ConfigError(f"{key}.prompt_template={config.prompt_template}: must contain {{prompt}}, or be {CHAT}")
    return load_chat_template(tokenizer, f"{key}.prompt_template={CHAT}") if config.prompt_template == CHAT else None


def _synthetic(made: Sequence[T], config: SourceConfig, kept: int | None) -> tuple[Sequence[T], int]:
    count = len(made) if config.size is None else min(config.size, len(made))
    wanted = count if kept is None else min(kept, count)
    return made if wanted == len(made) else [made[i] for i in range(wanted)], count


def answers_of(config: RunConfig, evaluated: bool = False) -> Answers:
    """The form of reference answers that training, or evaluation, needs: a verifier the final one."""
    needs = {_answer_for(part, config) for part in (parts_in_evaluation(config) if evaluated else parts_of(config.reward))}
    forms: tuple[Answers, ...] = ("final", "whole", "unused")
    return next(form for form in forms if form in needs)


def _answer_for(part: Part, config: RunConfig) -> Answers:
    if part.name == UNSCORED:
        return "unused"
    if part.role is None:
        return "whole" if ":" in part.name else "final"
    settings = config.roles.get(part.role)
    return "whole" if settings and "{answer}" in (settings.template or "") else "unused"


def _checked_rows(config: SourceConfig, key: str, make: Callable[[str, dict[str, Any]], T], kept: int | None) -> tuple[list[T], int]:
    """What `make` makes of every row, given where it is and its record."""
    rows: list[T] = []
    bad: dict[str, list[str]] = {}  # problem → where
    count = 0
    for where, record in islice(_records(config, key), config.size):
        count += 1
        try:
            if isinstance(record, _Problem):
                raise record
            if not isinstance(record, dict):
                raise _Problem(f"a row must be an object with fields, not {_kind(record)}")
            row = make(where, record)
            if kept is None or len(rows) < kept:
                rows.append(row)
        except _Problem as problem:
            bad.setdefault(str(problem), []).append(where)
    problems = [f"{found[0]}: {problem}{_as_in(len(found) - 1)}" for problem, found in islice(bad.items(), _MAX_PROBLEMS)]
    if unread := sum(map(len, list(bad.values())[_MAX_PROBLEMS:])):
        problems.append(f"{config.source}: {unread} more rows with problems")
    if not count:
        problems.append(f"{key}.source={config.source}: has no rows")
    if problems:
        raise ConfigError(problems)
    return rows, count


def _as_in(others: int) -> str:
    return f" (as in {others} more row{'s' * (others > 1)})" if others else ""


def _pair(where: str, record: dict[str, Any], config: PreferenceConfig, key: str, chat: Render | None) -> Pair:
    named = {"prompt_key": config.prompt_key, "chosen_key": config.chosen_key, "rejected_key": config.rejected_key}
    _check_columns(record, named | ({"margin_key": config.margin_key} if config.margin_key else {}), key)
    margin = _dig(record, config.margin_key) if config.margin_key else 0.0
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) <= sys.float_info.max:
        raise _Problem(f"field {config.margin_key!r} must be a finite number, not {margin!r}")
    chosen, rejected = (_response(record, field) for field in (config.chosen_key, config.rejected_key))
    if chosen == rejected:
        raise _Problem(f"fields {config.chosen_key!r} and {config.rejected_key!r} are the same: nothing is preferred")
    return Pair(_prompt(record, config, chat), chosen, rejected, float(margin), where)


def _response(record: dict[str, Any], field: str) -> str:
    """A text, or the last of a list of messages."""
    value = _dig(record, field)
    if not isinstance(value, list):
        return _text(record, field)
    last = value[-1] if value else None
    if not isinstance(last, dict) or not isinstance(last.get("content"), str) or last.get("role") == "user":
        raise _Problem(f"field {field!r} must be text, or messages of which the last is the response")
    return last["content"]


def _row(where: str, record: dict[str, Any], config: DatasetConfig, key: str, answers: Answers, chat: Render | None) -> Row:
    unneeded = answers == "unused" or (answers == "none" and config.demonstration_key)
    named = ["prompt_key", *([] if unneeded else ["answer_key"])]
    named += ["demonstration_key"] if config.demonstration_key and answers != "unused" else []
    _check_columns(record, {setting: getattr(config, setting) for setting in named}, key)
    prompt = _prompt(record, config, chat)
    if answers == "unused":
        return Row(prompt, "", "", where)
    if answers == "none":
        return Row(prompt, "", _demonstration(record, config.demonstration_key or config.answer_key), where)
    text = _whole_answer(record, config.answer_key) if answers == "whole" else _text(record, config.answer_key, numbers=True)
    return Row(
        prompt=prompt,
        answer=text if answers == "whole" else _final_answer(text, config.answer_key),
        demonstration=_demonstration(record, config.demonstration_key) if config.demonstration_key else text,
        where=where,
        record=record if answers == "whole" else {},
    )


def _check_columns(record: dict[str, Any], wanted: dict[str, str], key: str) -> None:
    """Reports all missing columns in one line, with the settings that name them."""
    missing = [f"{field!r} ({key}.{setting})" for setting, field in wanted.items() if _dig(record, field) is _MISSING]
    if missing:
        columns = ", ".join(repr(column) for column in islice(record, _MAX_PROBLEMS)) or "none"
        columns += f" and {len(record) - _MAX_PROBLEMS} more" if len(record) > _MAX_PROBLEMS else ""
        raise _Problem(f"no column {' and none '.join(missing)}; its columns are {columns}")


def _prompt(record: dict[str, Any], config: SourceConfig, chat: Render | None) -> str:
    """The prompt column in its template. A chat template takes it as a user's message or a list of messages."""
    if chat is None:
        return config.prompt_template.replace("{prompt}", _text(record, config.prompt_key))
    messages = _dig(record, config.prompt_key)
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": _text(record, config.prompt_key)}]
    parts = [message.get(part) if isinstance(message, dict) else None for message in messages for part in ("role", "content")]
    if not parts or not all(isinstance(part, str) for part in parts):
        raise _Problem(f"field {config.prompt_key!r} must be text, or messages with role and content, both text")
    try:
        return chat(messages)
    except ValueError as error:
        raise _Problem(f"field {config.prompt_key!r}: the chat template refuses it: {error}") from error


def _whole_answer(record: dict[str, Any], field: str) -> str:
    """Text as it is; anything else, such as a list of test cases, as JSON."""
    value = _dig(record, field)
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else _text(record, field, numbers=True)


def _text(record: dict[str, Any], field: str, numbers: bool = False) -> str:
    value = _dig(record, field)
    if numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise _Problem(f"field {field!r} must be text, not {_kind(value)}")
    if not value.strip():
        raise _Problem(f"field {field!r} is empty")
    return value


def _dig(record: dict[str, Any], field: str) -> Any:
    """A column, or a field inside one (`reward_model.ground_truth`); _MISSING if there is none."""
    if field in record:
        return record[field]
    column, dot, rest = field.partition(".")
    return _dig(record[column], rest) if dot and isinstance(record.get(column), dict) else _MISSING


def _demonstration(record: dict[str, Any], field: str) -> str | tuple[str, ...]:
    """One text; or a list of texts by policy and environment in turn, of which the policy's are first and last."""
    texts = _dig(record, field)
    if not isinstance(texts, list):
        return _text(record, field, numbers=True)
    if len(texts) % 2 == 0 or not all(isinstance(text, str) and text for text in texts):
        raise _Problem(f"field {field!r} must be text, or an odd number of texts: policy and environment in turn, policy first and last")
    return tuple(texts)


def _final_answer(text: str, field: str) -> str:
    marked = marked_answer(text)
    answer = clean(text) if marked is None else marked
    if not answer:
        places = "\\boxed{}, after ####, or the whole text"
        raise _Problem(f"field {field!r} has no final answer of 1 to {MAX_ANSWER_CHARS} characters ({places})")
    return answer


_KINDS = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def is_local(source: str) -> bool:
    """Whether reading it needs no network: it is a file or folder, even if missing, or a synthetic task."""
    path = Path(source).expanduser()
    looks_local = not _HUB_NAME.fullmatch(source) or path.suffix in (*_FILES, *_OTHER_FILES)
    return source.startswith(PREFIX) or looks_local or path.exists()


def _records(config: SourceConfig, key: str) -> Iterator[tuple[str, Any]]:
    """(where, record) pairs; for a line that is not JSON the record is a _Problem."""
    path, named = Path(config.source).expanduser(), f"{key}.source={config.source}"
    if not is_local(config.source) or path.is_dir():
        return _hub(config, key)
    if path.suffix not in _FILES:
        wanted = "a file must end in .jsonl or .parquet" if path.exists() or path.suffix in _OTHER_FILES else "no such file or folder"
        raise ConfigError(f"{named}: {wanted}")
    if not path.is_file():
        raise ConfigError(f"{named}: no such file{_near(path)}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{named}: may not be read")
    return _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)


def _near(path: Path) -> str:
    stems = {entry.stem: entry for entry in path.parent.iterdir() if entry.suffix in _FILES} if path.parent.is_dir() else {}
    found = difflib.get_close_matches(path.stem, stems, n=1)
    return f"; did you mean {stems[found[0]]}?" if found else ""


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record: Any = json.loads(line.decode().rstrip())
                if _SURROGATE.search(line):
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeDecodeError as error:
                record = _Problem(f"not UTF-8 at byte {error.start}")
            except json.JSONDecodeError as error:
                record = _Problem(f"malformed JSON at column {error.colno}: {error.msg}")
            except UnicodeEncodeError as error:
                record = _Problem(f"{error.object[error.start]!a} is half of a surrogate pair, and no character")
            except RecursionError:
                record = _Problem("JSON that is nested too deeply")
            except ValueError:  # the only one that is left
                record = _Problem("a number of too many digits")
            yield f"{path}, line {number}", record


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for number, record in enumerate((record for batch in batches for record in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a parquet file ({error})") from error


def _hub(config: SourceConfig, key: str) -> Iterator[tuple[str, Any]]:
    why = "" if Path(config.source).exists() else unreachable()  # must precede the import, which reads what this sets
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        subset = f", subset {config.subset}" if config.subset else ""
        what = f"{key}.source={config.source}{subset}, split {config.split}"
        reason = (why and f"it is not in the cache, and {why}") or (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what}: cannot be loaded: {reason}") from error
    for number, record in enumerate(rows, start=1):
        yield f"{config.source}, split {config.split}, row {number}", record
