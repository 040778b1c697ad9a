"""One episode of an agent: answers its calls, and keeps the sampled turns as a tree.

A call brings the whole conversation as text. This module finds the longest beginning that ends with
a message this episode has returned. For that beginning it uses the token ids that were sampled; the
chat template renders only the rest, which is then tokenised. So an agent that sends its
conversation back with more at the end continues it token by token.

Threads read, render and tokenise calls, one call of an episode after the other. So an agent that
sends much delays only itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import string
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from megarl.base.kept_sets import KeptSets, join_kept_sets
from megarl.base.rollout_types import UNANSWERED, Group, Prompt, Sample, TurnReward
from megarl.data.chat import ChatTemplate, Message, StandIns, name_of
from megarl.data.tokenizer import MOST_CHARS_PER_TOKEN, Tokenizer
from megarl.generator.completions import MOST_STRINGS, Completion, Sampling, cut
from megarl.generator.seeds import Seeds, seed_of
from megarl.generator.tool_parsers import Parser, ToolCall, Tools
from megarl.rewards.score import Score
from megarl.rollouts.environments.base import Generate


@dataclass(frozen=True, eq=False)
class Turn:
    """One sampled turn.

    Its token ids are kept as they were sampled, never derived from text again.
    """

    parent: Turn | None
    # ids after the parent's and before the sampled ones, which the policy did not write
    context: list[int]
    completion: Completion

    @property
    def path(self) -> list[Turn]:
        """The turns from the first to this one."""
        turns = []
        turn = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All ids up to the end of this turn."""
        ids: list[int] = []
        for turn in self.path:
            ids += turn.context
            ids += turn.completion.token_ids
        return ids


@dataclass
class Tree:
    """The sampled turns of one episode: the parent of a turn is the turn that it continues.

    A conversation that only grows is a single path. Retries, subagents and compacted conversations
    add branches. Every leaf becomes a sample, whose tokens are the path to it. Tokens that branches
    share are learned once, in the first of them, and are context in the others.
    """

    turns: list[Turn] = field(default_factory=list)  # in the order in which they finished
    rewards: dict[Turn, float] = field(default_factory=dict)  # of turns that have one of their own
    # what last turns earn besides; None: the episode's reward
    final_reward: float | None = None

    def add(self, parent: Turn | None, context: Sequence[int], completion: Completion) -> Turn:
        if parent is not None and parent not in self.turns:
            self.turns.append(parent)  # it was dropped, but has been read after all
        turn = Turn(parent, list(context), completion)
        self.turns.append(turn)
        return turn

    def drop(self, turn: Turn) -> None:
        """Removes a turn that nobody has read, unless another continues it."""
        if turn in self.leaves():
            self.turns.remove(turn)

    def leaves(self) -> list[Turn]:
        inner = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in inner]

    def samples(
        self,
        prompt_tokens: int,
        decode: Callable[[Sequence[int]], str],
        score: Score,
        metrics: dict[str, float],
    ) -> list[Sample]:
        """A sample for each leaf, without its first `prompt_tokens` ids, which must be context.

        Only the first sample has the metrics, the parts of the score and the failures, so that they
        count once.
        """
        learned: set[int] = set()
        samples = []
        for branch, leaf in enumerate(self.leaves()):
            path = leaf.path
            first: dict[str, Any] = {}
            if branch == 0:
                first = {
                    "metrics": metrics,
                    "reward_parts": score.parts,
                    "failures": score.failures,
                }
            fields = {"reward": score.reward, "branch": branch, **first}
            final_reward = score.reward if self.final_reward is None else self.final_reward
            rewards = [self.rewards.get(turn, 0.0) for turn in path]
            rewards[-1] += final_reward
            fields["turn_rewards"] = rewards
            samples.append(_sample(path, learned, prompt_tokens, decode, fields))
            learned |= set(map(id, path))
        return samples


class EpisodeResult(NamedTuple):
    """An episode that has ended."""

    tree: Tree
    score: Score
    metrics: dict[str, float]


