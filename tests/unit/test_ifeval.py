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

# lm-eval's folder as a package of its own, without the imports of the rest. It drops nulls and
# aggregates with its own code.
LIBRARY = """
import importlib.util, json, pathlib, shutil, sys
folder = pathlib.Path(sys.argv[1], "lm_eval", "tasks")
(own,) = importlib.util.find_spec("lm_eval").submodule_search_locations
shutil.copytree(pathlib.Path(own, "tasks", "ifeval"), folder / "ifeval")
for package in (folder.parent, folder, folder / "ifeval"):
    (package / "__init__.py").touch()
sys.path.insert(0, sys.argv[1])
importlib.invalidate_caches()
import langdetect
from lm_eval.tasks.ifeval.utils import agg_inst_level_acc, process_results
langdetect.DetectorFactory.seed = 0
rows = [json.loads(line) for line in sys.stdin]
found = [process_results(row, [row["response"]]) for row in rows]
levels = {key: agg_inst_level_acc([each[key] for each in found]) for key in ("inst_level_strict_acc", "inst_level_loose_acc")}
print(json.dumps([found, levels]))
"""


def answer_of(row: dict) -> str:
    return reference(json.dumps(row))


def pairs() -> list[tuple[dict, str, bool]]:
    """300 responses in the style of the set, to one to three instructions.

    Half are right; a wrong one breaks one instruction.
    """
    rng = random.Random("ifeval/7")
    made = []
    kinds = [name for name, *_ in cases(rng)]
    for number in range(150):
        name, arguments, right, wrong = next(
            case for case in cases(rng) if case[0] == kinds[number % len(kinds)]
        )
        row = record(name, arguments)
        extra = []
        if (
            "'" not in right
            and '"' not in right
            and name.startswith(("keywords:", "length_constraints:number_words"))
        ):
            extra = [("startend:quotation", {})]
            right = f'"{right}"'
            wrong = f'"{wrong}"'
        for other, own in extra:
            more = record(other, own)
            row["instruction_id_list"] += more["instruction_id_list"]
            row["kwargs"] += more["kwargs"]
        made += [(row, right, True), (row, wrong, False)]
    return made


@pytest.mark.parametrize("number", range(25))
def test_every_kind_of_instruction_is_told_followed_from_not(number: int) -> None:
    for seed in range(8):
        name, arguments, right, wrong = cases(random.Random(seed))[number]
        answer = answer_of(record(name, arguments))
        assert ifeval_reward(right, answer) == {"score": 1.0, **dict.fromkeys(MEASURES, 1.0)}, (
            name,
            right,
        )
        assert ifeval_reward(wrong, answer)["score"] == 0.0, (name, wrong)


def test_the_made_up_cases_are_of_all_kinds() -> None:
    assert len({name for name, *_ in cases(random.Random(0))}) == 25


def test_300_pairs_are_graded_as_the_library_grades_them(tmp_path: Path) -> None:
    made = pairs()
    lines = "".join(json.dumps({**row, "response": response}) + "\n" for row, response, _ in made)
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, tmp_path],
        input=lines,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    theirs, levels = json.loads(done.stdout.splitlines()[-1])
    found = [ifeval_reward(response, answer_of(row)) for row, response, _ in made]
    for ours, their in zip(found, theirs, strict=True):
        assert (
            ours["prompt_strict"] == their["prompt_level_strict_acc"]
            and ours["prompt_loose"] == their["prompt_level_loose_acc"]
        )
        assert ours["instruction_strict"] == fmean(their["inst_level_strict_acc"])
        assert ours["instruction_loose"] == fmean(their["inst_level_loose_acc"])
    rights = [right for *_, right in made]
    assert len(made) == 300 and sum(rights) == 150
    # no wrong response accepted, no right one refused
    assert [each["score"] for each in found] == list(map(float, rights))
    assert any(each["prompt_loose"] > each["prompt_strict"] for each in found) and {0.5} < {
        each["instruction_strict"] for each in found
    }

    groups = [group(row, [score]) for (row, *_), score in zip(made, found)]
    evaluated = scores(groups, grader="ifeval")
    assert evaluated["instruction_strict"] == pytest.approx(
        levels["inst_level_strict_acc"], abs=1e-12
    )
    assert evaluated["instruction_loose"] == pytest.approx(
        levels["inst_level_loose_acc"], abs=1e-12
    )
    assert evaluated["prompt_strict"] == evaluated["pass@1"] == 0.5 < evaluated["prompt_loose"]


def group(row: dict, found: list[dict[str, float]]) -> Group:
    parts = [{name: each[name] for name in MEASURES} if each else {} for each in found]
    rewards = [each["score"] if each else 0.0 for each in found]
    samples = [
        Sample([1], [0.0], [0], "", reward, "stop", reward_parts=own)
        for reward, own in zip(rewards, parts)
    ]
    return Group(Prompt(0, [1], "", answer_of(row)), samples)


