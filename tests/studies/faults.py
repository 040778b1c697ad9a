"""`python tests/studies faults`: a campaign of faults against one real run with a trainer at TP2,
two SGLang engines and a tiny Llama.

Faults come at random times, each after the previous one is over. The outcomes are:

- *survived*: the run names the cause (if a message is expected), recovers (a lost engine serves
  again), and makes steps;
- *ended cleanly*: the run ends with the expected exit status and message, leaves no process behind,
  and continues when it is started again;
- otherwise a hang, or failed.

Each time the run ends, the prompts that it trained on are compared with the checkpoints' ledger. At
the end of the campaign every prompt must have been trained on exactly once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from fault_kinds import (
    CONFIG,
    KINDS,
    PROMPTS,
    RUN_DIR,
    STARTED_S,
    Ended,
    FaultRun,
    Hang,
    Kind,
    small_file_systems,
)

from megarl.base.cores import usable_cores
from megarl.config.errors import ConfigError

LONGEST_WAIT_S = 2.0  # between recovery and the next fault
SURVIVED = "survived"
ENDED = "ended cleanly"
HANG = "hang"
FAILED = "failed"
COLUMNS = ("injected", SURVIVED, ENDED, HANG, FAILED, "orphans", "lost", "repeated")


@dataclass
class Fault:
    kind: str
    step: int  # steps done before it
    outcome: str = ""
    problem: str = ""  # why it counts as a hang or as failed
    orphans: int = 0  # processes left behind
    lost: int = 0  # prompts that were never trained on
    # prompts that were trained on more than once, or on which ledger and record differ
    repeated: int = 0
    seconds: float = 0.0


def run(
    faults: int, seed: int, kinds: Sequence[str], minutes: float, as_json: bool, keep: str | None
) -> None:
    """Prints a table, or one JSON object. No fault begins after `minutes`.

    Raises ConfigError; SystemExit(1) when a fault was neither survived nor ended cleanly.
    """
    if faults < 1:
        raise ConfigError(f"--faults {faults}: must be at least 1")
    if minutes <= 0:
        raise ConfigError(f"--minutes {minutes:g}: must be above 0")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"--kinds {unknown[0]}: there is {', '.join(KINDS)}")
    folder = Path(keep or tempfile.mkdtemp(prefix="megarl-faults-"))
    started = time.monotonic()
    possible = injectable(list(kinds) or list(KINDS), small_file_systems(folder / RUN_DIR))
    results = list(campaign(folder, plan(faults, seed, possible), seed, started + 60 * minutes))
    facts = {
        "hardware": f"{usable_cores()} CPU cores",
        "seed": seed,
        "seconds": time.monotonic() - started,
        "table": table(results),
        "faults": [asdict(fault) for fault in results],
    }
    print(json.dumps(facts) if as_json else render(facts))
    if any(fault.problem or fault.orphans or fault.lost or fault.repeated for fault in results):
        if os.path.ismount(folder / RUN_DIR):  # only this process's mount namespace has the folder
            shutil.copytree(folder / RUN_DIR, folder / "left", ignore_dangling_symlinks=True)
        print(
            "megarl: not every fault was survived or ended cleanly; the run and its logs are in "
            f"{folder}",
            file=sys.stderr,
        )
        raise SystemExit(1)
    if keep is None:
        shutil.rmtree(folder, ignore_errors=os.path.ismount(folder / RUN_DIR))


def injectable(kinds: list[str], mounted: bool) -> list[str]:
    """The kinds of faults that this process may inject. Raises ConfigError if there are none."""
    left_out = [kind for kind in kinds if KINDS[kind].root and not mounted]
    if left_out:
        print(f"left out, because only root can do them: {', '.join(left_out)}", file=sys.stderr)
    if len(left_out) == len(kinds):
        raise ConfigError(f"--kinds {','.join(kinds)}: needs root")
    return [kind for kind in kinds if kind not in left_out]


def plan(faults: int, seed: int, kinds: list[str]) -> list[str]:
    """Draws `faults` kinds: each kind once, as far as they suffice, then by weight.

    The result is shuffled.
    """
    random = Random(seed)
    selected = random.sample(kinds, min(faults, len(kinds)))
    weights = [max(KINDS[kind].weight, len(kinds) == 1) for kind in kinds]
    selected += random.choices(kinds, weights, k=faults - len(selected))
    random.shuffle(selected)
    return selected


def campaign(folder: Path, kinds: Sequence[str], seed: int, until: float) -> Iterator[Fault]:
    """Carries out the faults that can begin before `until` on the monotonic clock, and reports each
    on stderr.
    """
    random = Random(seed)
    faults = []
    run = FaultRun(folder, make_model(folder / "model", seed))
    try:
        run.start()
        run.wait_steps(1)
        for number, kind in enumerate(kinds):
            if time.monotonic() > until and faults:
                break
            time.sleep(random.uniform(0, LONGEST_WAIT_S))
            fault = carry_out(run, kind, random)
            faults.append(fault)
            line = (
                f"{number + 1}/{len(kinds)} {kind}, step {fault.step}: {fault.outcome}, "
                f"{fault.seconds:.0f} s"
            )
            print(f"{line}\n{fault.problem}".rstrip(), file=sys.stderr, flush=True)
        finish(run, faults)
    finally:
        run.kill()
    yield from faults


def carry_out(run: FaultRun, name: str, random: Random) -> Fault:
    """Carries out one fault and waits until the run has recovered.

    A run that hangs or fails is started again.
    """
    kind = KINDS[name]
    fault = Fault(name, run.steps)
    started = time.monotonic()
    repeated = len(run.repeated())
    run.mark()
    try:
        words = kind.inject(run, random)
        if kind.ends is None:
            survive(run, kind.notice.format(**words), kind.recovered.format(**words))
            fault.outcome = SURVIVED
        else:
            end(run, fault, kind.notice.format(**words), kind.ends)
            go_on(run, fault, kind)
            fault.outcome = ENDED
    except (Hang, Ended) as error:
        fault.outcome = HANG if isinstance(error, Hang) else FAILED
        fault.problem = str(error)
        run.kill()
        fault.orphans += run.orphans()
        go_on(run, fault, kind)
    fault.repeated += len(run.repeated()) - repeated
    fault.seconds = time.monotonic() - started
    return fault


def survive(run: FaultRun, notice: str, recovered: str) -> None:
    """Waits until the run has named the cause, recovered and made two steps. Raises Hang, Ended."""
    if notice:
        run.wait_until(lambda: run.has_printed(notice), f"word of it ({notice})", STARTED_S)
    if recovered:
        run.wait_until(lambda: run.has_printed(recovered), f"recovery ({recovered})", STARTED_S)
    run.wait_steps(2)


def end(run: FaultRun, fault: Fault, notice: str, status: int) -> None:
    """Waits for the run's end.

    Raises Hang; Ended if exit status or message are not the expected ones.
    """
    exit_status = run.exit_status(STARTED_S)
    fault.orphans += run.orphans()
    if exit_status != status or not run.has_printed(notice):
        raise Ended(
            f"it ended with {exit_status}, not {status}, or did not say "
            f"{notice!r}:\n{run.output.read_text(errors='replace')[-3000:]}"
        )


def go_on(run: FaultRun, fault: Fault, kind: Kind) -> None:
    """Undoes the damage, compares ledger and record, and starts the run again."""
    kind.mend(run)
    fault.repeated += run.ledger_problems()
    run.start()
    run.wait_steps(1)


def finish(run: FaultRun, faults: list[Fault]) -> None:
    """Lets the run finish.

    A prompt that was never trained on counts as lost by the fault during which it was due.
    """
    run.launcher.terminate()
    run.exit_status(STARTED_S)
    run.start(max_steps=run.steps + 2)
    status = run.exit_status(STARTED_S)
    if status != 0:
        raise RuntimeError(
            "the last part of the run ended with "
            f"{status}:\n{run.output.read_text(errors='replace')[-3000:]}"
        )
    faults[-1].orphans += run.orphans()
    for ordinal in run.missing():
        before = [fault for fault in faults if fault.step <= ordinal // PROMPTS]
        (before or faults[:1])[-1].lost += 1


def make_model(folder: Path, seed: int) -> Path:
    """The quickstart's model with random weights."""
    from megarl.generator import cpu_support  # not at the top, because it imports torch

    cpu_support.install()
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    shutil.copytree(CONFIG.parent / "models/tiny-llama", folder)
    torch.manual_seed(seed)
    LlamaForCausalLM(AutoConfig.from_pretrained(folder)).float().save_pretrained(folder)
    return folder


def table(faults: Sequence[Fault]) -> dict[str, dict[str, int]]:
    """Counts by kind."""
    rows = {}
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        if of_kind:
            outcomes = {
                outcome: sum(fault.outcome == outcome for fault in of_kind)
                for outcome in (SURVIVED, ENDED, HANG, FAILED)
            }
            sums = {
                column: sum(getattr(fault, column) for fault in of_kind)
                for column in ("orphans", "lost", "repeated")
            }
            rows[kind] = {"injected": len(of_kind), **outcomes, **sums}
    return rows


def render(facts: dict) -> str:
    rows = facts["table"]
    total = {column: sum(row[column] for row in rows.values()) for column in COLUMNS}
    width = max(map(len, [*rows, "all"]))
    lines = ["  ".join(["fault".ljust(width), *COLUMNS])]
    for kind, row in [*rows.items(), ("all", total)]:
        lines.append(
            "  ".join(
                [kind.ljust(width), *(str(row[column]).rjust(len(column)) for column in COLUMNS)]
            )
        )
    return "\n".join(
        [*lines, f"seed {facts['seed']}, {facts['seconds'] / 60:.0f} minutes, {facts['hardware']}"]
    )
