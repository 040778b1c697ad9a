"""How held-out sets are sampled: as their suite says, otherwise as `eval`, otherwise as the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import GRADERS, RunConfig
from megarl.data.rows import (
    held_out_samples,
    held_out_sampling,
    held_out_samplings,
    stops_on_text,
)
from megarl.evaluation.scores import as_metrics, sampling_text
from megarl.generator.completions import Sampling
from megarl.launch.start import most_kept
from megarl.plan.checks import check_eval
from megarl.speculative.plan import check_speculative

HELD_OUT = {"data": {"eval": {"source": "synthetic:chain", "split": "eval"}}}


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "none"}, **HELD_OUT}), encoding="utf-8")
    return load_config(path, list(overrides))


SUITE = "eval.suites.own.source=synthetic:chain"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Sampling(1024, 0.0)),
        (
            ("rollout.top_p=0.9", "rollout.top_k=50", "rollout.min_p=0.1", "rollout.stop=[x]"),
            Sampling(1024, 0.0, 0.9, 50, stop=("x",), min_p=0.1),
        ),
        (
            ("rollout.top_p=0.9", "rollout.stop=[x]", "eval.top_p=1", "eval.stop=[]"),
            Sampling(1024, 0.0),
        ),
        (
            ("eval.temperature=1", "eval.top_p=0.9", "eval.suites.own.top_p=0.8"),
            Sampling(1024, 1.0, 0.8),
        ),
        (
            ("eval.suites.own.top_k=20", "eval.suites.own.temperature=0.6"),
            Sampling(1024, 0.6, top_k=20),
        ),
        (
            (
                "rollout.stop=[x]",
                "eval.stop=[y]",
                "eval.suites.own.stop=[]",
                "eval.suites.own.max_tokens=7",
            ),
            Sampling(7, 0.0),
        ),
    ],
)
def test_suite_is_sampled_by_its_nearest_section(
    tmp_path: Path, overrides: tuple[str, ...], expected: Sampling
):
    config = config_of(tmp_path, SUITE, *overrides)
    assert held_out_samplings(config)[-1] == expected
    assert list(check_eval(config)) == []


PUBLISHED = {  # samples, and how they are drawn; docs/evaluation.md has the sources
    "math500": (4, Sampling(32768, 0.6, 0.95)),
    "gsm8k": (1, Sampling(2048, 0.0)),
    "aime2024": (64, Sampling(32768, 0.6, 0.95)),
    "aime2025": (64, Sampling(32768, 0.6, 0.95)),
    "mmlu_pro": (1, Sampling(2048, 0.0)),
    "gpqa": (4, Sampling(32768, 0.6, 0.95)),
    "ifeval": (1, Sampling(1280, 0.0)),
    "livecodebench": (10, Sampling(2000, 0.2, 0.95)),
}


def benchmark_sampling(tmp_path: Path, name: str, *overrides: str) -> tuple[int, Sampling]:
    config = config_of(tmp_path, f"eval.suites.own.benchmark={name}", *overrides)
    suite = config.eval.suites["own"]
    assert list(check_eval(config)) == []
    return held_out_samples(config, suite), held_out_sampling(config, suite)


@pytest.mark.parametrize("name", GRADERS)
def test_benchmark_is_sampled_as_published(tmp_path: Path, name: str):
    of_run = ("rollout.top_p=0.9", "rollout.top_k=50", "rollout.min_p=0.1")
    assert benchmark_sampling(tmp_path, name, *of_run) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("overrides", "samples", "sampling"),
    [
        (("data.eval=null", "eval.samples=2"), 2, Sampling(32768, 0.6, 0.95)),
        (("eval.temperature=1", "eval.suites.own.samples=8"), 8, Sampling(32768, 1.0, 0.95)),
        (("eval.temperature=0",), 1, Sampling(32768, 0.0)),
        (("eval.suites.own.temperature=0",), 1, Sampling(32768, 0.0)),
        (("eval.top_p=1", "eval.suites.own.top_k=20"), 64, Sampling(32768, 0.6, top_k=20)),
        (("rollout.max_tokens=65536",), 64, Sampling(65536, 0.6, 0.95)),
        (("eval.max_tokens=100",), 64, Sampling(100, 0.6, 0.95)),
    ],
)
def test_settings_win_over_what_is_published(
    tmp_path: Path, overrides: tuple[str, ...], samples: int, sampling: Sampling
):
    assert benchmark_sampling(tmp_path, "aime2025", *overrides) == (samples, sampling)


def test_several_samples_of_a_greedy_benchmark_are_refused(tmp_path: Path):
    config = config_of(tmp_path, "eval.suites.own.benchmark=gsm8k", "eval.suites.own.samples=4")
    assert list(check_eval(config)) == [
        "eval.suites.own.samples=4: at temperature 0 they are all the same; set "
        "eval.suites.own.temperature"
    ]


def test_engines_are_made_for_the_sampling_of_evaluations(tmp_path: Path):
    """A larger top_k than the run's, and stop strings of an evaluation alone, need an engine that
    can serve them.
    """
    config = config_of(
        tmp_path, "rollout.top_k=20", "eval.temperature=1", "eval.top_k=300", "eval.stop=[x]"
    )
    assert most_kept(config) == 300
    assert stops_on_text(config)
    assert not stops_on_text(config_of(tmp_path, "eval.stop=[]"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("eval.top_p=0.9",), "eval.top_p=0.9: needs a eval.temperature above 0"),
        (
            (
                "eval.temperature=1",
                SUITE,
                "eval.suites.own.temperature=0",
                "eval.suites.own.min_p=0.1",
            ),
            "eval.suites.own.min_p=0.1: needs",
        ),
    ],
)
def test_filters_of_a_greedy_evaluation_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str
):
    problems = check_eval(config_of(tmp_path, *overrides))
    assert any(problem.startswith(message) for problem in problems)


def test_impossible_sampling_values_are_refused(tmp_path: Path):
    for override in (
        "eval.top_p=0",
        "eval.top_k=1",
        "eval.min_p=1",
        "eval.stop=['']",
        "eval.suites.own.top_k=0",
    ):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            config_of(tmp_path, SUITE, override)


def test_drafting_engines_serve_no_truncated_evaluation(tmp_path: Path):
    def refusals(*overrides: str) -> int:
        config = config_of(tmp_path, "generator.speculative.algorithm=ngram", *overrides)
        problems = check_speculative(config, spec=SimpleNamespace(mtp_layers=0))
        return sum(
            "must be none with top_p, top_k or min_p of rollout or eval" in problem
            for problem in problems
        )

    assert refusals("eval.temperature=1") == 0
    assert refusals("eval.temperature=1", "eval.top_p=0.9") == 1


def test_scores_say_how_they_were_sampled():
    sampling = {
        "samples": 4,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 9,
        "stop": [],
    }
    assert sampling_text({"sampling": sampling}) == "temperature 0.6, top_p 0.95, max_tokens 9"
    assert sampling_text({"sampling": {**sampling, "temperature": 0}}) == "greedy, max_tokens 9"
    assert sampling_text({}) == ""
    assert as_metrics({"version": 1, "pass@1": 0.5, "sampling": sampling}) == {
        "eval/version": 1,
        "eval/pass@1": 0.5,
    }
