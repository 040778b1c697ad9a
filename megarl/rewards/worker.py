"""The process that verifies model output: small, without torch, under its own limits.

megarl.rewards.pool starts it, and kills it when an answer takes too long.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from megarl.config.limits import attribute
from megarl.rewards.score import score_of
from megarl.sandbox import process
from megarl.sandbox.process import own_line

_INSTRUCTIONS = {
    "instruction_id_list": [
        "language:response_language",
        "length_constraints:number_sentences",
        "change_case:capital_word_frequency",
        "length_constraints:number_words",
    ],
    "kwargs": [
        {"language": "en"},
        {"num_sentences": 2, "relation": "at least"},
        {"capital_frequency": 1, "capital_relation": "at least"},
        {"num_words": 9, "relation": "at least"},
    ],
}
_FOLLOWED = "This is the FIRST of two sentences, and it is English. This is the other one."
# Right answers. They make SymPy do its late imports before the clock runs and side effects are
# forbidden.
_WARM_UP = {
    "math": [
        ("\\boxed{x^2+2x+1}", "(x+1)^2"),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
        ("\\boxed{\\{1,\\frac12\\}}", "\\{0.5,1\\}"),
        ("\\boxed{x<1}", "1>x"),
    ],
    "last_number": [("1,2", "2.0")],
    "choice": [("the answer is (B)", "B")],
    "ifeval": [(_FOLLOWED, json.dumps(_INSTRUCTIONS))],
}
# SymPy evaluates these expressions to make numbers from text. latex2sympy does so for everything
# its grammar reads as a number.
_NUMBER_SOURCE = re.compile(
    rb"from sympy import \*|[-+]?\s*(?:Integer|Float)\s*\(\s*'?[\d.]+(?:[eE][-+]?\d+)?'?\s*\)"
)
# as the loader, the system and torch say it
_OUT_OF_MEMORY = re.compile(r"allocate memory|failed to map segment|bad_alloc")
_FORBIDDEN_EVENTS = (
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
    "pty.",
    "tempfile.",
    "urllib.",
    "sqlite3.",
    "signal.",
    "gc.",
)
# by Python's imports
_HARMLESS_EVENTS = (
    "os.listdir",
    "os.scandir",
    "os.walk",
    "ctypes.get_errno",
    "ctypes.set_errno",
    "ctypes.cdata",
)


def main(verifier: str, parameters: str, memory_mib: str, timeout_s: str, parent: str) -> None:
    """Serves until standard input closes."""
    process.prepare(parent)
    if ":" in verifier:
        function = own_function(verifier, parameters.split(",") if parameters else [])
        process.limit_resources(memory_mib, files_writable=True)
        process.serve(function, timeout_s)
        return
    logging.disable(logging.CRITICAL)  # math-verify logs all model output that it cannot parse
    from megarl.rewards.verify import VERIFIERS

    verify = VERIFIERS[verifier]
    for text, answer in _WARM_UP[verifier]:
        if score_of(verify(text, answer)).reward != 1.0:
            raise RuntimeError(
                f"verifier {verifier} does not find {text!r} right for the answer {answer!r}"
            )
    process.limit_resources(memory_mib, files_writable=False)
    _forbid_side_effects()
    process.serve(lambda text, answer: score(verify, text, answer), timeout_s)


def own_function(path: str, parameters: Sequence[str]) -> Callable[..., dict[str, Any] | str]:
    """Wraps the user's function.

    The result takes the values of `parameters`, and returns a Score, or the description of a
    mistake in the function as text. It raises ValueError, which is not a mistake.
    """
    function = attribute(path)

    def reward(*values: Any) -> dict[str, Any] | str:
        try:
            result = function(**dict(zip(parameters, values, strict=True)))
        except (ValueError, MemoryError):
            raise
        except Exception as error:
            traceback.print_exc()
            if _OUT_OF_MEMORY.search(str(error)):
                raise MemoryError from error
            return own_line(error)
        try:
            return msgspec.to_builtins(score_of(result))
        except TypeError as error:
            return str(error)

    return reward


def score(verify: Callable[[str, str], Any], text: str, answer: str) -> dict[str, Any]:
    """The verifier's score.

    Raises ValueError if the verifier fails on this text, and MemoryError.
    """
    try:
        return msgspec.to_builtins(score_of(verify(text, answer)))
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"the verifier failed: {type(error).__name__}") from error


def _forbid_side_effects() -> None:
    """Forbids to start processes, connect, delete or write files, and evaluate Python, except
    SymPy's numbers from text.

    This is the second line of defence. The first is that no answer is passed to anything that
    evaluates Python.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "compile":
            source = args[0]
            caller = sys._getframe(1).f_globals.get("__name__", "")
            is_number = isinstance(source, bytes) and _NUMBER_SOURCE.fullmatch(source)
            if caller.startswith("sympy.parsing") and not is_number:
                raise PermissionError("evaluating Python from text is not allowed here")
        elif event == "open":
            if (isinstance(args[1], str) and not args[1].startswith("r")) or args[2] & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT
            ):
                raise PermissionError("writing files is not allowed here")
        elif event.startswith(_FORBIDDEN_EVENTS) and event not in _HARMLESS_EVENTS:
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)