def group_of(
    prompt: Prompt, played: Sequence[EpisodeResult], decode: Callable[[Sequence[int]], str]
) -> Group:
    """The group of all episodes.

    Its prompt is what all their samples begin with. An episode that sampled nothing has an empty
    sample.
    """
    trees = [tree for tree, _, _ in played if tree.turns]
    prefix = shared_prefix(trees) if trees else prompt.token_ids
    samples = []
    for tree, score, metrics in played:
        if tree.turns:
            samples += tree.samples(len(prefix), decode, score, metrics)
            continue
        nothing = Sample(
            array("i"),
            array("f"),
            array("i"),
            "",
            score.reward,
            UNANSWERED,
            metrics=metrics,
            failures=score.failures,
        )
        samples.append(nothing)
    return Group(replace(prompt, token_ids=prefix), samples)


def shared_prefix(trees: Sequence[Tree]) -> list[int]:
    """The ids that all branches of all trees begin with and that were not sampled."""
    contexts = []
    for tree in trees:
        contexts += [turn.context for turn in tree.turns if turn.parent is None]
    shortest = min(contexts)
    longest = max(contexts)  # the common prefix of these two is that of all
    length = 0
    for number, number_of_longest in zip(shortest, longest):
        if number != number_of_longest:
            break
        length += 1
    return shortest[:length]


def _sample(
    path: list[Turn],
    learned: set[int],
    prompt_tokens: int,
    decode: Callable[[Sequence[int]], str],
    fields: dict[str, Any],
) -> Sample:
    ids = array("i")
    logprobs = array("f")
    versions = array("i")
    mask = array("b")
    kept_sets: KeptSets | None = None
    routing = b""
    text = ""
    spans = []
    turn_ends = []
    for turn in path:
        is_new = id(turn) not in learned
        context = turn.context[prompt_tokens:] if turn.parent is None else turn.context
        completion = turn.completion
        for numbers, by_policy in ((array("i", context), False), (completion.token_ids, is_new)):
            kept = completion.kept if by_policy else None
            kept_sets = join_kept_sets(kept_sets, len(ids), kept, len(numbers))
            ids += numbers
            zeros = bytes(4 * len(numbers))
            logprobs += completion.logprobs if by_policy else array("f", zeros)
            is_sampled = numbers is completion.token_ids
            versions += completion.versions if is_sampled else array("i", zeros)
            mask += array("b", [by_policy]) * len(numbers)
            piece_text = decode(numbers)
            if not by_policy and piece_text:
                spans.append((len(text), len(text) + len(piece_text)))
            text += piece_text
        # Each completion has the experts of all positions so far. Tokens of earlier turns keep the
        # experts they were sampled with.
        routing += completion.routing[len(routing) :]
        turn_ends.append(len(ids))
    finish_reason = path[-1].completion.finish_reason
    rewards = fields.pop("turn_rewards")
    if len(path) > 1 or rewards[-1] != fields["reward"]:
        fields["turn_rewards"] = list(map(TurnReward, turn_ends, rewards))
    return Sample(
        ids,
        logprobs,
        versions,
        text,
        finish_reason=finish_reason,
        routing=routing,
        kept=kept_sets,
        policy_mask=array("b") if all(mask) else mask,
        environment_spans=spans,
        **fields,
    )


NO_ARGUMENTS: Mapping[str, Any] = {}
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates refuse ids of any other length
_COUNTED_A_CALL = 4
TOO_LARGE = "request_too_large"
TOO_LONG = "context_length_exceeded"
_Result = TypeVar("_Result")

# what reading a malformed call raises
MISFORMED = (LookupError, TypeError, AttributeError, ValueError, RecursionError)


class RequestRefused(Exception):
    """The reason why a call is not answered. The agent gets it as an error."""

    def __init__(self, message: str, kind: str = "invalid_request_error", status: int = 400):
        super().__init__(message)
        self.kind = kind
        self.status = status


class Answer(NamedTuple):
    """A turn as an agent receives it."""

    content: str
    calls: list[tuple[str, ToolCall]]  # with their ids
    finish_reason: str  # "stop" | "length" | "tool_calls"
    prompt_tokens: int
    completion: Completion
    # the call's stop string that ended the turn; the content ends before it
    stop: str | None = None
    turn: Turn | None = None  # its place in the tree


class StoredConversation(NamedTuple):
    """A conversation up to an answer. A call may continue it without sending it again."""

    messages: list[Message]
    # in the messages of its last call; the rest is shared with the conversation that it continues
    letters: int


class _CallPosition(NamedTuple):
    """The place of a call in the tree."""

    parent: Turn | None  # the turn that the call continues
    context: list[int]  # the ids between that turn and the new one
    conversation: bytes  # the name of the conversation

    @property
    def prompt_ids(self) -> list[int]:
        if self.parent is None:
            return list(self.context)
        return self.parent.token_ids + self.context


