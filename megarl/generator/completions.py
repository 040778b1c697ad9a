"""Typed requests to SGLang's `/generate`, and its answers."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from megarl.models.routing import RoutingFormat
from megarl.types import Typed, Version, typed, view

ABORT = "abort"  # finish reason of a request that was told to end
_MOST_CANDIDATES = 4095  # SGLang reports at most 4096 kept tokens of a truncated distribution, including ties


class EngineError(RuntimeError):
    """The engine answered, but not with the expected result."""


class Sampling(msgspec.Struct, frozen=True):
    """How to draw a completion. temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off. If only top_p < 1 is set, SGLang also needs a bound here: the 4095 likeliest tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # needs the engine to have a tokenizer

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    def parameters(self) -> dict[str, Any]:
        """The parameters under SGLang's names."""
        top_k = self.top_k
        if self.truncated:
            top_k = min(top_k if top_k > 0 else _MOST_CANDIDATES, _MOST_CANDIDATES)
        return {
            **({"stop": list(self.stop)} if self.stop else {}),
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": top_k,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
        }


class Completion(Typed, frozen=True):
    """One response, with the behaviour policy that produced it. It is made of arrays or lists."""

    token_ids: array[int]  # [T] int32
    logprobs: array[float]  # [T] float32, under the distribution sampled from: after temperature, top-k and top-p
    versions: array[int]  # [T] int32, weight version that produced each token
    finish_reason: str  # "stop" | "length"; in a single answer of an engine also "abort"
    routing: bytes = b""  # experts (models/routing.py) at all positions of input and tokens except the last; empty if not asked for

    def __post_init__(self) -> None:
        self._convert(token_ids="i", logprobs="f", versions="i")


class _Span(msgspec.Struct):
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
    weight_versions: list[_Span] = []
    # Lists that were read into arrays already have their number in their place.
    output_token_logprobs: list[tuple[float, int, Any]] | int = []
    output_token_sampling_logprobs: list[float] | int = []
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    routed_experts: bytes = b""  # base64 in JSON


class _Answer(msgspec.Struct):
    meta_info: _Meta


# Inside a JSON string a quotation mark has a backslash before it, so what matches is a key, whatever a model wrote.
_LIST = re.compile(rb'"output_token_(sampling_)?logprobs":(?=\[)')
_decode_answers = msgspec.json.Decoder(list[_Answer]).decode


def load_parser() -> ModuleType:
    """Compiled when it is first imported on a machine, which takes seconds."""
    from megarl.kernels import json_numbers

    return json_numbers


class _Lists:
    """The number lists of one answer, read into arrays, and `rest`: the answer without them."""

    def __init__(self, answer: bytes):
        parser = load_parser()
        text, parts, done = np.frombuffer(answer, np.uint8), [], 0
        self._read: list[tuple[array[int], array[float]]] = []
        at = -1
        while (at := answer.find(b'"output_token_', at + 1)) >= 0:
            key = _LIST.match(answer, at)
            if key is None:
                continue
            start = key.end()
            beyond = answer.find(b'"', start)  # no list has a string in it
            room = ((beyond if beyond >= 0 else len(answer)) - start) // (2 if key[1] else 10) + 1
            values, ids = np.empty(room, np.float32), np.empty(0 if key[1] else room, np.int32)
            count, end = parser.read_floats(text, start, values) if key[1] else parser.read_token_logprobs(text, start, values, ids)
            if count >= 0:
                parts += [answer[done:start], b"%d" % len(self._read)]
                self._read.append((typed(ids[:count], "i"), typed(values[:count], "f")))
                done, at = end, end - 1
        self.rest = b"".join([*parts, answer[done:]])
        self._taken: set[int] = set()

    def take(self, number: int) -> tuple[array[int], array[float]]:
        """Token ids (none in a list of log-probs alone) and log-probs. Raises: LookupError, where the engine wrote the number itself."""
        if number in self._taken or not 0 <= number < len(self._read):
            raise LookupError(f"{number} in the place of a list")
        self._taken.add(number)
        return self._read[number]


def generation(
    inputs: Sequence[Sequence[int]], samplings: Sequence[Sampling], version: Version | None, routing: RoutingFormat | None = None
) -> dict[str, Any]:
    """The request for one completion of each input, with chosen experts if `routing` is given. `version`: see `EngineClient.complete`."""
    body: dict[str, Any] = {
        "input_ids": [list(each) for each in inputs],
        "sampling_params": [sampling.parameters() for sampling in samplings],
        "return_logprob": True,
    }
    if version is not None:
        body["extra_key"] = str(version)
    if samplings[0].truncated:
        body["return_sampling_mask"] = True
    if routing is not None:
        body["return_routed_experts"] = True
    return body


