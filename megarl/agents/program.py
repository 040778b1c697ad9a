"""Episodes that a program plays.

It may be any program that calls the policy by OpenAI's or Anthropic's interface (docs/agents.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from megarl.agents.endpoint import MODEL
from megarl.agents.episode import Episode, EpisodeResult, Tree
from megarl.agents.player import (
    MOST_METRICS,
    NoReward,
    Player,
    check_on_crash,
    numbers,
    reward_turns,
)
from megarl.base.rollout_types import UNANSWERED, Prompt
from megarl.config.errors import ConfigError, RunError, problems_of
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer
from megarl.generator.completions import Sampling
from megarl.generator.tool_parsers import find_parser
from megarl.rewards.score import Score, ScoreRequest
from megarl.rollouts.environments.base import RolloutContext
from megarl.sandbox import jail
from megarl.sandbox.jail import Jail, ProgramEnd

OUTPUT = "output"
PROGRAM = "program"
_NOT_FOUND = "exit status 127"  # as Jail and shells report a missing command
_INTERPRETER = re.compile(r"(python|node|bash|sh|ruby|perl|deno|bun)[\d.]*")
_LOOK = 'command -v "$1" >/dev/null || exit 3; test -z "$2" || test -e "$2" || exit 4'
_LOOK_S = 60.0
_MOST_WORD_BYTES = 128 << 10  # of one argument, including its final NUL: Linux's MAX_ARG_STRLEN
_Positive = Annotated[int, Meta(ge=1)]


class Program(Player):
    """Starts `command` once for each sample.

    The prompt replaces a word {prompt} in it; standard input has a JSON object with the prompt.

    `reward` says what is scored. With `output` or `message`, the run's reward scores the program's
    output or the policy's last message. With `program`, the last line of output is the reward, or a
    JSON object that contains it. A program fails by its exit status, its memory, `deadline_s` or a
    missing reward.
    """

    failures = ("exit", "deadline", "limits", "reward", UNANSWERED)

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        command: Annotated[list[str], Meta(min_length=1)],
        reward: Literal["output", "message", "program"] = OUTPUT,
        on_crash: float = 0.0,
        deadline_s: Annotated[float, Meta(gt=0)] = 600.0,
        memory_mib: _Positive = 2048,
        file_mib: _Positive = 256,
        folder: str | None = None,
        readable: list[str] = [],  # noqa: B006  it is never changed
        environment: dict[str, str] = {},  # noqa: B006
        sandbox: Literal["auto", "bwrap", "namespace", "limits"] = jail.AUTO,
        tool_parser: str = "json",
        max_calls: _Positive = 256,
        at_once: _Positive = 256,
        retries: Annotated[int, Meta(ge=0)] = 2,
        max_unanswered: Annotated[float, Meta(ge=0, le=1)] = 0.1,
    ):
        """Raises: ConfigError with all problems of the arguments."""
        problems = []
        kind = sandbox
        try:
            kind = jail.kind_for(sandbox)
        except ConfigError as error:
            problems += [f"rollout.args.{problem}" for problem in error.problems]
        paths = [("readable", path) for path in readable]
        if folder:
            paths.insert(0, ("folder", folder))
        for key, path in paths:
            if not Path(path).exists():
                problems.append(f"rollout.args.{key}={path}: there is no such path")
        problems += problems_of(lambda: check_on_crash(on_crash))
        if problems:
            raise ConfigError(problems)
        super().__init__(
            rollout=PROGRAM,
            name=command[0],
            tokenizer=tokenizer,
            template=load_chat_template(
                tokenizer, "rollout.name=program", "conversations cannot be rendered without one"
            ),
            parser=find_parser(tool_parser, "rollout.args.tool_parser"),
            on_crash=on_crash,
            max_calls=max_calls,
            retries=retries,
            at_once=at_once,
            max_unanswered=max_unanswered,
        )
        self._command = command
        self._reward = reward
        self._environment = environment
        self._limits: dict[str, Any] = {
            "kind": kind,
            "memory_mib": memory_mib,
            "file_mib": file_mib,
            "deadline_s": deadline_s,
            "folder": Path(folder).absolute() if folder else None,
            "paths": [Path(path).absolute() for path in readable],
        }
        self._jail = Jail(**self._limits)

    async def check(self) -> None:
        """Raises ConfigError if the sandbox lacks the program, or the script that an interpreter
        should run.
        """
        program = self._command[0]
        script = script_of(self._command)
        cell = Jail(**self._limits)
        cell.deadline_s = _LOOK_S
        try:
            ended = await cell.run(
                ["/bin/sh", "-c", _LOOK, "sh", program, script], "", self._environment, None
            )
        finally:
            await cell.close()
        missing = {
            "exit status 3": f"no program {program}",
            "exit status 4": f"no file {script}",
        }.get(ended.reason)
        if missing:
            folder = self._limits["folder"]
            start_folder = "an empty folder, because rollout.args.folder is not set"
            if folder:
                start_folder = f"rollout.args.folder={folder}"
            visibility = ""
            if cell.kind == jail.BWRAP:
                visibility = (
                    ", and of the host's other files sees only those in rollout.args.readable"
                )
            raise ConfigError(
                f"rollout.args.command={json.dumps(self._command)}: there is {missing}; it starts "
                f"in {start_folder}{visibility}"
            )

    async def open(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # for hundreds of programs, each with files and connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        await super().open()

    async def close(self) -> None:
        await super().close()
        await self._jail.close()

    async def play(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[EpisodeResult]:
        return await asyncio.gather(
            *(self._play(context, prompt, sampling, index) for index in range(n))
        )

    async def _play(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, index: int
    ) -> EpisodeResult:
        episode, ended = await self._attempt(context, prompt, sampling, index)
        kind = ended.kind
        reason = ended.reason
        if not episode.tree.turns:
            kind = UNANSWERED
            reason = self.unanswered(prompt, episode, ended.reason, ended.errors)
        if not kind:
            try:
                score, metrics = await self._score(context, prompt, episode, ended, index)
                return self.result_of(episode, score, metrics)
            except NoReward as error:
                kind = "reward"
                reason = str(error)
                self.log_failure(prompt, reason, ended.errors)
        return self.result_of(episode, self.failure_score(kind, reason, ended.errors), {})

    async def _attempt(
        self, context: RolloutContext, prompt: Prompt, sampling: Sampling, index: int
    ) -> tuple[Episode, ProgramEnd]:
        """Starts the program until one of its calls is answered, at most 1 + `retries` times.

        It is not started again if its row is the cause.
        """
        retries_left = self.retries
        while True:
            episode = self.episode(context, sampling, index)
            unfit = self._unfit(prompt)
            ended = ProgramEnd(unfit, "exit", "", "") if unfit else await self._run(episode, prompt)
            reason = ended.reason
            if not episode.tree.turns:
                reason = self.unanswered(prompt, episode, ended.reason, ended.errors)
            if reason:
                self.log_failure(prompt, reason, ended.errors)
            # after a turn, the policy may be the cause
            if not episode.tree.turns and ended.reason == _NOT_FOUND:
                message = (
                    f"ended with {_NOT_FOUND}: the command was not found; the end of its "
                    f"errors: {ended.errors.strip() or 'none'}"
                )
                raise RunError(f"rollout.args.command={json.dumps(self._command)}: {message}")
            if episode.tree.turns or unfit or episode.counts["out_of_room"] or not retries_left:
                return episode, ended
            retries_left -= 1

    def _unfit(self, prompt: Prompt) -> str:
        """The reason why the prompt cannot be an argument of the command; empty if it can."""
        for word in self._words(prompt):
            if "\0" in word:
                return (
                    "the prompt has the character NUL, which {prompt} in rollout.args.command "
                    "cannot hold; standard input has it too"
                )
            size = len(word.encode(errors="surrogatepass"))
            if size >= _MOST_WORD_BYTES:
                limit = f"{size} bytes, and Linux takes fewer than {_MOST_WORD_BYTES}"
                return (
                    f"the prompt is too long for {{prompt}} in rollout.args.command: {limit}; "
                    "standard input has it too"
                )
        return ""

    def _words(self, prompt: Prompt) -> list[str]:
        return [word.replace("{prompt}", prompt.text) for word in self._command]

    async def _run(self, episode: Episode, prompt: Prompt) -> ProgramEnd:
        """Runs the program. Raises the error if a call of the policy fails."""
        cell = self._jail
        async with self._places, contextlib.AsyncExitStack() as context:
            folder = context.enter_context(tempfile.TemporaryDirectory(prefix="megarl-endpoint-"))
            path = None if cell.networked else Path(folder) / "socket"
            key, port, failed, over = await context.enter_async_context(
                self._endpoint.serving(episode, path)
            )
            url = cell.base_url(port)
            variables = {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": key,
            }
            standard_input = self._standard_input(prompt)
            environment = {"MODEL": MODEL, **variables, **self._environment}
            running = asyncio.ensure_future(
                cell.run(self._words(prompt), standard_input, environment, path)
            )
            try:
                await asyncio.wait({running, failed, over}, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
                return ProgramEnd(over.result(), "limits", "", "") if over.done() else await running
            finally:
                running.cancel()
                await asyncio.wait({running})

    def _standard_input(self, prompt: Prompt) -> str:
        """The program's standard input.

        Only programs that score themselves get the answer: others could show it to the policy.
        """
        fields: dict[str, Any] = {"prompt": prompt.text}
        if self._reward == PROGRAM:
            fields |= {"answer": prompt.answer, "row": prompt.row}
        return json.dumps(fields, default=str) + "\n"

    async def _score(
        self,
        context: RolloutContext,
        prompt: Prompt,
        episode: Episode,
        ended: ProgramEnd,
        index: int,
    ) -> tuple[Score, dict[str, float]]:
        if self._reward == PROGRAM:
            return score_of_output(ended.output, episode.tree)
        last = episode.tree.turns[-1]
        request = ScoreRequest(
            response=ended.output.strip() if self._reward == OUTPUT else episode.last_content,
            answer=prompt.answer,
            prompt=prompt.text,
            row=prompt.row,
            source=prompt.source,
            prompt_token_ids=last.path[0].context,
            token_ids=last.token_ids[len(last.path[0].context) :],
            version=max(
                version for turn in episode.tree.turns for version in turn.completion.versions
            ),
            sample_index=index,
            truncated=last.completion.finish_reason == "length",
        )
        return await context.score(request), {}


def score_of_output(output: str, tree: Tree) -> tuple[Score, dict[str, float]]:
    """The reward in the last line of output, and the other numbers there as metrics. Rewards of
    turns there go to `tree`.

    Raises NoReward.
    """
    line = output.strip().rpartition("\n")[2]
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    report = value if isinstance(value, dict) else {"reward": value}
    turns = report.pop("turn_rewards", None)
    form = (
        f"a JSON object of numbers with one, with at most {MOST_METRICS} names of letters, "
        "digits and _"
    )
    score, metrics = numbers(
        report, f"its last line of output is neither a reward nor {form}: {line[:200]!r}"
    )
    if turns is not None:
        reward_turns(tree, turns, final_reward=score.reward)
    return score, metrics


def script_of(command: list[str]) -> str:
    """The script that the command's interpreter runs; empty if there is none, or if its name
    contains the prompt.
    """
    if not _INTERPRETER.fullmatch(Path(command[0]).name) or len(command) < 2:
        return ""
    script = command[1]
    if script.startswith("-") or "{prompt}" in script or script == "run":
        return ""
    return script
