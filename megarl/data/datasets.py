"""Reads rows from files, the hub or synthetic tasks."""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from megarl.base.files import HubAway, HubError, hub_file, unreachable
from megarl.config.errors import ConfigError
from megarl.config.schema import (
    OF_HUBS,
    UNSCORED,
    DatasetConfig,
    LearnedConfig,
    ModelConfig,
    PreferenceConfig,
    RunConfig,
    SourceConfig,
)
from megarl.config.tasks import source_of, task_of
from megarl.data.chat import CHAT, ChatTemplate, Message, check_shown, load_chat_template, name_of
from megarl.data.rows import (
    WITH_ROW,
    Answers,
    Pair,
    Reading,
    Row,
    RowProblem,
    Rows,
    dates_of,
    files_of,
    in_shuffled_order,
    with_benchmark_question,
    within_dates,
    without_nulls,
)
from megarl.data.synthetic import PREFIX, synthetic_pairs, synthetic_rows
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards import code, ifeval
from megarl.rewards.code import cases_of
from megarl.rewards.extract import MAX_ANSWER_CHARS, clean, marked_answer, plain
from megarl.rewards.score import (
    RewardPart,
    parts_in_evaluation,
    parts_in_labels,
    parts_in_win_rate,
    parts_of_source,
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_LONGEST_VALUE = 2**31 - 1  # in characters, for .csv files; the default of module csv is 131,072
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that is half of a surrogate pair
_OTHER_FILES = (".txt", ".gz", ".zst", ".arrow")


def is_local(source: str) -> bool:
    """Whether `source` is a file or folder (possibly missing) or a synthetic task, and so needs no
    network.
    """
    path = Path(source).expanduser()
    looks_local = not _HUB_NAME.fullmatch(source) or path.suffix in (*_FILES, *_OTHER_FILES)
    return source.startswith(PREFIX) or looks_local or path.exists()


def records(config: SourceConfig, key: str) -> Iterator[tuple[str, Any]]:
    """(location, record) for each row. The record is a RowProblem if the line is not JSON."""
    path = Path(config.source).expanduser()
    named = f"{key}.source={config.source}"
    parts = files_of(config)
    if not is_local(config.source) or path.is_dir():
        if parts:
            return chain.from_iterable(_jsonl(_part(config, name, key)) for name in parts)
        return _hub(config, key)
    if path.suffix not in _FILES:
        requirement = "no such file or folder"
        if path.exists() or path.suffix in _OTHER_FILES:
            requirement = f"a file must end in {', '.join(_FILES[:-1])} or {_FILES[-1]}"
        raise ConfigError(f"{named}: {requirement}")
    if not path.is_file():
        raise ConfigError(f"{named}: no such file{_near(path)}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{named}: may not be read")
    return _READERS[path.suffix](path)


def _part(config: SourceConfig, name: str, key: str) -> Path:
    """The file `name` of a dataset in a folder or on the hub.

    (The hub's own client can no longer read datasets with a loading script.)
    """
    folder = Path(config.source).expanduser()
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ConfigError(
                f"{key}.source={config.source}: has no {name}, which "
                f"{key}.subset={config.subset} needs"
            )
        return folder / name
    try:
        return hub_file(config.source, name, "dataset")
    except HubError as error:
        raise ConfigError(f"{key}.source={config.source}: {error}") from error


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    stems = {entry.stem: entry for entry in path.parent.iterdir() if entry.suffix in _FILES}
    matches = difflib.get_close_matches(path.stem, stems, n=1)
    return f"; did you mean {stems[matches[0]]}?" if matches else ""


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = parsed(line)
            except RowProblem as problem:
                record = problem
            yield f"{path}, line {number}", record


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of one JSON list, or of a JSONL file that is named .json."""
    text = path.read_bytes()
    try:
        rows = parsed(text)
    except RowProblem as problem:
        if text.lstrip()[:1] == b"[" or text.strip().split(b"\n")[0].strip() == b"{":
            raise ConfigError(
                f"{path}: {problem}; it must be a list of rows, or have one row on each line"
            ) from problem
        yield from _jsonl(path)
        return
    if not isinstance(rows, list):
        if b"\n" in text.strip():
            raise ConfigError(
                f"{path}: holds one value; it must be a list of rows, or have one row on each line"
            )
        rows = [rows]
    yield from ((f"{path}, row {number}", record) for number, record in enumerate(rows, start=1))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of comma-separated (.csv) or tab-separated values.

    The first line names the columns, and all values are texts. A column without a name, such as the
    index that pandas writes, is left out.
    """
    csv.field_size_limit(_LONGEST_VALUE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = "," if path.suffix == ".csv" else "\t"
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            named = [name for name in rows.fieldnames or () if name]
            if len(set(named)) < len(named):
                raise ConfigError(f"{path}: its first line names a column twice")
            for record in rows:
                values: Any = {name: record[name] for name in named}
                if rows.restkey in record:
                    columns = len(rows.fieldnames or ())
                    values = RowProblem(
                        f"it has more values than the first line has columns: {columns}"
                    )
                yield f"{path}, line {rows.line_num}", values
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix}: {error}") from error


def parsed(text: bytes) -> Any:
    """JSON. Raises RowProblem."""
    try:
        value = json.loads(text.decode("utf-8-sig").rstrip())
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise RowProblem(f"not UTF-8 at byte {error.start}", "not UTF-8") from error
    except json.JSONDecodeError as error:
        raise RowProblem(
            f"malformed JSON at column {error.colno}: {error.msg}", "malformed JSON"
        ) from error
    except UnicodeEncodeError as error:
        raise RowProblem(
            f"{error.object[error.start]!a} is half of a surrogate pair, and no character"
        ) from error
    except RecursionError as error:
        raise RowProblem("JSON that is nested too deeply") from error
    except ValueError as error:  # the only other kind
        raise RowProblem("a number with too many digits") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, record in enumerate(rows, start=1):
            yield f"{path}, row {number}", ArrowRow(record)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a parquet file ({error})") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}


def _hub(config: SourceConfig, key: str) -> Iterator[tuple[str, Any]]:
    # before the import, which reads the variables that this sets
    unreachable_reason = "" if Path(config.source).exists() else unreachable()
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        subset = f", subset {config.subset}" if config.subset else ""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        cause: Exception = error
        if unreachable_reason:
            reason = f"it is not in the cache, and {unreachable_reason}"
            cause = HubAway(unreachable_reason)
        raise ConfigError(
            f"{key}.source={config.source}{subset}, split {config.split}: cannot be loaded: "
            f"{reason}"
        ) from cause
    for number, record in enumerate(rows, start=1):
        yield f"{config.source}, split {config.split}, row {number}", ArrowRow(record)


class ArrowRow(dict[str, Any]):
    """A row of a parquet file or of the library datasets.

    Arrow gives all objects of a column the same fields, and those that an object lacks are null.
    """

    @property
    def compact(self) -> dict[str, Any]:
        """The row without the nulls inside its columns.

        In Arrow they cannot be told from absent fields. A list's items, and what is in a column of
        JSON texts, are as they were written. TRL's remove_none_values does the same.
        """
        return {name: without_nulls(value) for name, value in self.items()}


ROLES = ("system", "developer", "user", "assistant", "tool")


class Format(NamedTuple):
    name: str
    keys: tuple[str, ...]  # the columns that identify the format
    prompt: str
    answer: str


FORMATS = (
    Format("question and answer", ("question",), "question", "answer"),
    Format("OpenAI's", ("messages",), "messages", "answer"),
    Format("verl's", ("prompt", "reward_model"), "prompt", "reward_model.ground_truth"),
    Format("slime's", ("prompt", "label"), "prompt", "label"),
)


# used if no other format fits; environments of hubs write such rows
_PLAIN = Format("a prompt", ("prompt",), "prompt", "answer")


class Columns(NamedTuple):
    prompt: str
    answer: str | None  # None: the answer is the conversation's last message


def columns_of(record: Mapping[str, Any], config: DatasetConfig, key: str) -> Columns:
    """The row's columns: those that the section names, else those of the one format whose keys the
    row has, else `prompt` and `answer`. Raises RowProblem if the row has the keys of several
    formats.
    """
    if config.prompt_key is not None:
        return Columns(config.prompt_key, config.answer_key or "answer")
    fits = [form for form in FORMATS if all(record.get(name) is not None for name in form.keys)]
    if len(fits) > 1:
        names = [f"{' with '.join(map(repr, form.keys))} ({form.name})" for form in fits]
        raise RowProblem(
            f"it has the columns {' and '.join(names)}: set {key}.prompt_key and {key}.answer_key"
        )
    if fits:
        form = fits[0]
    elif "prompt" in record:
        form = _PLAIN
    else:
        form = FORMATS[0]
    if config.answer_key:
        return Columns(form.prompt, config.answer_key)
    in_conversation = form.prompt == "messages" and form.answer not in record
    return Columns(form.prompt, None if in_conversation else form.answer)


def messages_of(value: list[Any], field: str) -> list[Message]:
    """A conversation in the form that chat templates read: contents are texts, arguments of tool
    calls are objects. Raises RowProblem.
    """
    messages = []
    for number, message in enumerate(value, start=1):
        messages.append(_message(message, f"field {field!r}, message {number}"))
    return messages


def _message(message: Any, location: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowProblem(f"{location}: must be an object with role and content")
    # parquet writes null for absent keys
    fields = {name: value for name, value in message.items() if value is not None}
    if fields["role"] not in ROLES:
        raise RowProblem(f"{location}: role {fields['role']!r} must be one of {', '.join(ROLES)}")
    calls = fields.get("tool_calls")
    content = _content(fields.get("content", "" if calls else None), location)
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(name_of(call), str) for call in calls)
    ):
        raise RowProblem(
            f"{location}: tool_calls must be a list of objects, each with the function's name"
        )
    fields["content"] = content
    if calls:
        fields["tool_calls"] = [_call(call, location) for call in calls]
    return fields