def completions_of(engine: str, answer: bytes, samplings: Sequence[Sampling], routing: RoutingFormat | None = None) -> list[Completion]:
    """Decodes the answer to `generation`. Raises EngineError that names `engine`."""
    try:
        lists = _Lists(answer)
        answers = [each.meta_info for each in _decode_answers(lists.rest)]
        read = [_numbers(meta, lists) for meta in answers]
    except (msgspec.DecodeError, LookupError, OverflowError) as error:  # JSON has no NaN: SGLang writes null
        raise EngineError(f"engine {engine} gave an unreadable answer: {error} (a log-prob of null is NaN or infinite)") from error
    return [_completion(engine, *each, routing) for each in zip(answers, read, samplings, strict=True)]


def scoring(sequences: list[list[int]]) -> dict[str, Any]:
    """The request for the log-probs of given tokens."""
    return {
        "input_ids": sequences,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def scores_of(answer: bytes) -> list[list[float]]:
    """Decodes the answer to `scoring`: the log-probs of all tokens of each sequence except its first. Raises EngineError."""
    return [[_finite(value) for value, _, _ in each.meta_info.input_token_logprobs[1:]] for each in _decode_answers(answer)]


def _finite(logprob: float | None) -> float:
    if logprob is None:  # JSON has no NaN: SGLang writes null
        raise EngineError("an engine scored a token with a log-prob of null: NaN or infinite")
    return logprob


def _numbers(meta: _Meta, lists: _Lists) -> tuple[array[int], array[float], array[float]]:
    """Token ids, their log-probs, and those of the truncated distribution, if there is one."""
    triples, floats = meta.output_token_logprobs, meta.output_token_sampling_logprobs
    if isinstance(triples, int):
        tokens, logprobs = lists.take(triples)
    else:
        tokens, logprobs = typed([token for _, token, _ in triples], "i"), typed([value for value, _, _ in triples], "f")
    return tokens, logprobs, lists.take(floats)[1] if isinstance(floats, int) else typed(floats, "f")


def _completion(
    engine: str, meta: _Meta, read: tuple[array[int], array[float], array[float]], sampling: Sampling, routing: RoutingFormat | None
) -> Completion:
    if meta.finish_reason.type not in ("stop", "length", ABORT):
        raise EngineError(f"engine {engine} ended a request by {meta.finish_reason.type}: {meta.finish_reason.message}")
    tokens, logprobs, of_truncated = read
    if sampling.truncated:
        logprobs = of_truncated
    if not np.isfinite(view(logprobs)).all():
        raise EngineError(f"engine {engine} answered with a log-prob that is infinite")
    spans = meta.weight_versions or [_Span(meta.weight_version, 0, len(tokens))]
    versions = array("i")
    for span in spans:
        versions += array("i", [int(span.version)]) * (span.end - span.start)
    experts = _routing(engine, meta, routing) if routing is not None else b""
    if meta.finish_reason.type == ABORT:
        # The engine did not check whether the last token ends the response, so that token is sampled again. The same goes for tokens
        # whose experts it has forgotten, because the request was aborted while it waited for memory.
        kept = max(0, min(len(tokens), len(logprobs), len(versions)) - 1)
        if routing is not None:
            kept = min(kept, max(0, routing.positions(experts) + 1 - meta.prompt_tokens))
            experts = experts[: (meta.prompt_tokens + kept - 1) * routing.position_bytes] if kept else b""
        return Completion(tokens[:kept], logprobs[:kept], versions[:kept], ABORT, experts)
    if routing is not None and routing.positions(experts) != meta.prompt_tokens + len(tokens) - 1:
        positions = f"of {routing.positions(experts)} positions; there were {meta.prompt_tokens} + {len(tokens)} tokens"
        raise EngineError(f"engine {engine} answered with the experts {positions}")
    if not len(tokens) == len(logprobs) == len(versions):
        counts = f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions"
        raise EngineError(f"engine {engine} answered with {counts}")
    return Completion(tokens, logprobs, versions, meta.finish_reason.type, experts)


def _routing(engine: str, meta: _Meta, routing: RoutingFormat) -> bytes:
    try:
        return routing.from_engine(meta.routed_experts)
    except ValueError as error:
        raise EngineError(f"engine {engine} answered with experts that cannot be: {error}") from error
