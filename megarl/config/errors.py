"""Errors that are the user's to mend. The command line turns them into exit status 2."""

from __future__ import annotations


class ConfigError(ValueError):
    """One or more problems in configuration, arguments or data, found before anything started.

    Every problem is one line: the key, the value it has, what is allowed.
    """

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
