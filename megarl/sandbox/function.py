"""The process that calls any function `package.module:name`. It imports the function before the limits hold and the clock runs."""

from __future__ import annotations

import importlib

from megarl.sandbox import process


def main(path: str, memory_mib: str, timeout_s: str, parent: str) -> None:
    """Serves until standard input closes."""
    process.prepare(parent)
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    process.limit_resources(memory_mib, files_writable=True)
    process.serve(function, timeout_s)
