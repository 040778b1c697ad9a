"""How held-out sets are sampled: as their suite says, otherwise as `eval`, otherwise as the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.data.rows import held_out_samplings, stops_on_text
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
    assert sampling_text({"sampling": sampling}) == "temperature 0.6, top_p 0.95"
    assert sampling_text({"sampling": {**sampling, "temperature": 0}}) == "greedy"
    assert sampling_text({}) == ""
    assert as_metrics({"version": 1, "pass@1": 0.5, "sampling": sampling}) == {
        "eval/version": 1,
        "eval/pass@1": 0.5,
    }
