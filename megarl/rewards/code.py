"""Rewards programs that pass tests.

They run in a sandbox (megarl.sandbox), which gets only the inputs of the tests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickletools
import shutil
import zlib
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import RewardConfig
from megarl.rewards.extract import MAX_TEXT_CHARS, after_thinking, thinking_in
from megarl.rewards.pool import workers_of
from megarl.rewards.score import RewardPart, Score, ScoreRequest
from megarl.sandbox import tested
from megarl.sandbox.jail import BWRAP, PYTHON, Jail, ProgramEnd

MOST_BYTES = 1 << 29  # most bytes of a problem's tests, unpacked
MOST_OUTPUT_BYTES = 1 << 26  # most bytes of a problem's results
# the operations of a pickle that push a text
_OF_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BESIDE_TEXTS = ("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP")


class Cases(NamedTuple):
    inputs: list[Any]  # texts for standard input; for a function, lists of arguments
    outputs: list[Any]  # texts; for a function, lists of results, any of which is right
    function: str | None  # None: the program reads standard input

    def passed(self, test: int, result: str) -> bool:
        """Whether `result` is right for `test`.

        Args: result: what the program printed, or JSON of what the function returned.
        """
        if self.function is None:
            return same_output(result, self.outputs[test])
        try:
            return json.loads(result) in self.outputs[test]
        except (ValueError, RecursionError):
            return False


def cases_of(answer: str) -> Cases:
    """Reads the tests of a programming problem, in the formats of common data sets.

    Formats: JSON of LiveCodeBench's columns; {"inputs", "outputs", "fn_name"} as in APPS, TACO and
    verl's rows; or a list of {"input", "output"}. Raises ValueError.
    """
    tests = _json(answer, "the tests")
    if isinstance(tests, dict) and "public_test_cases" in tests:
        public = _cases(tests.get("public_test_cases"), "public_test_cases")
        private = _cases(tests.get("private_test_cases"), "private_test_cases")
        metadata = _json(tests.get("metadata") or "{}", "metadata")
        named = metadata.get("func_name") if isinstance(metadata, dict) else None
        tests = {**_apart([*public, *private]), "fn_name": named}
    elif isinstance(tests, list):
        tests = _apart(tests)
    if not isinstance(tests, dict):
        tests = {}
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or not 0 < len(inputs) == len(outputs)
    ):
        either = "an object with inputs and outputs, two lists of one length"
        raise ValueError(f"tests must be {either}, or a list of objects with input and output")
    if sum(map(size_bytes, outputs)) > MOST_OUTPUT_BYTES:
        raise ValueError(f"outputs must have at most {MOST_OUTPUT_BYTES} bytes")
    function = tests.get("fn_name")
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise ValueError(f"the function's name must be a name, not {function!r}")
    if function is None:
        if not all(isinstance(text, str) for text in [*inputs, *outputs]):
            raise ValueError("inputs and outputs of a program must be texts")
        return Cases(inputs, outputs, None)
    return Cases(list(map(_arguments, inputs)), list(map(_results, inputs, outputs)), function)


def size_bytes(output: Any) -> int:
    text = output if isinstance(output, str) else json.dumps(output)
    return len(text.encode(errors="replace"))


def _arguments(value: Any) -> list[Any]:
    """The arguments of a function's call: one line of JSON for each, or a list of them."""
    arguments = value
    if isinstance(value, str):
        arguments = [_json(line, "an input") for line in value.split("\n")]
    if not isinstance(arguments, list):
        raise ValueError(
            "an input of a function must be lines of JSON, or a list of arguments, not "
            f"{arguments!r}"
        )
    return arguments


def _results(input_value: Any, output: Any) -> list[Any]:
    """The results that count as right.

    If arguments are a list, APPS may wrap a function's result in a list or not.
    """
    if isinstance(input_value, str):
        return [_json(output, "an output") if isinstance(output, str) else output]
    if isinstance(output, list) and len(output) == 1:
        return [output, *output]
    return [output]


