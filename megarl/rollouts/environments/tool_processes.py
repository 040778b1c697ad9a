"""Worker processes for the functions that rollouts call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.rollouts.environments.base import ToolError
from megarl.sandbox.pool import CallFailed, WorkerPool


class ToolProcesses:
    """Runs each function in rollout.tool_workers processes of its own, started at its first call. Use it in one event loop; close it."""

    def __init__(self, config: RolloutConfig, log_folder: Path | None = None):
        """The functions' output goes to `log_folder`/<module>.<function>.<number>.log."""
        self._config, self._log_folder = config, log_folder
        self._pools: dict[str, WorkerPool] = {}

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See RunInWorker. Raises: ValueError if it is not a module's function, RuntimeError if a worker cannot import the module."""
        path = f"{function.__module__}:{function.__qualname__}"
        if "." in function.__qualname__ or function.__module__ == "__main__":
            raise ValueError(f"{path}: only a function of a module can be called in another process")
        if path not in self._pools:
            config = self._config
            limits = (config.tool_workers, config.tool_timeout_s, config.tool_memory_mib)
            paths = [place for place in sys.path if place]
            self._pools[path] = WorkerPool(path, "megarl.sandbox.function", [path], *limits, paths, self._log_folder)
            self._pools[path].open()
        try:
            return await self._pools[path].call(*arguments)
        except CallFailed as error:
            raise ToolError(str(error)) from error

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
