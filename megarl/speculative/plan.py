"""Speculative decoding (`generator.speculative`): checks of its settings, SGLang's arguments, and
the share of drafts that engines keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.errors import RunError
from megarl.config.schema import IGNORE, TRAIN, RunConfig
from megarl.data.rows import held_out_samplings
from megarl.models.registry import missing_folder
from megarl.models.spec import ModelSpec
from megarl.speculative.settings import EAGLE, EAGLE3, NEXTN, NGRAM, NONE

# SGLang's NEXTN is a name of EAGLE's
_NAMES = {NGRAM: "NGRAM", NEXTN: "EAGLE", EAGLE: "EAGLE", EAGLE3: "EAGLE3"}
ACCEPTED = "speculative/accept_rate"
STALE_SHARE = 0.8  # share of the first acceptance; below it, the draft model counts as stale


def check_speculative(config: RunConfig, spec: ModelSpec) -> Iterable[str]:
    settings = config.generator.speculative
    key = f"generator.speculative.algorithm={settings.algorithm}"
    if (settings.path is not None) != (settings.algorithm in (EAGLE, EAGLE3)):
        yield (
            f"generator.speculative.path={settings.path or 'null'}: must be set for eagle and "
            f"eagle3 alone; {key}"
        )
    if not settings.drafts:
        return
    if settings.path is not None and Path(settings.path) == Path(config.model.path):
        yield (
            f"generator.speculative.path={settings.path}: must be another model than model.path, "
            f"whose own layer {NEXTN} drafts with; {key}"
        )
    if settings.algorithm in (EAGLE, EAGLE3) and config.generator.quantization is not None:
        quantization = f"generator.quantization={config.generator.quantization}"
        yield (
            f"{key}: must be {NONE}, {NGRAM} or {NEXTN} with {quantization}: SGLang would give "
            "the draft model that format too"
        )
    if settings.steps >= config.rollout.max_tokens:
        yield (
            f"generator.speculative.steps={settings.steps}: must be less than "
            f"rollout.max_tokens={config.rollout.max_tokens}"
        )
    length = config.plan.accept_length or 0
    if length > settings.steps + 1:
        yield (
            f"plan.accept_length={length:g}: must be at most {settings.steps + 1}, "
            "generator.speculative.steps and the token that is sampled"
        )
    if settings.algorithm == NEXTN and config.trainer.mtp == IGNORE:
        yield (
            f"{key}: needs trainer.mtp to be keep or train, so that engines get the layer that "
            "drafts"
        )
    evaluated = any(sampling.truncated for sampling in held_out_samplings(config))
    if config.rollout.truncated or evaluated:  # srt/speculative/spec_sampling_mask.py:27
        yield (
            f"{key}: must be none with top_p, top_k or min_p of rollout or eval: SGLang does "
            "not say which tokens it has kept"
        )
    if config.cluster.gpu == "cpu" and spec.linear_attention and spec.linear_layers:
        yield (
            f"{key}: must be none for a {spec.family} model on CPUs, whose "
            f"{spec.linear_attention.NAME} cannot take back rejected drafts there"
        )
    if config.lora.rank:
        yield (
            f"{key}: must be none with lora.rank={config.lora.rank}: no draft is made with adapters"
        )
    # srt/speculative/ngram_worker.py:544 returns none
    if config.trainer.routing_replay and settings.algorithm == NGRAM:
        yield (
            f"{key}: must not be ngram with trainer.routing_replay: SGLang does not say which "
            "experts it chose"
        )
    # srt/arg_groups/speculative_hook.py:1368
    if config.generator.dp_attention > 1 and settings.algorithm == NGRAM:
        yield (
            f"{key}: must not be ngram with "
            f"generator.dp_attention={config.generator.dp_attention}: SGLang refuses it"
        )


def check_draft_model(config: RunConfig) -> Iterable[str]:
    """Problems if the draft model's folder is missing or incomplete."""
    key = "generator.speculative.path"
    path = config.generator.speculative.path
    if path is None:
        return
    problems = list(missing_folder(key, path))
    yield from problems
    if not problems and Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        yield f"{key}={path}: the folder holds no config.json"


def arguments(config: RunConfig) -> dict[str, Any]:
    """The arguments of SGLang's server.

    A draft is a single chain of tokens: from a tree, the engine might accept tokens that were not
    sampled.
    """
    settings = config.generator.speculative
    if not settings.drafts:
        return {}
    server_arguments: dict[str, Any] = {
        "speculative_algorithm": _NAMES[settings.algorithm],
        "speculative_num_draft_tokens": settings.steps + 1,
    }
    if settings.algorithm == NGRAM:
        return server_arguments | {"speculative_ngram_max_bfs_breadth": 1}
    server_arguments |= {"speculative_num_steps": settings.steps, "speculative_eagle_topk": 1}
    if settings.path:
        server_arguments["speculative_draft_model_path"] = settings.path
        # Without its own load format, the draft model would start with random weights like the
        # engine, and no update would write it.
        server_arguments["speculative_draft_load_format"] = "auto"
    return server_arguments


def never_trained(config: RunConfig) -> str:
    """The description of a draft model that does not change while the policy learns; otherwise
    empty.
    """
    settings = config.generator.speculative
    if settings.algorithm == NEXTN and config.trainer.mtp != TRAIN:
        return f"the layer for multi-token prediction (trainer.mtp={config.trainer.mtp})"
    if settings.algorithm in (EAGLE, EAGLE3):
        return f"the draft model {settings.path}"
    return ""


@dataclass
class Acceptance:
    """Follows the acceptance over a run.

    `stale`: the description of a draft model that is not trained; otherwise empty.
    """

    stale: str = ""
    first: float = 0.0
    warned: bool = False

    def metrics(self, version: int, drafted: int, accepted: int, verified: int) -> dict[str, float]:
        """The metrics of the tokens since the previous version.

        `drafted`: their drafts; `accepted`: the drafts that engines kept; `verified`: the passes
        that verified drafts. Raises RunError if more were kept than drafted.
        """
        if accepted > drafted:
            raise RunError(
                f"weights version {version}: engines say that they kept {accepted} of {drafted} "
                "drafted tokens"
            )
        if not verified:
            return {}
        rate = accepted / max(1, drafted)
        self.first = self.first or rate
        metrics = {ACCEPTED: rate, "speculative/accept_length": 1 + accepted / verified}
        if self.stale:
            metrics["speculative/untrained_versions"] = version
        return metrics

    def warning(self, version: int, rate: float | None) -> str:
        """A line for the terminal when the draft model first counts as stale; otherwise empty."""
        if self.warned or not self.stale or rate is None or rate >= STALE_SHARE * self.first:
            return ""
        self.warned = True
        return (
            f"weights version {version}: engines keep {rate:.0%} of what is drafted, at first "
            f"{self.first:.0%}: {self.stale} stays as it was, and the policy has moved on. "
            "Log-probs are not affected; rollouts take longer"
        )
