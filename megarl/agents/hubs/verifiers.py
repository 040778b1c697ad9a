"""Environments of PrimeIntellect's package `verifiers`, in a separate interpreter that has their
packages (docs/agents.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megarl.agents.hubs.rollout import Count, HubRollout, Interpreter, Positive, Seconds, Share
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer
from megarl.generator.tool_parsers import find_parser

# split -> which tasks of a taskset it has (verifiers from 0.4 on)
_Rows = dict[Literal["train", "eval"], dict[str, Any]]


class Verifiers(HubRollout):
    """The environment provides tools, state and rubric.

    One process loads it once and plays all episodes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        environment: str,
        args: dict[str, Any] = {},  # noqa: B006  it is never changed
        rows: _Rows = {},  # noqa: B006
        python: str = "python",
        folder: str | None = None,
        variables: dict[str, str] = {},  # noqa: B006
        on_crash: float = 0.0,
        deadline_s: Seconds = 600.0,
        start_s: Seconds = 300.0,
        memory_mib: Positive = 8192,
        tool_parser: str = "json",
        max_calls: Positive = 256,
        at_once: Positive = 256,
        retries: Count = 2,
        max_unanswered: Share = 0.1,
    ):
        """Raises: ConfigError with all problems of the arguments, also if the interpreter lacks the
        environment.
        """
        interpreter = _interpreter(python, environment, args, rows, folder, variables)
        interpreter.check(on_crash)
        super().__init__(
            rollout="verifiers",
            name=f"the environment {environment}",
            tokenizer=tokenizer,
            template=load_chat_template(
                tokenizer, "rollout.name=verifiers", "conversations cannot be rendered without one"
            ),
            parser=find_parser(tool_parser, "rollout.args.tool_parser"),
            worker=interpreter.worker(memory_mib, start_s),
            deadline_s=deadline_s,
            on_crash=on_crash,
            max_calls=max_calls,
            retries=retries,
            at_once=at_once,
            max_unanswered=max_unanswered,
        )


def write_rows(arguments: dict[str, Any], files: dict[str, Path]) -> str:
    """Writes the environment's rows to `files`, split ("train", "eval") -> file.

    Returns how many. Raises ConfigError.

    Args: arguments: rollout.args.
    """
    interpreter = _interpreter(
        python=arguments.get("python", "python"),
        environment=arguments["environment"],
        args=arguments.get("args", {}),
        rows=arguments.get("rows", {}),
        folder=arguments.get("folder"),
        variables=arguments.get("variables", {}),
    )
    return interpreter.write_rows(files, arguments.get("start_s", 300.0))


def _interpreter(
    python: str,
    environment: str,
    args: dict[str, Any],
    rows: _Rows,
    folder: str | None,
    variables: dict[str, str],
) -> Interpreter:
    request = {"environment": environment, "args": args, "rows": rows}
    key = f"rollout.args.environment={environment}"
    return Interpreter(
        "inside_verifiers.py", python, key, request, folder, {"VF_LOG_LEVEL": "ERROR", **variables}
    )
