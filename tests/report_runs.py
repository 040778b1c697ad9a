"""Made-up folders of runs, to test the report page: of any size, with faults and hostile text.

A run's own writers write them.
"""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.base.rollout_types import Failure, Group, GroupTexts, Prompt, Sample
from megarl.observe.metrics import MetricsWriter
from megarl.observe.samples import SamplesWriter, TokensWriter

STEP_S = 2.0
EPOCH_US = 1_795_000_000_000_000
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=\"document.title='owned'\">",
    "plain \u202egnp.exe\u202c \u2066hidden\u2069 zero\u200bwidth \x1b[31mred\x00 bell\x07",
    "]]><!-- <style>body{display:none}</style> ${document.title='owned'} `x` \\u003c \u2028 "
    "\U000e0041",
    "שלום مرحبا 你好 🙂 e\u0301",
)


def metrics(step: int, rng: np.random.Generator) -> dict[str, float]:
    progress = 1 - math.exp(-step / 400)
    noise = lambda size: float(rng.normal(0, size))  # noqa: E731
    return {
        "reward/mean": 0.3 + 0.65 * progress + noise(0.02),
        "reward/std": 0.4 - 0.2 * progress,
        "loss": -0.05 + noise(0.02),
        "entropy/mean": 0.2 * (1 - progress) + 0.02,
        "grad_norm": math.exp(noise(0.3)),
        "learning_rate": 1e-5,
        "response_tokens/mean": 12 + 8 * progress + noise(0.3),
        "truncated_fraction": max(0.0, noise(0.02)),
        "zero_advantage_fraction": 0.2 + 0.2 * progress,
        "is_ratio/mean": 1 + noise(0.003),
        "is_ratio/clipped_fraction": abs(noise(0.01)),
        "agreement/ess": 1 - abs(noise(0.004)),
        "agreement/abs_diff_mean": 1e-3 * math.exp(noise(0.2)),
        "agreement/kl_k3": 1e-5 * math.exp(noise(0.3)),
        "agreement/tokens": 512.0,
        "staleness/mean": 1 + abs(noise(0.1)),
        "staleness/max": 2,
        "staleness/rejected": 0,
        "weights/version": step + 1,
        "time/step_s": STEP_S,
        "time/train_s": 1.1,
        "time/generate_s": 1.5 + noise(0.05),
        "time/sync_s": 0.02,
        "time/sync_pause_s": 0.05,
        "time/trainer_wait_s": 0.85 + noise(0.03),
        "time/generator_wait_s": 0.1,
        "time/save_s": 0.0,
        "samples_per_s": 40 + noise(1),
        "tokens_per_s": 700 + noise(10),
        "sync/bytes": 3_215_872,
        "sync/audit_ok": True,
        "prompts/buffered": 3,
        "flops/policy": 4.2e14,
        "memory/trainer_gib": 20.5 if step else 20.0,
        "memory/gpu_in_use_gib": 40.0,
        **(
            {"logprob/abs_diff_mean": 2e-4 * math.exp(noise(0.2)), "logprob/limit": 0.05}
            if step % 10 == 0
            else {}
        ),
        **(
            {"eval/version": step, "eval/pass@1": 0.2 + 0.7 * progress + noise(0.01)}
            if step % 50 == 0
            else {}
        ),
    }


