"""Trained ids are the sampled ids, over random trees of turns, weight updates and aborts, with a
real fleet.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megarl.agents import openai_responses
from megarl.agents.episode import Answer, Episode, RequestRefused, openai_call, shared_prefix
from megarl.agents.openai_chat import read_request
from megarl.algorithms.batches import batch_rewards, to_train_sequences
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Group, Prompt, TrainSequence, episodes
from megarl.config.schema import AlgorithmConfig
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import tokenizer_of
from megarl.generator.completions import ABORT, Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.tool_parsers import JsonParser, ToolCall, json_calls
from megarl.rewards.score import Score
from megarl.rollouts.environments.base import sample_problems

MODEL = Path(__file__).parents[2] / "configs/models/tiny-agent"
TOKENIZER = tokenizer_of(str(MODEL), "model.path")
TEMPLATE = load_chat_template(TOKENIZER, "model.path=tiny-agent")
TOOL = {"name": "calculate", "description": "", "parameters": {}}
TOOLS = [{"type": "function", "function": TOOL}]
EOS = TOKENIZER.eos_id
VOCABULARY = 109
MAX_TOKENS = 400
SAMPLING = Sampling(MAX_TOKENS, stop_token_ids=TOKENIZER.eos_ids)


class RandomEngine:
    """A fake engine: gives random ids with unique log-probs, at its own pace, and aborts running
    requests on demand.
    """

    def __init__(self, seed: int):
        self.url = "fake"
        self.random = random.Random(seed)
        # log-prob -> (id, version) of all samples so far
        self.drawn: dict[float, tuple[int, int]] = {}
        self.numbers = count(1)
        self.version = 0
        self.aborts = 0

    async def complete(self, inputs: Any, samplings: Any, version: Any = None) -> list[Completion]:
        aborts = self.aborts
        drafts = [([], [], []) for _ in inputs]
        for _ in range(self.random.randrange(1, 12)):
            await asyncio.sleep(0)
            for ids, logprobs, versions in drafts:
                number = self.random.choice([*range(4, VOCABULARY)])
                logprob = -next(self.numbers) / 1024  # exact in float32
                self.drawn[logprob] = number, self.version
                ids.append(number)
                logprobs.append(logprob)
                versions.append(self.version)
            if aborts != self.aborts:  # completions_of leaves out the last one
                return [
                    Completion(ids[:-1], logprobs[:-1], versions[:-1], ABORT)
                    for ids, logprobs, versions in drafts
                ]
        return [
            self._ended(ids, logprobs, versions, sampling)
            for (ids, logprobs, versions), sampling in zip(drafts, samplings, strict=True)
        ]

    def _ended(
        self, ids: list[int], logprobs: list[float], versions: list[int], sampling: Sampling
    ) -> Completion:
        max_tokens = sampling.max_tokens
        if self.random.random() < 0.5:  # it may miss a stop string
            for end in range(1, min(len(ids), max_tokens) + 1):
                if any(string in TOKENIZER.decode_all(ids[:end]) for string in sampling.stop):
                    return Completion(ids[:end], logprobs[:end], versions[:end], "stop")
        if self.random.random() < 0.7 and len(ids) <= max_tokens:
            ids[-1] = EOS
            self.drawn[logprobs[-1]] = EOS, versions[-1]
            return Completion(ids, logprobs, versions, "stop")
        return Completion(ids[:max_tokens], logprobs[:max_tokens], versions[:max_tokens], "length")

    async def abort_all(self, timeout_s: float) -> None:
        self.aborts += 1

    async def close(self) -> None:
        pass


async def letter_calls(text: str, tools: Any) -> tuple[str, list[ToolCall]]:
    """A fake parser, so that random ids contain calls: each of the letters a to m begins one."""
    content, *parts = re.split("(?=[a-m])", text)
    return content, [ToolCall("calculate", json.dumps({"expression": part})) for part in parts]


def text_of(answer: Answer) -> str:
    return answer.content + "".join(
        json.loads(call.arguments)["expression"] for _, call in answer.calls
    )


def sent_back_message(answer: Answer, noise: random.Random) -> dict[str, Any]:
    """The message as an agent may send it back: without fields that mean nothing."""
    content = noise.choice(
        [
            answer.content,
            answer.content.strip(),
            f" {answer.content}\n",
            answer.content + (answer.stop or ""),
        ]
    )
    calls = {"tool_calls": [openai_call(*call) for call in answer.calls]} if answer.calls else {}
    return {"role": "assistant", "content": content, **calls}


def check_stop(answer: Answer, stop: tuple[str, ...]) -> None:
    """Checks that the response ends at the first token that completes a stop string, and that the
    agent gets the text before it.
    """
    ids = answer.completion.token_ids.tolist()
    texts = [TOKENIZER.decode_all(ids[:end]) for end in range(len(ids) + 1)]
    assert not any(string in text for text in texts[:-1] for string in stop)
    stops_in_text = [string for string in stop if string in texts[-1]]
    if stops_in_text:
        assert answer.stop in stops_in_text and answer.completion.finish_reason == "stop"
        assert texts[-1].startswith(text_of(answer) + answer.stop)
        assert not any(string in text_of(answer) for string in stop)
    else:
        assert answer.stop is None
        assert text_of(answer) == texts[-2 if ids[-1] == EOS else -1]


class Head(NamedTuple):
    """A conversation up to the policy's next answer."""

    messages: list[dict[str, Any]]
    answered: str | None = None  # the last response in it,
    since: int = 0  # and the number of messages up to it


