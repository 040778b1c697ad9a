"""What all tests share: one thread per process, a clean working directory, an end to tests that
hang, and no process left behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ROOT = Path(__file__).parents[1]
LEFTOVERS = {"runs", "build", "dist", ".hypothesis", ".pytest_cache"}  # a used checkout has these
COROUTINE_S = 500.0  # less than the timeout, which ends the whole session
LINGER_S = 2.0  # for children to end after their signal
# Children that live as long as this process, and end with it.
HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch_shm_manager",
    "nursery.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--linger",
        type=float,
        default=20.0,
        help="seconds for processes to end after the last test",
    )


def pytest_configure(config: pytest.Config) -> None:
    # a busy machine is slower than any fixed deadline
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    os.environ.update(OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
    # a shell starts background jobs so; the tests need a terminal's Ctrl-C
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Orphans of our children become our children, so that the check at the end finds them.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, in an event loop of its own and with a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, COROUTINE_S))
    return True


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fails the last test if a process outlives it.

    All other fixtures begin after this one, so they are torn down by then.
    """
    yield
    psutil.wait_procs(surviving_children(), timeout=pytestconfig.getoption("--linger"))
    leftovers = surviving_children()
    descriptions = [describe(child) for child in leftovers]
    stop(leftovers, signal.SIGKILL)
    assert not leftovers, f"processes left behind by the tests: {descriptions}"


@pytest.fixture(scope="session", autouse=True)
def checkout(
    no_process_left_behind: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The working directory of all tests: this checkout as after a clone, without runs and other
    leftovers.
    """
    folder = tmp_path_factory.mktemp("checkout")
    before = Path.cwd()
    for entry in ROOT.iterdir():
        if entry.name not in LEFTOVERS:
            (folder / entry.name).symlink_to(entry)
    os.chdir(folder)
    yield folder
    os.chdir(before)


def surviving_children() -> list[psutil.Process]:
    alive = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and not any(
                name in " ".join(child.cmdline()) for name in HELPERS
            ):
                alive.append(child)
        except psutil.NoSuchProcess:
            continue
    return alive


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def stop(processes: list[psutil.Process], signal_number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(signal_number)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=LINGER_S)


def end_session(item: pytest.Item, timeout_s: float) -> None:
    """Print every thread's stack, here and (by SIGABRT and faulthandler) in the children, then end
    the whole session.
    """
    stderr = sys.__stderr__
    capture = item.config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(in_=True)
    children = surviving_children()
    running = [describe(child) for child in children]
    print(
        f"\n{item.nodeid} ran for more than {timeout_s:.0f} s; children: {running}",
        file=stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    stop(children, signal.SIGABRT)
    stop(surviving_children(), signal.SIGKILL)
    for captured in capture.read_global_capture():
        print(captured, file=stderr, flush=True)
    os._exit(1)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings) -> bool:
    """Like pytest-timeout's thread method, but children end too: a blocked gloo call never sees a
    Python exception.
    """
    timer = threading.Timer(settings.timeout, end_session, (item, settings.timeout))
    timer.daemon = True
    item.cancel_timeout = timer.cancel  # pytest-timeout calls it when the test is over
    timer.start()
    return True
