"""Typed requests to SGLang's `/generate`, and its answers."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from megarl.base.kept_sets import MOST_KEPT, KeptSets
from megarl.base.rollout_types import Typed, Version, impossible_logprobs, typed, view
from megarl.base.teacher_scores import TeacherScores
from megarl.generator.seeds import seed_of
from megarl.models.routing import RoutingFormat

POLICY = "policy"  # name of the adapter that engines serve
ABORT = "abort"  # finish reason of an aborted request


class EngineError(RuntimeError):
    """The engine answered, but not with the expected result."""


class Sampling(msgspec.Struct, frozen=True):
    """How to draw a completion. temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    # -1: off. SGLang needs a bound even with top_p or min_p alone: it then gets MOST_KEPT
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # requires that the engine has a tokenizer
    min_p: float = 0.0  # 0: off
    # of the request; sample i of several gets a seed made from it and i. None: the engine draws one
    seed: int | None = None

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0)

    @property
    def kept_limit(self) -> int:
        return self.top_k if self.top_k > 0 else MOST_KEPT

    def of_sample(self, index: int) -> Sampling:
        """The sampling of one of several samples of a request."""
        return self if self.seed is None else replace(self, seed=seed_of(self.seed, index))

    def parameters(self) -> dict[str, Any]:
        """The parameters under SGLang's names."""
        parameters: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.kept_limit if self.truncated else self.top_k,
            "min_p": self.min_p,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
        }
        if self.stop:
            parameters["stop"] = list(self.stop)
        if self.seed is not None:
            parameters["sampling_seed"] = self.seed
        return parameters


class Completion(Typed, frozen=True):
    """One response, with the log-probs and versions of the policy that produced it, in arrays or
    lists.
    """

    token_ids: array[int]  # [T] int32
    # [T] float32, under the distribution sampled from: after temperature, top-k, top-p and min-p
    logprobs: array[float]
    versions: array[int]  # [T] int32, weight version that produced each token
    finish_reason: str  # "stop" | "length"; in a single answer of an engine also "abort"
    # experts (models/routing.py) at all positions of input and tokens but the last; empty if not
    # requested
    routing: bytes = b""
    # the set that each token was drawn from; None if not requested, or if it is the whole
    # vocabulary
    kept: KeptSets | None = None
    # drafted tokens, accepted ones, and verifying passes, in one answer of an engine
    drafts: tuple[int, int, int] = (0, 0, 0)
    # input tokens, and those of them whose keys and values the engine had, in one answer
    prefill: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._convert(token_ids="i", logprobs="f", versions="i")


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    message: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_versions: list[_VersionSpan] = []
    # In place of a list that was already read into an array stands the number of the list.
    output_token_logprobs: list[tuple[float, int, Any]] | int = []
    output_token_sampling_logprobs: list[float] | int = []
    output_token_sampling_mask: list[list[int]] | int = []
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    input_top_logprobs_val_flat_b64: bytes = b""
    input_top_logprobs_idx_flat_b64: bytes = b""
    routed_experts: bytes = b""  # these three are base64 in JSON
    spec_num_proposed_drafts: int = 0
    spec_num_correct_drafts: int = 0
    spec_verify_ct: int = 0

    @property
    def drafts(self) -> tuple[int, int, int]:
        return self.spec_num_proposed_drafts, self.spec_num_correct_drafts, self.spec_verify_ct

    @property
    def prefill(self) -> tuple[int, int]:
        return self.prompt_tokens, self.cached_tokens


class _Answer(msgspec.Struct):
    meta_info: _Meta


# Inside a JSON string, quotation marks are escaped. So every match is a key, whatever text a model
# wrote.
_LIST = re.compile(rb'"output_token_(logprobs|sampling_logprobs|sampling_mask)":(?=\[)')
# least bytes of an entry; for a mask, of a token id
_LEAST_BYTES = {b"logprobs": 10, b"sampling_logprobs": 2, b"sampling_mask": 2}
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_answers = msgspec.json.Decoder(list[_Answer]).decode


def load_parser() -> ModuleType:
    """Imports the parser of number lists.

    The first import on a machine compiles it, for some seconds.
    """
    from megarl.kernels import json_numbers

    return json_numbers