class _ParsedText(NamedTuple):
    """The parsed text of a completion."""

    content: str
    calls: list[ToolCall]
    stop: str | None  # the stop string that has ended the turn


@dataclass
class Episode:
    """One episode.

    `sampling` is the run's: an agent cannot ask for another temperature, since log-probs would then
    not be those of the policy that is trained. `sampling.max_tokens` bounds every branch as a
    whole, including prompts and tools.
    """

    generate: Generate
    tokenizer: Tokenizer
    template: ChatTemplate
    parser: Parser
    sampling: Sampling
    # most completions, including abandoned ones; also most calls that are refused or abandoned
    max_calls: int = 256
    tree: Tree = field(default_factory=Tree)
    # number of calls, and how many of them were rewritten, unstable, out_of_room
    counts: Counter[str] = field(default_factory=Counter)
    last_refusal: str = ""
    # name of an answer -> the conversation up to it, oldest first
    stored_conversations: dict[str, StoredConversation] = field(default_factory=dict)
    # id of a sampled call -> id of the first call of its turn
    first_calls: dict[str, str] = field(default_factory=dict)
    refused: int = 0  # refused or abandoned calls
    _contents: dict[Turn, str] = field(default_factory=dict)  # content of each turn
    _started: int = 0  # completions that have begun
    _counted: int = 0  # calls that counted tokens
    # name of the conversation up to a turn's message -> the turn
    _known_turns: dict[bytes, Turn] = field(default_factory=dict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _seeds: Seeds | None = None

    def __post_init__(self) -> None:
        if self.sampling.seed is not None:
            self._seeds = Seeds(self.sampling.seed)

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        max_tokens: int | None = None,
        n: int = 1,
        stop: Sequence[str] = (),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        seed: int | None = None,
    ) -> list[Answer]:
        """Samples n next turns.

        Messages and tools are in OpenAI's form; contents are texts. A turn also ends at any of the
        strings in `stop`. `arguments`: variables of the chat template, beside those of
        model.chat_template. In one episode the same messages and `seed` give the same turns;
        without `seed` each call draws others. Raises: RequestRefused, EngineError, TimeoutError.

        A cancelled call adds nothing to the tree, since nobody has seen its answer.
        """
        position = await self._prepare_call(messages, tools, n, stop, arguments)
        ids = position.prompt_ids
        room = self.sampling.max_tokens - len(ids)
        if room < 1:
            raise self._too_long(f"{len(ids)} tokens")
        self._started += n
        sampling = replace(
            self.sampling,
            max_tokens=min(room, max_tokens or room),
            stop=(*self.sampling.stop, *stop),
            seed=self._seed(ids, seed),
        )
        completions = await self.generate(ids, sampling, n)
        self.counts["calls"] += 1
        parsed_texts = [await self._parse(completion, tools, stop) for completion in completions]
        answers = []
        for completion, parsed in zip(completions, parsed_texts, strict=True):
            answers.append(self._answer(position, completion, parsed))
        return answers

    def _seed(self, ids: Sequence[int], call_seed: int | None) -> int | None:
        """The seed of a call that asks for the seed `call_seed`.

        Episodes differ in it all the same: a program that always sends one seed would otherwise
        play the same episode n times.
        """
        if call_seed is not None:
            return seed_of("call", self.sampling.seed or 0, call_seed)
        return None if self._seeds is None else self._seeds.next(ids)

    async def aside(self, function: Callable[[], _Result]) -> _Result:
        """Runs `function` in a thread and returns its result.

        Calls run one after the other, even if the caller of one has gone.
        """
        async with self._reading:
            running = asyncio.ensure_future(asyncio.to_thread(function))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.gather(running, return_exceptions=True)
                raise

    def refuse(self, refusal: RequestRefused) -> None:
        """Counts a call that was not answered."""
        self.refused += 1
        self.last_refusal = str(refusal)
        self.counts["out_of_room"] += refusal.kind in (TOO_LARGE, TOO_LONG)

    def unread(self, turns: Sequence[Turn]) -> None:
        """Drops answers that were sent, but whose connection broke before the agent had read them.

        They count as calls given up.
        """
        for turn in turns:
            self.tree.drop(turn)
        self.refuse(RequestRefused("its answer was not read"))

    @property
    def last_content(self) -> str:
        """The content of the turn that finished last."""
        return self._contents[self.tree.turns[-1]] if self.tree.turns else ""

    @property
    def exhausted(self) -> str:
        """The reason why no more calls are accepted; empty as long as they are."""
        if self.refused <= self.max_calls:
            return ""
        limit = (
            f"more than rollout.args.max_calls={self.max_calls} of its calls were refused or "
            "given up"
        )
        return f"{limit}; the last one: {self.last_refusal}"

    def metrics(self) -> dict[str, float]:
        names = ("calls", "rewritten", "unstable", "out_of_room")
        metrics = {name: float(self.counts[name]) for name in names}
        metrics["branches"] = float(len(self.tree.leaves()))
        return metrics

    def unanswered_reason(self, player_failure: str) -> str:
        """The message for an episode that has sampled nothing.

        `player_failure`: what went wrong with its player, or empty.
        """
        refused = f"its last call was refused: {self.last_refusal}; " if self.last_refusal else ""
        return f"no call of it was answered: {refused}{player_failure or 'it ended well'}"

    async def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> int:
        """The number of tokens in the prompt of these messages, all tokenised from text.

        Raises RequestRefused.
        """
        self._counted += 1
        if self._counted > _COUNTED_A_CALL * self.max_calls:
            raise RequestRefused(
                f"tokens are counted {_COUNTED_A_CALL} times for each of "
                f"rollout.args.max_calls={self.max_calls}",
                "max_calls",
            )
        try:
            return len(await self.aside(lambda: self._place(messages, tools, arguments, None)[1]))
        except MISFORMED as error:
            raise RequestRefused(f"the conversation cannot be rendered: {error}"[:500]) from error

    def logprobs(self, answer: Answer) -> list[tuple[str, float]]:
        """The text and log-prob of each sampled token of an answer, without end-of-text."""
        ids = answer.completion.token_ids
        values = answer.completion.logprobs
        pieces = []
        for number, value in zip(ids, values):
            if number not in self.tokenizer.eos_ids:
                pieces.append((self.tokenizer.piece(number), value))
        return pieces

    async def _prepare_call(
        self,
        messages: Sequence[Message],
        tools: Tools,
        n: int,
        stop: Sequence[str],
        arguments: Mapping[str, Any],
    ) -> _CallPosition:
        """Raises RequestRefused."""
        if not messages or messages[-1]["role"] == "assistant":
            raise RequestRefused(
                "the last message must not be the assistant's: the policy does not continue a "
                "turn that it has not sampled"
            )
        if self._started + n > self.max_calls:
            raise self._no_more_calls()
        if len(stop) + len(self.sampling.stop) > MOST_STRINGS:
            raise RequestRefused(
                f"stop: {len(stop)} texts; with those of rollout.stop, there can be {MOST_STRINGS}"
            )

        def place() -> _CallPosition:
            conversations = _conversations(messages, tools, arguments)
            parent, context = self._place(messages, tools, arguments, conversations)
            return _CallPosition(parent, context, conversations[-1])

        try:
            # if it cannot read the tools, raises now and not after the policy has answered
            await self.parser("", tools)
            position = await self.aside(place)
        except MISFORMED as error:
            raise RequestRefused(f"the conversation cannot be rendered: {error}"[:500]) from error
        if self._started + n > self.max_calls:  # other calls may have begun meanwhile
            raise self._no_more_calls()
        return position

    def _place(
        self,
        messages: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any],
        conversations: Sequence[bytes] | None,
    ) -> tuple[Turn | None, list[int]]:
        """The turn that the messages continue, and the ids between it and the new turn.

        Without `conversations` (the names of the conversations up to each message) the turn is
        None. Raises ValueError if the template refuses the messages, and RequestRefused.
        """
        if len(messages) > self.sampling.max_tokens:
            raise self._too_long(f"{len(messages)} messages")
        stand_ins = StandIns([*self.template.special_tokens, *self.template.ends])
        template = self.template.with_arguments(stand_ins.hide(dict(arguments)))
        shown = [stand_ins.hide(_as_template_wants(message)) for message in messages]
        listed = list(tools) or None
        rendered = template.render(shown, listed)
        if len(rendered) > MOST_CHARS_PER_TOKEN * self.sampling.max_tokens:
            raise self._too_long(f"{len(rendered)} characters")
        for name in map(name_of, tools):
            if name not in rendered and json.dumps(name)[1:-1] not in rendered:
                raise RequestRefused(
                    f"tools: the model's chat template leaves out the tool {str(name)[:100]!r}, "
                    "so the policy would not see it"
                )
        if conversations is None:
            return None, stand_ins.encode(rendered, self.tokenizer)
        answer_places = []
        for place, message in enumerate(messages, start=1):
            if message["role"] == "assistant":
                answer_places.append(place)
        if answer_places and conversations[answer_places[-1]] not in self._known_turns:
            self.counts["rewritten"] += 1
        for place in reversed(answer_places):
            turn = self._known_turns.get(conversations[place])
            if turn is None:
                continue
            before = template.render(shown[:place], listed, answered=True)
            end = 0
            for token in template.ends:
                index = before.rfind(token)
                if index >= 0:
                    end = max(end, index + len(token))
            if end and not before[end:].strip() and rendered.startswith(before):
                begin = end
                if turn.completion.token_ids[-1] not in self.tokenizer.eos_ids:
                    begin = max(map(before.rfind, template.ends))
                return turn, stand_ins.encode(rendered[begin:], self.tokenizer)
            self.counts["unstable"] += 1
        return None, stand_ins.encode(rendered, self.tokenizer)

    def _no_more_calls(self) -> RequestRefused:
        return RequestRefused(
            f"rollout.args.max_calls={self.max_calls} is the most that an episode may sample",
            "max_calls",
        )

    def _too_long(self, length: str) -> RequestRefused:
        limit = (
            f"rollout.max_tokens={self.sampling.max_tokens} is the most that a conversation "
            "may have"
        )
        return RequestRefused(
            f"the maximum context length is exceeded: {length}, and {limit}", TOO_LONG
        )

    async def _parse(
        self, completion: Completion, tools: Tools, stops: Sequence[str]
    ) -> _ParsedText:
        ids = completion.token_ids.tolist()
        text, stop = cut(self.tokenizer.decode_all(ids), stops)
        if stop is None and ids[-1] in self.tokenizer.eos_ids:
            text = self.tokenizer.decode_all(ids[:-1])
        try:
            content, calls = await self.parser(text, tools) if tools else (text, [])
        except MISFORMED:  # the tools are valid, so the text is malformed
            content = text
            calls = []
        return _ParsedText(content, calls, stop)

    def _answer(
        self, position: _CallPosition, completion: Completion, parsed: _ParsedText
    ) -> Answer:
        turn = self.tree.add(position.parent, position.context, completion)
        content, calls, stop = parsed
        named = []
        for call in calls:
            letters = [secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)]
            named.append(("".join(letters), call))
        finish_reason = completion.finish_reason
        if calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        self.first_calls.update((number, named[0][0]) for number, _ in named)
        message = {"role": "assistant", "tool_calls": [openai_call(*call) for call in named]}
        for form in (content, content + (stop or "")):  # some agents put the stop string back
            self._known_turns[_next(position.conversation, {**message, "content": form})] = turn
        self._contents[turn] = content
        return Answer(
            content, named, finish_reason, len(position.prompt_ids), completion, stop, turn
        )


