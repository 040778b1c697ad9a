"""An asyncio client for one engine: SGLang's HTTP interface with types, deadlines, and errors that
name the engine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import torch

from megarl.base.files import log_tail
from megarl.base.rollout_types import Version
from megarl.base.teacher_scores import TeacherScores
from megarl.generator.completions import (
    ABORT,
    Completion,
    EngineError,
    Sampling,
    completions_of,
    generation,
    judgement_of,
    judging,
    load_parser,
    score_in,
    scores_of,
    scoring,
)
from megarl.generator.server import LOADER
from megarl.models.routing import RoutingFormat

# The function that makes a storage of bytes. When Megatron (0.19.2) is imported, it replaces
# torch's function by its own, which then goes into pickles. SGLang accepts only torch's function.
_TORCHS = b"ctorch.storage\n_load_from_bytes\n"
_MEGATRONS = b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"
_GIVE_UP_S = 10.0  # deadline for telling an engine that nobody waits any more


def tensor_payload(content: bytes) -> str:
    """Encodes `content` as an entry of SGLang's `serialized_named_tensors`: one uint8 tensor named
    "command", base64 of a plain pickle. SGLang passes bytes on to an engine's workers in no other
    form.

    Plain pickle puts the values into the message itself. SGLang's own helper would send a handle to
    shared memory, and would start a manager process to keep that memory.
    """
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # in protocol 3, names of functions are plain lines
    pickled = pickle.dumps([("command", tensor)], protocol=3)
    return base64.b64encode(pickled.replace(_MEGATRONS, _TORCHS, 1)).decode()


def content_of(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """The `content` of `tensor_payload`. SGLang has put the tensor on the worker's device."""
    [(_, tensor)] = named_tensors
    return tensor.cpu().numpy().tobytes()


class EngineUnreachable(EngineError):
    """The connection to the engine at `url` broke or could not be made: its process has ended, or
    is about to.
    """

    def __init__(self, url: str, message: str):
        super().__init__(message)
        self.url = url


class Parallelism(msgspec.Struct):
    tp_size: int
    ep_size: int
    attn_dp_size: int = 1
    max_total_tokens: int | None = None  # tokens of a replica's KV cache that SGLang was told
    max_total_num_tokens: int = 0  # the tokens that it has; 0: not told


class _Info(msgspec.Struct):
    weight_version: str


class _Outcome(msgspec.Struct):
    success: bool = True
    message: str = ""


_decode_outcome = msgspec.json.Decoder(_Outcome).decode