def test_a_response_that_could_not_be_graded_has_followed_nothing() -> None:
    row, right, _ = pairs()[0]
    assert len(row["instruction_id_list"]) == 2
    found = scores([group(row, [ifeval_reward(right, answer_of(row)), {}])], grader="ifeval")
    assert [found[name] for name in MEASURES] == [0.5] * 4
    assert all(found[f"ci95/{name}/low"] < 0.5 < found[f"ci95/{name}/high"] for name in MEASURES)


def test_a_mean_over_instructions_has_an_interval_that_covers_it() -> None:
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


def test_verdicts_do_not_depend_on_chance_or_on_what_was_asked_before() -> None:
    """Language detection is random, and the authors' code draws a random letter if a keyword is
    none.
    """
    tongue = answer_of(record("language:response_language", {"language": "fi"}))
    hashes = answer_of(
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
found = {text: [ifeval_reward(text, answer) for answer in answers] for text in order * 4}
print(json.dumps([found[text] for text in texts]))
"""
    asked = json.dumps([texts, [tongue, hashes]])
    found = [
        subprocess.run(
            [sys.executable, "-c", code, asked, way], capture_output=True, text=True, timeout=120
        )
        for way in ("1", "-1")
    ]
    assert found[0].stdout == found[1].stdout != "", found[0].stderr


def test_rows_lose_their_nulls_and_whole_numbers_may_be_floats(tmp_path: Path) -> None:
    rows = [
        record("length_constraints:number_words", {"num_words": 8.0, "relation": "at least"}),
        record("punctuation:no_comma", {}),
    ]
    found = rows_of("ifeval", rows, tmp_path)
    assert [row.prompt for row in found] == ["Write about the river."] * 2
    assert [json.loads(row.answer)["kwargs"] for row in found] == [
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
def test_a_row_that_would_be_graded_by_lot_is_refused(
    row: dict, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        rows_of("ifeval", [row], tmp_path)


HOSTILE = [
    # the library's pattern takes quadratic time on these
    ("detectable_format:title", {}, "<<" * 130_000, "timeout"),
    ("detectable_format:json_format", {}, "[" * 200_000, "error"),
    ("keywords:existence", {"keywords": ["river"]}, "\x00\ud800 river", ""),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        "a b c " * 100_000,
        "long",
    ),
    ("language:response_language", {"language": "en"}, "\u202e" * 1000, ""),
]


@pytest.mark.long
def test_hostile_responses_are_outlived_by_the_worker_pool() -> None:
    async def graded() -> list[Score]:
        async with RewardPool(RewardConfig(name="ifeval", timeout_s=2.0)) as pool:
            asked = [
                ScoreRequest(text, answer_of(record(name, own))) for name, own, text, _ in HOSTILE
            ]
            right = ScoreRequest(
                "The river is old.",
                answer_of(record("keywords:existence", {"keywords": ["river"]})),
            )
            return await asyncio.gather(*(pool.score(request) for request in [*asked, right]))

    *found, last = asyncio.run(asyncio.wait_for(graded(), 200))
    assert [[failure.kind for failure in score.failures] for score in found] == [
        ["timeout"],
        ["error"],
        [],
        [],
        [],
    ]
    assert [score.reward for score in found] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert last == Score(1.0, dict.fromkeys(MEASURES, 1.0))


def test_without_the_sentence_data_a_run_is_refused_with_the_command_that_fetches_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(record("punctuation:no_comma", {})) + "\n")
    source = f"eval.suites.own.source={tmp_path / 'rows.jsonl'}"
    kept = {name: value for name, value in os.environ.items() if name != "NLTK_DATA"} | {
        "HOME": str(tmp_path)
    }
    there = "import nltk; nltk.data.find('tokenizers/punkt_tab/english')"
    if subprocess.run([sys.executable, "-c", there], env=kept, capture_output=True).returncode == 0:
        pytest.skip("this machine has the data for all users")
    arguments = [
        "eval",
        "configs/quickstart.yaml",
        "data.eval=null",
        "eval.suites.own.benchmark=ifeval",
        source,
        f"run_dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "megarl", *arguments],
        env=kept,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    wanted = (
        "eval.suites.own.benchmark=ifeval, graded by reward.name=ifeval: needs nltk's data "
        "punkt_tab, which splits sentences: "
    )
    assert (
        f"{wanted}python -m nltk.downloader punkt_tab" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_without_the_packages_the_command_that_installs_them_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megarl.rewards.ifeval.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"reward.name=ifeval: needs .*\(lm_eval, langdetect, .*pip install -e '.\[ifeval\]'",
    ):
        check_installed("reward.name=ifeval")
