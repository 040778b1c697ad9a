"""The papers' runs in configs/papers, and the other rows of their tables that docs/papers.md gives overrides for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.keys import value_at
from megarl.config.load import load_config

ROOT = Path(__file__).parents[2]
AIPO = {"trainer.optimizer.lr": 2e-7, "rollout.prompts_per_step": 512, "rollout.n": 4, "algorithm.name": "aipo", "async.capacity": 1}
PAPERS = {  # GPUs of trainer and generator, and settings as printed: LlamaRL, section 8.1 and table 3; Asynchronous RLHF, table 10
    "llamarl_8b_math": (128, 128, {**AIPO, "trainer.tp": 8, "generator.tp": 1, "generator.max_concurrency": 32}),
    "llamarl_70b_math": (136, 120, {**AIPO, "trainer.tp": 8, "generator.tp": 4, "generator.max_concurrency": 16}),
    "llamarl_405b_math": (512, 512, {**AIPO, "generator.tp": 8, "generator.max_concurrency": 32}),
    "async_rlhf_1b_gsm8k": (
        3,
        1,
        {
            "trainer.optimizer.lr": 3e-6,
            "trainer.optimizer.schedule": "constant",
            "rollout.temperature": 0.7,
            "rollout.max_tokens": 512,
            "trainer.epochs": 1,
            "rollout.prompts_per_step": 252,
            "rollout.n": 4,
            "algorithm.name": "online_dpo",
            "algorithm.beta": 0.05,
            "async.capacity": 1,
        },
    ),
}
ROWS = re.findall(r"^\| `(\w+)` \| .* \| `(.+)` \|$", (ROOT / "docs/papers.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "overrides"), [*((name, "") for name in PAPERS), *ROWS])
def test_a_papers_run_loads_fits_and_can_be_started(
    name: str, overrides: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert len(ROWS) == 5 and {path.stem for path in Path("configs/papers").glob("*.yaml")} == set(PAPERS)
    path, (trainer, generator, settings) = f"configs/papers/{name}.yaml", PAPERS[name]
    config = load_config(path, overrides.split())
    t, g = config.trainer, config.generator
    gpus = t.tp * t.pp * t.dp, g.engines * g.tp
    if overrides:
        assert sum(gpus) == trainer + generator
    else:
        assert (gpus, {key: value_at(config, key) for key in settings}) == ((trainer, generator), settings)
    for command in (["plan", path], ["train", path, "--dry-run"])[: 1 if overrides else 2]:
        assert cli.main([*command, *overrides.split()]) == 0
        assert "\nfits       yes\n" in capsys.readouterr().out