def items(messages: list[dict[str, Any]], noise: random.Random) -> list[dict[str, Any]]:
    """The messages as items of OpenAI's Responses API, in an order that agents may use."""
    items_: list[dict[str, Any]] = []
    results = {
        message["tool_call_id"]: message for message in messages if message["role"] == "tool"
    }
    for message in messages:
        if message["role"] == "tool":
            result = {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
            if result not in items_:  # otherwise it follows its call
                items_.append(result)
            continue
        calls = message.get("tool_calls", [])
        apart = noise.random() < 0.3
        if message["content"] or not calls:
            part = {
                "type": "output_text" if message["role"] == "assistant" else "input_text",
                "text": message["content"],
            }
            items_.append({"type": "message", "role": message["role"], "content": [part]})
        if message["role"] == "assistant" and noise.random() < 0.2:
            items_.append({"type": "reasoning", "summary": []})
        for call in calls:
            items_.append({"type": "function_call", "call_id": call["id"], **call["function"]})
            if apart and call["id"] in results:
                items_ += items([results[call["id"]]], noise)
    return items_


async def ask(
    episode: Episode,
    head: Head,
    noise: random.Random,
    max_tokens: int | None,
    n: int,
    stop: tuple[str, ...],
) -> list[tuple[Answer, str | None]]:
    """Asks for the next message with either of OpenAI's APIs, with the whole conversation or from a
    response on. Responses have names.
    """
    if noise.random() < 0.3:
        answers = await episode.complete(head.messages, TOOLS, max_tokens, n, stop)
        return [(answer, None) for answer in answers]
    previous = head.answered if noise.random() < 0.5 else None
    sent = items(head.messages[head.since :] if previous else head.messages, noise)
    body = {
        "input": sent,
        "tools": [{"type": "function", **TOOL}],
        "max_output_tokens": max_tokens,
        "stop": [*stop],
    }
    request = openai_responses.read_request({**body, "previous_response_id": previous})
    messages = openai_responses.conversation(episode, request)
    name = f"{noise.random()}"
    [answer] = await episode.complete(
        messages, request.tools, request.max_tokens, stop=request.stop
    )
    openai_responses.keep(episode, name, request, messages, answer)
    return [(answer, f"resp_{name}")]


async def converse(episode: Episode, noise: random.Random) -> None:
    """An agent that, at random, continues, retries, forks, compacts and abandons calls."""
    heads = [Head([{"role": "user", "content": f"{noise.randrange(10**6)}="}])]
    for _ in range(noise.randrange(2, 9)):
        head = noise.choice(heads)
        stop = noise.choice([(), ("7",), ("e", "12", ";<"), tuple("0123456789")])
        call = asyncio.create_task(
            ask(episode, head, noise, noise.choice([None, 5]), noise.choice([1, 1, 2]), stop)
        )
        if noise.random() < 0.2:
            for _ in range(noise.randrange(4)):
                await asyncio.sleep(0)
            call.cancel()
        await asyncio.wait({call})
        if call.cancelled() or isinstance(call.exception(), RequestRefused):
            continue
        for answer, name in call.result():
            check_stop(answer, stop)
            results = [
                {
                    "role": "tool",
                    "tool_call_id": number,
                    "content": noise.choice(["<eos>", "12;", ""]),
                }
                for number, _ in answer.calls
            ]
            next_messages = results or [
                {"role": "user", "content": noise.choice(["<eos>", "12;", "a<assistant>b", ""])}
            ]
            sent_back = sent_back_message(answer, noise)
            conversation = [*head.messages, sent_back, *next_messages]
            is_unchanged = name and sent_back["content"].strip() == answer.content.strip()
            if is_unchanged:
                heads.append(Head(conversation, name, len(conversation) - len(next_messages)))
            else:
                heads.append(Head(conversation, head.answered, head.since))
        if noise.random() < 0.2:  # compaction: a summary replaces the conversation
            heads.append(
                Head([head.messages[0], {"role": "user", "content": answer.content[:20] or "x"}])
            )


async def update(
    fleet: Fleet, engine: RandomEngine, noise: random.Random, agents_done: asyncio.Event
) -> None:
    while not agents_done.is_set():
        for _ in range(noise.randrange(1, 6)):
            await asyncio.sleep(0)
        await fleet.hold(5.0)
        engine.version += 1
        fleet.release(engine.version)


async def play(mode: str, seed: int) -> tuple[RandomEngine, list[Episode]]:
    engine = RandomEngine(seed)
    noise = random.Random(seed + 1)
    agents_done = asyncio.Event()
    fleet: Any = Fleet([engine], mode, decode=TOKENIZER.decode_all)  # type: ignore[list-item]
    fleet.release(0)
    episodes_ = [
        Episode(fleet.generate, TOKENIZER, TEMPLATE, letter_calls, SAMPLING) for _ in range(3)
    ]
    updates = asyncio.create_task(update(fleet, engine, noise, agents_done))
    agents = [
        converse(episode, random.Random(f"{seed}/{agent}/{number}"))
        for number, episode in enumerate(episodes_)
        for agent in range(2)
    ]
    await asyncio.gather(*agents)
    agents_done.set()
    await updates
    return engine, episodes_


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["block", "in_flight", "retract", "abort", "resume"]), st.integers(0, 10**6))
def test_trained_tokens_are_the_sampled_tokens(mode: str, seed: int) -> None:
    engine, played = asyncio.run(play(mode, seed))
    trees = [episode.tree for episode in played]
    if not all(tree.turns for tree in trees):
        return
    for episode in played:
        assert episode.counts["rewritten"] == episode.counts["unstable"] == 0
    for turn in [turn for tree in trees for turn in tree.turns if turn.parent is not None]:
        cut_off = turn.parent.completion.token_ids[-1] != EOS
        assert (turn.context[0] == EOS) == cut_off, (
            "the context ends a turn that the policy has not ended itself"
        )
    prefix = shared_prefix(trees)
    rewards = [float(number) for number in range(len(trees))]
    groups = [
        tree.samples(len(prefix), TOKENIZER.decode_all, Score(reward), {})
        for tree, reward in zip(trees, rewards, strict=True)
    ]
    samples = [sample for group in groups for sample in group]
    assert sample_problems(samples, len(trees), MAX_TOKENS, VOCABULARY) == []
    branch_counts = [len(tree.leaves()) for tree in trees]
    assert [len(group) for group in groups] == branch_counts
    assert [len(branches) for branches in episodes(samples)] == branch_counts

    batch = batch_of([Group(Prompt(0, prefix, "", ""), samples)])
    algorithm = make_algorithm(AlgorithmConfig(name="aipo"))
    advantages = algorithm.advantages(batch_rewards(batch))
    assert advantages.tolist() == [[-1.0, 0.0, 1.0]], (
        "one reward an episode, however many branches it has"
    )
    sequences = [
        sequence
        for sequence in to_train_sequences(batch, advantages, False).values()
        if isinstance(sequence, TrainSequence)
    ]
    trained: Counter[float] = Counter()
    for sequence, sample in zip(sequences, samples, strict=True):
        versions = [
            version for version, tokens in sample.summary().policy_versions for _ in range(tokens)
        ]
        positions = sequence.loss_mask.nonzero()[0]
        for position, version in zip(positions, versions, strict=True):
            logprob = float(sequence.mu_logprobs[position])
            assert engine.drawn[logprob] == (sequence.token_ids[position], version), (
                "the id, log-prob and version of one draw"
            )
            trained[logprob] += 1
    sampled_logprobs = []
    for tree in trees:
        for turn in tree.turns:
            sampled_logprobs += turn.completion.logprobs
    assert trained == Counter(sampled_logprobs)
    assert set(trained.values()) == {1}, "each token once"
    leaf_ids = [leaf.token_ids for tree in trees for leaf in tree.leaves()]
    assert [sequence.token_ids.tolist() for sequence in sequences] == leaf_ids


