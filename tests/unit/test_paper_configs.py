"""The papers' runs in configs/papers, and further rows of their tables, for which docs/papers.md
gives overrides.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import table3

from megarl.config.keys import value_at
from megarl.config.load import load_config
from megarl.roles.settings import ENGINES, place_of

ROOT = Path(__file__).parents[2]
AIPO = {
    "trainer.optimizer.lr": 2e-7,
    "rollout.prompts_per_step": 512,
    "rollout.n": 4,
    "algorithm.name": "aipo",
    "async.capacity": 1,
}
# GPUs of trainer and of all engines, and settings, as printed in LlamaRL, section 8.1 and table 3;
# Asynchronous RLHF, tables 4 to 7 and 10
PAPERS = {
    "llamarl_8b_math": (
        128,
        128,
        {**AIPO, "trainer.tp": 8, "generator.tp": 1, "generator.max_concurrency": 32},
    ),
    "llamarl_70b_math": (
        136,
        120,
        {**AIPO, "trainer.tp": 8, "generator.tp": 4, "generator.max_concurrency": 16},
    ),
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
    **{
        f"async_rlhf_{size}_tldr": (
            2,
            2,  # one GPU holds the reward model
            {
                "trainer.optimizer.lr": 3e-6,
                "trainer.optimizer.schedule": "linear",
                "rollout.temperature": 0.7,
                "rollout.max_tokens": 128,
                "trainer.epochs": 1,
                "rollout.prompts_per_step": 512,
                "max_steps": 131072 // 512,
                "rollout.n": 2,
                "algorithm.name": "online_dpo",
                "algorithm.beta": 0.1,
                "reward.unfinished_score": -1.0,
            },
        )
        for size in ("410m", "1b", "2.8b")
    },
    "async_rlhf_8b_no_robots": (
        6,
        2,
        {
            "trainer.optimizer.lr": 8e-7,
            "trainer.optimizer.schedule": "linear",
            "rollout.temperature": 0.7,
            "rollout.max_tokens": 1024,
            "rollout.prompts_per_step": 256,
            "algorithm.beta": 0.03,
            "reward.unfinished_score": -10.0,
            "sft.batch_size": 128,
            "sft.optimizer.lr": 5e-6,
            "reward_model.batch_size": 256,
            "reward_model.optimizer.lr": 3e-6,
        },
    ),
}
PAGE = (ROOT / "docs/papers.md").read_text()
ROWS = re.findall(r"^\| `([\w.]+)` \| .* \| `(.+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "overrides"), [*((name, "") for name in PAPERS), *ROWS])
def test_a_papers_run_loads_fits_and_can_be_started(name: str, overrides: str, printed) -> None:
    assert len(ROWS) == 17
    assert {path.stem for path in Path("configs/papers").glob("*.yaml")} == set(PAPERS)
    path = f"configs/papers/{name}.yaml"
    trainer, generator, settings = PAPERS[name]
    config = load_config(path, overrides.split())
    t = config.trainer
    g = config.generator
    served = [
        role
        for role_name, role in config.roles.items()
        if role
        and place_of(role_name, role) == ENGINES
        and config.label.reward != f"roles.{role_name}"  # a run has no engines for it
    ]
    gpus = t.tp * t.pp * t.dp, sum(fleet.engines * fleet.tp for fleet in (g, *served))
    if overrides:
        assert (max(gpus) if config.cluster.share_gpus else sum(gpus)) == trainer + generator
    else:
        assert (gpus, {key: value_at(config, key) for key in settings}) == (
            (trainer, generator),
            settings,
        )
    for command in (["plan", path], ["train", path, "--dry-run"])[: 1 if overrides else 2]:
        assert "\nfits       yes\n" in printed(*command, *overrides.split())


@pytest.mark.parametrize("name", table3.ROWS)
def test_page_has_table_3_as_the_planner_plans_it(name: str) -> None:
    line = next(line for line in PAGE.splitlines() if f"| {name} |" in line)
    config, overrides = table3.ROWS[name]
    planned = table3.with_error(table3.planned_s(name), table3.PUBLISHED_S[name])
    assert f"| `{config}` |" in line
    assert f" | {planned} | " in line
    assert line.endswith(f"| `{overrides}` |" if overrides else "| – |")
