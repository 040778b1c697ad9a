"""Environments of OpenEnv, with the package's own servers and client in an interpreter of their
own. The policy is a fake.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hub_play import FAILED, FOLDER, ROOT, TOKENIZER, Played, Saying
from json_files import json_lines

from megarl.agents.hubs.openenv import OpenEnv, write_rows
from megarl.base.rollout_types import UNANSWERED
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.launch.rows import write_environment_rows

THERE = os.environ.get("MEGARL_OPENENV_PYTHON", str(ROOT / "envs/openenv/bin/python"))
TEXT = {"text_field": "text"}
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not Path(THERE).exists(), reason="no interpreter with openenv (docs/agents.md)"
    ),
]


def opened(**arguments: Any) -> Played:
    settings = {
        "python": THERE,
        "server": "boards:app",
        "folder": FOLDER,
        "deadline_s": 120.0,
        **arguments,
    }
    return Played(lambda: OpenEnv(TOKENIZER, **settings))


@pytest.fixture(scope="module")
def boards() -> Iterator[Played]:
    with opened(**TEXT) as played:
        yield played


@pytest.fixture(scope="module")
def products() -> Iterator[Played]:
    """An environment whose actions are calls of MCP tools."""
    with opened(server="products:app") as played:
        yield played


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def test_a_policy_that_calls_the_tools_of_the_environment(products: Played):
    """Seed 3 of the environment asks for 343*706, which is 242158."""
    turns = [call("calculate", {"expression": "343*706"}), call("answer", {"number": "242158"})]
    policy = Saying(*turns)
    [sample] = products(
        policy, {"prompt": [{"role": "system", "content": "be right"}], "reset": {"seed": 3}}
    ).samples
    start = (
        "<bos><tools>calculate,answer,picture,fields,own<system>be right<user>343*706=<assistant>"
    )
    assert policy.prompts == [start, f"{start}{turns[0]}<eos><tool>242158<assistant>"]
    assert (
        sample.text == f"{turns[0]}<eos><tool>242158<assistant>{turns[1]}<eos>"
        and sample.reward == 1.0
    )
    # the environment's text, between two tokens of the template
    written = len(TOKENIZER.encode_text("242158")) + 2
    assert list(sample.policy_mask).count(False) == written
    assert (
        sample.metrics["env_steps"],
        sample.metrics["env_ended"],
        sample.metrics["env_refused"],
    ) == (2, 1, 0)
    assert not any(map(sample.metrics.get, FAILED))


def test_what_a_tool_refuses_is_told_to_the_policy_and_counted(products: Played):
    turns = [
        call("calculate", {"x": 1}),
        call("calculate", {"expression": "1/0"}),
        call("solve", {}),
    ]
    policy = Saying(*turns)
    [sample] = products(policy, {"prompt": "", "reset": {"seed": 3}}, max_tokens=2000).samples
    tool_results = policy.prompts[-1].split("<tool>")[1:]
    assert [part.split("<assistant>")[0][:40] for part in tool_results] == [
        "error: 2 validation errors for call[calc",
        "error: Error calling tool 'calculate': n",
    ]
    assert (
        sample.reward == 0.0
        and sample.metrics["env_refused"] == 2
        and sample.metrics["env_ended"] == 0
    )


@pytest.mark.parametrize(
    "tool, shown", [("picture", "[image]"), ("fields", '{"number": 7}'), ("own", "not that way")]
)
def test_what_a_tool_says_that_is_no_text(products: Played, tool: str, shown: str):
    policy = Saying(call(tool, {}), "enough")
    [sample] = products(policy, {"prompt": "", "reset": {"seed": 3}}, max_tokens=2000).samples
    assert f"<eos><tool>{shown}<assistant>" in policy.prompts[1] and not any(
        map(sample.metrics.get, FAILED)
    )


def test_a_prompt_whose_contents_are_parts(boards: Played):
    policy = Saying("ab")
    boards(
        policy,
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "move"}]}],
            "reset": {"seed": 5},
        },
    )
    assert policy.prompts[0] == "<bos><user>move\nseed 5<assistant>"


def test_too_large_start_has_no_room_and_is_tried_once(
    boards: Played, capfd: pytest.CaptureFixture[str]
):
    [sample] = boards(Saying("ab"), {"reset": {"kind": "large"}}).samples
    assert sample.finish_reason == UNANSWERED and sample.metrics["out_of_room"] == 1
    assert "its last call was refused: the request has more than" in capfd.readouterr().out


def test_a_policy_whose_texts_are_actions(boards: Played):
    policy = Saying("ab", "cd", "ef")
    [sample] = boards(policy, {"prompt": "move", "reset": {"seed": 5}}).samples
    assert policy.prompts[0] == "<bos><user>move\nseed 5<assistant>"
    assert (
        policy.prompts[2]
        == "<bos><user>move\nseed 5<assistant>ab<eos><user>ba<assistant>cd<eos><user>dc<assistant>"
    )
    assert (
        sample.reward == 0.25 + 0.5 + 0.75
        and sample.metrics["env_steps"] == 3
        and sample.metrics["env_ended"] == 1
    )


@pytest.mark.long
def test_the_reward_of_the_last_step_after_the_most_turns():
    with opened(reward="last", max_turns=2, **TEXT) as played:
        [sample] = played(Saying("ab"), {"reset": {}}).samples
    assert (
        sample.reward == 0.5
        and sample.metrics["env_steps"] == 2
        and sample.metrics["env_ended"] == 0
    )


@pytest.mark.long
def test_environment_without_tools_takes_calls_of_one_tool():
    policy = Saying(
        call("step", {"text": "ab", "times": 2}), call("step", {"texts": "ab"}), "enough"
    )
    with opened() as played:
        [sample] = played(policy, {"reset": {}}).samples
    assert policy.prompts[0].startswith("<bos><tools>step<user>seed None<assistant>")
    assert (
        "<tool>baba<assistant>" in policy.prompts[1]
        and "<tool>error: the action does not have the form of one" in policy.prompts[2]
    )
    assert (sample.reward, sample.metrics["env_steps"], sample.metrics["env_refused"]) == (
        0.25,
        1,
        1,
    )


def check_failure(played: Played, kind: str, counted: str) -> None:
    [sample] = played(Saying("ab"), {"reset": {"kind": kind}}).samples
    assert sample.reward == -0.5 and sample.text.startswith("ab<eos>")
    assert [name for name in FAILED if sample.metrics[name]] == [counted]


def test_failed_episode_is_counted_and_rewarded_as_a_crash(
    capfd: pytest.CaptureFixture[str],
):
    with opened(on_crash=-0.5, retries=0, **TEXT) as played:
        check_failure(played, "raises", "failed_environment")
        assert "the board is broken" in capfd.readouterr().out
        check_failure(played, "poor", "failed_reward")
        assert "none of its 3 steps had a reward" in capfd.readouterr().out
        check_failure(played, "dies", "failed_worker")
        assert "it ended with status 3" in capfd.readouterr().out
        [sample] = played(Saying("ab"), {"reset": {}}).samples  # in another process
        assert sample.reward == 1.5


@pytest.mark.long
@pytest.mark.parametrize("server", ["boards:threads", "boards:app"])
def test_slow_episode_is_rewarded_as_a_crash(server: str, capfd: pytest.CaptureFixture[str]):
    """Also if it blocks the whole server."""
    with opened(server=server, on_crash=-0.5, deadline_s=10.0, **TEXT) as played:
        check_failure(played, "late", "failed_deadline")
    assert "it took longer than 10 s" in capfd.readouterr().out


def test_an_episode_that_is_over_at_once_drops_its_prompt(boards: Played):
    [sample] = boards(Saying("ab"), {"reset": {"kind": "over"}}).samples
    assert sample.finish_reason == UNANSWERED and sample.metrics["failed_unanswered"] == 1


@pytest.mark.long
def test_fields_that_no_observation_has_are_told(capfd: pytest.CaptureFixture[str]):
    with opened(shown=["bord", "metadata"], **TEXT) as played:
        assert played(policy := Saying("ab"), {"reset": {}}).samples[0].reward == 1.5
    assert policy.prompts[0] == '<bos><user>{"metadata": {}}<assistant>'
    with opened(shown=["bord"], retries=0, **TEXT) as played:
        assert played(Saying("ab"), {"reset": {}}).samples[0].finish_reason == UNANSWERED
    assert "shown=bord: the first observation has metadata, board" in capfd.readouterr().out


def test_an_episode_ends_where_the_conversation_has_no_room(boards: Played):
    [sample] = boards(Saying("ab" * 20), {"reset": {}}, max_tokens=90).samples
    assert (
        sample.reward == 0.25
        and sample.metrics["out_of_room"] == 1
        and not any(map(sample.metrics.get, FAILED))
    )


@pytest.mark.long
def test_a_server_that_is_full_is_asked_again():
    with opened(server="boards:narrow", **TEXT) as played:
        samples = played(Saying("ab"), {"reset": {}}, n=5).samples
    assert [sample.reward for sample in samples] == [1.5] * 5 and not any(
        sample.metrics["other_starts"] for sample in samples
    )


def test_steps_without_a_number_as_reward_are_counted(boards: Played):
    [sample] = boards(Saying("ab"), {"reset": {"kind": "nan"}}).samples
    assert sample.reward == 0.25 + 0.75 and sample.metrics["env_unrewarded"] == 1
    assert boards(Saying("ab"), {"reset": {}}).samples[0].metrics["env_unrewarded"] == 0


def test_episodes_of_a_row_that_do_not_begin_alike_are_counted(boards: Played):
    samples = boards(Saying("ab"), {"reset": {"kind": "deaf"}}, n=3).samples
    assert [sample.metrics["other_starts"] for sample in samples] == [1.0] * 3


@pytest.fixture
def urls() -> list[str]:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as first,
        closing(socket.create_server(("127.0.0.1", 0))) as second,
    ):
        return [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in (first, second)]


@pytest.fixture
def servers(urls: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two servers that already run, as on a cluster."""
    running = [*map(serve_at, urls)]
    try:
        yield running
    finally:
        for server in running:
            server.kill()
            server.wait()


