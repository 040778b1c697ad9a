"""The process that calls any function `package.module:name`. It imports the function before the limits hold and the clock runs."""

from __future__ import annotations

from megarl.config.named import attribute
from megarl.sandbox import process


def main(path: str, memory_mib: str, timeout_s: str, parent: str) -> None:
    """Serves until standard input closes."""
    process.prepare(parent)
    function = attribute(path)
    process.limit_resources(memory_mib, files_writable=True)
    process.serve(function, timeout_s)
