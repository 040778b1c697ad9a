"""Environments of verifiers, played by a process of another interpreter. The policy is a fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hub_play import FAILED, FOLDER, ROOT, TOKENIZER, Played, Saying

from megarl.agents.hubs.verifiers import Verifiers, write_rows
from megarl.base.rollout_types import UNANSWERED, Group
from megarl.config.errors import ConfigError
from megarl.generator.completions import Completion, EngineError

HERE = {"python": sys.executable, "folder": FOLDER}
THERE = os.environ.get("MEGARL_VERIFIERS_PYTHON", str(ROOT / "envs/verifiers/bin/python"))
pytestmark = pytest.mark.timeout(900)
SILENT = {"deadline_s": 8.0, "grace_s": 2.0, "retries": 0}


def roll_out(
    generate: Any, row: dict[str, Any], n: int = 1, grace_s: float = 15.0, **arguments: Any
) -> Group:
    with Played(
        lambda: Verifiers(TOKENIZER, **{**HERE, "deadline_s": 120.0, **arguments})
    ) as played:
        played.rollout.grace_s = grace_s
        return played(generate, row, n)


def play(kind: str, *texts: str, n: int = 1, **arguments: Any) -> Group:
    row = {"prompt": [{"role": "user", "content": "a"}], "answer": "a", "example_id": 0}
    return roll_out(Saying(*texts), row, n, environment="games", args={"kind": kind}, **arguments)


def test_reward_and_metrics_are_the_environments():
    samples = {sample.text: sample for sample in play("fine", "a", "bcd", n=2).samples}
    assert {text: sample.reward for text, sample in samples.items()} == {
        "a<eos>": 1.0,
        "bcd<eos>": 0.0,
    }
    right = samples["a<eos>"].metrics
    assert (
        right["letters"] == 1
        and right["_lambda_"] == 2
        and right["calls"] == 1
        and not any(map(right.get, FAILED))
    )


@pytest.mark.parametrize(
    "kind, counted, arguments, message",
    [
        ("raises", "failed_environment", {}, "RuntimeError: the board is broken"),
        ("error", "failed_environment", {}, "ValueError: no such move"),
        ("function", "failed_reward", {}, "Error calling reward function reward: 'rubric'"),
        (
            "nan",
            "failed_reward",
            {},
            "not all finite numbers, with at most 32 names: {'reward': nan",
        ),
        ("late", "failed_deadline", {"deadline_s": 8.0}, "it took longer than 8 s"),
        ("halves", "failed_environment", {}, "RuntimeError: half of a character: \\ud800"),
        (
            "cancels",
            "failed_environment",
            {},
            "CancelledError: the episode has been cancelled from inside",
        ),
        ("times out", "failed_environment", {}, "TimeoutError: no answer of the judge"),
        ("array", "failed_reward", {}, "its reward and metrics are not numbers: ValueError"),
        ("keys", "failed_reward", {}, "its reward and metrics are not numbers: TypeError"),
        ("large", "failed_reward", {}, "there can be 32768"),
        ("many", "failed_reward", {}, "with at most 32 names"),
        pytest.param(
            "hangs",
            "failed_worker",
            SILENT,
            "it did not answer within 10 s",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "leaves",
            "failed_worker",
            SILENT,
            "it did not answer within 10 s",
            marks=pytest.mark.long,
        ),
        ("dies", "failed_worker", {"retries": 0}, "it ended with status 3"),
    ],
)
def test_failed_episode_is_counted_and_rewarded_as_a_crash(
    kind: str,
    counted: str,
    arguments: dict[str, Any],
    message: str,
    capfd: pytest.CaptureFixture[str],
):
    [sample] = play(kind, "a", on_crash=-0.5, **arguments).samples
    assert sample.reward == -0.5 and sample.text == "a<eos>"
    assert [name for name in FAILED if sample.metrics[name]] == [counted]
    assert message in capfd.readouterr().out


def test_reward_function_named_reward_is_a_metric():
    [sample] = play("own reward", "a").samples
    assert sample.reward == 1.0 and sample.metrics["reward_"] == 0.5


def test_episodes_are_cleaned_up_at_the_same_time():
    samples = play("cleans", "a", n=8, deadline_s=8.0, grace_s=1.0, retries=0).samples
    assert [sample.reward for sample in samples] == [1.0] * 8


def test_rollouts_that_the_rubric_compares_are_scored_together():
    assert sorted(
        (sample.text, sample.reward) for sample in play("compares", "a", "bcd", n=2).samples
    ) == [
        ("a<eos>", 0.0),
        ("bcd<eos>", 1.0),
    ]


def test_an_environment_that_never_calls_drops_its_prompt():
    group = play("mute", "a", n=2, retries=1, on_crash=-0.5)
    assert group.prompt.token_ids == [1, 5]
    for sample in group.samples:
        assert (sample.finish_reason, len(sample.token_ids), sample.reward) == (UNANSWERED, 0, -0.5)
        assert [name for name in FAILED if sample.metrics[name]] == ["failed_unanswered"]


def test_too_many_prompts_without_a_call_end_the_run():
    message = (
        r"the environment games sampled nothing from the policy for 1 of the last 1 prompts, "
        r"more than rollout.args.max_unanswered=0"
    )
    with pytest.raises(
        RuntimeError,
        match=rf"{message} of 100; for example prompt 0: no call of it was answered: it ended well",
    ):
        play("mute", "a", retries=1, max_unanswered=0.0)


def test_a_row_that_has_no_room_is_tried_once():
    row = {"prompt": [{"role": "user", "content": "a" * 300}], "answer": "a", "example_id": 0}
    policy = Saying("a")
    [sample] = roll_out(policy, row, environment="games", args={"kind": "fine"}, retries=3).samples
    assert (
        sample.finish_reason == UNANSWERED
        and sample.metrics["out_of_room"] == 1
        and not policy.prompts
    )


def test_unloadable_environment_ends_the_run_with_the_reason():
    with pytest.raises(
        RuntimeError,
        match=r"(?s)status 1;.*it cannot be loaded: TypeError: load_environment\(\) got an "
        r"unexpected",
    ):
        roll_out(Saying("a"), {}, environment="games", args={"kind": "fine", "size": 3}, retries=0)


def test_an_engine_that_fails_ends_the_run():
    async def failing(*_: Any) -> list[Completion]:
        raise EngineError("the engine is gone")

    with pytest.raises(EngineError, match="the engine is gone"):
        roll_out(
            failing,
            {"prompt": [{"role": "user", "content": "a"}], "answer": "a"},
            environment="games",
            args={"kind": "fine"},
        )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"environment": "no-such-game"},
            "rollout.args.environment=no-such-game, with .*: its module no_such_game is not "
            "installed there",
        ),
        ({"environment": "games; rm"}, "its module games; rm is not installed"),
        (
            {"environment": "games", "python": "no-such-python"},
            "rollout.args.python=no-such-python: there is no such program",
        ),
        (
            {"environment": "games", "folder": "no/such"},
            "rollout.args.folder=no/such: there is no such folder",
        ),
        (
            {"environment": "games", "on_crash": float("nan")},
            "rollout.args.on_crash=nan: must be a finite number",
        ),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(
    arguments: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        Verifiers(TOKENIZER, **{**HERE, **arguments})


def test_an_interpreter_without_verifiers_is_refused():
    with pytest.raises(ConfigError, match="the package verifiers is not installed there"):
        Verifiers(TOKENIZER, python=sys.executable, environment="games")


def test_rows_are_written_as_the_environment_has_them(tmp_path: Path):
    arguments = {**HERE, "environment": "games", "args": {"kind": "fine"}}
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "eval")}
    assert write_rows(arguments, files) == f"{files['train']}: 2 rows\n{files['eval']}: 1 rows\n"
    assert [json.loads(line)["answer"] for line in files["train"].read_text().splitlines()] == [
        "a",
        "b",
    ]
    with pytest.raises(ConfigError, match="it is no environment of verifiers, but int"):
        write_rows({**arguments, "environment": "games:not_an_environment", "args": {}}, files)


@pytest.mark.skipif(
    not Path(THERE).exists(), reason="no interpreter with verifiers[rg] (docs/agents.md)"
)
def test_an_environment_of_the_package_itself(tmp_path: Path):
    """The reference answers are reasoning_gym's: a word, spelled backward."""
    gym = [
        {"name": "spell_backward", "weight": 1, "config": {"min_word_len": 3, "max_word_len": 4}}
    ]
    args = {"gym": gym, "num_train_examples": 5, "num_eval_examples": 2, "system_prompt": ""}
    arguments: dict[str, Any] = {
        "python": THERE,
        "folder": None,
        "environment": "verifiers:ReasoningGymEnv",
        "args": args,
    }
    write_rows(arguments, {"train": tmp_path / "rows.jsonl"})
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[3])
    word = row["question"].rpartition(" ")[2]
    right = f"<answer>{word[::-1]}</answer>"
    policy = Saying(right, "no answer")
    samples = roll_out(policy, row, n=2, **arguments).samples
    assert {sample.text: sample.reward for sample in samples} == {
        f"{right}<eos>": 1.0,
        "no answer<eos>": 0.0,
    }
    assert policy.prompts == [f"<bos><user>{row['question']}<assistant>"] * 2
    assert samples[0].metrics["check_answer_reward_func"] == samples[0].reward and not any(
        map(samples[0].metrics.get, FAILED)
    )