def _content(content: Any, location: str) -> str:
    """The text of a message's content: a text, or OpenAI's list of text parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RowProblem(f"{location}: content must be text")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: dict[str, Any], location: str) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    inner = call.get("function", call)
    if not isinstance(inner.get("arguments"), str):
        return call
    try:
        function = {**inner, "arguments": parsed(inner["arguments"].encode())}
    except RowProblem as problem:
        raise RowProblem(
            f"{location}: the arguments of its tool call are not JSON: {problem}"
        ) from problem
    return {**call, "function": function} if inner is not call else function


# the column, named as in TRL and Hugging Face's chat templates, with the tools to offer to the
# model
TOOLS = "tools"


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a row offers, as a list or as JSON; None without any. Raises RowProblem."""
    tools = record.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = parsed(tools.encode())
        except RowProblem as problem:
            raise RowProblem(
                f"field {TOOLS!r} is neither a list of tools nor JSON of one: {problem}"
            ) from problem
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise RowProblem(f"field {TOOLS!r} must be a list of tools")
    return tools or None


def learned(messages: list[Message], learn: str, field: str) -> tuple[list[Message], list[int]]:
    """The messages without their weights, and the indices of the learned ones.

    Raises RowProblem.
    """
    places = []
    for place, message in enumerate(messages):
        weight = message.get("weight", 1)
        train = message.get("train", True)
        location = f"field {field!r}, message {place + 1}"
        if weight not in (0, 1):
            raise RowProblem(f"{location}: weight must be 0 or 1, not {weight!r}")
        if not isinstance(train, bool):
            raise RowProblem(f"{location}: train must be true or false, not {train!r}")
        if message["role"] == "assistant" and weight and train:
            places.append(place)
    if learn == "last":
        places = [place for place in places if place == len(messages) - 1]
    if not places:
        raise RowProblem(f"field {field!r}: it has no assistant's turn to learn")
    return _without_weights(messages), places


