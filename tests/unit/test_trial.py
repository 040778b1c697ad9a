"""A user's own code is tried before anything starts: rewards on a few rows, and an agent's program
and script.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from json_files import write_json_lines

from megarl.agents.program import script_of
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.data.check import check_data
from megarl.launch.inputs import RewardTrial, try_rewards
from megarl.models import load_spec
from megarl.plan.checks import check_run_dir_here
from megarl.rollouts.environments.loading import check_rollout

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/models/tiny-llama"
GRADERS = """
def equal(text, answer, row, token_ids, prompt_token_ids):
    assert row["level"] == 3 and len(prompt_token_ids) == 5
    return {"score": text == answer, "tokens": len(token_ids)}

async def nothing(text):
    return None

def first_word(text):
    return text.split()[0]

def bounds(text):
    return float("nan") if len(text) > 500 else 1

def careful(text):
    if not text:
        raise ValueError("no text")
    return len(text) / 1000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trial_folder = tmp_path_factory.mktemp("trial")
    (trial_folder / "trial_graders.py").write_text(GRADERS)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": 3} for n in range(5)]
    write_json_lines(trial_folder / "rows.jsonl", rows)
    train = "train: {source: ./rows.jsonl}"
    (trial_folder / "run.yaml").write_text(
        f"model: {{path: {TINY}, dtype: float32, random_init: true}}\ndata: {{{train}}}\nrun_dir: "
        f"./run\ncluster: {{gpu: cpu}}\n"
        "rollout: {max_tokens: 400, prompts_per_step: 4}\nsft: {steps: 1}\n"
    )
    return trial_folder


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "run.yaml", overrides)


def tried(folder: Path, *names: str, thorough: bool = True) -> list[RewardTrial]:
    parts = [f"reward.parts.{name}.name={folder}/trial_graders.py:{name}" for name in names]
    config = config_of(folder, *parts)
    return try_rewards(config, check_data(config, load_spec(TINY), "train", at_hand=True), thorough)


def test_trial_scores_reference_empty_and_absurd_texts(
    folder: Path,
) -> None:
    """To a few rows."""
    equal, careful = tried(folder, "equal", "careful")
    shown = str(equal)
    assert shown.endswith(
        "equal, 3 rows of data.train: the reference answer 1, 1, 1; an empty text 0, 0, 0; an "
        "absurd text 0, 0, 0"
    )
    assert [score.parts for score in equal.scores["the reference answer"]] == [{"tokens": 1.0}] * 3
    assert "an empty text failed, failed, failed" in str(careful)
    assert [*careful.remarks] == ["scoring an empty text failed: no text"]


def test_function_beside_a_verifier_gets_the_row(folder: Path) -> None:
    config = config_of(
        folder,
        "reward.parts.right.name=math",
        f"reward.parts.own.name={folder}/trial_graders.py:equal",
    )
    [trial] = try_rewards(
        config, check_data(config, load_spec(TINY), "train", at_hand=True), thorough=False
    )
    assert [score.reward for score in trial.scores["the reference answer"]] == [1.0]


@pytest.mark.parametrize(
    ("form", "unread"),
    [("<total> </total>", "<total>…</total>"), ("<sum></sum> or <answer></answer>", "")],
)
def test_answer_form_that_the_grader_cannot_read_is_reported(
    folder: Path, form: str, unread: str
) -> None:
    config = config_of(folder, f'data.train.prompt_template="Answer in {form}. {{prompt}}<think>"')
    [tried] = try_rewards(config, check_data(config, None, "train", at_hand=True), thorough=True)
    assert [score.reward for score in tried.scores["the reference answer"]] == [1.0] * 3, (
        "though the prompt begins thinking"
    )
    readable = "<answer>…</answer>, \\boxed{…}, #### …, Answer: …, or the last line"
    remarks = (
        [f"the prompt asks for {unread}, where math finds no answer; it reads {readable}"]
        if unread
        else []
    )
    assert [*tried.remarks] == remarks


def test_rewards_that_would_end_a_run_are_refused_early(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        tried(folder, "nothing", "first_word", "bounds", thorough=False)
    key = f"{folder}/trial_graders.py"
    location = f"to {folder}/rows.jsonl, line 1"
    assert refused.value.problems == [
        f"reward.parts.nothing.name={key}:nothing: it must give a number, or a dict with a score "
        "and its parts, not None; it was given the "
        f"reference answer {location}",
        f"reward.parts.first_word.name={key}:first_word: it must give a number, or a dict with a "
        "score and its parts, not '1'; it was "
        f"given the reference answer {location}",
        f"reward.parts.bounds.name={key}:bounds: it must give a number, or a dict with a score "
        "and its parts, finite and at most "
        f"1e+06 in size, not nan; it was given an absurd text {location}",
    ]


AGENT = [
    "rollout.name=program",
    f"model.path={ROOT}/configs/models/tiny-agent",
    f"rollout.args.folder={ROOT}/configs/agents",
]


def test_missing_program_or_script_of_an_agent_is_named(folder: Path) -> None:
    """As the sandbox sees them."""
    check_rollout(
        config_of(folder, *AGENT, 'rollout.args.command=[python, with_openai.py, "{prompt}"]')
    )
    for command, missing in (
        ("[pythn, with_openai.py]", "no program pythn"),
        ("[python, with_opnai.py]", "no file with_opnai.py"),
        ("[./agent.sh]", "no program ./agent.sh"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"rollout.args.command=\[.*\]: there is {missing}; it starts in "
            r"rollout.args.folder=",
        ):
            check_rollout(config_of(folder, *AGENT, f"rollout.args.command={command}"))


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python a.py", "a.py"), ("/usr/bin/python3.11 a.py x", "a.py"), ("node a.js", "a.js"),
        ("python -m agent", ""),
        ("python -c pass", ""), ("bash {prompt}", ""), ("deno run a.ts", ""), ("agent a.py", ""),
        ("python", ""),
    ],
)  # fmt: skip
def test_script_is_found_in_a_command(command: str, script: str) -> None:
    assert script_of(command.split()) == script


def test_dry_run_reports_what_a_run_would_refuse(folder: Path, refusal, monkeypatch) -> None:
    """Checks the run's folder, unless its disk is another machine's; trackers; and the reward."""
    (folder / "file").touch()
    missing = importlib.util.find_spec("mlflow") is None
    grader = f"reward.name={folder}/trial_graders.py:nothing"
    for override, message in (
        (
            f"run_dir={folder}/file/run",
            f"run_dir={folder}/file/run: {folder}/file is a file, must be a folder",
        ),
        *(
            [
                (
                    "observe.trackers=[mlflow]",
                    "observe.trackers=[mlflow]: mlflow cannot be imported here; install with: ",
                )
            ]
            * missing
        ),
        (grader, f"{grader}: it must give a number"),
    ):
        assert message in refusal("train", str(folder / "run.yaml"), "--dry-run", override)
    assert list(check_run_dir_here(config_of(folder, "run_dir=/no-such-disk/runs/a"))) == []