def write_run(
    folder: Path,
    steps: int,
    groups: int = 2,
    n: int = 4,
    ranks: int = 2,
    engines: int = 2,
    seed: int = 0,
    faults: bool = False,
) -> Path:
    """Keeps `groups` x `n` samples of each step. With `faults`, engine 1 is lost after a third of
    the run. After two thirds the run ends and is resumed.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": {"path": "models/8b"},
        "algorithm": {"name": "aipo"},
        "async": {"capacity": 1},
        "generator": {"engines": engines},
        "max_steps": steps,
        "seed": seed,
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    writer = MetricsWriter(folder)
    samples = SamplesWriter(folder)
    tokens = [TokensWriter(folder, rank, piece) for rank in range(ranks)]
    for step in range(steps):
        writer.write(step, {"wall_s": STEP_S * (step + 1), **metrics(step, rng)})
        trained = [group(step * groups + number, step, n, rng) for number in range(groups)]
        for trained_group in trained:
            for number, sample in enumerate(trained_group.samples):
                ids = np.array(sample.token_ids)
                size = len(sample.token_ids)
                phases = (
                    np.flatnonzero(np.array(sample.policy_mask))
                    if sample.policy_mask
                    else np.arange(size)
                )
                mu = np.array(sample.logprobs, np.float32)[phases]
                row = SimpleNamespace(
                    ids=ids[phases],
                    positions=phases + len(trained_group.prompt.token_ids),
                    mu_logprobs=mu,
                    logprobs=mu + rng.normal(0, 0.02, len(phases)).astype(np.float32),
                    advantages=np.full(len(phases), sample.reward - 0.5, np.float32),
                )
                tokens[number % ranks].write(step, trained_group.prompt.ordinal, number, row)
        samples.write(
            step, [(summary(trained_group), texts(trained_group)) for trained_group in trained]
        )
    for file in (writer, samples, *tokens):
        file.close()
    _trace(folder, steps, ranks, engines, faults)
    return folder


VOCABULARY = [
    "",
    *"0123456789",
    " the",
    " sum",
    " of",
    " is",
    ",",
    ".",
    "\n",
    " carry",
    " digit",
    " so",
    " we",
    "你",
    "�",
    "</s>",
]


def piece(token: int) -> str:
    return VOCABULARY[token % len(VOCABULARY)]


def group(
    ordinal: int, step: int, n: int, rng: np.random.Generator, text: str | None = None
) -> Group:
    samples = []
    for number in range(n):
        size = int(rng.integers(8, 28))
        ids = rng.integers(1, len(VOCABULARY), size)
        mask = array("b")
        spans = []
        response_text = "".join(map(piece, ids))
        if number == 1:  # a second turn, after a tool's result
            half = size // 2
            answer = "[tool: 42]"
            first = "".join(map(piece, ids[:half]))
            response_text = first + answer + "".join(map(piece, ids[half:]))
            spans = [(len(first), len(first) + len(answer))]
            ids = np.concatenate([ids[:half], np.full(3, 5), ids[half:]])
            mask = array("b", [1] * half + [0] * 3 + [1] * (size - half))
        versions = np.full(len(ids), max(0, step - 1))
        versions[: len(ids) // 3] = max(0, step - 2)
        samples.append(
            Sample(
                token_ids=ids,
                logprobs=-np.abs(rng.normal(0, 0.7, len(ids))).astype(np.float32),
                versions=versions,
                text=text if text is not None else response_text,
                reward=float(rng.random() < 0.6),
                finish_reason="length" if size > 26 else "stop",
                policy_mask=mask,
                environment_spans=spans if text is None else [],
                failures=[Failure("timeout", "it took longer than 5 s")] if size == 8 else [],
            )
        )
    return Group(
        Prompt(ordinal, list(range(6)), text or f"{ordinal}+{step}=", text or str(ordinal + step)),
        samples,
    )


def summary(group: Group) -> Any:
    return SimpleNamespace(
        ordinal=group.prompt.ordinal,
        prompt_tokens=len(group.prompt.token_ids),
        samples=[sample.summary() for sample in group.samples],
    )


def texts(group: Group) -> GroupTexts:
    return GroupTexts(
        group.prompt.text,
        group.prompt.answer,
        [(sample.text, sample.environment_spans) for sample in group.samples],
    )


def _trace(folder: Path, steps: int, ranks: int, engines: int, faults: bool) -> None:
    (folder / "trace").mkdir(exist_ok=True)
    expected = {
        "fits": True,
        "train_s": 1.0,
        "generate_s": 1.2,
        "sync_s": 0.015,
        "step_s": 1.9,
        "binding": "generation: decoding at full concurrency",
        "gpu": "H100",
        "peak_flops": 989e12,
        "trainer_ranks": ranks,
        "asynchronous": True,
        "marks_gib": {"trainer": 21.0, "engine": 12.0},
    }
    third = steps // 3

    def lines(name: str, events: list[dict[str, Any]]) -> None:
        text = "".join(
            json.dumps({"track": "main", "dur": 0.0, **event, "ts": EPOCH_US + event["ts"] * 1e6})
            + "\n"
            for event in events
        )
        (folder / "trace" / f"{name}.jsonl").write_text(text)

    start = [
        {"name": "start", "ts": 0.0, "args": {"step": 0, "max_steps": steps, "expected": expected}}
    ]
    if faults:
        start += [
            {
                "name": "start engine.1 again",
                "track": "engine.1",
                "ts": third * STEP_S + 1.0,
                "args": {
                    "why": "engine.1 was killed by signal 9 (SIGKILL)",
                    "cause": "",
                    "restarts": 1,
                },
            },
            {
                "name": "end",
                "ts": 2 * third * STEP_S + 1.5,
                "args": {
                    "how": "failed: trainer.1 was killed by signal 9 (SIGKILL); the end of "
                    "logs/trainer.1.log"
                },
            },
            {
                "name": "start",
                "ts": 2 * third * STEP_S + 1.8,
                "args": {"step": 2 * third, "max_steps": steps, "expected": expected},
            },
        ]
    lines(
        "launcher.0",
        [*start, {"name": "end", "ts": steps * STEP_S + 1, "args": {"how": "finished"}}],
    )
    for rank in range(ranks):
        to = [[generator, 3_215_872 // ranks // engines] for generator in range(engines)]
        events: list[dict[str, Any]] = [{"name": "weights map", "ts": 0.1, "args": {"to": to}}]
        for step in range(steps):
            start_s = step * STEP_S + 0.1
            events += [
                {"name": f"wait for batch {step}", "ts": start_s, "dur": 0.8e6},
                {"name": f"train step {step}", "ts": start_s + 0.8, "dur": 1.1e6},
                {
                    "name": f"wait for engines to take weights {step + 1}",
                    "ts": start_s + 1.9,
                    "dur": 0.01e6,
                },
                {
                    "name": f"write weights {step + 1}",
                    "ts": start_s + 1.91,
                    "dur": 0.02e6,
                    "args": {"bytes": 3_215_872 // ranks},
                },
            ]
            if step % 100 == 99:
                events.append(
                    {"name": f"checkpoint {step + 1}", "ts": start_s + 1.93, "dur": 0.06e6}
                )
        lines(f"trainer.{rank}", events)
    events = []
    for step in range(steps):
        start_s = step * STEP_S + 0.2
        tokens = [
            5000 // (1 + 2 * (engine == engines - 1 and engines > 1)) for engine in range(engines)
        ]
        alive = [
            engine
            for engine in range(engines)
            if not (faults and engine == 1 and third <= step < third + 5)
        ]
        events += [
            {
                "name": f"generate batch {step}",
                "ts": start_s,
                "dur": 1.5e6,
                "args": {"engine_tokens": tokens},
            },
            {
                "name": f"pause for weights {step + 1}",
                "track": "weights",
                "ts": start_s + 1.8,
                "dur": 0.05e6,
                "args": {"bytes": 3_215_872, "audited": True, "engines": alive},
            },
        ]
    if faults:
        events += [
            {
                "name": "lost",
                "track": "engine.1",
                "ts": third * STEP_S + 0.5,
                "args": {"why": "the connection broke"},
            },
            {"name": "away", "track": "engine.1", "ts": third * STEP_S + 0.5, "dur": 10e6},
        ]
    lines("generator.0", events)
