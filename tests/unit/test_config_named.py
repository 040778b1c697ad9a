"""Objects that a configuration names by their import paths."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.limits import find_callable, is_async


def test_module_that_exits_at_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_at_import.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match="reward.name=ends_at_import:f: importing ends_at_import failed: SystemExit: 3",
    ):
        find_callable("ends_at_import:f", "reward.name=ends_at_import:f")


def test_objects_with_an_async_call_are_awaited() -> None:
    class AsyncJudge:
        async def __call__(self, text: str) -> float:
            return 1.0

    async def judge(text: str) -> float:
        return 1.0

    def plain(text: str) -> Any:
        return 1.0

    assert is_async(AsyncJudge()) and is_async(judge) and is_async(functools.partial(judge, "a"))
    assert not is_async(plain) and not is_async(functools.partial(plain, "a"))