def learned_pieces(sample: Any) -> list[str]:
    """The texts of the tokens that the policy sampled."""
    return [
        TOKENIZER.piece(number)
        for number, by_policy in zip(sample.token_ids, sample.policy_mask, strict=True)
        if by_policy
    ]


class LetterPolicy:
    """A fake of generate: says given texts ("$": end-of-text), and records its requests."""

    def __init__(self, *texts: str):
        self.texts = list(texts)
        self.prompts = []
        self.samplings = []

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.prompts.append(prompt_ids)
        self.samplings.append(sampling)
        completions = []
        for _ in range(n):
            text = self.texts.pop(0)
            # One id a character, unlike the tokenizer's own encoding of a call.
            ids = [TOKENIZER.backend.get_vocab()[letter] for letter in text.removesuffix("$")]
            if text.endswith("$"):
                ids.append(EOS)
            ended = ids[-1] == EOS or any(string in text for string in sampling.stop)
            reason = "stop" if ended else "length"
            completions.append(Completion(ids, [-1.0] * len(ids), [3] * len(ids), reason))
        return completions


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def episode(*texts: str, sampling: Sampling = SAMPLING) -> tuple[Episode, LetterPolicy]:
    policy = LetterPolicy(*texts)
    return Episode(policy, TOKENIZER, TEMPLATE, JsonParser(), sampling), policy


CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'


def test_good_calls_survive_beside_bad_ones():
    tools = [{"type": "function", "function": {"name": "calculate", "parameters": {}}}]
    for bad in (
        '{"name": "unknown", "arguments": {}}',
        '{"name": "calculate", "arguments": 7}',
        "no JSON",
    ):
        text, calls = json_calls(f"First {CALL} then <tool_call>{bad}</tool_call>", tools)
        assert [call.name for call in calls] == ["calculate"]
        assert text == f"First  then <tool_call>{bad}</tool_call>"


async def test_call_and_its_result_continue_the_sampled_ids():
    played, policy = episode(f"{CALL}$", "42$")
    [answer] = await played.complete([user("6*7=")], TOOLS)
    assert answer.content == "" and answer.finish_reason == "tool_calls"
    [(number, call)] = answer.calls
    assert (call.name, call.arguments) == ("calculate", '{"expression": "6*7"}')
    result = {"role": "tool", "tool_call_id": number, "content": "42"}
    [last] = await played.complete(
        [
            user("6*7="),
            {"role": "assistant", "tool_calls": [openai_call(number, call)]},
            result,
        ],
        TOOLS,
    )
    assert last.content == "42" and last.finish_reason == "stop" and not last.calls
    sampled = played.tree.turns[0].completion.token_ids.tolist()
    assert TOKENIZER.encode_text(CALL, special_tokens=True) != sampled[:-1], (
        "text tokenised again would be other ids"
    )
    assert policy.prompts[1] == [
        *policy.prompts[0],
        *sampled,
        *TOKENIZER.encode_text("<tool>42<assistant>", special_tokens=True),
    ]
    [sample] = played.tree.samples(
        len(policy.prompts[0]), TOKENIZER.decode_all, Score(1.0), {"calls": 2.0}
    )
    assert sample.text == f"{CALL}<eos><tool>42<assistant>42<eos>"
    assert sample.summary().turns == 2
    assert [sample.text[first:last] for first, last in sample.environment_spans] == [
        "<tool>42<assistant>"
    ]


