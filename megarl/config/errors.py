"""Errors that the command line shows as their message alone, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ConfigError(ValueError):
    """One or more problems in configuration, arguments or data that the user can fix.

    The command line exits with status 2.

    Every problem is one line: the key, the value it has, what is allowed.
    """

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """A run cannot go on.

    The message has everything a user needs and is shown instead of the traceback, which is in the
    log.
    """


def tell(error: Exception) -> None:
    """Prints why the command ends, unless it has been printed before."""
    if not error.__dict__.get("told"):
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"megarl: {problem}", file=sys.stderr, flush=True)
    error.__dict__["told"] = True


def unreadable(error: OSError) -> ConfigError:
    """A ConfigError that says why the path in `error` cannot be accessed, such as a missing
    permission or too long a name. Raises `error` itself if it names no path.
    """
    if error.filename is None:
        raise error
    return ConfigError(f"{error.filename}: cannot be accessed: {error.strerror}")


def problems_of(*checks: Callable[[], object]) -> list[str]:
    """The problems that the checks find, without duplicates.

    All checks run, even after one has raised ConfigError.
    """
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
        except OSError as error:
            problems += unreadable(error).problems
    return list(dict.fromkeys(problems))
