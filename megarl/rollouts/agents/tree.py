"""What was sampled in one episode of an agent, as a tree: each turn of the policy stands behind the turn that it goes on from.

A conversation that only grows is a single path. Retries, subagents and compacted conversations are further branches. Every leaf becomes a
sample, with the path to it as its tokens. What branches share is learned once, in the first of them, and is context in the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from megarl.generator.completions import Completion
from megarl.kept_sets import KeptSets, join
from megarl.rewards.score import Score
from megarl.types import UNANSWERED, Group, Prompt, Sample


@dataclass(frozen=True, eq=False)
class Turn:
    """Token ids are kept as they were sampled, and never made from text again."""

    parent: Turn | None
    context: list[int]  # ids between the parent's and the sampled ones, which the policy did not write
    completion: Completion

    @property
    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        found, turn = [], self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All ids up to the end of this turn."""
        return [number for turn in self.path for number in (*turn.context, *turn.completion.token_ids)]


@dataclass
class Tree:
    turns: list[Turn] = field(default_factory=list)  # in the order in which they were finished

    def add(self, parent: Turn | None, context: Sequence[int], completion: Completion) -> Turn:
        turn = Turn(parent, list(context), completion)
        self.turns.append(turn)
        return turn

    def leaves(self) -> list[Turn]:
        inner = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in inner]

    def samples(self, prompt_tokens: int, decode: Callable[[Sequence[int]], str], score: Score, metrics: dict[str, float]) -> list[Sample]:
        """A sample for each leaf, without its first `prompt_tokens` ids, which must be context. Metrics, parts of the score and failures
        belong to the first, so that they count once."""
        learned: set[int] = set()
        found = []
        for branch, leaf in enumerate(self.leaves()):
            path = leaf.path
            first = {} if branch else {"metrics": metrics, "reward_parts": score.parts, "failures": score.failures}
            found.append(_sample(path, learned, prompt_tokens, decode, reward=score.reward, branch=branch, **first))
            learned |= set(map(id, path))
        return found


class Played(NamedTuple):
    """An episode that has ended."""

    tree: Tree
    score: Score
    metrics: dict[str, float]


def group_of(prompt: Prompt, played: Sequence[Played], decode: Callable[[Sequence[int]], str]) -> Group:
    """The samples of all episodes, behind what they all begin with. An episode that has sampled nothing has an empty one."""
    trees = [tree for tree, _, _ in played if tree.turns]
    prefix, samples = shared_prefix(trees) if trees else prompt.token_ids, []
    for tree, score, metrics in played:
        nothing = Sample(array("i"), array("f"), array("i"), "", score.reward, UNANSWERED, metrics=metrics, failures=score.failures)
        samples += tree.samples(len(prefix), decode, score, metrics) or [nothing]
    return Group(replace(prompt, token_ids=prefix), samples)


def shared_prefix(trees: Sequence[Tree]) -> list[int]:
    """The ids that all branches of all trees begin with, and that none of them has sampled."""
    contexts = [turn.context for tree in trees for turn in tree.turns if turn.parent is None]
    shortest, longest = min(contexts), max(contexts)  # what these two share, all share
    same = next((place for place, (one, other) in enumerate(zip(shortest, longest)) if one != other), min(len(shortest), len(longest)))
    return shortest[:same]


def _sample(path: list[Turn], learned: set[int], prompt_tokens: int, decode: Callable[[Sequence[int]], str], **more: object) -> Sample:
    ids, logprobs, versions, mask = array("i"), array("f"), array("i"), array("b")
    kept: KeptSets | None = None
    routing, text, spans = b"", "", []
    for turn in path:
        mine = id(turn) not in learned
        context, drawn = turn.context[prompt_tokens:] if turn.parent is None else turn.context, turn.completion
        for numbers, own in ((array("i", context), False), (drawn.token_ids, mine)):
            kept = join(kept, len(ids), drawn.kept if own else None, len(numbers))
            ids += numbers
            logprobs += drawn.logprobs if own else array("f", bytes(4 * len(numbers)))
            versions += drawn.versions if numbers is drawn.token_ids else array("i", bytes(4 * len(numbers)))
            mask += array("b", [own]) * len(numbers)
            said = decode(numbers)
            if not own and said:
                spans.append((len(text), len(text) + len(said)))
            text += said
        # Each answer of an engine covers all positions so far. Earlier turns keep the experts that they were sampled with.
        routing += drawn.routing[len(routing) :]
    finish_reason = path[-1].completion.finish_reason
    masks = {"policy_mask": array("b") if all(mask) else mask, "environment_spans": spans}
    return Sample(ids, logprobs, versions, text, finish_reason=finish_reason, routing=routing, kept=kept, **masks, **more)  # pyright: ignore