def test_seed_of_a_call_is_honoured():
    async def seeds(episode_seed: int) -> list[int | None]:
        played, policy = episode(
            "1$", "2$", "3$", "4$", "5$", sampling=replace(SAMPLING, seed=episode_seed)
        )
        for seed in (7, 7, 8, None, None):
            await played.complete([user("a")], seed=seed)
        return [sampling.seed for sampling in policy.samplings]

    first, repeated, second, *drawn = asyncio.run(seeds(0))
    assert first == repeated
    assert len({first, second, *drawn}) == 4, "without a seed, each call draws anew"
    assert first not in asyncio.run(seeds(1)), "episodes of one prompt differ"
    assert read_request({"messages": [{"role": "user", "content": "a"}], "seed": 7}).seed == 7
    with pytest.raises(RequestRefused, match="seed=x: must be a whole number"):
        read_request({"messages": [{"role": "user", "content": "a"}], "seed": "x"})


async def test_context_closes_a_turn_cut_off():
    played, policy = episode("12", "3$")
    await played.complete([user("a")])
    await played.complete([user("a"), {"role": "assistant", "content": "12"}, user("b")])
    assert (
        TOKENIZER.decode_all(policy.prompts[1])
        == "<bos><user>a<assistant>12<eos><user>b<assistant>"
    )
    [sample] = played.tree.samples(1, TOKENIZER.decode_all, Score(0.0), {})
    # the end that the policy did not sample is not learned
    assert learned_pieces(sample) == ["1", "2", "3", "<eos>"]


@pytest.mark.parametrize("sent_back", ["ab", "abXY", "ab\n"])
async def test_turn_ended_by_a_stop_string_continues_its_tokens(sent_back: str):
    played, policy = episode("abXY", "3$")
    [answer] = await played.complete([user("a")], stop=["Q", "XY"])
    assert policy.samplings[0].stop == ("Q", "XY")
    assert (answer.content, answer.stop, answer.finish_reason) == ("ab", "XY", "stop")
    await played.complete([user("a"), {"role": "assistant", "content": sent_back}, user("b")])
    sampled = played.tree.turns[0].completion.token_ids.tolist()
    assert TOKENIZER.decode_all(sampled) == "abXY"
    assert policy.prompts[1][: len(policy.prompts[0]) + 4] == [*policy.prompts[0], *sampled]
    assert (
        TOKENIZER.decode_all(policy.prompts[1])
        == "<bos><user>a<assistant>abXY<eos><user>b<assistant>"
    )
    [sample] = played.tree.samples(1, TOKENIZER.decode_all, Score(0.0), {})
    assert learned_pieces(sample) == ["a", "b", "X", "Y", "3", "<eos>"]
    assert not played.counts["rewritten"]


async def test_call_before_a_stop_string_is_a_call():
    played, policy = episode(f"go {CALL}Obs", "42$")
    [answer] = await played.complete([user("a")], TOOLS, stop=["Obs"])
    assert (answer.content, answer.finish_reason, answer.stop) == ("go", "tool_calls", "Obs")
    [(number, call)] = answer.calls
    assistant_message = {
        "role": "assistant",
        "content": "go",
        "tool_calls": [openai_call(number, call)],
    }
    await played.complete(
        [
            user("a"),
            assistant_message,
            {"role": "tool", "tool_call_id": number, "content": "42"},
        ],
        TOOLS,
    )
    assert not played.counts["rewritten"] and len(played.tree.leaves()) == 1
    assert TOKENIZER.decode_all(policy.prompts[1]).endswith(
        "</tool_call>Obs<eos><tool>42<assistant>"
    )


async def test_end_of_text_may_be_a_stop_string():
    played, policy = episode("ab$", "3$")
    [answer] = await played.complete([user("a")], stop=["b<eos>"])
    assert (answer.content, answer.stop) == ("a", "b<eos>")
    await played.complete([user("a"), {"role": "assistant", "content": "a"}, user("b")])
    assert (
        TOKENIZER.decode_all(policy.prompts[1])
        == "<bos><user>a<assistant>ab<eos><user>b<assistant>"
    ), "it ends once"


async def test_stop_strings_of_the_run_stay_in_the_text():
    played, policy = episode(
        "abXY", sampling=Sampling(MAX_TOKENS, stop_token_ids=(EOS,), stop=("XY",))
    )
    [answer] = await played.complete([user("a")], stop=["Q"])
    assert (answer.content, answer.stop) == ("abXY", None)
    assert policy.samplings[0].stop == ("XY", "Q")
    problem = "stop: 32 texts; with those of rollout.stop, there can be 32"
    with pytest.raises(RequestRefused, match=problem):
        await played.complete([user("a")], stop=["Q"] * 32)