def _without_weights(messages: list[Message]) -> list[Message]:
    result = []
    for message in messages:
        message = dict(message)
        message.pop("weight", None)
        message.pop("train", None)
        result.append(message)
    return result


_MAX_PROBLEMS = 10  # most problems that one message shows
_AS_IT_IS = "{prompt}"  # the prompt_template that changes nothing
_MISSING = object()


def load_rows(
    config: DatasetConfig,
    key: str,
    seed: int,
    answers: Answers = "final",
    model: ModelConfig | None = None,
    reading: Reading | None = None,
) -> Rows:
    """All rows of a dataset.

    The final answer is the marked part of the answer column, after \\boxed{} (MATH) or "####"
    (GSM8K), else the whole text. Args: key: config section such as "data.train", for messages;
    seed: for synthetic tasks; answers: what to take from the answer column; model: whose chat
    template prompt_template="chat" uses; reading: whether to leave out rows with problems, and
    which further checks rows must pass. Raises ConfigError that lists all problems with file and
    line: malformed lines, missing or empty fields, wrong types, answers that cannot be found, a
    dataset without rows.
    """
    return read_rows(config, key, seed, answers, model, reading)[0]


def read_rows(
    config: DatasetConfig,
    key: str,
    seed: int,
    answers: Answers,
    model: ModelConfig | None,
    reading: Reading | None = None,
    limit: int | None = None,
) -> tuple[Rows, int]:
    """Like `load_rows`, but returns only the first `limit` usable rows, and the number of all rows.

    `reading.tokens` checks only the rows that are returned.
    """
    if config.source.startswith(PREFIX):
        return _synthetic(
            synthetic_rows(config.source, config.split, seed, key), config, key, reading, limit
        )
    chat = _template(config, key, model, reading)

    def make(location: str, record: dict[str, Any]) -> Row:
        question = with_benchmark_question(record, config)
        return _row(location, question, config, key, answers, chat)

    return _checked_rows(_records(config, key), config, key, make, reading, limit)