def openai_call(number: str, call: ToolCall) -> dict[str, Any]:
    return {
        "id": number,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _conversations(
    messages: Sequence[Message], tools: Tools, arguments: Mapping[str, Any]
) -> list[bytes]:
    """[len(messages) + 1] a name for the conversation up to each message."""
    settings = json.dumps([list(tools), dict(arguments)], sort_keys=True)
    return list(accumulate(messages, _next, initial=hashlib.sha256(settings.encode()).digest()))


def _next(conversation: bytes, message: Message) -> bytes:
    """The name after one more message.

    It ignores what agents may change without changing the meaning: outer white space, other fields.
    """
    calls = [
        (call.get("id"), call["function"]["name"], _json(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    fields = [
        message["role"],
        (message.get("content") or "").strip(),
        calls,
        message.get("tool_call_id") or message.get("name"),
    ]
    return hashlib.sha256(conversation + json.dumps(fields, sort_keys=True).encode()).digest()


def _json(arguments: Any) -> Any:
    """The value of a call's arguments, which are JSON text in OpenAI's form; unchanged if they are
    not JSON.
    """
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_template_wants(message: Message) -> Message:
    """Converts a call's arguments to an object, as most templates take them.

    For the others data/chat.py converts them to JSON.
    """
    if not message.get("tool_calls"):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _json(function["arguments"])
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