def test_processes_of_an_environment_end_with_the_run():
    """The end of the pipe alone tells the worker, as when the run is killed."""
    request = {"do": "serve", "environment": "games", "args": {"kind": "starts"}}
    inside = ROOT / "megarl/agents/hubs/inside_verifiers.py"
    environment = {**os.environ, "PYTHONPATH": HERE["folder"]}
    command = [sys.executable, str(inside), json.dumps(request)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        assert json.loads(worker.stdout.readline()) == {"ready": True}
        [child] = psutil.Process(worker.pid).children()
        worker.stdin.close()
        worker.wait(timeout=100)
        assert not psutil.wait_procs([child], timeout=20)[1], (
            "what the environment has started is alive"
        )


@pytest.mark.parametrize(
    "names, message",
    [({"A=B": "x"}, "illegal environment variable name"), ({"A": "x\0y"}, "embedded null byte")],
)
def test_variables_that_cannot_be_are_refused(names: dict[str, str], message: str):
    with pytest.raises(
        ConfigError, match=f"rollout.args.environment=games: .* cannot be started: {message}"
    ):
        Verifiers(TOKENIZER, environment="games", args={"kind": "fine"}, variables=names, **HERE)


def test_rows_do_not_wait_for_what_the_environment_has_started(tmp_path: Path):
    earlier = set(psutil.process_iter())
    arguments = {**HERE, "environment": "games", "args": {"kind": "starts"}, "start_s": 100.0}
    begin = time.monotonic()
    assert write_rows(arguments, {"train": tmp_path / "rows.jsonl"}).endswith(
        "rows.jsonl: 2 rows\n"
    )
    assert time.monotonic() - begin < 60
    # None for zombies
    sleeping = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", "1009"]
    ]
    assert not psutil.wait_procs(set(sleeping) - earlier, timeout=10)[1]


def test_a_worker_ends_with_whoever_has_started_it():
    """Even while a reward function hangs: the pipe that the worker reads is closed."""
    request = {"do": "serve", "environment": "games", "args": {"kind": "hangs"}}
    inside = ROOT / "megarl/agents/hubs/inside_verifiers.py"
    environment = {**os.environ, "PYTHONPATH": HERE["folder"]}
    with subprocess.Popen(
        [sys.executable, str(inside), json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        assert json.loads(worker.stdout.readline()) == {"ready": True}
        worker.stdin.close()
        assert worker.wait(timeout=100) == 0