class _NumberLists:
    """The number lists of one answer, read into arrays, and `text`: the answer without them."""

    def __init__(self, answer: bytes):
        parser = load_parser()
        text = np.frombuffer(answer, np.uint8)
        parts = []
        copied_until = 0
        self._read: list[tuple[array[int], array[Any]]] = []
        place = answer.find(b'"output_token_')
        while place >= 0:
            key = _LIST.match(answer, place)
            if key is None:
                place = answer.find(b'"output_token_', place + 1)
                continue
            start = key.end()
            next_string = answer.find(b'"', start)  # a list contains no strings
            if next_string < 0:
                next_string = len(answer)
            room = (next_string - start) // _LEAST_BYTES[key[1]] + 1
            ids = np.empty(room, np.int32)
            values = np.empty(room, np.float32)
            if key[1] == b"logprobs":
                count, end = parser.read_token_logprobs(text, start, values, ids)
                numbers = typed(ids[:count], "i"), typed(values[:count], "f")
            elif key[1] == b"sampling_logprobs":
                count, end = parser.read_floats(text, start, values)
                numbers = array("i"), typed(values[:count], "f")
            else:
                sizes = values.view(np.int32)
                count, end = parser.read_id_lists(text, start, ids, sizes)
                numbers = (
                    typed(ids[: sizes[: max(count, 0)].sum()], "i"),
                    typed(sizes[:count], "i"),
                )
            if count >= 0:
                parts += [answer[copied_until:start], b"%d" % len(self._read)]
                self._read.append(numbers)
                copied_until = end
                place = end - 1
            place = answer.find(b'"output_token_', place + 1)
        self.text = b"".join([*parts, answer[copied_until:]])
        self._returned: set[int] = set()  # numbers of the lists that were taken

    def take(self, number: int) -> tuple[array[int], array[Any]]:
        """Token ids (none in a list of log-probs alone), and log-probs.

        For a mask: token ids, and how many each token has. Raises: LookupError if the engine itself
        wrote a number instead of a list.
        """
        if number in self._returned or not 0 <= number < len(self._read):
            raise LookupError(f"{number} in the place of a list")
        self._returned.add(number)
        return self._read[number]


def _adapter_fields(adapter: bool) -> dict[str, Any]:
    return {"lora_path": POLICY} if adapter else {}


def generation(
    inputs: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    cache_key: Version | str | None,
    routing: RoutingFormat | None = None,
    adapter: bool = False,
) -> dict[str, Any]:
    """The request for one completion of each input.

    With `routing` it asks for chosen experts, with `adapter` it uses the policy's adapter.
    `cache_key`: see `EngineClient.complete`.
    """
    body: dict[str, Any] = {
        **_adapter_fields(adapter),
        "input_ids": [list(token_ids) for token_ids in inputs],
        "sampling_params": [sampling.parameters() for sampling in samplings],
        "return_logprob": True,
    }
    if cache_key is not None:
        body["extra_key"] = str(cache_key)
    if samplings[0].truncated:
        body["return_sampling_mask"] = True
    if routing is not None:
        body["return_routed_experts"] = True
    return body


def completions_of(
    engine: str,
    answer: bytes,
    samplings: Sequence[Sampling],
    routing: RoutingFormat | None = None,
    vocab_size: int | None = None,
) -> list[Completion]:
    """Decodes the answer to `generation`.

    With `vocab_size`, completions have the sets that tokens were drawn from, if these are not the
    whole vocabulary. Raises EngineError that names `engine`.
    """
    try:
        lists = _NumberLists(answer)
        answers = [decoded.meta_info for decoded in _decode_answers(lists.text)]
        numbers = [_numbers(meta, lists) for meta in answers]
    except (msgspec.DecodeError, LookupError, OverflowError, ValueError) as error:
        # JSON has no NaN: SGLang writes null
        raise EngineError(
            f"engine {engine} gave an unreadable answer: {error} (a log-prob of null is NaN or "
            "infinite)"
        ) from error
    if len(answers) != len(samplings):
        raise EngineError(
            f"engine {engine} gave {len(answers)} answers to {len(samplings)} requests"
        )
    return [
        _completion(engine, meta, sampled, sampling, routing, vocab_size)
        for meta, sampled, sampling in zip(answers, numbers, samplings, strict=True)
    ]