@pytest.mark.long
def test_servers_that_run_already_share_the_episodes(urls: list[str], servers: list[Any]):
    with opened(server=urls, folder=None, **TEXT) as played:
        samples = played(Saying("ab"), {"reset": {}}, n=4).samples
    assert [sample.reward for sample in samples] == [1.5] * 4
    rows = {"server": f"{urls[0]}/", "python": THERE, "rows": {"train": "train"}}
    assert write_rows(rows, {"train": Path(os.devnull)}) == f"{os.devnull}: 4 rows\n"


def serve_at(url: str) -> subprocess.Popen[bytes]:
    command = [
        THERE,
        "-m",
        "uvicorn",
        "boards:narrow",
        "--port",
        url.rpartition(":")[2],
        "--log-level",
        "warning",
    ]
    return subprocess.Popen(command, cwd=FOLDER)


@pytest.mark.long
def test_episodes_go_to_live_servers_and_wait_for_a_lost_one(urls: list[str], servers: list[Any]):
    with opened(server=urls, folder=None, retries=0, **TEXT) as played:
        played(Saying("ab"), {"reset": {}})
        servers[0].kill()
        servers[0].wait()
        samples = played(Saying("ab"), {"reset": {}}, n=4).samples
        assert [sample.reward for sample in samples] == [1.5] * 4
        servers[1].kill()
        servers[1].wait()
        played.earlier_children.add(psutil.Process((back := serve_at(urls[1])).pid))
        servers.append(back)
        assert played(Saying("ab"), {"reset": {}}).samples[0].reward == 1.5


