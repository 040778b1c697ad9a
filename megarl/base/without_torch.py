"""Runs a program that asks Transformers without importing torch, and keeps its answer.

Transformers imports torch if it can: 6 s and 800 MiB for AutoTokenizer, against 2 s and 80 MiB
without. So the question is a program of its own, a file that prints one JSON object. The answer is
kept in ~/.cache by everything that decides it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megarl.base.files import write_whole

CACHE = "~/.cache/megarl"


def ask_program(
    program: str, arguments: Sequence[str], kind: str, decided_by: Iterable[bytes]
) -> dict[str, Any]:
    """The JSON object that `python program arguments` prints as its last line.

    Args: kind: a folder of the cache; decided_by: what decides the answer, beside the program and
    the versions of Transformers and tokenizers. An object with a "problem" is not kept. Raises
    ValueError with the last line of stderr if the program fails.
    """
    digest = hashlib.sha256()
    versions = [f"{name} {version(name)}".encode() for name in ("transformers", "tokenizers")]
    for part in (*versions, Path(program).read_bytes(), *decided_by):
        digest.update(len(part).to_bytes(8, "little") + part)
    cached = Path(CACHE).expanduser() / kind / f"{digest.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(cached.read_text(encoding="utf-8"))
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.run(
        [sys.executable, "-P", program, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
    )
    if process.returncode:
        raise ValueError((process.stderr.strip().splitlines() or [""])[-1])
    answer = json.loads(process.stdout.splitlines()[-1])
    if "problem" not in answer:
        with contextlib.suppress(OSError):  # a home that cannot be written
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cached, json.dumps(answer))
    return answer