def scoring(sequences: list[list[int]] | list[int], adapter: bool = False) -> dict[str, Any]:
    """The request for the log-probs of given tokens. `adapter`: see `generation`."""
    return {
        **_adapter_fields(adapter),
        "input_ids": sequences,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def judging(prompt: Sequence[int], response: Sequence[int], top_k: int) -> dict[str, Any]:
    """The request for a teacher's log-probs of a response: those of its tokens, or with `top_k` the
    likeliest tokens at each place and their log-probs. SGLang computes them at temperature 1,
    whatever a request asks for.
    """
    body = scoring([*prompt, *response]) | {"logprob_start_len": max(0, len(prompt) - 1)}
    if top_k:
        body |= {
            "top_logprobs_num": top_k,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    return body


def judgement_of(engine: str, answer: bytes, response: Sequence[int], top_k: int) -> TeacherScores:
    """Decodes the answer to `judging`. Raises EngineError that names `engine`."""
    try:
        meta = _decode_answer(answer).meta_info
        tokens = len(response)
        triples = meta.input_token_logprobs[-tokens:]
        # SGLang writes 0 instead of the vocabulary's last id, for models with images. The log-prob
        # is right.
        if len(triples) != tokens or any(
            token_id not in (0, sent_id) for (_, token_id, _), sent_id in zip(triples, response)
        ):
            raise EngineError(
                f"engine {engine} gave log-probs of {len(triples)} other tokens than the {tokens} "
                "it was sent"
            )
        if not top_k:
            return TeacherScores(
                np.zeros((tokens, 0), np.int32),
                np.array([[_finite(value)] for value, _, _ in triples], np.float32),
            )
        ids = np.frombuffer(meta.input_top_logprobs_idx_flat_b64, "<i4").reshape(-1, top_k)
        logprobs = np.frombuffer(meta.input_top_logprobs_val_flat_b64, "<f4").reshape(-1, top_k)
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineError(f"engine {engine} gave an unreadable answer: {error}") from error
    if not len(ids) == len(logprobs) >= tokens or impossible_logprobs(logprobs[-tokens:]).any():
        raise EngineError(
            f"engine {engine} gave {len(ids)} x {top_k} log-probs for {tokens} tokens, or some "
            "that no token can have"
        )
    return TeacherScores(ids[-tokens:], logprobs[-tokens:])


def scores_of(answer: bytes) -> list[list[float]]:
    """Decodes the answer to `scoring`: the log-probs of all tokens of each sequence except its
    first. Raises EngineError.
    """
    return [
        [_finite(value) for value, _, _ in sequence.meta_info.input_token_logprobs[1:]]
        for sequence in _decode_answers(answer)
    ]


class _Embedding(msgspec.Struct):
    embedding: list[float | None]


def score_in(engine: str, answer: bytes) -> float:
    """Decodes a reward model's answer. Raises EngineError that names `engine`."""
    try:
        [score] = msgspec.json.decode(answer, type=_Embedding).embedding
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineError(f"engine {engine} gave an unreadable score: {error}") from error
    if score is None:  # JSON has no NaN: SGLang writes null
        raise EngineError(f"engine {engine} gave the score null: NaN or infinite")
    return score


def _finite(logprob: float | None) -> float:
    if logprob is None:  # JSON has no NaN: SGLang writes null
        raise EngineError("an engine scored a token with a log-prob of null: NaN or infinite")
    return logprob


class _SampledNumbers(NamedTuple):
    tokens: array[int]
    logprobs: array[float]
    sampling_logprobs: array[float]  # log-probs; empty if the distribution was not truncated
    mask: tuple[array[int], array[int]]  # token ids of all sets, and the size of each token's set
    versions: array[int]  # version of the weights that sampled each token


def _numbers(meta: _Meta, lists: _NumberLists) -> _SampledNumbers:
    triples = meta.output_token_logprobs
    floats = meta.output_token_sampling_logprobs
    masks = meta.output_token_sampling_mask
    if isinstance(triples, int):
        tokens, logprobs = lists.take(triples)
    else:
        tokens = typed([token for _, token, _ in triples], "i")
        logprobs = typed([value for value, _, _ in triples], "f")
    if isinstance(masks, int):
        mask_lists = lists.take(masks)
    else:
        mask_lists = (
            typed([token for mask in masks for token in mask], "i"),
            typed([len(mask) for mask in masks], "i"),
        )
    versions = array("i")
    for span in meta.weight_versions or [_VersionSpan(meta.weight_version, 0, len(tokens))]:
        versions += array("i", [int(span.version)]) * (span.end - span.start)
    return _SampledNumbers(
        tokens,
        logprobs,
        lists.take(floats)[1] if isinstance(floats, int) else typed(floats, "f"),
        mask_lists,
        versions,
    )


def _completion(
    engine: str,
    meta: _Meta,
    numbers: _SampledNumbers,
    sampling: Sampling,
    routing: RoutingFormat | None,
    vocab_size: int | None,
) -> Completion:
    if meta.finish_reason.type not in ("stop", "length", ABORT):
        raise EngineError(
            f"engine {engine} ended a request by {meta.finish_reason.type}: "
            f"{meta.finish_reason.message}"
        )
    tokens = numbers.tokens
    versions = numbers.versions
    logprobs = numbers.sampling_logprobs if sampling.truncated else numbers.logprobs
    vocab_size = vocab_size if sampling.truncated else None
    impossible = view(logprobs)[impossible_logprobs(view(logprobs))]
    if len(impossible):
        raise EngineError(f"engine {engine} answered with the log-prob {impossible[0]}")
    experts = _routing(engine, meta, routing) if routing is not None else b""
    if meta.finish_reason.type == ABORT:
        # The engine has not checked whether the last token ends the response, so that token is
        # sampled again. So are tokens whose experts the engine no longer has, since the request was
        # aborted while it waited for memory.
        counts = [len(tokens), len(logprobs), len(versions)]
        if vocab_size:
            counts.append(len(numbers.mask[1]))
        complete = max(0, min(counts) - 1)
        if routing is not None:
            complete = min(complete, max(0, routing.positions(experts) + 1 - meta.prompt_tokens))
            positions = meta.prompt_tokens + complete - 1 if complete else 0
            experts = experts[: positions * routing.position_bytes]
        sets = _kept(engine, numbers, complete, vocab_size)
        return Completion(
            tokens[:complete],
            logprobs[:complete],
            versions[:complete],
            ABORT,
            experts,
            sets,
            meta.drafts,
            meta.prefill,
        )
    if routing is not None and routing.positions(experts) != meta.prompt_tokens + len(tokens) - 1:
        positions = (
            f"of {routing.positions(experts)} positions; there were {meta.prompt_tokens} "
            f"+ {len(tokens)} tokens"
        )
        raise EngineError(f"engine {engine} answered with the experts {positions}")
    if not len(tokens) == len(logprobs) == len(versions):
        counts_text = f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions"
        raise EngineError(f"engine {engine} answered with {counts_text}")
    sets = _kept(engine, numbers, len(numbers.mask[1]), vocab_size)
    return Completion(
        tokens,
        logprobs,
        versions,
        meta.finish_reason.type,
        experts,
        sets,
        meta.drafts,
        meta.prefill,
    )


def _routing(engine: str, meta: _Meta, routing: RoutingFormat) -> bytes:
    try:
        return routing.from_engine(meta.routed_experts)
    except ValueError as error:
        raise EngineError(f"engine {engine} answered with impossible experts: {error}") from error


def _kept(
    engine: str, numbers: _SampledNumbers, count: int, vocab_size: int | None
) -> KeptSets | None:
    """The sets that the first tokens were drawn from."""
    if vocab_size is None:
        return None
    ids, sizes = map(view, numbers.mask)
    tokens = view(numbers.tokens) if count == len(sizes) else view(numbers.tokens)[:count]
    try:
        return KeptSets.from_ids(vocab_size, tokens, sizes[:count], ids[: sizes[:count].sum()])
    except ValueError as error:
        raise EngineError(
            f"engine {engine} answered with impossible sets of kept tokens: {error}"
        ) from error


MOST_STRINGS = 32  # most stop strings of a request in SGLang
Decode = Callable[[Sequence[int]], str]
"""The text of tokens, including special ones."""


class StopStrings:
    """Decides where a response ends: finds stop strings that SGLang misses.

    SGLang ends a request at a stop string, which saves sampling further tokens. But it checks only
    the last few tokens of a request (0.5.23, schedule_batch.py: one more than the string itself
    has). It misses a string that was sampled in more and shorter tokens, and a string whose first
    part an earlier request has sampled. So the end of a response is decided here.

    The string belongs to the response, both its tokens and its text, since the policy sampled it.
    """

    def __init__(self, strings: Sequence[str], decode: Decode):
        self._strings = strings
        self._decode = decode

    def end(self, token_ids: Sequence[int]) -> int | None:
        """The number of tokens up to the end of the first stop string; None if there is none."""
        if not self._contains_stop(token_ids):
            return None
        least = 1
        most = len(token_ids)
        while least < most:
            middle = (least + most) // 2
            if self._contains_stop(token_ids[:middle]):
                most = middle
            else:
                least = middle + 1
        return least

    def _contains_stop(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(string in text for string in self._strings)


def cut(text: str, strings: Sequence[str]) -> tuple[str, str | None]:
    """The text before its first stop string, and that string.

    The first string is the one that ends first, or the longest of several.
    """
    ends = [
        (text.find(string) + len(string), -len(string), string)
        for string in strings
        if string in text
    ]
    if not ends:
        return text, None
    end, _, string = min(ends)
    return text[: end - len(string)], string