def read_pairs(
    config: PreferenceConfig,
    key: str,
    seed: int,
    model: ModelConfig | None,
    reading: Reading | None = None,
    limit: int | None = None,
) -> tuple[Sequence[Pair], int]:
    """Like `read_rows`, for pairs of responses."""
    if config.source.startswith(PREFIX):
        return _synthetic(
            synthetic_pairs(config.source, config.split, seed, key), config, key, reading, limit
        )
    chat = _template(config, key, model, reading)
    return _checked_rows(
        _records(config, key),
        config,
        key,
        lambda location, row: _pair(location, row, config, key, chat),
        reading,
        limit,
    )


Chat = Callable[[], ChatTemplate]
# section -> the section that names its columns
_COLUMNS_OF = {"reward_model.eval": "reward_model.data"}


def _template(
    config: SourceConfig, key: str, model: ModelConfig | None, reading: Reading | None
) -> Chat:
    """Loads the chat template: now if the section asks for it, else when the first row with
    messages needs it.
    """
    if "{prompt}" not in config.prompt_template and config.prompt_template != CHAT:
        raise ConfigError(
            f"{_COLUMNS_OF.get(key, key)}.prompt_template={config.prompt_template}: must contain "
            f"{{prompt}}, or be {CHAT}"
        )

    @cache
    def load() -> ChatTemplate:
        assert model is not None
        tokenizer = load_tokenizer(model)
        if config.prompt_template == CHAT:
            setting = f"{_COLUMNS_OF.get(key, key)}.prompt_template={CHAT}"
            template = load_chat_template(tokenizer, setting)
        else:
            template = load_chat_template(
                tokenizer, f"{key}.source={config.source}", "its rows have messages, which need one"
            )
        if reading is not None:
            reading.remark = template.remark
        return template

    if config.prompt_template == CHAT:
        load()
    return load


def _synthetic[R: (Row, Pair)](
    rows: Sequence[R], config: SourceConfig, key: str, reading: Reading | None, limit: int | None
) -> tuple[Sequence[R], int]:
    """Rows of a synthetic task, which are generated on access.

    So none is left out; `limit` of them are checked.
    """
    size = _size(config)
    count = len(rows) if size is None else min(size, len(rows))
    if limit is None and count == len(rows):
        return rows, count
    if limit is None:
        return [rows[i] for i in range(count)], count
    located_rows = ((rows[i].location, rows[i]) for i in range(min(limit, count)))
    if reading is not None:
        reading = Reading(tokens=reading.tokens, lengths=reading.lengths, digests=reading.digests)
    checked_rows, _ = _checked_rows(
        located_rows, config, key, lambda location, row: row, reading, limit
    )
    return checked_rows, count


def answers_of(config: RunConfig, evaluated: bool = False, name: str = "") -> Answers:
    """The form of reference answers that training (on the source `name`) or evaluation (of the
    suite `name`) needs.

    A verifier, for example, needs the final answer.
    """
    if not evaluated:
        return _answers_for(parts_of_source(config, name), task_of(config, name))
    settings = config.eval.suites.get(name)
    compared = [] if settings and settings.benchmark else parts_in_win_rate(config)
    parts = [*parts_in_evaluation(config, name), *compared]
    task = task_of(config, source_of(config, f"eval.suites.{name}"))
    return _answers_for(parts, task, with_reference=bool(compared))


