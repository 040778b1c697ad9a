"""Errors whose message is all that a user needs."""

from __future__ import annotations

from collections.abc import Callable


class ConfigError(ValueError):
    """One or more problems in configuration, arguments or data, the user's to mend; the command line turns it into exit status 2.

    Every problem is one line: the key, the value it has, what is allowed.
    """

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """A run cannot go on. The message says all that a person needs, and is shown in the place of a traceback, which the log has."""


def unreadable(error: OSError) -> ConfigError:
    """Of a path that cannot even be looked at: too long a name, or in a folder that this user may not read. Raises `error` if it is of no
    path."""
    if error.filename is None:
        raise error
    return ConfigError(f"{error.filename}: cannot be looked at: {error.strerror}")


def problems_of(*checks: Callable[[], object]) -> list[str]:
    """Of all of them, each once: what a check raises a ConfigError about keeps no other from being asked."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found += error.problems
        except OSError as error:
            found += unreadable(error).problems
    return list(dict.fromkeys(found))