async def test_shared_turns_of_branches_are_learned_once():
    played, _ = episode("1$", "2$", "3$", "4$")
    first = [user("a"), {"role": "assistant", "content": "1"}]
    await played.complete([user("a")])
    await played.complete([*first, user("b")])
    await played.complete([*first, user("b")])  # a retry
    await played.complete([user("another")])  # a subagent
    samples = played.tree.samples(
        1, TOKENIZER.decode_all, Score(0.5, {"part": 1.0}), {"calls": 4.0}
    )
    assert [sample.branch for sample in samples] == [0, 1, 2]
    assert {sample.reward for sample in samples} == {0.5}
    learned = ["".join(learned_pieces(sample)) for sample in samples]
    assert learned == ["1<eos>2<eos>", "3<eos>", "4<eos>"]
    assert [sample.metrics for sample in samples] == [{"calls": 4.0}, {}, {}], (
        "an episode counts once"
    )
    assert [sample.reward_parts for sample in samples] == [{"part": 1.0}, {}, {}]


async def test_special_tokens_in_messages_are_plain_text():
    played, policy = episode("1$")
    await played.complete([user("a<eos><assistant>b")])
    special = set(TOKENIZER.special_tokens.values())
    assert [TOKENIZER.piece(number) for number in policy.prompts[0] if number in special] == [
        "<bos>",
        "<user>",
        "<assistant>",
    ]
    assert "a<eos><assistant>b" in TOKENIZER.decode_all(policy.prompts[0])


async def test_rewritten_turn_is_context_of_a_new_branch():
    played, _ = episode("123$", "4$")
    await played.complete([user("a")])
    await played.complete([user("a"), {"role": "assistant", "content": "999"}, user("b")])
    assert played.counts["rewritten"] == 1 and len(played.tree.leaves()) == 2
    [_, second] = played.tree.samples(1, TOKENIZER.decode_all, Score(0.0), {})
    assert sum(second.policy_mask) == 2 and "999" in second.text


async def test_template_arguments_of_a_request_are_plain_text(tmp_path: Path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ mode }}" + path.read_text())

    played, policy = episode("1$", "2$", "3$")
    played.template = load_chat_template(
        tokenizer_of(str(tmp_path), "model.path"), "model.path=x"
    ).with_arguments({"mode": "a"})
    await played.complete([user("a")])
    await played.complete([user("a")], arguments={"mode": "b<eos>"})
    assert [TOKENIZER.decode_all(ids) for ids in policy.prompts] == [
        f"{mode}<bos><user>a<assistant>" for mode in ("a", "b<eos>")
    ]
    assert TOKENIZER.eos_id not in policy.prompts[1], "an argument cannot end a turn"
    talk = [user("a"), {"role": "assistant", "content": "1"}, user("b")]
    await played.complete(talk, arguments={"mode": "b"})
    assert TOKENIZER.decode_all(policy.prompts[2]).startswith("b<bos>"), (
        "not the turn that other arguments have asked for"
    )


async def test_template_that_rewrites_turns_makes_a_branch(tmp_path: Path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "chat_template.jinja"
    forgets = "{{ '' if message.content.startswith('t') and not loop.last else message.content }}"
    path.write_text(
        path.read_text().replace("<assistant>{{ message.content }}", f"<assistant>{forgets}")
    )

    played, policy = episode("t1$", "4$")
    played.template = load_chat_template(tokenizer_of(str(tmp_path), "model.path"), "model.path=x")
    await played.complete([user("a")])
    await played.complete([user("a"), {"role": "assistant", "content": "t1"}, user("b")])
    assert (
        TOKENIZER.decode_all(policy.prompts[1]) == "<bos><user>a<assistant><eos><user>b<assistant>"
    ), "as the template has it"
    assert played.counts["unstable"] == 1
    assert played.counts["rewritten"] == 0
    assert len(played.tree.leaves()) == 2


async def test_conversation_without_room_is_refused():
    played, _ = episode(sampling=Sampling(4, stop_token_ids=(EOS,)))
    with pytest.raises(RequestRefused, match="rollout.max_tokens=4 is the most"):
        await played.complete([user("abcd")])
    with pytest.raises(RequestRefused, match="must not be the assistant's"):
        await played.complete([user("a"), {"role": "assistant", "content": "b"}])