def _apart(cases: Sequence[Any]) -> dict[str, list[Any]]:
    if not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
        raise ValueError("each test must be an object with input and output")
    return {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }


def _cases(text: Any, column: str) -> list[Any]:
    """A list of tests from JSON, or from JSON that was pickled, compressed by zlib and encoded in
    base 64.
    """
    if not isinstance(text, str):
        raise ValueError(f"{column} must be text")
    if not text.lstrip().startswith(("[", "{")):
        text = unpacked(text, column)
    cases = _json(text, column)
    if not isinstance(cases, list):
        raise ValueError(f"{column} must be a list of tests")
    return cases


def unpacked(text: str, column: str, most_bytes: int = MOST_BYTES) -> str:
    """The text that `text` holds in base 64, compressed and pickled.

    Raises ValueError for any other content or more than `most_bytes`.
    """
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), most_bytes)
        if not unpacking.eof:
            raise ValueError(f"cut short, or more than {most_bytes} bytes")
        return _pickled_text(data)
    except (zlib.error, ValueError) as error:
        raise ValueError(
            f"{column}: neither JSON nor a text that is pickled, compressed and in base 64 "
            f"({error})"
        ) from error


def _pickled_text(data: bytes) -> str:
    """Reads the pickle without unpickling: that could call any function and allocate any amount of
    memory. Raises ValueError.
    """
    texts: list[str] = []
    for operation, value, _ in pickletools.genops(data):
        if operation.name in _OF_TEXTS:
            texts.append(str(value))
        elif operation.name not in _BESIDE_TEXTS:
            raise ValueError(f"a pickle of something other than a text: {operation.name}")
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} texts")
    return texts[0]


