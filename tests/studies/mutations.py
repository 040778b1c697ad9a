"""`python tests/studies mutations`: breaks the code in one place at a time, and shows which tests
fail.

Each mutation is made in a copy of this checkout, where its tests passed before. A mutation that no
test notices shows a gap.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.config.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("megarl", "kernels", "launch", "configs", "tests", "slurm", "docs", "pyproject.toml")
TESTS_S = 900.0  # for the tests of one mutation


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    now: str  # a part of the file that occurs once
    broken: str
    tests: tuple[str, ...]  # files under tests/


MUTATIONS = [
    Mutation(
        "common elements of two boxes are one too few",
        file="megarl/base/geometry.py",
        now="            shape.append(extent)\n",
        broken="            shape.append(max(extent - 1, 1))\n",
        tests=("unit/test_reshard_map.py", "unit/test_reshard_proof.py"),
    ),
    Mutation(
        "AIPO's weight has no upper bound",
        file="megarl/algorithms/losses.py",
        now="Weights(log_ratio.clamp(inputs.low, inputs.high).exp(),",
        broken="Weights(log_ratio.clamp(inputs.low).exp(),",
        tests=("unit/test_algorithms.py",),
    ),
    Mutation(
        "the ledger forgets what was trained on",
        file="megarl/rollouts/buffer.py",
        now="        self._consumed.add(ordinal)\n        self._ever_rejected",
        broken="        self._ever_rejected",
        tests=("unit/test_buffer.py", "unit/test_buffer_schedules.py"),
    ),
    Mutation(
        "groups one version too old are trained on",
        file="megarl/rollouts/buffer.py",
        now="if version < step - self._max_staleness:\n",
        broken="if version < step - self._max_staleness - 1:\n",
        tests=("unit/test_buffer.py", "unit/test_buffer_schedules.py"),
    ),
    Mutation(
        "the audit leaves out the last rank",
        file="megarl/weight_sync/audit.py",
        now="in enumerate(of_ranks):",
        broken="in enumerate(list(of_ranks)[:-1]):",
        tests=("unit/test_generator_protocol.py",),
    ),
    Mutation(
        "a changed element of a delta is lost where its bits differ by one",
        file="megarl/kernels/changes.py",
        now="torch.nonzero(new != old)",
        broken="torch.nonzero((new - old).abs() > 1)",
        tests=("unit/test_deltas.py",),
    ),
    Mutation(
        "tiles of fp8 are scaled to 447",
        file="megarl/kernels/quantise_rules.py",
        now="E4M3_MAX = 448.0",
        broken="E4M3_MAX = 447.0",
        tests=("unit/test_quantise.py", "unit/test_reshard_fp8.py"),
    ),
    Mutation(
        "anybody may connect to a run",
        file="megarl/messaging/link.py",
        now="        return key == self._accepted  #",
        broken="        return True  #",
        tests=("unit/test_link.py",),
    ),
    Mutation(
        "targets are the inputs, not the tokens after them",
        file="megarl/trainer/microbatch.py",
        now="targets=laid(lambda i: sequences_here[i].token_ids, np.int64),",
        broken="targets=laid(lambda i: sequences_here[i].token_ids, np.int64, slice(-1)),",
        tests=("unit/test_microbatch.py", "unit/test_packing.py"),
    ),
    Mutation(
        "a message of an update that was not asked for is taken",
        file="megarl/weight_sync/updates.py",
        now="not in self._unfinished or message.version != self._version:",
        broken="not in self._unfinished:",
        tests=("unit/test_writes.py",),
    ),
    Mutation(
        "what engines should hold leaves out the frozen weights",
        file="megarl/lora/updates.py",
        now="frozen.get(rank, {}) | part.shares",
        broken="{} | part.shares",
        tests=("unit/test_adapter_pool.py",),
    ),
    Mutation(
        "an unanswered episode counts as answered",
        file="megarl/agents/player.py",
        now="not all(tree.turns for tree, _, _ in played)",
        broken="not played",
        tests=("cpu/test_agents_endpoint.py",),
    ),
]


@dataclass(frozen=True)
class MutationOutcome:
    mutation: str
    by: list[str]  # tests that failed, at most three; empty if none did
    seconds: float


def run(names: Sequence[str], as_json: bool) -> None:
    """Prints a table, or one JSON object.

    Raises ConfigError; RuntimeError if no test noticed a mutation.
    """
    unknown = [name for name in names if not any(name in mutation.name for mutation in MUTATIONS)]
    if unknown:
        raise ConfigError(
            f"--only {unknown[0]}: is part of none of: "
            + "; ".join(mutation.name for mutation in MUTATIONS)
        )
    selected = [
        mutation
        for mutation in MUTATIONS
        if not names or any(name in mutation.name for name in names)
    ]
    outcomes = []
    for outcome in study(selected):
        outcomes.append(outcome)
        print(
            f"{len(outcomes)}/{len(selected)} {outcome.mutation}: "
            f"{', '.join(outcome.by) or 'NOT SEEN'}",
            file=sys.stderr,
            flush=True,
        )
    print(json.dumps([asdict(outcome) for outcome in outcomes]) if as_json else render(outcomes))
    missed = [outcome.mutation for outcome in outcomes if not outcome.by]
    if missed:
        raise RuntimeError(f"no test saw: {'; '.join(missed)}")


def study(mutations: Sequence[Mutation]) -> Iterator[MutationOutcome]:
    with tempfile.TemporaryDirectory(prefix="megarl-mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name,
                    copy / name,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy2(ROOT / name, copy / name)
        every = sorted({name for mutation in mutations for name in mutation.tests})
        wrong = failures(every, copy)
        if wrong:
            raise RuntimeError(f"tests fail though nothing is broken: {', '.join(wrong)}")
        for mutation in mutations:
            file = copy / mutation.file
            start_s = time.monotonic()
            text = file.read_text()
            file.write_text(broken(mutation, text))
            yield MutationOutcome(
                mutation.name, failures(mutation.tests, copy), time.monotonic() - start_s
            )
            file.write_text(text)


def broken(mutation: Mutation, text: str) -> str:
    """`text` with the mutation. Raises RuntimeError unless the text to replace occurs once."""
    count = text.count(mutation.now)
    if count != 1:
        raise RuntimeError(
            f"{mutation.file} has {mutation.now.strip()!r} {count} times, must have it once"
        )
    return text.replace(mutation.now, mutation.broken)


def failures(tests: Sequence[str], copy: Path) -> list[str]:
    """The tests of these files that fail, at most three.

    Raises RuntimeError if pytest cannot run them.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "--maxfail=3",
        "-p",
        "no:cacheprovider",
        *(f"tests/{name}" for name in tests),
    ]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    ended = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TESTS_S
    )
    if ended.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        )
    return re.findall(r"^FAILED tests/\S+::(\w+)", ended.stdout, re.MULTILINE)


def render(outcomes: Sequence[MutationOutcome]) -> str:
    rows = [
        f"| {outcome.mutation} | {', '.join(dict.fromkeys(outcome.by)) or '**no test**'} |"
        for outcome in outcomes
    ]
    return "\n".join(["| broken | seen by |", "|---|---|", *rows])
