"""IFEval: every kind of instruction, and agreement with lm-eval's own files, which run alone in
another process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from instructed import cases, record, sentence_data
from test_benchmarks import rows_of

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.config.errors import ConfigError
from megarl.config.schema import RewardConfig
from megarl.evaluation.evaluate import scores
from megarl.evaluation.scores import interval
from megarl.rewards.ifeval import MEASURES, check_installed, ifeval_reward, reference
from megarl.rewards.pool import RewardPool
from megarl.rewards.score import Score, ScoreRequest

pytest.importorskip("lm_eval", reason="the extra ifeval is not installed")
if sentence_data() is None:
    pytest.skip("nltk's data punkt_tab is in no package here", allow_module_level=True)

# Only lm-eval's folder of IFEval, as a package: the imports of its other tasks are not needed.
# lm-eval drops nulls and aggregates.
LIBRARY = """
import importlib.util, json, pathlib, shutil, sys
folder = pathlib.Path(sys.argv[1], "lm_eval", "tasks")
(installed,) = importlib.util.find_spec("lm_eval").submodule_search_locations
shutil.copytree(pathlib.Path(installed, "tasks", "ifeval"), folder / "ifeval")
for package in (folder.parent, folder, folder / "ifeval"):
    (package / "__init__.py").touch()