def _json(text: Any, subject: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{subject}: not JSON ({error})") from error


def same_output(printed: str, expected: str) -> bool:
    """Compares as LiveCodeBench does: line by line without surrounding blanks, as texts or else as
    decimal numbers.
    """
    printed_lines = [line.strip() for line in printed.strip().split("\n")]
    expected_lines = [line.strip() for line in expected.strip().split("\n")]
    return len(printed_lines) == len(expected_lines) and all(
        map(_same_line, printed_lines, expected_lines)
    )


def _same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    printed_words = printed.split()
    expected_words = expected.split()
    try:
        return len(printed_words) == len(expected_words) and all(
            Decimal(a) == Decimal(b) for a, b in zip(printed_words, expected_words)
        )
    except ArithmeticError:  # not a number, or a NaN that signals
        return False


NAME = "code"  # as reward.name
_INSIDE = Path(tested.__file__)
_ROOM_MIB = 256  # most memory for temporary files, output and report of a program
_JSON_GROWTH = 8  # most by which a text grows as JSON
_GRACE_S = 5.0  # time for the sandbox to start and end
_PROBE = "a = int(input())\nprint(a + len(input().split()))"


def check_sandbox(setting: str) -> None:
    """Raises ConfigError if bubblewrap is missing, which hides the host's files, and so the tests'
    results, from programs.
    """
    if shutil.which(BWRAP) is None:
        raise ConfigError(
            f"{setting}: programs run in bubblewrap, which is not installed: {BWRAP} is not in PATH"
        )


def program_in(text: str) -> str:
    """The text between the last two lines with a code fence, as in LiveCodeBench; empty if there
    are fewer than two.
    """
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


class CodeReward:
    """Scores 1 if the program in a response passes all tests of the reference (see cases_of), else
    0. `workers_of(config)` programs run at a time. Parts of the score: `tests`, the share of tests
    that passed before the first one without a result; and whether the program is missing
    (`no_program`), `crashed`, was too `slow`, or printed too much (`long`).

    Scoring counts as failed only if an empty program cannot run either. Use as `async with`, in one
    event loop.
    """

    def __init__(self, config: RewardConfig, part: RewardPart):
        self._part = part
        self._code = config.code
        self._places = asyncio.Semaphore(workers_of(config))
        self._jail = Jail(
            BWRAP,
            config.code.memory_mib,
            _ROOM_MIB,
            config.code.timeout_s + _GRACE_S,
            paths=[_INSIDE],
            output_bytes=_ROOM_MIB << 20,
            printed_bytes=_ROOM_MIB << 20,
        )

    async def __aenter__(self) -> CodeReward:
        """Raises RunError if the sandbox does not tell a right program from a wrong one."""
        for output, reward in (("3.0", 1.0), ("4", 0.0)):
            tests = Cases(["1\n2 3"], [output], None)
            ended = await self._run(_PROBE, tests)
            score = _score(ended, tests)
            if score is None or score.reward != reward:
                raise RunError(
                    f"{self._part.setting}: the sandbox does not run programs: "
                    f"{ended.reason or 'no result'}; {ended.errors}"
                )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._jail.close()

    async def score(self, request: ScoreRequest) -> Score:
        text = after_thinking(thinking_in(request.prompt) + request.response)
        program = program_in(text.rstrip()[-MAX_TEXT_CHARS:])
        if not program.strip():
            return Score(0.0, _parts("no_program", 0.0))
        async with self._places:
            tests = await asyncio.to_thread(cases_of, request.answer)
            score = await self._scored(program, tests)
            if score:
                return score
            # a program may delete its own report; does an empty one give a report?
            ended = await self._run("", tests)
            if not ended.output:
                reason = (
                    f"the sandbox does not run programs: {ended.reason or 'no result'}; "
                    f"{ended.errors}"
                )
                return self._part.failed("exit", reason, request)
            return await self._scored(program, tests) or Score(0.0, _parts("crashed", 0.0))

    async def _scored(self, program: str, tests: Cases) -> Score | None:
        return await asyncio.to_thread(_score, await self._run(program, tests), tests)

    async def _run(self, program: str, tests: Cases) -> ProgramEnd:
        task = {
            "code": program,
            "function": tests.function,
            "inputs": tests.inputs,
            "test_timeout_s": self._code.test_timeout_s,
            "timeout_s": self._code.timeout_s,
            "most_bytes": most_bytes(tests),
        }
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # A program may stop the process that tests it, so the time limit of a test is also enforced
        # from outside.
        lines = len(tests.inputs) + 1
        line_s = self._code.test_timeout_s + _GRACE_S
        return await self._jail.run(
            [PYTHON, "-I", str(_INSIDE)], json.dumps(task), environment, None, lines, line_s
        )


def _score(ended: ProgramEnd, tests: Cases) -> Score | None:
    """The score; None without a report.

    A program can overwrite the report, but gains nothing: only right results pass.
    """
    if not ended.output:
        return None
    # one line for each test, then an empty one
    _, *lines = ended.output.split("\n", len(tests.inputs) + 1)
    most = _JSON_GROWTH * most_bytes(tests)
    count = len(tests.inputs)
    passed = 0
    failure = "slow" if ended.kind == "deadline" else "crashed"
    for test in range(count):
        line = lines[test] if test < len(lines) else ""
        status, result = _told(line) if len(line) <= most else ("", "")
        if status != "done":
            failure = status or failure
            break
        passed += tests.passed(test, result)
    else:
        failure = ""
    return Score(float(passed == count), _parts(failure, passed / count))


def most_bytes(tests: Cases) -> int:
    """Most bytes of all results of a program together."""
    return 2 * sum(map(size_bytes, tests.outputs)) + (1 << 20)


def _told(line: str) -> tuple[str, str]:
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(report, list) or len(report) != 2:
        return "", ""
    status, result = report
    if not isinstance(result, str) or status not in ("done", "crashed", "slow", "long"):
        return "", ""
    return status, result


def _parts(failure: str, tests: float) -> dict[str, float]:
    return {
        "tests": tests,
        **{name: float(name == failure) for name in ("no_program", "crashed", "slow", "long")},
    }
