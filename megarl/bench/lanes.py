"""Runs the cells of `megarl bench overlap`, each by one trainer and one generator process, several such pairs side by side."""

from __future__ import annotations

import faulthandler
import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.bench.overlap_cell import Cell, generate, train
from megarl.messaging.link import RunKey

Rows = list[dict[str, Any]]


class Lane:
    """A pair of processes that runs one cell after another."""

    def __init__(self, timeout_s: float):
        context = multiprocessing.get_context("forkserver")  # common imports are done once
        context.set_forkserver_preload([__name__])
        self._timeout_s, self._key = timeout_s, RunKey.generate()
        addresses_in, addresses_out = context.Pipe(duplex=False)
        self._pipes, self._processes = [], []
        for body, address in ((_generator, addresses_out), (_trainer, addresses_in)):
            ours, theirs = context.Pipe()
            process = context.Process(target=body, args=(theirs, self._key, address, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        addresses_in.close()
        addresses_out.close()

    def run(self, cell: Cell) -> Rows:
        """The trainer's rows. Raises RuntimeError if one of the two processes fails, TimeoutError past the deadline."""
        for pipe in self._pipes:
            pipe.send(cell)
        deadline, answers = time.monotonic() + self._timeout_s, {}
        while len(answers) < 2:
            left_s = deadline - time.monotonic()
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait(waiting, max(0.0, left_s))
            if not ready:
                names = [name for name, pipe in zip(("the generator", "the trainer"), self._pipes) if pipe in waiting]
                raise TimeoutError(f"{cell.name}: {' and '.join(names)} did not finish within {self._timeout_s:.0f} s")
            for pipe in (pipe for pipe in waiting if pipe in ready):
                answers[pipe] = _answer(cell, pipe)
        return answers[self._pipes[1]]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


def _answer(cell: Cell, pipe: Connection) -> Rows:
    try:
        done, answer = pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"{cell.name}: a process ended before its time") from error
    if not done:
        raise RuntimeError(f"{cell.name}:\n{answer}")
    return answer


def run_cells(cells: Sequence[Cell], lanes: int, timeout_s: float, done: Callable[[Cell], None]) -> list[Rows]:
    """The rows of every cell, in order. A lane's thread calls `done` when a cell ends."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(cells)):
        todo.put(index)
    rows: list[Rows] = [[] for _ in cells]
    failed = threading.Event()

    def work(lane: Lane) -> None:
        try:
            while not failed.is_set():
                index = todo.get_nowait()
                rows[index] = lane.run(cells[index])
                done(cells[index])
        except queue.Empty:
            return
        except BaseException:
            failed.set()
            raise

    opened: list[Lane] = []
    try:
        opened += [Lane(timeout_s) for _ in range(min(lanes, len(cells)))]
        with ThreadPoolExecutor(len(opened)) as pool:
            for future in [pool.submit(work, lane) for lane in opened]:
                future.result()
    finally:
        for lane in opened:
            lane.close()
    return rows


def _generator(pipe: Connection, key: RunKey, address: Connection, timeout_s: float) -> None:
    _serve(pipe, lambda cell: generate(cell, key, address), timeout_s)


def _trainer(pipe: Connection, key: RunKey, address: Connection, timeout_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _serve(pipe, lambda cell: train(cell, key, address.recv()), timeout_s)


def _serve(pipe: Connection, run: Callable[[Cell], Any], timeout_s: float) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:  # the benchmark is gone
            return
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        try:
            pipe.send((True, run(cell)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
