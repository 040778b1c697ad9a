"""Real reward worker processes, under attack."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from reward_pools import DEADLINE_S, RewardPool

from megarl.config.schema import RewardConfig
from megarl.rewards import pool as rewards
from megarl.rewards.score import Score, ScoreRequest

ATTACKS = [
    "9**9**9**9",
    "10**10**10",
    "factorial(10**9)",
    "[" * 10_000 + "1" + "]" * 10_000,
    r"\boxed{9^{9^{9^9}}}",
    "1" * 300_000,
    "\\boxed{" + r"\frac{1}{" * 40 + "2" + "}" * 41,
    "__import__('os').system('touch {pwned}')",
    r"\boxed{__import__('os').system('touch {pwned}')}",
    "open('/etc/passwd')",
    "().__class__.__bases__",
    "4\u200b2",
    "\x00",
    "\ud800",
]
RIGHT = [
    ("#### 42", "42"),
    ("7", "7.0"),
    (r"\boxed{\frac{x}{2}}", "x/2"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}"),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{x=-\frac{2}{3}}", r"\frac{-2}{3}"),
    (r"\boxed{[1,2)}", "[1, 2)"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{1-i}", "-i+1"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{x\in(0,1)}", "(0,1)"),
    (r"\boxed{2\pi}", "6.283185307179586"),
    (r"\boxed{\text{(A)}}", "A"),
]
SLOW = "slow"  # for reward_functions:patient


def pids(parent: int) -> list[int]:
    """The reward workers among a process's children, found through the system and not through the
    pool.
    """
    process_ids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid
        for pid in process_ids
        if parent_of(pid) == parent
        and b"megarl.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def parent_of(pid: int) -> int:
    try:
        return int(status(pid, "PPid"))
    except FileNotFoundError:  # it has just ended
        return 0


def status(pid: int, key: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return line.split(":", 1)[1].strip()
    raise KeyError(key)


async def test_attacks_score_zero_and_the_pool_works_on(tmp_path: Path):
    pwned = tmp_path / "pwned"

    async with RewardPool("math", workers=1, timeout_s=4.0, memory_mib=512) as pool:
        attacks = [text.replace("{pwned}", str(pwned)) for text in ATTACKS]
        scores = await asyncio.gather(
            *(pool.rate(t, "1") for t in attacks), *(pool.rate(t, a) for t, a in RIGHT)
        )
        assert scores[: len(attacks)] == [0.0] * len(attacks)
        assert [
            pair for pair, score in zip(RIGHT, scores[len(attacks) :], strict=True) if score != 1.0
        ] == []
        (pid,) = pids(os.getpid())
        assert int(status(pid, "VmRSS").split()[0]) < 150 * 1024
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert not pwned.exists()


async def test_a_function_without_parameters_is_called_without_any():
    async with rewards.RewardPool(
        RewardConfig(name="reward_functions:unasked", workers=1), []
    ) as pool:
        assert await pool.score(ScoreRequest("1", "1")) == Score(0.25)


async def test_a_slow_answer_costs_its_worker_and_nothing_else():
    async with RewardPool("reward_functions:patient", workers=1, timeout_s=0.5) as pool:
        ratings = [pool.rate(str(i), "3") for i in range(40)]
        slow, *scores = await asyncio.gather(pool.rate(SLOW, "1"), *ratings)
        assert slow == 0.0 and scores == [float(i == 3) for i in range(40)]
        assert pool.timed_out == 1 and pool.replaced == 1
        assert await pool.rate("5", "5") == 1.0


async def test_blocked_event_loop_does_not_blame_the_worker():
    async with RewardPool("last_number", timeout_s=0.2) as pool:
        assert await pool.rate("1", "1") == 1.0
        requests = [asyncio.create_task(pool.rate("2", "2")) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.5)  # blocks the event loop; the worker answers long before the end
        assert await asyncio.gather(*requests) == [1.0] * 20
        assert pool.timed_out == pool.replaced == 0


async def test_killed_workers_lose_no_request():
    async with RewardPool("last_number", workers=2) as pool:
        assert await pool.rate("1,2", "2") == 1.0
        for _ in range(2):  # a slot gives up after three failed starts
            requests = [asyncio.create_task(pool.rate(f"0,{i}", "7")) for i in range(300)]
            await asyncio.sleep(0)
            # some are still starting, some are in the middle of a batch
            for pid in pids(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*requests) == [float(i == 7) for i in range(300)]
        assert pool.replaced >= 1


async def test_a_caller_that_gives_up_does_not_stall_the_rest():
    async with RewardPool("last_number") as pool:
        cancelled = asyncio.create_task(pool.rate("1", "1"))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await asyncio.gather(pool.rate("2", "2"), pool.rate("3", "2")) == [1.0, 0.0]


async def test_closing_ends_the_processes_and_fails_what_is_pending():
    pool = RewardPool("reward_functions:patient")
    async with pool:
        assert await pool.rate("1", "1") == 1.0
        (pid,) = pids(os.getpid())
        pending = [asyncio.create_task(pool.rate(SLOW, "1")) for _ in range(50)]
        await asyncio.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists() and pids(os.getpid()) == []
    for task in pending:
        with pytest.raises(RuntimeError, match="closed"):
            await task
    with pytest.raises(RuntimeError, match="closed"):
        await pool.rate("1", "1")


async def test_workers_that_cannot_start_fail_the_calls():
    async with RewardPool("no_such_module:score") as pool:
        with pytest.raises(RuntimeError, match="did not start"):
            await pool.rate("1", "1")


def test_workers_die_with_their_parent():
    """Also a busy one, which would notice its closed input only hours later."""
    program = textwrap.dedent(f"""
        import asyncio, os, sys
        from megarl.config.schema import RewardConfig
        from megarl.rewards.pool import RewardPool
        from megarl.rewards.score import ScoreRequest
        async def main():
            pool = await RewardPool(RewardConfig(name="reward_functions:patient", timeout_s=3600.0), ["text", "answer"]).__aenter__()
            await pool.score(ScoreRequest("1", "1"))
            busy = asyncio.create_task(pool.score(ScoreRequest({SLOW!r}, "1")))
            await asyncio.sleep(0.1)
            print("serving", flush=True)
            await busy
        asyncio.run(main())
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    try:
        assert parent.stdout.readline() == "serving\n"
        (worker,) = pids(parent.pid)
    finally:
        parent.kill()
        parent.wait()

    async def gone() -> None:
        while Path(f"/proc/{worker}").exists() and "Z" not in status(worker, "State"):
            await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(gone(), 10.0))
    finally:
        if Path(f"/proc/{worker}").exists():
            os.kill(worker, signal.SIGKILL)


def test_the_worker_forbids_what_no_answer_needs():
    """Tests the second line of defence directly: a process forbids, then tries."""
    program = textwrap.dedent("""
        import os, socket, subprocess, sympy
        from megarl.rewards.worker import _forbid_side_effects
        _forbid_side_effects()
        assert sympy.Number("12.5") + sympy.Number("3") == 15.5
        attempts = [
            lambda: os.system("true"), lambda: subprocess.run(["true"]), lambda: open("/tmp/megarl-never", "w"), lambda: os.fork(),
            lambda: sympy.sympify("1+1"), lambda: sympy.parsing.parse_expr("x"), lambda: socket.create_connection(("127.0.0.1", 9)),
        ]
        for attempt in attempts:
            try:
                attempt()
            except Exception as error:
                print(type(error).__name__, isinstance(error, PermissionError) or isinstance(error, sympy.SympifyError))
            else:
                print("allowed", False)
    """)
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert out.stdout.split().count("True") == 7 and "False" not in out.stdout, (
        out.stdout + out.stderr
    )
