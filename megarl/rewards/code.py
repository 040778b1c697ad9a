"""Programs that must pass tests: they run in a sandbox (megarl.sandbox), which is given the tests' inputs alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import RewardConfig
from megarl.rewards.cases import Cases, cases_of, size_bytes
from megarl.rewards.parts import Part
from megarl.rewards.pool import workers_of
from megarl.rewards.score import Score, ScoreRequest
from megarl.rewards.verify import MAX_TEXT_CHARS
from megarl.sandbox import tested
from megarl.sandbox.jail import BWRAP, PYTHON, Ended, Jail

NAME = "code"  # as reward.name
_INSIDE = Path(tested.__file__)
_ROOM_MIB = 256  # of all that the tests of a program give
_JSON_GROWTH = 8  # at most, of a text as JSON
_GRACE_S = 5.0  # for the sandbox to start and end
_PROBE = "a = int(input())\nprint(a + len(input().split()))"


def check_sandbox(setting: str) -> None:
    """Raises ConfigError where there is no sandbox that hides the host's files, the tests' results among them."""
    if shutil.which(BWRAP) is None:
        raise ConfigError(f"{setting}: programs run in bubblewrap, which is not installed: {BWRAP} is not in PATH")


def program_in(text: str) -> str:
    """What is between the last two lines with a fence, as LiveCodeBench takes it; empty if there are no two."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


class CodeReward:
    """Scores 1 if the program in a response passes all tests of the reference (see cases_of), else 0; `workers_of(config)` programs run at
    a time. Parts of the score: the share of `tests` that are passed before the first that has no result, and whether there is `no_program`,
    it `crashed`, was too `slow`, or printed too much (`long`).

    A score is a failed one only where a program without a line cannot run either. Use as `async with`, in one event loop.
    """

    def __init__(self, config: RewardConfig, part: Part):
        self._part, self._code = part, config.code
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
            found = _score(ended, tests)
            if found is None or found.reward != reward:
                raise RunError(f"{self._part.setting}: the sandbox does not run programs: {ended.why or 'no result'}; {ended.errors}")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._jail.close()

    async def score(self, request: ScoreRequest) -> Score:
        program = program_in(request.response) if len(request.response) <= MAX_TEXT_CHARS else ""
        if not program.strip():
            return Score(0.0, _parts("no_program", 0.0))
        async with self._places:
            tests = await asyncio.to_thread(cases_of, request.answer)
            if found := await self._scored(program, tests):
                return found
            ended = await self._run("", tests)  # the program may have removed what was said of it: is one without a line told of?
            if not ended.output:
                why = f"the sandbox does not run programs: {ended.why or 'no result'}; {ended.errors}"
                return self._part.failed("exit", why, request)
            return await self._scored(program, tests) or Score(0.0, _parts("crashed", 0.0))

    async def _scored(self, program: str, tests: Cases) -> Score | None:
        return await asyncio.to_thread(_score, await self._run(program, tests), tests)

    async def _run(self, program: str, tests: Cases) -> Ended:
        task = {
            "code": program,
            "function": tests.function,
            "inputs": tests.inputs,
            "test_timeout_s": self._code.test_timeout_s,
            "timeout_s": self._code.timeout_s,
            "most_bytes": most_bytes(tests),
        }
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # A program may stop the process that tests it, so the time for a test is kept from outside, too.
        lines, line_s = len(tests.inputs) + 1, self._code.test_timeout_s + _GRACE_S
        return await self._jail.run([PYTHON, "-I", str(_INSIDE)], json.dumps(task), environment, None, lines, line_s)


def _score(ended: Ended, tests: Cases) -> Score | None:
    """None if nothing was said. A program can overwrite what is said of it, to no avail: only right results pass."""
    if not ended.output:
        return None
    _, *lines = ended.output.split("\n", len(tests.inputs) + 1)  # each but the last, in which there is nothing, of one test
    most = _JSON_GROWTH * most_bytes(tests)
    count, passed, why = len(tests.inputs), 0, "slow" if ended.kind == "deadline" else "crashed"
    for test in range(count):
        line = lines[test] if test < len(lines) else ""
        status, result = _told(line) if len(line) <= most else ("", "")
        if status != "done":
            why = status or why
            break
        passed += tests.passed(test, result)
    else:
        why = ""
    return Score(float(passed == count), _parts(why, passed / count))


def most_bytes(tests: Cases) -> int:
    """Of all results of a program together."""
    return 2 * sum(map(size_bytes, tests.outputs)) + (1 << 20)


def _told(line: str) -> tuple[str, str]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return "", ""
    right = isinstance(found, list) and len(found) == 2 and all(isinstance(each, str) for each in found)
    return (found[0], found[1]) if right and found[0] in ("done", "crashed", "slow", "long") else ("", "")


def _parts(why: str, tests: float) -> dict[str, float]:
    return {"tests": tests, **{name: float(name == why) for name in ("no_program", "crashed", "slow", "long")}}