def answers_of_labels(config: RunConfig) -> Answers:
    """The form of reference answers that megarl label needs, always with the row."""
    form = _answers_for(parts_in_labels(config), config, with_reference=config.label.reference)
    return WITH_ROW.get(form, form)


def _answers_for(
    parts: Sequence[RewardPart], config: RunConfig, with_reference: bool = False
) -> Answers:
    rollout = config.rollout.name
    if rollout in OF_HUBS:
        return "row"
    needs = {_answer_for(part, config) for part in parts}
    if with_reference:
        needs.add("whole")
    forms: tuple[Answers, ...] = ("final", "instructions", "tests", "whole", "unused")
    answer_form: Answers = next(form for form in forms if form in needs)
    gives_row = "whole" in needs or ":" in rollout or rollout == "program"
    return WITH_ROW.get(answer_form, answer_form) if gives_row else answer_form


def _answer_for(part: RewardPart, config: RunConfig) -> Answers:
    if part.name == UNSCORED:
        return "unused"
    if part.role is None:
        return "whole" if ":" in part.name else _FORMS.get(part.name, "final")
    settings = config.roles.get(part.role)
    return "whole" if settings and "{answer}" in (settings.template or "") else "unused"


def _size(config: SourceConfig) -> int | None:
    """How many rows are used, from the first on; None: all. eval.limit does this for held-out
    prompts.
    """
    return config.size if isinstance(config, (LearnedConfig, PreferenceConfig)) else None


def _records(config: SourceConfig, key: str) -> Iterable[tuple[str, dict[str, Any] | RowProblem]]:
    """(location, record) of each row that the section selects."""
    selected = in_shuffled_order(within_dates(records(config, key), config), config)
    for location, record in islice(selected, _size(config)):
        if not isinstance(record, dict | RowProblem):
            record = RowProblem(f"a row must be an object with fields, not {_kind(record)}")
        yield location, record


def _checked_rows[R: (Row, Pair)](
    located_records: Iterable[tuple[str, Any]],
    config: SourceConfig,
    key: str,
    make: Callable[[str, Any], R],
    reading: Reading | None,
    limit: int | None,
) -> tuple[list[R], int]:
    """The results of `make(location, record)` for the rows, and the number of all rows."""
    rows: list[R] = []
    bad: dict[str, list[str]] = {}  # problem -> the places where it occurs
    reading = reading or Reading()
    count = 0
    for location, record in located_records:
        count += 1
        try:
            if isinstance(record, RowProblem):
                raise record
            row = make(location, record)
            if limit is None or len(rows) < limit:
                if reading.tokens is not None:
                    reading.lengths.append(reading.tokens(row))
                rows.append(row)
            reading.note(row)
        except RowProblem as problem:
            description = problem.kind if reading.drop else str(problem)
            bad.setdefault(description, []).append(location)
    problems = []
    for problem, places in islice(bad.items(), _MAX_PROBLEMS):
        problems.append(f"{places[0]}: {problem}{_as_in(len(places) - 1)}")
    unread = sum(map(len, list(bad.values())[_MAX_PROBLEMS:]))
    if unread:
        problems.append(f"{config.source}: {unread} more rows with problems")
    if reading.drop and (rows or not count):
        reading.dropped |= bad
        problems = []
    if not count:
        problems.append(f"{key}.source={config.source}: has no rows{dates_of(config)}")
    if problems:
        raise ConfigError(problems)
    return rows, count


def _as_in(count: int) -> str:
    return f" (as in {count} more row{'s' * (count > 1)})" if count else ""