sys.path.insert(0, sys.argv[1])
importlib.invalidate_caches()
import langdetect
from lm_eval.tasks.ifeval.utils import agg_inst_level_acc, process_results
langdetect.DetectorFactory.seed = 0
rows = [json.loads(line) for line in sys.stdin]
results = [process_results(row, [row["response"]]) for row in rows]
means = {
    key: agg_inst_level_acc([result[key] for result in results])
    for key in ("inst_level_strict_acc", "inst_level_loose_acc")
}
print(json.dumps([results, means]))
"""


def answer_of(row: dict) -> str:
    return reference(json.dumps(row))


def graded_responses() -> list[tuple[dict, str, bool]]:
    """300 responses in the style of the set, to one to three instructions.

    Half are right; a wrong one breaks one instruction.
    """
    rng = random.Random("ifeval/7")
    pairs = []
    kinds = [name for name, *_ in cases(rng)]
    for number in range(150):
        name, arguments, right, wrong = next(
            case for case in cases(rng) if case[0] == kinds[number % len(kinds)]
        )
        row = record(name, arguments)
        if (
            "'" not in right
            and '"' not in right
            and name.startswith(("keywords:", "length_constraints:number_words"))
        ):
            quotation = record("startend:quotation", {})
            row["instruction_id_list"] += quotation["instruction_id_list"]
            row["kwargs"] += quotation["kwargs"]
            right = f'"{right}"'
            wrong = f'"{wrong}"'
        pairs += [(row, right, True), (row, wrong, False)]
    return pairs


@pytest.mark.parametrize("number", range(25))
def test_right_and_wrong_response_of_every_instruction(number: int) -> None:
    for seed in range(8):
        name, arguments, right, wrong = cases(random.Random(seed))[number]
        answer = answer_of(record(name, arguments))
        full_score = {"score": 1.0, **dict.fromkeys(MEASURES, 1.0)}
        assert ifeval_reward(right, answer) == full_score, (name, right)
        assert ifeval_reward(wrong, answer)["score"] == 0.0, (name, wrong)


def test_cases_are_of_all_kinds() -> None:
    assert len({name for name, *_ in cases(random.Random(0))}) == 25


def test_300_responses_get_the_scores_of_lm_eval(tmp_path: Path) -> None:
    responses = graded_responses()
    lines = "".join(
        json.dumps({**row, "response": response}) + "\n" for row, response, _ in responses
    )
    completed = subprocess.run(
        [sys.executable, "-c", LIBRARY, tmp_path],
        input=lines,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ,
    )
    assert completed.returncode == 0, completed.stderr
    expected, expected_means = json.loads(completed.stdout.splitlines()[-1])
    rewards = [ifeval_reward(response, answer_of(row)) for row, response, _ in responses]
    for reward, result in zip(rewards, expected, strict=True):
        assert reward["prompt_strict"] == result["prompt_level_strict_acc"]
        assert reward["prompt_loose"] == result["prompt_level_loose_acc"]
        assert reward["instruction_strict"] == fmean(result["inst_level_strict_acc"])
        assert reward["instruction_loose"] == fmean(result["inst_level_loose_acc"])
    verdicts = [right for *_, right in responses]
    assert len(responses) == 300 and sum(verdicts) == 150
    # no wrong response accepted, no right one refused
    assert [reward["score"] for reward in rewards] == list(map(float, verdicts))
    assert any(reward["prompt_loose"] > reward["prompt_strict"] for reward in rewards)
    assert {0.5} < {reward["instruction_strict"] for reward in rewards}

    groups = [group(row, [reward]) for (row, *_), reward in zip(responses, rewards)]
    evaluated = scores(groups, grader="ifeval")
    strict_mean = expected_means["inst_level_strict_acc"]
    loose_mean = expected_means["inst_level_loose_acc"]
    assert evaluated["instruction_strict"] == pytest.approx(strict_mean, abs=1e-12)
    assert evaluated["instruction_loose"] == pytest.approx(loose_mean, abs=1e-12)
    assert evaluated["prompt_strict"] == evaluated["pass@1"] == 0.5 < evaluated["prompt_loose"]


def group(row: dict, rewards: list[dict[str, float]]) -> Group:
    """A group with one sample a reward. An empty reward: the response could not be graded."""
    samples = []
    for reward in rewards:
        parts = {name: value for name, value in reward.items() if name in MEASURES}
        score = reward.get("score", 0.0)
        samples.append(Sample([1], [0.0], [0], "", score, "stop", reward_parts=parts))
    return Group(Prompt(0, [1], "", answer_of(row)), samples)


def test_ungraded_response_counts_as_not_followed() -> None:
    row, right, _ = graded_responses()[0]
    assert len(row["instruction_id_list"]) == 2
    measures = scores([group(row, [ifeval_reward(right, answer_of(row)), {}])], grader="ifeval")
    for name in MEASURES:
        assert measures[name] == 0.5
        assert measures[f"ci95/{name}/low"] < 0.5 < measures[f"ci95/{name}/high"]


def test_interval_of_a_mean_over_instructions() -> None:
    """Prompts have one to three instructions, whose outcomes are correlated.

    With equal counts the interval equals the usual one.
    """
    shares = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert interval(shares, 1, [1.0] * 5) == interval(shares, 1)
    # one prompt has nearly all the weight
    assert interval([1.0] * 3, 1, [1.0, 1.0, 9.0])[0] < interval([1.0] * 3, 1)[0]
    rng = np.random.default_rng(3)
    inside = []
    for _ in range(2000):
        counts = rng.integers(1, 4, 200)
        followed = rng.binomial(counts, rng.beta(1.4, 0.6, 200))
        low, high = interval(
            [float(f / c) for f, c in zip(followed, counts)], 1, [float(c) for c in counts]
        )
        inside.append(low <= 0.7 <= high)
    assert 0.935 <= fmean(inside) <= 0.97


def test_verdicts_depend_neither_on_chance_nor_on_order() -> None:
    """Language detection is random, and the authors' code draws a random letter if a keyword is
    none.
    """
    language_answer = answer_of(record("language:response_language", {"language": "fi"}))
    letter_answer = answer_of(
        record(
            "keywords:letter_frequency",
            {"letter": "#", "let_frequency": 4, "let_relation": "at least"},
        )
    )
    texts = [
        "hei",
        "tule",
        "alma",
        "kala on",
        "en",
        "aaaa bbbb cccc dddd eeee ffff gggg hhhh iiii jjjj kkkk llll",
        "me olla",
        "river stone",
    ]
    code = """