class EngineClient:
    """Construct it inside a running event loop, and `close` it at the end.

    `request_s`: deadline of a generation request. With `routing`, completions include the chosen
    experts; with `vocab_size`, the sets that tokens were drawn from. With `adapter`, requests use
    the policy's adapter.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        admin_key: str,
        request_s: float = 3600.0,
        routing: RoutingFormat | None = None,
        vocab_size: int | None = None,
        adapter: bool = False,
    ):
        load_parser()  # compiles it now, and not while the event loop must serve answers
        self.url = url
        self._request_s = request_s
        self._routing = routing
        self._vocab_size = vocab_size
        self._adapter = adapter
        self._given_up: set[asyncio.Task[None]] = set()  # requests of which the engine is told now
        self._condemned = ""  # why this engine must not be used any more
        self._user = {"Authorization": f"Bearer {api_key}"}
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        # No limit on connections: continuous batching needs all requests at the engine at once. The
        # caller bounds their number.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
        )

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, n: int = 1, version: Version | None = None
    ) -> list[Completion]:
        """Returns n independent completions of one prompt, in one request; for `version` see
        `complete`.

        Raises EngineError when the engine refuses or aborts the request, TimeoutError past
        `request_s`.
        """
        # The prompt is sent n times. With SGLang's own parameter n, it would first prefill each
        # prompt alone and wait for that.
        completions = await self.complete(
            [prompt_ids] * n, [sampling.of_sample(index) for index in range(n)], version
        )
        if any(completion.finish_reason == ABORT for completion in completions):
            raise EngineError(f"engine {self.url} aborted a request")
        return completions

    async def complete(
        self,
        inputs: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        cache_key: Version | str | None = None,
    ) -> list[Completion]:
        """Returns one completion of each input, in one request.

        An aborted completion has all tokens sampled so far but the last.

        SGLang's prefix cache reuses keys and values only among requests of one `cache_key`. With
        the version of the weights at submission, those of older weights are never reused
        (`KeptCache.key` has another). Either all of `samplings` are truncated, or none. If it is
        cancelled, or late, the engine drops the request at once. Raises EngineError, TimeoutError.
        """
        body = generation(inputs, samplings, cache_key, self._routing, self._adapter)
        body["rid"] = rids = [uuid4().hex for _ in inputs]
        try:
            answer = await self._post("/generate", body, self._user, self._request_s)
        except (asyncio.CancelledError, TimeoutError):
            self._give_up(rids)
            raise
        return completions_of(self.url, answer, samplings, self._routing, self._vocab_size)

    def _give_up(self, rids: Sequence[str]) -> None:
        """Tells the engine, beside all else, that nobody waits for these requests.

        Otherwise SGLang notices it some seconds later, and decodes on until then.
        """
        task = asyncio.ensure_future(self._abort(rids))
        self._given_up.add(task)
        task.add_done_callback(self._given_up.discard)

    async def _abort(self, rids: Sequence[str]) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # then SGLang notices by itself
            for rid in rids:
                await self._admin_call("/abort_request", {"rid": rid}, _GIVE_UP_S)

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Returns [L - 1] for each sequence of L tokens: the log-probs of tokens 1 to L - 1, each
        given the tokens before it.
        """
        return scores_of(
            await self._post(
                "/generate", scoring(sequences, self._adapter), self._user, self._request_s
            )
        )

    async def judge(
        self, prompt: Sequence[int], response: Sequence[int], top_k: int
    ) -> TeacherScores:
        """A teacher's log-probs for a response; see `completions.judging`.

        Raises EngineError, TimeoutError.
        """
        answer = await self._post(
            "/generate", judging(prompt, response, top_k), self._user, self._request_s
        )
        return judgement_of(self.url, answer, response, top_k)

    async def classify(self, token_ids: Sequence[int]) -> float:
        """The score of the tokens by a reward model.

        (`/generate` would crash such an engine.) Raises EngineError, TimeoutError.
        """
        answer = await self._post(
            "/classify", {"input_ids": list(token_ids)}, self._user, self._request_s
        )
        return score_in(self.url, answer)

    async def wait_ready(
        self,
        timeout_s: float,
        log: Path | None = None,
        failed: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Returns once the engine takes requests.

        Raises TimeoutError past the deadline, RuntimeError as soon as `failed` returns a reason;
        both quote the end of `log`.
        """
        deadline = time.monotonic() + timeout_s
        while not await self._is_ready():
            reason = failed()
            if reason:
                raise RuntimeError(f"engine {self.url} {reason}{_tail(log)}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"engine {self.url} was not ready after {timeout_s:.0f} s{_tail(log)}"
                )
            await asyncio.sleep(0.1)

    async def _is_ready(self) -> bool:
        if self._session.closed:  # the engine has left meanwhile
            return False
        try:
            async with self._session.get(
                f"{self.url}/ready", timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def pause(self, timeout_s: float, mode: str = "retract") -> None:
        """Stops sampling at a token boundary.

        With `retract` the KV cache of running requests is freed, and recomputed when they continue.
        With `in_place` it is kept.
        """
        await self._admin_call("/pause_generation", {"mode": mode}, timeout_s)

    async def abort_all(self, timeout_s: float) -> None:
        """Ends every request that the engine has now.

        Each is answered with finish reason "abort".
        """
        await self._admin_call("/abort_request", {"rid": "", "abort_all": True}, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._admin_call("/continue_generation", {"torch_empty_cache": False}, timeout_s)

    async def begin_update(self, timeout_s: float) -> None:
        """Opens SGLang's weight-update session.

        This undoes any repacking of weights after loading.
        """
        await self._admin_call("/begin_weight_update", {}, timeout_s)

    async def end_update(self, timeout_s: float) -> None:
        await self._admin_call("/end_weight_update", {}, timeout_s)

    async def flush(self, timeout_s: float) -> None:
        """Empties the prefix cache. Raises EngineError while requests still use it."""
        await self._admin_call("/flush_cache", {}, timeout_s)

    async def set_version(self, version: Version, timeout_s: float) -> None:
        """Marks every token that is sampled from now on with `version`."""
        await self._admin_call(
            "/update_weight_version",
            {"new_version": str(version), "abort_all_requests": False},
            timeout_s,
        )

    async def command(
        self, encoded: bytes, tp: int, timeout_s: float, empty_cache: bool = False
    ) -> None:
        """Runs one loader command (megarl.weight_sync.engine.loader) in each of the `tp` workers.

        Needs an open update session. With `empty_cache`, SGLang then empties the prefix cache;
        raises EngineError while requests still use it.
        """
        payload = tensor_payload(encoded)
        body = {
            "serialized_named_tensors": [payload] * tp,
            "load_format": LOADER,
            "flush_cache": empty_cache,
            "torch_empty_cache": False,
            "selector": "target",
        }
        await self._admin_call("/update_weights_from_tensor", body, timeout_s)

    async def version(self, timeout_s: float) -> Version:
        """The version of the weights that the engine reports; -1 for the weights that it started
        with.
        """
        text = await self._call("GET", "/model_info", b"", self._user, timeout_s)
        return int(msgspec.json.decode(text, type=_Info).weight_version)

    async def fresh(self) -> bool:
        """Whether the engine takes requests, and still has the weights that it started with."""
        try:
            return await self._is_ready() and await self.version(timeout_s=5) == -1
        except (EngineError, TimeoutError):
            return False

    async def answers(self) -> bool:
        """Whether the engine takes requests, and its schedulers answer."""
        try:
            return await self._is_ready() and await self.parallelism(timeout_s=5) is not None
        except (EngineError, TimeoutError):
            return False

    async def parallelism(self, timeout_s: float) -> Parallelism:
        """How many ranks the engine has, and how they share the model."""
        text = await self._call("GET", "/server_info", b"", self._user, timeout_s)
        return msgspec.json.decode(text, type=Parallelism)

    async def condemn(self, reason: str) -> None:
        """Makes every later call fail with `reason`; calls that wait for an answer fail at once."""
        self._condemned = reason
        await self._session.close()

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """Calls any other administrative endpoint of SGLang; used for comparisons."""
        await self._admin_call(path, body, timeout_s)

    async def close(self) -> None:
        for task in self._given_up:
            task.cancel()
        await asyncio.gather(*self._given_up, return_exceptions=True)
        await self._session.close()

    async def _admin_call(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        text = await self._post(path, body, self._admin, timeout_s)
        outcome = _decode_outcome(text) if text.startswith(b"{") else _Outcome()
        if not outcome.success:
            raise EngineError(f"engine {self.url}{path}: {outcome.message}")

    async def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float
    ) -> bytes:
        return await self._call("POST", path, msgspec.json.encode(body), headers, timeout_s)

    async def _call(
        self, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> bytes:
        self._check_condemned()
        # the engine has left just now; aiohttp would raise a bare RuntimeError
        if self._session.closed:
            raise EngineUnreachable(self.url, f"engine {self.url} has left")
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body,
                headers={"Content-Type": "application/json", **headers},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = await response.read()
                if response.status != 200:
                    raise EngineError(
                        f"engine {self.url}{path} answered {response.status}: "
                        f"{text.decode(errors='replace')[:2000]}"
                    )
                return text
        except TimeoutError as error:
            raise TimeoutError(
                f"engine {self.url}{path} gave no answer within {timeout_s:.0f} s"
            ) from error
        except aiohttp.ClientError as error:
            self._check_condemned()
            # not the engine's fault
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise EngineError(
                    f"no connection to engine {self.url}: {error.strerror}; raise ulimit -n"
                ) from error
            raise EngineUnreachable(
                self.url, f"engine {self.url}{path} is not reachable: {error}"
            ) from error

    def _check_condemned(self) -> None:
        if self._condemned:
            raise EngineError(f"engine {self.url} must not be used any more: {self._condemned}")


def _tail(log: Path | None) -> str:
    return "" if log is None else f"; the end of {log}:\n{log_tail(log)}"
