"""Programs in the sandbox: right, wrong and hostile ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from programming import fenced, pairs, row

from megarl.config.schema import RewardConfig
from megarl.data.rows import BENCHMARKS
from megarl.rewards.code import CodeReward
from megarl.rewards.score import Score, ScoreRequest, single

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]
SUM = row([("1 2\n", "3\n"), ("4 5\n", "9\n"), ("7 0\n", "7\n")])
GOOD = "print(sum(map(int, input().split())))"


def score_programs(
    items: Sequence[tuple[dict, str]], test_timeout_s: float = 6.0, timeout_s: float = 60.0
) -> list[Score]:
    config = RewardConfig(name="code", workers=3)
    config.code.test_timeout_s = test_timeout_s
    config.code.timeout_s = timeout_s
    config.code.memory_mib = 512
    requests = [
        ScoreRequest(text, json.dumps(BENCHMARKS["livecodebench"].question_of(record)[1]))
        for record, text in items
    ]

    async def run() -> list[Score]:
        async with CodeReward(config, single(config)) as reward:
            return await asyncio.gather(*map(reward.score, requests))

    return asyncio.run(asyncio.wait_for(run(), 500))


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.long)])
def test_programs_are_told_right_from_wrong(count: int) -> None:
    labelled = pairs()[:count]
    scores = score_programs([(record, text) for record, text, _ in labelled])
    wrong = [
        (text, right, score)
        for (_, text, right), score in zip(labelled, scores, strict=True)
        if score.reward != right
    ]
    assert len(labelled) == count and sum(right for *_, right in labelled) == count / 2
    assert not wrong and not any(score.failures for score in scores)


ADDED = "a, b = map(int, input().split())\n"
# right programs that leave work to the interpreter's exit, or depend on being the main module
AS_PROGRAMS = [
    "import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(lambda: "
    "sys.__stdout__.write(sys.stdout.getvalue()))\n"
    f"{ADDED}print(a + b)",
    f"import atexit, os\n{ADDED}atexit.register(lambda: os.write(1, b'%d' % (a + b)))",
    f"import sys\n{ADDED}sys.__stdout__.write(str(a + b))",
    f"import sys\n{ADDED}print(a + b)\nsys.stdout.close()",
    f"import sys\n{ADDED}print(a + b, flush=True)\nsys.stdout = None",
    f"import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\n{ADDED}print(a + b)",
    f"import pickle\nclass A: pass\npickle.dumps(A())\n{ADDED}print(a + b)",
    f"import typing\nclass A:\n x: 'A'\ntyping.get_type_hints(A)\n{ADDED}print(a + b)",
    f"import multiprocessing\n{ADDED}def f(x): return x\nwith multiprocessing.Pool(2) as pool: "
    "print(sum(pool.map(f, [a, b])))",
]


def test_programs_end_and_are_found_as_the_interpreter_has_them() -> None:
    scores = score_programs([(SUM, fenced(program)) for program in AS_PROGRAMS])
    assert [score.reward for score in scores] == [1.0] * len(AS_PROGRAMS)


FILL = """
block = b"x" * (1 << 20)
for number in range(12):
    with open(f"{}/{number}", "wb") as file:
        for _ in range(100): file.write(block)