import json, sys, random
from megarl.rewards.ifeval import ifeval_reward
texts, answers = json.loads(sys.argv[1])
random.seed("other" + sys.argv[2])
order = texts[:: int(sys.argv[2])]
rewards = {text: [ifeval_reward(text, answer) for answer in answers] for text in order * 4}
print(json.dumps([rewards[text] for text in texts]))
"""
    cases_json = json.dumps([texts, [language_answer, letter_answer]])
    printed = []
    for step in ("1", "-1"):
        command = [sys.executable, "-c", code, cases_json, step]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert completed.stdout, completed.stderr
        printed.append(completed.stdout)
    assert printed[0] == printed[1]


def test_rows_without_nulls_and_with_whole_floats(tmp_path: Path) -> None:
    rows = [
        record("length_constraints:number_words", {"num_words": 8.0, "relation": "at least"}),
        record("punctuation:no_comma", {}),
    ]
    prompts = rows_of("ifeval", rows, tmp_path)
    assert [row.prompt for row in prompts] == ["Write about the river."] * 2
    assert [json.loads(row.answer)["kwargs"] for row in prompts] == [
        [{"num_words": 8, "relation": "at least"}],
        [{}],
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "?", "kwargs": []},
            "must have the columns 'instruction_id_list'; its columns are 'prompt', 'kwargs'",
        ),
        (record("punctuation:no_comma", {}) | {"kwargs": []}, "two lists of one length"),
        (record("keywords:no_such", {}), "'keywords:no_such' is none of the 25 instructions"),
        (
            record("punctuation:no_comma", {"num_words": 3}),
            "punctuation:no_comma takes no arguments, not {'num_words': 3}",
        ),
        (
            record("length_constraints:number_words", {"num_words": 3}),
            "needs num_words, relation, none of them 0 or empty, not",
        ),
        (
            record("length_constraints:number_words", {"num_words": 0, "relation": "at least"}),
            "none of them 0 or empty, not",
        ),
        (
            record("length_constraints:number_words", {"num_words": 3, "relation": "exactly"}),
            "cannot take .*exactly",
        ),
        (record("language:response_language", {"language": "xx"}), "cannot take .*xx"),
    ],
)
def test_malformed_row_is_refused(row: dict, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        rows_of("ifeval", [row], tmp_path)


HOSTILE = [
    # the library's pattern takes quadratic time on these
    ("detectable_format:title", {}, "<<" * 130_000),
    ("detectable_format:json_format", {}, "[" * 200_000),
    ("keywords:existence", {"keywords": ["river"]}, "\x00\ud800 river"),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        "a b c " * 100_000,  # longer than a graded response may be
    ),
    ("language:response_language", {"language": "en"}, "\u202e" * 1000),
]


@pytest.mark.long
def test_reward_pool_outlives_hostile_responses() -> None:
    async def graded() -> list[Score]:
        async with RewardPool(RewardConfig(name="ifeval", timeout_s=2.0)) as pool:
            hostile_requests = [
                ScoreRequest(text, answer_of(record(name, arguments)))
                for name, arguments, text in HOSTILE
            ]
            right = ScoreRequest(
                "The river is old.",
                answer_of(record("keywords:existence", {"keywords": ["river"]})),
            )
            requests = [*hostile_requests, right]
            return await asyncio.gather(*(pool.score(request) for request in requests))

    *hostile_scores, last_score = asyncio.run(asyncio.wait_for(graded(), 200))
    failures = [[failure.kind for failure in score.failures] for score in hostile_scores]
    assert failures == [["timeout"], ["error"], [], ["error"], []]
    assert [score.reward for score in hostile_scores] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert last_score == Score(1.0, dict.fromkeys(MEASURES, 1.0))


def test_missing_sentence_data_is_refused_with_its_download(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(record("punctuation:no_comma", {})) + "\n")
    source = f"eval.suites.own.source={tmp_path / 'rows.jsonl'}"
    environment = os.environ | {"HOME": str(tmp_path)}
    environment.pop("NLTK_DATA", None)
    look_up = "import nltk; nltk.data.find('tokenizers/punkt_tab/english')"
    command = [sys.executable, "-c", look_up]
    if subprocess.run(command, env=environment, capture_output=True).returncode == 0:
        pytest.skip("this machine has the data for all users")
    arguments = [
        "eval",
        "configs/quickstart.yaml",
        "data.eval=null",
        "eval.suites.own.benchmark=ifeval",
        source,
        f"run_dir={tmp_path}",
    ]
    completed = subprocess.run(
        [sys.executable, "-P", "-m", "megarl", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 2 and completed.stdout == ""
    problem = (
        "eval.suites.own.benchmark=ifeval, graded by reward.name=ifeval: needs nltk's data "
        "punkt_tab, which splits sentences: python -m nltk.downloader punkt_tab"
    )
    assert problem in completed.stderr and "Traceback" not in completed.stderr


def test_missing_packages_are_refused_with_their_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rewards.ifeval.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"reward.name=ifeval: needs .*\(lm_eval, langdetect, .*pip install -e '.\[ifeval\]'",
    ):
        check_installed("reward.name=ifeval")
