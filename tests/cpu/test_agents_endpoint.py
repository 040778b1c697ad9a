"""Agents with the official packages, as processes in the sandbox, against the real endpoint with a
fake policy.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from batches import batch_of
from msgspec.structs import replace

from megarl.agents.program import Program
from megarl.algorithms.batches import dropped_metrics
from megarl.base.rollout_types import Group, Prompt, episodes
from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import RunConfig
from megarl.data.tokenizer import tokenizer_of
from megarl.generator.completions import Completion, EngineError, Sampling
from megarl.rewards.score import Score, ScoreRequest
from megarl.rollouts.channel import judged, pack
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.rollout import CheckedRollout
from megarl.sandbox import jail

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs/models/tiny-agent"
TOKENIZER = tokenizer_of(str(MODEL), "model.path")
EOS = TOKENIZER.eos_id
SAMPLING = Sampling(200, stop_token_ids=TOKENIZER.eos_ids)


def can(kind: str) -> bool:
    """Whether this machine has this kind of sandbox."""
    try:
        return bool(jail.kind_for(kind))
    except ConfigError:
        return False


KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not can(kind), reason=f"no {kind} here"))
    for kind in ("bwrap", "namespace", "limits")
]
pytestmark = pytest.mark.timeout(900)


class Calculating:
    """A fake of generate: calls the tool for the user's task, then copies the result.

    One id a character.
    """

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.prompts.append(prompt_ids)
        await asyncio.sleep(0.01)
        text = TOKENIZER.decode_all(prompt_ids)
        task, _, result = text.partition("<user>")[2].partition("=<assistant>")
        if "<tool>" in result:
            answer = result.rpartition("<tool>")[2].removesuffix("<assistant>")
        else:
            answer = (
                '<tool_call>{"name": "calculate", "arguments": {"expression": "'
                + task
                + '"}}</tool_call>'
            )
        ids = [TOKENIZER.backend.get_vocab()[letter] for letter in answer] + [EOS]
        return [
            Completion(ids, [-0.25] * len(ids), [len(self.prompts)] * len(ids), "stop")
            for _ in range(n)
        ]


def roll_out_all(codes: list[str], played: list[Group]) -> None:
    """Rolls out one prompt after another. A prompt says what the program does."""

    async def run() -> None:
        command = [sys.executable, "-c", SCRIPT + "exec(sys.argv[1])", "{prompt}"]
        rollout = Program(
            TOKENIZER,
            command=command,
            sandbox="limits",
            deadline_s=240.0,
            retries=0,
            max_unanswered=0.02,
            reward="message",
        )
        context = RolloutContext(TOKENIZER, Calculating(), anything_goes, None, 5.0)  # type: ignore[arg-type]
        try:
            for number, code in enumerate(codes):
                played.append(await rollout(context, Prompt(number, [1, 5], code, ""), SAMPLING, 1))
        finally:
            await rollout.close()

    asyncio.run(run())


async def anything_goes(request: ScoreRequest) -> Score:
    return Score(1.0)


def roll_out(generate: Any, n: int = 1, prompt: str = "6*7=", **arguments: Any) -> Group:
    async def score(request: ScoreRequest) -> Score:
        return Score(float(request.response == request.answer))

    async def run() -> Group:
        rollout = Program(TOKENIZER, **{"sandbox": "limits", "deadline_s": 240.0, **arguments})
        context = RolloutContext(TOKENIZER, generate, score, None, 5.0)  # type: ignore[arg-type]
        checked = CheckedRollout("program", rollout, context, 400.0, 112)
        try:
            return await checked(Prompt(0, [1, 5], prompt, "42"), SAMPLING, n)
        finally:
            await rollout.close()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_an_agent_of_an_official_package_as_it_is(package: str, kind: str):
    pytest.importorskip(package)
    policy = Calculating()
    command = [sys.executable, f"with_{package}.py", "{prompt}"]
    group = roll_out(
        policy, n=2, command=command, folder=str(ROOT / "configs/agents"), sandbox=kind
    )
    assert [sample.reward for sample in group.samples] == [1.0, 1.0], [
        sample.text for sample in group.samples
    ]
    for sample in group.samples:
        assert (
            sample.text.endswith("</tool_call><eos><tool>42<assistant>42<eos>")
            and sample.summary().turns == 2
        )
        assert (
            sample.metrics["calls"] == 2
            and sample.metrics["branches"] == 1
            and not sample.metrics["rewritten"]
        )
    assert (
        TOKENIZER.decode_all(group.prompt.token_ids) == "<bos><tools>calculate<user>6*7=<assistant>"
    )
    second = next(ids for ids in policy.prompts if len(ids) > len(group.prompt.token_ids))
    [sample, *_] = group.samples
    assert second == [
        *group.prompt.token_ids,
        *sample.token_ids[: len(second) - len(group.prompt.token_ids)],
    ], "ids as they were sampled"


SCRIPT = """
import json, os, sys, urllib.error, urllib.request
def call(path="/chat/completions", **body):
    body = {"messages": [{"role": "user", "content": "6*7="}], **body}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
                                     {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    try:
        return urllib.request.urlopen(request).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
"""


def script(code: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT + code]


def test_the_program_says_its_reward_and_metrics():
    code = (
        "task = json.loads(sys.stdin.readline()); call(); "
        "call(n=2)\nprint(json.dumps({'reward': 0.5, 'own': len(task['answer'])}))"
    )
    group = roll_out(Calculating(), command=script(code), reward="program")
    [branches] = episodes(group.samples)
    assert [sample.reward for sample in branches] == [0.5] * 3, (
        "two calls of the same messages, one of them with two choices"
    )
    assert branches[0].metrics["own"] == 2.0 and branches[0].metrics["branches"] == 3.0


def test_a_program_goes_on_from_a_response():
    code = (
        "one = json.loads(call('/responses', input='6*7='))\ncall('/responses', input='8', "
        "previous_response_id=one['id'])\nprint(1)"
    )
    [sample] = roll_out(Calculating(), command=script(code), reward="program").samples
    assert (
        sample.metrics["calls"] == 2
        and sample.metrics["branches"] == 1
        and sample.summary().turns == 2
        and sample.reward == 1.0
    )


def test_the_policys_last_message_is_scored():
    assert (
        roll_out(Calculating(), command=script("call(); print('nothing')"), reward="message")
        .samples[0]
        .reward
        == 0.0
    )


@pytest.mark.parametrize(
    ("code", "arguments", "kind"),
    [
        ("call(); sys.exit(3)", {}, "exit"),
        pytest.param(
            "call(); import time; time.sleep(60)",
            {"deadline_s": 15.0},
            "deadline",
            marks=pytest.mark.long,
        ),
        # more than one process may have
        ("call(); x = b'1' * (1 << 30)", {"memory_mib": 256}, "exit"),
        ("call(); print('no number')", {"reward": "program"}, "reward"),
    ],
)
def test_a_program_that_fails_has_the_reward_that_was_asked_for(
    code: str, arguments: dict[str, Any], kind: str
):
    [sample] = roll_out(Calculating(), command=script(code), on_crash=-0.5, **arguments).samples
    assert sample.reward == -0.5 and sample.metrics[f"failed_{kind}"] == 1.0
    assert (
        sum(
            sample.metrics[f"failed_{failure_kind}"]
            for failure_kind in ("exit", "deadline", "limits", "reward")
        )
        == 1.0
    )
    assert [(failure.kind, failure.part) for failure in sample.failures] == [
        (kind, "rollout.program")
    ] and sample.failures[0].reason


def test_a_program_that_never_calls_ends_the_run_with_its_errors():
    message = (
        r"sampled nothing .* for 1 of the last 1 prompts, more than "
        r"rollout.args.max_unanswered=0 .* exit status 1(.|\n)*ZeroDivisionError"
    )
    with pytest.raises(RuntimeError, match=message):
        roll_out(Calculating(), command=script("1 / 0"), retries=1, max_unanswered=0.0)


def test_a_program_that_is_not_there_ends_the_run_at_once():
    with pytest.raises(
        RunError,
        match=r'rollout.args.command=\["./nowhere"\]: ended with exit status 127: .*: ./nowhere: '
        r".*No such file",
    ):
        roll_out(Calculating(), command=["./nowhere"], max_unanswered=1.0)
    code = "call(); sys.exit(127)"  # the policy may have caused this
    assert roll_out(Calculating(), command=script(code)).samples[0].metrics["failed_exit"] == 1.0


TOO_LONG = "print(call(messages=[{'role': 'user', 'content': 'a' * 300}]))"


@pytest.mark.parametrize(
    ("code", "word", "prompt", "starts", "message"),
    [
        ("1 / 0", "", "6*7=", 2, "no call of it was answered: exit status 1"),
        (
            TOO_LONG,
            "",
            "6*7=",
            1,
            "no call of it was answered: its last call was refused: the maximum context length is "
            "exceeded",
        ),
        (
            "call()",
            "{prompt}",
            "x" * (128 << 10),
            0,
            "too long for {prompt} in rollout.args.command: 131072 bytes",
        ),
        ("call()", "{prompt}", "6*7=\0", 0, "has the character NUL"),
    ],
)
def test_unanswered_episode_is_counted_and_its_prompt_dropped(
    code: str,
    word: str,
    prompt: str,
    starts: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """An episode is unanswered if none of its calls was answered."""
    code = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n{code}"
    group = roll_out(
        Calculating(), command=[*script(code), word], retries=1, on_crash=-0.5, prompt=prompt
    )
    [sample] = group.samples
    assert (
        sample.reward,
        sample.finish_reason,
        len(sample.token_ids),
        sample.metrics["failed_unanswered"],
    ) == (-0.5, "unanswered", 0, 1.0)
    assert (tmp_path / "starts").exists() == bool(starts) and (
        not starts or (tmp_path / "starts").stat().st_size == starts
    )
    assert message in capsys.readouterr().out
    dropped = judged(pack(group), RunConfig())
    assert dropped.dropped and not dropped.pieces


def test_the_longest_word_that_linux_takes_is_given():
    group = roll_out(
        Calculating(), command=[*script("call()"), "{prompt}"], prompt="x" * ((128 << 10) - 1)
    )
    assert group.samples[0].finish_reason == "stop"


def test_unanswered_episode_drops_its_group(
    tmp_path: Path,
):
    """What the group's other episodes sampled is shown."""
    code = f"import os\ntry: os.mkdir({str(tmp_path / 'first')!r})\nexcept OSError: call()"
    group = roll_out(Calculating(), n=2, command=script(code), retries=0)
    assert sorted(sample.finish_reason for sample in group.samples) == ["stop", "unanswered"]
    assert judged(pack(group), RunConfig()).dropped
    batch = batch_of([group])
    metrics = dropped_metrics(replace(batch, groups=[], dropped=batch.groups))
    assert metrics == {
        "prompts/unanswered": 1,
        "prompts/dropped": 0,
        "prompts/dropped_right": 0,
        "prompts/dropped_wrong": 0,
    }


def test_run_ends_if_too_many_recent_prompts_are_unanswered():
    played: list[Group] = []
    with pytest.raises(
        RuntimeError,
        match=r"for 3 of the last 4 prompts, more than rollout.args.max_unanswered=0.02 of 100; "
        r"for example",
    ):
        roll_out_all(["", "call()", "", "", ""], played)
    assert [group.samples[0].finish_reason for group in played] == [
        "unanswered",
        "stop",
        "unanswered",
    ]


def test_an_engine_that_fails_ends_the_run():
    async def fails(*_: Any) -> list[Completion]:
        raise EngineError("the engine is gone")

    with pytest.raises(EngineError, match="the engine is gone"):
        roll_out(fails, command=script("call(); import time; time.sleep(60)"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tool_choice='required'", "no call can be forced"),
        ("response_format={'type': 'json_object'}", "no format can be forced"),
        ("messages=[]", "the last message must not be"),
        ("messages=[{'content': 'a'}]", "does not have the required form"),
        (
            "messages=[{'role': 'user', 'content': [{'type': 'image_url'}]}]",
            "only text is supported",
        ),
        ("messages=[{'role': 'user', 'content': 'a' * 300}]", "context_length_exceeded"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_words(body: str, message: str):
    code = f"call(); print(json.dumps({{'reward': float({message!r} in call({body}))}}))"
    assert roll_out(Calculating(), command=script(code), reward="program").samples[0].reward == 1.0


def test_a_key_is_that_of_one_episode():
    code = (
        "call(); os.environ['OPENAI_API_KEY'] = 'sk-other'; print(json.dumps({'reward': "
        "float(call().startswith('401'))}))"
    )
    assert roll_out(Calculating(), command=script(code), reward="program").samples[0].reward == 1.0


def test_a_call_that_the_program_gives_up_is_sampled_anew():
    """The abandoned call leaves nothing behind; only the next call's answer counts."""
    slow = Calculating()
    first = asyncio.Event()
    cancelled = []

    async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        if not first.is_set():
            first.set()
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
        return await slow(prompt_ids, sampling, n)

    code = """
import socket, urllib.parse, time
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"messages": [{"role": "user", "content": "6*7="}]})
given_up = socket.create_connection((url.hostname, url.port))
given_up.sendall(("POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer " + os.environ["OPENAI_API_KEY"]
                  + "\\r\\nContent-Length: " + str(len(body)) + "\\r\\n\\r\\n" + body).encode())
time.sleep(1)
given_up.close()
time.sleep(0.5)
call()
print(1)
"""
    [sample] = roll_out(generate, command=script(code), reward="program").samples
    assert cancelled and sample.metrics["calls"] == 1 and sample.reward == 1.0


@pytest.mark.parametrize("kind", KINDS[:2])
def test_sandbox_has_no_network_and_no_file_of_the_host(kind: str, tmp_path: Path):
    """Only bwrap hides the host's files."""
    (tmp_path / "secret").write_text("secret")
    code = f"""
import socket
call()
reached = 0
for address in (("1.1.1.1", 53), ("127.0.0.1", PORT)):
    try:
        socket.create_connection(address, 1)
        reached += 1
    except OSError:
        pass
reached += os.path.exists({str(tmp_path / "secret")!r})
print(json.dumps({{"reward": reached}}))
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1]))
        [sample] = roll_out(
            Calculating(), command=script(code), reward="program", sandbox=kind
        ).samples
    assert sample.reward == (0.0 if kind == "bwrap" else 1.0), (
        "a namespace leaves it the files that the user can read"
    )


def test_memory_of_all_processes_together_is_bounded():
    eater = (
        "x = bytearray(150 << 20); x[::4096] = b'1' * len(x[::4096]); import time; time.sleep(60)"
    )
    code = (
        "call()\nimport subprocess, time\nfor _ in range(4): "
        f"subprocess.Popen([sys.executable, '-c', {eater!r}])\ntime.sleep(60)"
    )
    [sample] = roll_out(Calculating(), command=script(code), memory_mib=300, on_crash=-1.0).samples
    assert sample.reward == -1.0 and sample.metrics["failed_limits"] == 1.0


def test_mistakes_in_the_arguments_are_told_together():
    with pytest.raises(ConfigError) as error:
        Program(TOKENIZER, command=["x"], folder="/nowhere", on_crash=float("nan"))
    assert "rollout.args.folder=/nowhere: there is no such path" in str(
        error.value
    ) and "rollout.args.on_crash=nan" in str(error.value)
    with pytest.raises(ConfigError, match="did you mean qwen25"):
        Program(TOKENIZER, command=["x"], tool_parser="qwen2", sandbox="limits")