print(3)
"""
OF_THE_HOST = {  # what a program must not be able to do; it prints 3 if it can
    "kernel settings": "name = '/proc/sys/vm/swappiness'\nvalue = open(name).read()\nopen(name, "
    "'w').write(value)\nprint(3)",
    "fill /": FILL.replace("{}", "", 1),
    "fill /dev": FILL.replace("{}", "/dev"),
    "fill /dev/shm": FILL.replace("{}", "/dev/shm"),
    "fill /tmp": FILL.replace("{}", "/tmp"),
    "fill files that are memory": "import os, time\nfor _ in range(12):\n file = "
    "os.memfd_create('a')\n"
    " for _ in range(100): os.write(file, b'x' * (1 << 20))\ntime.sleep(2)\nprint(3)",
}


@pytest.mark.parametrize("attack", OF_THE_HOST)
def test_programs_cannot_reach_the_kernel_or_fill_memory(attack: str) -> None:
    """Also as root: then the kernel takes root's files in /proc to be the program's own."""
    [score] = score_programs([(row([("1 2\n", "3\n")]), fenced(OF_THE_HOST[attack]))])
    assert score.reward == 0.0 and score.parts["crashed"] == 1.0


FORGED = """
import os
file = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY)
os.write(file, b"ready\\n" + START)
block = BLOCK * (1 << 20)
for _ in range(TIMES): os.write(file, block)
os.kill(os.getppid(), 9)
"""


@pytest.mark.parametrize(
    ("start", "block", "times"),
    [("b''", r"b'\n'", 200), ("b'['", "b'[],'", 60)],
    ids=["lines", "lists"],
)
def test_forged_results_cost_little(start: str, block: str, times: int) -> None:
    """Results that would become gigabytes of lists, and delay all other work of the comparing
    process.
    """
    forged = FORGED.replace("START", start).replace("BLOCK", block).replace("TIMES", str(times))

    async def run() -> tuple[Score, float]:
        config = RewardConfig(name="code")
        async with CodeReward(config, single(config)) as reward:
            scoring = asyncio.create_task(
                reward.score(
                    ScoreRequest(fenced(forged), json.dumps([{"input": "1 2", "output": "3"}]))
                )
            )
            held_up = 0.0
            last = time.thread_time()
            while not scoring.done():
                await asyncio.sleep(0.01)
                held_up = max(held_up, time.thread_time() - last)
                last = time.thread_time()
            return await scoring, held_up

    score, held_up_s = asyncio.run(run())
    assert score.reward == 0.0 and score.parts["crashed"] == 1.0
    assert held_up_s < 1.5


HOSTILE = {
    "while True: pass": "slow",
    "import time\ntime.sleep(1e6)": "slow",
    "while True: print('3' * 1000)": "long",
    "import sys\nprint(3, flush=True)\nwhile True: sys.stderr.write('x' * 10**6)": "slow",
    "a = 'x' * (1 << 34)": "crashed",
    "raise ValueError": "crashed",
    "import os\nprint(3)\nos.kill(os.getppid(), 9)": "crashed",
    "import os\nos.write(os.open(f'/proc/{os.getppid()}/fd/1', 1), b'[\"done\", \"3\"]\\n' * "
    "3)\nprint(0)": "",
    "import os\nos.truncate(f'/proc/{os.getppid()}/fd/1', 0)\nos.kill(os.getppid(), 9)": "crashed",
    "import os\nos.kill(-1, 9)": "crashed",
    "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(1e6)": "slow",
    "import socket\nprint(3 if socket.create_connection(('1.1.1.1', 53), 1) else 0)": "crashed",
    "import os\nif os.fork(): print('NaN')\nelse:\n import time; time.sleep(1e6)": "",
    "print('\\ud800')": "",
    "print(float('nan'))": "",
    "class L(str):\n def __eq__(self, other): return True\nprint(L('8'))": "",
}


def test_hostile_programs_neither_pass_nor_hang_nor_end_the_run() -> None:
    """Some programs forge results, or remove all records of them.

    A good program is scored beside them.
    """
    scores = score_programs(
        [
            *((SUM, fenced(program)) for program in HOSTILE),
            (SUM, fenced(GOOD)),
            (SUM, GOOD),
            (SUM, ""),
        ],
        2.0,
        20.0,
    )
    *bad, good, bare, empty = scores
    assert [score.reward for score in bad] == [0.0] * len(HOSTILE)
    reasons = [
        next((name for name, value in score.parts.items() if value and name != "tests"), "")
        for score in bad
    ]
    assert reasons == list(HOSTILE.values())
    assert not any(score.failures for score in scores)
    assert good.reward == 1.0 and good.parts["tests"] == 1.0
    assert bare.parts["no_program"] == empty.parts["no_program"] == 1.0 and bare.reward == 0.0


STOPS = (
    "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\nfile = "
    "os.open(f'/proc/{os.getppid()}/fd/1', 1)\nwhile True:\n"
)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("' '", "slow"), pytest.param(r"'\n'", "crashed", marks=pytest.mark.long)],
)
def test_program_that_stops_its_tester_costs_one_test_timeout(program: str, reason: str) -> None:
    """Not the time of all tests, here an hour, whatever it writes in that process's place."""
    hostile = f"{STOPS} os.write(file, {program}.encode())\n time.sleep(0.5)"
    [score] = score_programs([(row([("1 2\n", "3\n")]), fenced(hostile))], 0.5, 3600.0)
    assert score.reward == 0.0 and score.parts[reason] == 1.0


def test_a_sandbox_that_runs_nothing_is_a_failed_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("bwrap")
    broken = tmp_path / "broken"
    (tmp_path / "bwrap").write_text(
        f'#!/bin/sh\n[ -e {broken} ] && {{ echo "no room" >&2; exit 1; }}\nexec {real} "$@"\n'
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = RewardConfig(name="code")

    async def run() -> Score:
        async with CodeReward(config, single(config)) as reward:
            broken.touch()
            return await reward.score(
                ScoreRequest(fenced(GOOD), json.dumps([{"input": "1 2", "output": "3"}]))
            )

    score = asyncio.run(run())
    assert (
        score.reward == 0.0 and len(score.failures) == 1 and "no room" in score.failures[0].reason
    )


RELATIVE = """
import asyncio, json
from megarl.config.schema import RewardConfig
from megarl.rewards.code import CodeReward
from megarl.rewards.score import single
async def open_and_close():
    async with CodeReward(RewardConfig(name="code"), single(RewardConfig(name="code"))):
        print("it runs programs")
asyncio.run(open_and_close())
"""


def test_python_with_a_relative_path_runs_programs(tmp_path: Path) -> None:
    python = tmp_path / os.path.relpath(sys.executable, tmp_path)
    completed = subprocess.run(
        [python, "-c", RELATIVE], capture_output=True, text=True, check=False
    )
    assert completed.stdout == "it runs programs\n", completed.stderr


def test_what_a_function_returns_must_be_plain() -> None:
    called = row([("1\n[2]", "[1, 2]")], "f")
    bodies = {
        "return [a, *b]": 1.0, "return (a, *b)": 1.0, "print('noise'); return [a, *b]": 1.0,
        "return [True, 2.0]": 1.0,
        "return [[a], b]": 0.0, "return {1: 2}": 0.0, "return type('E', (), {'__eq__': lambda s, "
                                                      "o: True})()": 0.0, "exit(0)": 0.0,
    }  # fmt: skip
    scores = score_programs([(called, fenced(f"def f(a, b):\n    {body}")) for body in bodies])
    assert [score.reward for score in scores] == list(bodies.values())
