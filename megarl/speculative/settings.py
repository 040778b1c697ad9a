"""The schema's section on speculative decoding (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.limits import INPUT, at_least, one_of, setting

NONE = "none"
NGRAM = "ngram"
NEXTN = "nextn"
EAGLE = "eagle"
EAGLE3 = "eagle3"


@dataclass
class SpeculativeConfig:
    """Engines draft tokens and accept those that the policy would have sampled."""

    algorithm: str = setting(
        NONE,
        "what drafts tokens. ngram: what followed the same tokens before; nextn: the model's "
        "layer for multi-token prediction (trainer.mtp), which updates write; eagle, eagle3: the "
        "model in `path`, which no update writes",
        one_of(NONE, NGRAM, NEXTN, EAGLE, EAGLE3),
    )
    path: str | None = setting(
        None, "folder or hub name of the draft model of eagle and eagle3", path=INPUT
    )
    steps: int = setting(
        3,
        "tokens that are drafted one after another; the model then verifies them in one pass",
        at_least(1),
    )

    @property
    def drafts(self) -> bool:
        return self.algorithm != NONE