def _pair(
    location: str, record: dict[str, Any], config: PreferenceConfig, key: str, chat: Chat
) -> Pair:
    record = record.compact if isinstance(record, ArrowRow) else record
    field = config.prompt_key or "prompt"
    named = {"chosen_key": config.chosen_key, "rejected_key": config.rejected_key}
    if config.margin_key:
        named["margin_key"] = config.margin_key
    if config.prompt_key is None and field not in record:
        record = record | _prompt_of_both(record, field, config.chosen_key, config.rejected_key)
    _check_columns(record, {"prompt_key": field} | named, _COLUMNS_OF.get(key, key))
    margin = _dig(record, config.margin_key) if config.margin_key else 0.0
    if (
        isinstance(margin, bool)
        or not isinstance(margin, (int, float))
        or not abs(margin) <= sys.float_info.max
    ):
        raise RowProblem(f"field {config.margin_key!r} must be a finite number, not {margin!r}")
    chosen = _response(record, config.chosen_key)
    rejected = _response(record, config.rejected_key)
    if chosen == rejected:
        raise RowProblem(
            f"fields {config.chosen_key!r} and {config.rejected_key!r} are the same: nothing is "
            "preferred"
        )
    prompt = _prompt(record, field, config, chat)
    rendered = _is_rendered(record, field, config)
    return Pair(prompt, chosen, rejected, float(margin), location, rendered)


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common prefix."""
    for length, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return length
    return min(len(first), len(second))


def _prompt_of_both(
    record: dict[str, Any], prompt: str, chosen: str, rejected: str
) -> dict[str, Any]:
    """The columns of a row without a prompt column (TRL's implicit prompt): the prompt is the
    common beginning of both responses, up to a word boundary. Empty if the row lacks a response
    too.
    """
    first = _dig(record, chosen)
    second = _dig(record, rejected)
    if first is _MISSING or second is _MISSING:
        return {}
    lists = all(isinstance(value, list) for value in (first, second))
    texts = all(isinstance(value, str) for value in (first, second))
    shared = _common_length(first, second) if lists or texts else 0
    if texts:
        shared = len(re.sub(r"\w+\Z", "", first[:shared]).rstrip()) or shared
    if not shared or (lists and not len(first) == len(second) == shared + 1):
        after = "messages, followed by one response each" if lists else "text"
        raise RowProblem(
            f"no column {prompt!r}, and fields {chosen!r} and {rejected!r} do not begin with the "
            f"same {after}"
        )
    columns = {prompt: first[:shared]}
    if texts:
        columns |= {chosen: first[shared:], rejected: second[shared:]}
    return columns


def _response(record: dict[str, Any], field: str) -> str:
    """The response in a column: a text, or the last of a list of messages."""
    value = _dig(record, field)
    if not isinstance(value, list):
        return _text(record, field)
    last = value[-1] if value else None
    if (
        not isinstance(last, dict)
        or not isinstance(last.get("content"), str)
        or last.get("role") == "user"
    ):
        raise RowProblem(
            f"field {field!r} must be text, or a list of messages that ends with the response"
        )
    return last["content"]


def _row(
    location: str,
    record: dict[str, Any],
    config: DatasetConfig,
    key: str,
    answers: Answers,
    chat: Chat,
) -> Row:
    raw = record
    record = record.compact if isinstance(record, ArrowRow) else record
    columns = columns_of(record, config, key)
    demonstration = config.demonstration_key if isinstance(config, LearnedConfig) else None
    messages = _dig(record, columns.prompt)
    if columns.answer is None and not isinstance(messages, list):
        raise RowProblem(
            f"field {columns.prompt!r} must be a list of messages, not {_kind(messages)}"
        )
    if answers == "none" and not demonstration and columns.answer is None:
        return _conversation(location, record, messages, columns.prompt, config, chat)
    # Functions of verl expect the nulls of Arrow in their columns. An environment shows
    # conversations and tools to the policy.
    shown = {name: record[name] for name in (columns.prompt, "tools") if name in record}
    user_record = {**raw, **shown} if answers == "whole" or answers in WITH_ROW.values() else {}
    fields_by_setting = {"prompt_key": columns.prompt}
    if answers not in ("row", "unused"):
        if columns.answer and not (answers == "none" and demonstration):
            fields_by_setting["answer_key"] = columns.answer
        if demonstration:
            fields_by_setting["demonstration_key"] = demonstration
    _check_columns(record, fields_by_setting, key)
    prompt = _prompt(record, columns.prompt, config, chat, answered=config.prompt_key is None)
    rendered = _is_rendered(record, columns.prompt, config)
    answer = ""
    demonstrated: str | tuple[str, ...] = ""
    if answers in ("row", "unused"):
        demonstration = None
        value = _dig(record, columns.answer or "")
        if isinstance(value, str):
            answer = value
    elif answers == "none":
        demonstration = demonstration or columns.answer
    else:
        if columns.answer is None:
            text = _last(messages, columns.prompt)
        elif answers in _FINAL:
            text = _text(record, columns.answer, numbers=True)
        else:
            text = _whole_answer(record, columns.answer)
        answer = _REFERENCES[answers](text, columns.answer or columns.prompt)
        demonstrated = text
    if demonstration:
        demonstrated = _demonstration(record, demonstration)
    return Row(prompt, answer, demonstrated, location, user_record, rendered=rendered)


def _check_columns(record: dict[str, Any], fields_by_setting: dict[str, str], key: str) -> None:
    """Raises RowProblem that names all missing columns, and the settings that name them."""
    missing = []
    for setting, field in fields_by_setting.items():
        if _dig(record, field) is _MISSING:
            missing.append(f"{field!r} ({key}.{setting})")
    if missing:
        columns = ", ".join(map(repr, islice(record, _MAX_PROBLEMS))) or "none"
        if len(record) > _MAX_PROBLEMS:
            columns += f" and {len(record) - _MAX_PROBLEMS} more"
        raise RowProblem(f"no column {' and none '.join(missing)}; its columns are {columns}")


def _prompt(
    record: dict[str, Any], field: str, config: SourceConfig, chat: Chat, answered: bool = False
) -> str:
    """The prompt column in its template.

    A chat template takes it as a user's message or a list of messages. `answered`: if the list ends
    with an answer, the prompt is what comes before it.
    """
    if not _is_rendered(record, field, config):
        return config.prompt_template.replace("{prompt}", _text(record, field))
    conversation = _prompt_messages(record, field, config, answered)
    return _rendered(
        record,
        conversation,
        field,
        chat,
        lambda template, tools: template.render(conversation, tools),
    )


def _prompt_messages(
    record: dict[str, Any], field: str, config: SourceConfig, answered: bool
) -> list[Message]:
    """The messages that `_prompt` renders."""
    messages = _dig(record, field)
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": _text(record, field)}]
    conversation = _messages(messages, field, config)
    if answered and len(conversation) > 1 and conversation[-1]["role"] == "assistant":
        conversation = conversation[:-1]
    if conversation[-1]["role"] == "assistant":
        raise RowProblem(
            f"field {field!r}: the last message is the assistant's, so there is nothing to answer"
        )
    return _without_weights(conversation)


def conversation_of(record: dict[str, Any], config: DatasetConfig, key: str) -> list[Message]:
    """The messages behind the prompt of a row that was rendered by the chat template."""
    record = record.compact if isinstance(record, ArrowRow) else record
    field = columns_of(record, config, key).prompt
    return _prompt_messages(record, field, config, answered=config.prompt_key is None)


def responses_in(record: dict[str, Any], columns: Sequence[str]) -> list[tuple[str, str]]:
    """(column, text) of the responses in `columns`, each a text or a list of texts.

    Raises RowProblem.
    """
    responses: list[tuple[str, str]] = []
    for column in columns:
        value = _dig(record, column)
        texts = value if isinstance(value, list) else [value]
        if value is _MISSING:
            raise RowProblem(f"no column {column!r} (label.columns)")
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise RowProblem(f"field {column!r} (label.columns) must be text, or a list of texts")
        responses += [(column, text) for text in texts]
    return responses


def _is_rendered(record: dict[str, Any], field: str, config: SourceConfig) -> bool:
    """Whether `_prompt` uses the chat template."""
    return config.prompt_template == CHAT or isinstance(_dig(record, field), list)


def _messages(value: list[Any], field: str, config: SourceConfig) -> list[Message]:
    if not value:
        raise RowProblem(f"field {field!r} has no messages")
    if config.prompt_template not in (CHAT, _AS_IT_IS):
        only = f"prompt_template={config.prompt_template} cannot be applied to them"
        raise RowProblem(f"field {field!r} has messages, which need a chat template: {only}")
    return messages_of(value, field)


def _rendered[T](
    record: dict[str, Any],
    messages: list[Message],
    field: str,
    chat: Chat,
    make: Callable[[ChatTemplate, Any], T],
) -> T:
    """The result of `make(template, tools)`.

    Raises RowProblem if the template leaves out tools or messages of the row.
    """
    template = chat()
    tools = tools_of(record)
    try:
        template.check(messages, tools)
        text = template.render(messages, tools, answered=True)
        if tools and text == template.render(messages, answered=True):
            raise RowProblem(f"field {TOOLS!r} has tools, but the model's chat template shows none")
        check_shown(messages, text)
        return make(template, tools)
    except ValueError as error:
        raise RowProblem(f"field {field!r}: {error}") from error


def _conversation(
    location: str,
    record: dict[str, Any],
    messages: list[Any],
    field: str,
    config: DatasetConfig,
    chat: Chat,
) -> Row:
    """A row from a conversation to learn from. Its prompt ends before the first learned turn."""
    learn = config.learn if isinstance(config, LearnedConfig) else "all"
    turns, places = learned(_messages(messages, field, config), learn, field)
    pieces = _rendered(
        record,
        turns,
        field,
        chat,
        lambda template, tools: template.pieces(turns, tools, places),
    )
    return Row(pieces[0], "", tuple(pieces[1:]), location, ended=True, rendered=True)


def _last(messages: list[Any], field: str) -> str:
    """The reference answer of a conversation without an answer column: the last message, which must
    be the assistant's.
    """
    last = messages_of(messages, field)[-1]
    if last["role"] != "assistant" or not last["content"].strip():
        raise RowProblem(
            f"field {field!r}: the last message is not the assistant's answer, and there is no "
            "column 'answer'"
        )
    return last["content"]


def _whole_answer(record: dict[str, Any], field: str) -> str:
    """The column's text as it is, or any other value, such as a list of test cases, as JSON."""
    value = _dig(record, field)
    if not isinstance(value, (list, dict, bool)):
        return _text(record, field, numbers=True)
    try:
        return json.dumps(value)
    except TypeError as error:  # parquet has more kinds of values than JSON
        raise RowProblem(f"field {field!r} cannot be written as JSON: {error}") from error


def _text(record: dict[str, Any], field: str, numbers: bool = False) -> str:
    value = _dig(record, field)
    if numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
        # pandas writes NaN for a missing value
        if isinstance(value, float) and not math.isfinite(value):
            raise RowProblem(f"field {field!r} must be a finite number, not {value}")
        return str(value)
    if not isinstance(value, str):
        raise RowProblem(f"field {field!r} must be text, not {_kind(value)}")
    if not value.strip():
        raise RowProblem(f"field {field!r} is empty")
    return value


def _dig(record: dict[str, Any], field: str) -> Any:
    """The value of a column, or of a field inside one (`reward_model.ground_truth`); _MISSING if
    there is none.
    """
    if field in record:
        return record[field]
    column, dot, inner_field = field.partition(".")
    if dot and isinstance(record.get(column), dict):
        return _dig(record[column], inner_field)
    return _MISSING


def _demonstration(record: dict[str, Any], field: str) -> str | tuple[str, ...]:
    """One text, or a list of texts that policy and environment write alternately.

    The policy writes the first and the last.
    """
    texts = _dig(record, field)
    if not isinstance(texts, list):
        return _text(record, field, numbers=True)
    if len(texts) % 2 == 0 or not all(isinstance(text, str) and text for text in texts):
        raise RowProblem(
            f"field {field!r} must be text, or an odd number of texts: policy and environment in "
            "turn, policy first and last"
        )
    return tuple(texts)


def _final_answer(text: str, field: str) -> str:
    text = plain(text)
    marked = marked_answer(text)
    answer = clean(text) if marked is None else marked
    if not answer:
        places = "\\boxed{}, after ####, or the whole text"
        raise RowProblem(
            f"field {field!r} has no final answer of 1 to {MAX_ANSWER_CHARS} characters ({places})"
        )
    return answer


def _tests(text: str, field: str) -> str:
    """The tests, checked but not unpacked: unpacked, they may be many times as large."""
    try:
        cases_of(text)
        return text
    except ValueError as problem:
        raise RowProblem(f"field {field!r}: {problem}") from problem


def _instructions(text: str, field: str) -> str:
    try:
        return ifeval.reference(text)
    except ValueError as problem:
        raise RowProblem(f"field {field!r}: {problem}") from problem


_REFERENCES: dict[Answers, Callable[[str, str], str]] = {
    "final": _final_answer,
    "instructions": _instructions,
    "tests": _tests,
    "whole": lambda text, field: text,
}
_REFERENCES |= {WITH_ROW[form]: _REFERENCES[form] for form in WITH_ROW if form in _REFERENCES}
_FINAL = ("final", WITH_ROW["final"])
# reward.name -> form of the reference answers
_FORMS: dict[str, Answers] = {ifeval.NAME: "instructions", code.NAME: "tests"}
_KINDS = {
    type(None): "null",
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)