@pytest.mark.long
def test_lost_server_fails_the_episode_with_the_reason(
    urls: list[str], servers: list[Any], capfd: pytest.CaptureFixture[str]
):
    with opened(server=urls[0], retries=0, deadline_s=4.0, **TEXT) as played:
        played(Saying("ab"), {"reset": {}})
        servers[0].kill()
        servers[0].wait()
        [sample] = played(Saying("ab"), {"reset": {}}).samples
    assert (
        sample.finish_reason == UNANSWERED
        and "ConnectionError: Failed to connect" in capfd.readouterr().out
    )


HOLDS = """
import sys, time, httpx
from openenv.core.generic_client import GenericEnvClient
while True:
    try:
        httpx.get(sys.argv[1] + "/health")
        break
    except httpx.HTTPError:
        time.sleep(0.2)
with GenericEnvClient(base_url=sys.argv[1]).sync() as session:
    session.reset()
    print("holds", flush=True)
    time.sleep(6)
"""


@pytest.mark.long
def test_full_server_is_asked_again_for_its_tools(urls: list[str], servers: list[Any]):
    """Another client has its only session, and leaves after a while."""
    with subprocess.Popen([THERE, "-c", HOLDS, urls[0]], stdout=subprocess.PIPE) as holds:
        assert holds.stdout is not None and holds.stdout.readline() == b"holds\n"
        with opened(server=urls[0], retries=0) as played:
            played.earlier_children.add(psutil.Process(holds.pid))
            [sample] = played(Saying(call("step", {"text": "ab"}), "enough"), {"reset": {}}).samples
    assert sample.reward == 0.25


