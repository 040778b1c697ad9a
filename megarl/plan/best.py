"""The best checkpoint of a run by a held-out score (checkpoint.keep_best): which scores it can be chosen by."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.config.limits import alike, did_you_mean
from megarl.config.schema import RunConfig
from megarl.data.held_out import held_out
from megarl.rewards.parts import parts_in_evaluation


def scores_to_choose_by(config: RunConfig) -> list[str]:
    """The keys in metrics.jsonl of the held-out scores of which more is better."""
    graded = any(part.role is not None for part in parts_in_evaluation(config))  # then no answer counts as right or wrong
    keys: list[str] = []
    for name, _, _, suite in held_out(config):
        samples = (suite.samples if suite else None) or config.eval.samples
        right = [] if graded else ["pass@1", *([f"pass@{samples}", f"avg@{samples}"] if samples > 1 else [])]
        keys += ["/".join(("eval", *name.split(), score)) for score in (*right, "reward/mean")]
    return keys


def check_best(config: RunConfig) -> Iterable[str]:
    """Problems with checkpoint.keep_best. A version can only be kept if it is both evaluated and saved."""
    key, keys = config.checkpoint.keep_best, scores_to_choose_by(config)
    if key is None:
        return
    if key not in keys:
        yield f"checkpoint.keep_best={key}: must be " + (
            f"one of {', '.join(keys)}{did_you_mean(alike(key, keys))}" if keys else "null without a held-out set"
        )
    every, saved = config.eval.every, config.checkpoint.every
    if every == 0 or saved == 0 or every % saved:
        yield f"checkpoint.keep_best={key}: needs eval.every={every} to be a multiple of checkpoint.every={saved}, and neither to be 0"
