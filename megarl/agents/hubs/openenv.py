"""Environments of OpenEnv.

They are servers, which the package `openenv` calls from a separate interpreter (docs/agents.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megarl.agents.hubs.rollout import Count, HubRollout, Interpreter, Positive, Seconds, Share
from megarl.config.errors import ConfigError
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer
from megarl.generator.tool_parsers import find_parser

# split -> a number of seeds, or the name of one of the environment's splits
_Rows = dict[Literal["train", "eval"], Positive | str]
_ROWS: _Rows = {"train": 1000, "eval": 100}


class OpenEnv(HubRollout):
    """An episode is a session with a server.

    The policy's turns become steps, whose rewards are summed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        server: str | list[str],
        text_field: str | None = None,
        shown: list[str] | None = None,
        reward: Literal["sum", "last"] = "sum",
        max_turns: Positive = 16,
        rows: _Rows = _ROWS,  # this and the next two are for `megarl rows`
        system_prompt: str = "",
        instructions: str = "",
        python: str = "python",
        folder: str | None = None,
        variables: dict[str, str] = {},  # noqa: B006  it is never changed
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
        package or an app.
        """
        request = {
            "text_field": text_field,
            "shown": shown,
            "reward": reward,
            "max_turns": max_turns,
            "start_s": start_s,
            "rows": rows,
        }
        interpreter = _interpreter(server, request, python, folder, variables)
        interpreter.check(on_crash)
        super().__init__(
            rollout="openenv",
            name=f"the environment {', '.join(_listed(server))}",
            tokenizer=tokenizer,
            template=load_chat_template(
                tokenizer, "rollout.name=openenv", "conversations cannot be rendered without one"
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
    """Writes a row for each seed or task to `files`, split ("train", "eval") -> file.

    Returns how many. Raises ConfigError.

    Args: arguments: rollout.args.
    """
    limit_s = arguments.get("start_s", 300.0)
    request = {
        "rows": arguments.get("rows", _ROWS),
        "system_prompt": arguments.get("system_prompt", ""),
        "instructions": arguments.get("instructions", ""),
        "start_s": limit_s,
    }
    interpreter = _interpreter(
        arguments["server"],
        request,
        python=arguments.get("python", "python"),
        folder=arguments.get("folder"),
        variables=arguments.get("variables", {}),
    )
    return interpreter.write_rows(files, limit_s)


def _listed(server: str | list[str]) -> list[str]:
    return [server] if isinstance(server, str) else server


def _interpreter(
    server: str | list[str],
    request: dict[str, Any],
    python: str,
    folder: str | None,
    variables: dict[str, str],
) -> Interpreter:
    """Raises ConfigError."""
    servers = _listed(server)
    if not servers:
        raise ConfigError(
            "rollout.args.server=[]: must name a server, or a list of them that serve the same "
            "environment"
        )
    return Interpreter(
        "inside_openenv.py",
        python,
        f"rollout.args.server={', '.join(servers)}",
        {**request, "servers": servers},
        folder,
        variables,
    )