def test_rows_of_a_server_without_tasks_are_refused():
    arguments = {
        "server": "products:app",
        "python": THERE,
        "folder": FOLDER,
        "rows": {"train": "train"},
    }
    with pytest.raises(
        ConfigError,
        match="products/num_tasks did not answer as OpenEnv's servers do: .*501 Not Implemented",
    ):
        write_rows(arguments, {"train": Path(os.devnull)})


def test_rows_are_seeds_or_tasks(boards: Played, tmp_path: Path):
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "eval")}
    arguments = {
        "server": "boards:app",
        "python": THERE,
        "folder": FOLDER,
        "system_prompt": "s",
        "instructions": "i",
    }
    write_rows({**arguments, "rows": {"train": 3, "eval": 2}}, files)
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "i"}]
    assert read(files["train"]) == [
        {"prompt": prompt, "reset": {"seed": seed}} for seed in (0, 1, 2)
    ]
    assert read(files["eval"]) == [{"prompt": prompt, "reset": {"seed": seed}} for seed in (3, 4)]
    write_rows({**arguments, "rows": {"train": "train", "eval": "test"}}, files)
    assert [row["reset"] for row in read(files["eval"])] == [
        {"split": "test", "index": index} for index in (0, 1)
    ]
    policy = Saying("ab")
    boards(policy, read(files["eval"])[1])
    assert policy.prompts[0] == "<bos><system>s<user>i\ntest 1<assistant>"
    with pytest.raises(ConfigError, match="rollout.args.rows has no eval"):
        write_rows({**arguments, "rows": {"train": 3}}, files)


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.args.rows.train=0", "rollout.args.rows=.*expected `int` >= 1"),
        ("rollout.args.seeds=3", "rollout.args.seeds=3: unknown argument"),
        ("data.eval.source=rows.parquet", "data.eval.source=rows.parquet: must be a .jsonl file"),
        ("rollout.name=single_turn", "rollout.name=single_turn: only an environment of a hub"),
    ],
)
def test_rows_are_refused_where_the_settings_are_wrong(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        write_environment_rows(load_config(str(ROOT / "configs/examples/openenv.yaml"), [override]))


def read(file: Path) -> list[dict[str, Any]]:
    return json_lines(file)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"server": "no_such:app"},
            "rollout.args.server=no_such:app, with .*: its module no_such is not installed there",
        ),
        ({"server": "boards"}, "boards must be a URL .*, or module:app"),
        ({"server": "localhost:8000"}, "localhost:8000 must be a URL .*, or module:app"),
        ({"server": "http://"}, "http:// must be a URL .*, or module:app"),
        ({"server": []}, "must name a server"),
        ({"python": sys.executable}, "the package openenv is not installed there"),
        (
            {"python": "no-such-python"},
            "rollout.args.python=no-such-python: there is no such program",
        ),
        ({"on_crash": float("inf")}, "rollout.args.on_crash=inf: must be a finite number"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(
    arguments: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        OpenEnv(
            TOKENIZER, **{"python": THERE, "server": "boards:app", "folder": FOLDER, **arguments}
        )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"text_field": "move"}, "text_field=move: an action has text, times"),
        pytest.param(
            {"text_field": "times"},
            "text_field=times: an action needs text too",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"server": "boards:nothing"},
            "boards:nothing cannot be loaded: AttributeError",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"server": "http://127.0.0.1:9", "start_s": 15.0},
            "http://127.0.0.1:9/health: ConnectError",
            marks=pytest.mark.long,
        ),
    ],
)
def test_unusable_server_ends_the_run_with_the_reason(arguments: dict[str, Any], message: str):
    with (
        opened(**arguments, retries=0) as played,
        pytest.raises(RuntimeError, match=f"(?s)could not be started.*{message}"),
    ):
        played(Saying("ab"), {"reset": {}})
