"""docs/config.md equals the text generated from the dataclasses, and describes every key."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import MISSING

from megarl.algorithms.advantages import ADVANTAGES
from megarl.config.algorithms import ALGORITHMS
from megarl.config.keys import Setting, settings
from megarl.config.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"


def test_committed_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), (
        "run: python -m megarl.config.reference > docs/config.md"
    )


@pytest.mark.parametrize("setting", settings().values(), ids=lambda setting: setting.key)
def test_every_key_has_a_meaning_and_an_allowed_default(setting: Setting) -> None:
    assert setting.meaning
    if setting.limit is not None and setting.default not in (None, MISSING):
        assert setting.limit.accepts(setting.default)


def test_allowed_algorithms_are_those_that_exist() -> None:
    for key, names in (
        ("algorithm.name", [*ALGORITHMS, "package.module:rule", "./file.py:rule"]),
        ("algorithm.advantage", [*ADVANTAGES, "critic"]),
    ):
        assert settings()[key].limit.text == "one of " + ", ".join(names)
