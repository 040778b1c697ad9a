"""The noise of a sample: a function of its seed and of the position in the sequence, not of the
engine or of its other requests.

SGLang's sampler does this already (`multinomial_with_seed`: Gumbel noise, hashed from seed,
position and token id), but takes seeds from requests only with `--enable-deterministic-inference`,
whose kernels cost speed. The hooks here take them always. So a response that another engine
continues gets the noise that it would have got. With speculative decoding, engines on CPUs draw the
tokens of plain decoding, up to rounding.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_DRAW = "sglang.srt.layers.sampler.multinomial_with_seed"
_FILTER = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"


def seed_of(*parts: int | str | bytes, bits: int = 63) -> int:
    """A random seed from `parts`, of at most 63 bits, as SGLang takes for requests.

    It is a hash: sums would be equal for sample 1 of seed 0 and sample 0 of seed 1.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - bits)


class Seeds:
    """The seeds of the requests of one prompt or episode: from `seed`, the tokens to continue, and
    how often these were asked for before.

    So seeds do not depend on the order in which the requests of different conversations arrive.
    """

    def __init__(self, seed: int):
        self._seed = seed
        self._requests: Counter[bytes] = Counter()

    def next(self, token_ids: Sequence[int]) -> int:
        tokens = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16).digest()
        number = self._requests[tokens]
        self._requests[tokens] += 1
        return seed_of(self._seed, tokens, number)


def register_hooks(on_cpu: bool) -> None:
    """Registers the hooks with SGLang's plugin registry.

    `on_cpu`: sgl_kernel, which has the hash for CPUs, is absent; and torch would compile what uses
    it again for many sizes of a batch.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_BATCH, give_seeds, HookType.AFTER)
    HookRegistry.register(_FILTER, filter_first, HookType.AROUND)
    if on_cpu:
        HookRegistry.register(_DRAW, drawn, HookType.REPLACE)


def give_seeds(info: Any, _: type, batch: Any, *__: Any, **___: Any) -> None:
    """Runs after SGLang has made the sampling settings of new requests.

    Requests without a seed get a random one, since a batch with and without seeds cannot be merged,
    and since SGLang would give all of them the seed 42.
    """
    import torch

    request_seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    drawn = torch.randint(2**63 - 1, (len(request_seeds),)).tolist()
    seeds = [drawn_seed if seed is None else seed for seed, drawn_seed in zip(request_seeds, drawn)]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.temperatures.device)


def filter_first(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Runs around sampling from truncated distributions, and applies min_p before.

    The original refuses min_p beside seeds, though noise on log-probs needs no normalised ones. The
    filters commute: min_p drops the least likely tokens, which top_p counts last.
    """
    if need_min_p_sampling:
        least = probs.amax(-1, keepdim=True) * min_ps.view(-1, 1)
        probs = probs.masked_fill(probs < least, 0.0)
    return original(probs, top_ks, top_ps, min_ps, False, *arguments, **named)


def drawn(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n, 1] the token ids drawn from `logprobs` [n, m], float32 or float64: the likeliest after
    adding `gumbel_noise`. Replaces SGLang's `multinomial_with_seed`, and draws the same.
    """
    import torch

    from megarl.kernels import draw_numba

    logprobs = logprobs.contiguous()
    tokens = torch.empty(len(logprobs), dtype=torch.int64)
    draw_numba.draw(
        logprobs.numpy(),
        logprobs.exp().numpy(),
        seed.numpy(),
        positions.long().numpy(),
        tokens.numpy(),
    )
    return tokens[:, None]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[n, vocab_size] float64: the noise that SGLang's `multinomial_with_seed` adds to the
    log-probs after these `positions` [n].
    """
    import torch

    uniform = (
        murmur_hash32(seeds, positions, torch.arange(vocab_size)).to(torch.float64)
        / torch.iinfo(torch.uint32).max
    )
    exponential = uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    return exponential.log_().neg_()


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """[n, m] uint32: MurmurHash3 of `seed` [n], `positions` [n] and `columns` [m]. In NumPy, since
    torch has no products of uint32."""
    import torch

    words = seed.numpy().astype(np.uint64)
    rows = (
        words.astype(np.uint32),
        (words >> 32).astype(np.uint32),
        positions.numpy().astype(np.uint32),
    )
    h = np.zeros(len(words), np.uint32)
    for block in rows:
        h = _mixed(h, block)
    h = _mixed(h[:, None], columns.numpy().astype(np.uint32))
    h ^= np.uint32(16)
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    return torch.from_numpy(h)


def _mixed(h: np.ndarray, block: np.ndarray) -> np.ndarray:
    k = block * np.uint32(0xCC9E2D51)
    k = (k << 15 | k >> 17) * np.uint32(0x1B873593)
    h = h ^ k
    h = h << 13 | h >> 19
    return h * np.uint32(5) + np.uint32(0xE6546B64)
