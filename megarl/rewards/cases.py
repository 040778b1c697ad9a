"""The tests of a programming problem, in the forms in which data sets have them, and whether results are those that are wanted."""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

MOST_BYTES = 1 << 29  # of a problem's tests, unpacked
MOST_OUTPUT_BYTES = 1 << 26  # of a problem's results
_OF_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")  # a pickle's operations
_BESIDE_TEXTS = ("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP")


class Cases(NamedTuple):
    inputs: list[Any]  # texts for standard input; for a function its lists of arguments
    outputs: list[Any]  # texts; for a function its results, any of which is right
    function: str | None  # None: the program reads standard input

    def passed(self, test: int, result: str) -> bool:
        """Args: result: what a program printed, or JSON of what the function returned."""
        if self.function is None:
            return same_output(result, self.outputs[test])
        try:
            return json.loads(result) in self.outputs[test]
        except (ValueError, RecursionError):
            return False


def cases_of(answer: str) -> Cases:
    """From JSON of LiveCodeBench's columns; of {"inputs", "outputs", "fn_name"} as APPS, TACO and verl's rows have them; or of a list of
    {"input", "output"}. Raises ValueError."""
    found = _json(answer, "the tests")
    if isinstance(found, dict) and "public_test_cases" in found:
        public, private = (_cases(found.get(f"{kind}_test_cases"), f"{kind}_test_cases") for kind in ("public", "private"))
        metadata = _json(found.get("metadata") or "{}", "metadata")
        named = metadata.get("func_name") if isinstance(metadata, dict) else None
        found = {**_apart([*public, *private]), "fn_name": named}
    elif isinstance(found, list):
        found = _apart(found)
    inputs, outputs = (found.get(key) if isinstance(found, dict) else None for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        either = "an object with inputs and outputs, two lists of one length"
        raise ValueError(f"tests must be {either}, or a list of objects with input and output")
    if sum(map(size_bytes, outputs)) > MOST_OUTPUT_BYTES:
        raise ValueError(f"outputs must have at most {MOST_OUTPUT_BYTES} bytes")
    function = found.get("fn_name")
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise ValueError(f"the function's name must be a name, not {function!r}")
    if function is None:
        if not all(isinstance(text, str) for text in [*inputs, *outputs]):
            raise ValueError("inputs and outputs of a program must be texts")
        return Cases(inputs, outputs, None)
    return Cases([_arguments(given) for given in inputs], [_results(given, wanted) for given, wanted in zip(inputs, outputs)], function)


def size_bytes(output: Any) -> int:
    return len((output if isinstance(output, str) else json.dumps(output)).encode(errors="replace"))


def _arguments(given: Any) -> list[Any]:
    """Of a function: a line of JSON for each, or a list of them."""
    found = [_json(line, "an input") for line in given.split("\n")] if isinstance(given, str) else given
    if not isinstance(found, list):
        raise ValueError(f"an input of a function must be lines of JSON, or a list of arguments, not {found!r}")
    return found


def _results(given: Any, wanted: Any) -> list[Any]:
    """APPS has a function's results in a list, or not, where its arguments are a list."""
    if isinstance(given, str):
        return [_json(wanted, "an output") if isinstance(wanted, str) else wanted]
    return [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]


def _apart(cases: Sequence[Any]) -> dict[str, list[Any]]:
    if not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
        raise ValueError("each test must be an object with input and output")
    return {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}


def _cases(text: Any, column: str) -> list[Any]:
    """A list in JSON; or that in a text, pickled, compressed by zlib and in base 64."""
    if not isinstance(text, str):
        raise ValueError(f"{column} must be text")
    if not text.lstrip().startswith(("[", "{")):
        text = unpacked(text, column)
    found = _json(text, column)
    if not isinstance(found, list):
        raise ValueError(f"{column} must be a list of tests")
    return found


def unpacked(text: str, column: str, most_bytes: int = MOST_BYTES) -> str:
    """The text that is pickled in it; anything else that may be pickled is refused, and so is more than `most_bytes`. Raises ValueError."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), most_bytes)
        if not unpacking.eof:
            raise ValueError(f"cut short, or more than {most_bytes} bytes")
        return _pickled_text(data)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"{column}: neither JSON nor a text that is pickled, compressed and in base 64 ({error})") from error


def _pickled_text(data: bytes) -> str:
    """Read and not run: an unpickler would call what a pickle names, and fill as much memory as a number in it says. Raises ValueError."""
    found: list[str] = []
    for operation, value, _ in pickletools.genops(data):
        if operation.name in _OF_TEXTS:
            found.append(str(value))
        elif operation.name not in _BESIDE_TEXTS:
            raise ValueError(f"a pickle of something else than a text: {operation.name}")
    if len(found) != 1:
        raise ValueError(f"a pickle of {len(found)} texts")
    return found[0]


def _json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{what}: not JSON ({error})") from error


def same_output(printed: str, wanted: str) -> bool:
    """As LiveCodeBench compares: line by line without blanks around them, as texts or else as decimal numbers."""
    found, expected = ([line.strip() for line in text.strip().split("\n")] for text in (printed, wanted))
    return len(found) == len(expected) and all(map(_same_line, found, expected))


def _same_line(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    ours, theirs = found.split(), wanted.split()
    try:
        return len(ours) == len(theirs) and all(Decimal(a) == Decimal(b) for a, b in zip(ours, theirs))
    except ArithmeticError:  # not a number, or a NaN that signals
        return False
