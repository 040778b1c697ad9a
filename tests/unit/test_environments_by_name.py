"""Rollouts and reward functions that a configuration names: refusals before anything starts, and
their arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_policy import (
    MARKS,
    ROOT,
    SAMPLING,
    TINY,
    TOKENIZER,
    VOCABULARY,
    ScriptedPolicy,
    prompt,
)

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.score import Score, parameters_of, score_of
from megarl.rollouts.environments.base import sample_problems
from megarl.rollouts.environments.loading import check_rollout, load_rollout
from megarl.rollouts.environments.tool_calls import ToolCalls


def config(name: str, **arguments: Any) -> RunConfig:
    config = RunConfig()
    config.model.path = TINY
    config.rollout.name = name
    config.rollout.args = arguments
    return config


async def no_annotation(context, prompt, sampling, n, *, depth=1): ...


async def needs_depth(context, prompt, sampling, n, *, depth: int): ...


async def three(context, prompt, sampling): ...


def not_async(context, prompt, sampling, n): ...


class NotCallable:
    def __init__(self, tokenizer: Tokenizer): ...


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (
            "no_such_module_here:f",
            {},
            "rollout.name=no_such_module_here:f: cannot be imported: No module named "
            "'no_such_module_here'",
        ),
        (
            f"{__name__}:need_depth",
            {},
            f"{__name__} has no function or class need_depth; did you mean needs_depth?",
        ),
        (f"{__name__}:needs_depth", {}, "rollout.args.depth: must be set"),
        (
            f"{__name__}:needs_depth",
            {"depth": "3"},
            "rollout.args.depth=3: expected `int`, got `str`",
        ),
        (
            f"{__name__}:needs_depth",
            {"depth": 3, "dept": 1},
            "rollout.args.dept=1: unknown argument; did you mean depth?",
        ),
        (f"{__name__}:no_annotation", {}, "its argument depth has no type annotation"),
        (
            f"{__name__}:three",
            {},
            "must take 4 positional arguments, and all others by keyword only",
        ),
        (f"{__name__}:not_async", {}, "must be an async function or a class"),
        (f"{__name__}:NotCallable", {}, "must be callable by an async __call__"),
        ("single_turn", {"x": 1}, "rollout.args.x=1: unknown argument; there is none"),
        ("tool_calls", {**MARKS, "max_calls": 0}, "rollout.args.max_calls=0: expected `int` >= 1"),
        (
            "tool_calls",
            {**MARKS, "call_close": "</call>"},
            f"rollout.args.call_close=</call>: must be one token of {TINY}",
        ),
        (
            "tool_calls",
            {**MARKS, "call_open": "\u00e9"},
            "rollout.args.call_open=\u00e9: must be one token",
        ),
        (
            "tool_calls",
            {**MARKS, "result": "{}"},
            "rollout.args.result={}: must contain {result} once",
        ),
        (
            "tool_calls",
            {**MARKS, "tool": "abacus"},
            "rollout.args.tool=abacus: must be calculator, package.module:function, "
            "./file.py:function",
        ),
    ],
)
def test_impossible_rollout_is_refused_early(name: str, arguments: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        check_rollout(config(name, **arguments))
    assert any(problem in line for line in error.value.problems), error.value.problems


def same_length(text: str, answer: str) -> float:
    return float(len(text) == len(answer))


def misspelt(text: str, anwser: str) -> float: ...


def nameless(text: str, *texts: str) -> float: ...


def of_trl(prompts, completions, **kwargs) -> list[float]: ...


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float: ...


async def judge(prompt: str, response: str, *, row: dict[str, Any], **_: Any) -> float: ...


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module_here:f", "cannot be imported: No module named 'no_such_module_here'"),
        (
            f"{__name__}:same_lenght",
            f"{__name__} has no function or class same_lenght; did you mean same_length?",
        ),
        (f"{__name__}:NotCallable", "must be a function; see docs/extending.md"),
        (
            f"{__name__}:misspelt",
            "its parameter anwser has no default and is none of text, response, answer, prompt, "
            "row, prompt_token_ids, token_ids, version, turn_ends, "
            "sample_index, truncated, source; did you mean answer?",
        ),
        (
            f"{__name__}:of_trl",
            "it has TRL's parameters, lists of all responses of a batch; here a function scores "
            "one response, and returns one number. "
            "prompts[i] is prompt, completions[i] is response, completion_ids[i] is token_ids, a "
            "column is row[its name]. This calls it: "
            "def reward(prompt, response, row): return of_trl(prompts=[prompt], "
            "completions=[response], "
            "**{key: [value] for key, value in row.items()})[0]",
        ),
        (f"{__name__}:compute_score", ""),
        (f"{__name__}:same_length", ""),
        (f"{__name__}:nameless", ""),
        (f"{__name__}:judge", ""),
    ],
)
def test_reward_function_is_checked_early(name: str, problem: str):
    settings = config("single_turn")
    settings.reward.name = name
    if not problem:
        return check_rollout(settings)
    with pytest.raises(ConfigError) as error:
        check_rollout(settings)
    assert error.value.problems == [f"reward.name={name}: {problem}"]


def answered(completions, answer, trainer_state=None, **kwargs) -> list[float]:
    return [float(response == right) for response, right in zip(completions, answer)]


def one_column(completions, *, answer) -> list[float]:
    return answered(completions, answer)


def counted(completion_ids, completions) -> list[float]:
    return [float(len(ids) == 2) for ids in completion_ids]


def shown(prompts, completions, **kwargs) -> list[float]:
    return [float(prompt == "1 + 1" and kwargs["level"] == [3]) for prompt in prompts]


@pytest.mark.parametrize("function", [answered, one_column, counted, shown])
def test_suggested_wrapper_calls_a_function_of_trl(function: Any):
    with pytest.raises(ConfigError) as error:
        parameters_of(function, "reward.name=own.py:it")
    names = {function.__name__: function}
    exec("def reward(" + str(error.value).partition("def reward(")[2], names)
    request = {
        "prompt": "1 + 1",
        "response": "2",
        "token_ids": [5, 0],
        "row": {"answer": "2", "level": 3},
    }
    reward = names["reward"]
    arguments = {name: request[name] for name in inspect.signature(reward).parameters}
    assert reward(**arguments) == 1.0


def test_arguments_reach_the_rollout():
    rollout = load_rollout(config(f"{__name__}:needs_depth", depth=3), TOKENIZER)
    assert rollout.keywords == {"depth": 3}
    assert isinstance(load_rollout(config("tool_calls", **MARKS), TOKENIZER), ToolCalls)


def test_example_of_the_page_of_environments_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    codes = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL
    )
    [code] = [code for code in codes if "higher_or_lower" in code]
    (tmp_path / "games.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rollout = load_rollout(config("games:higher_or_lower", max_guesses=3), TOKENIZER)
    winner = ScriptedPolicy("5", "x", "144").context()
    [sample] = asyncio.run(rollout(winner, prompt("?"), SAMPLING, 1))
    assert sample.text == "5 higher\nx a number!\n144"
    assert sample.reward == 1.0
    assert sample.metrics == {"guesses": 3}
    assert sample_problems([sample], 1, SAMPLING.max_tokens, VOCABULARY) == []
    assert sample.summary().turns == 3
    loser = ScriptedPolicy("145", "1", "2").context()
    [lost] = asyncio.run(rollout(loser, prompt("?"), SAMPLING, 1))
    assert lost.text == "145 lower\n1 higher\n2 higher\n" and lost.reward == 0.0
    with pytest.raises(
        ConfigError, match="rollout.args.max_guess=3: unknown argument; did you mean max_guesses"
    ):
        load_rollout(config("games:higher_or_lower", max_guess=3), TOKENIZER)


def test_example_of_the_page_of_own_runs_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs/own_run.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [settings] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "graders.py").write_text("\n".join(codes))
    (tmp_path / "run.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "graders", raising=False)
    check_rollout(load_config("run.yaml", [f"model.path={TINY}"]))
    assert sys.modules["graders"].share_right(" a,b,d\n", "a,b,c") == pytest.approx(2 / 3)
    check_rollout(load_config("run.yaml", [f"model.path={TINY}", "reward.name=graders:graded"]))
    graded = sys.modules["graders"].graded("so 42\n", "42", {"weight": 2}, truncated=True)
    assert score_of(graded) == Score(pytest.approx(1.9), {"right": 1.0})
