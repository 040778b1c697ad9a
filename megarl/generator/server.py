"""Runs one SGLang engine as its own process: `python -P -m megarl.generator.server '<JSON of SGLang
server arguments>'`.

The keys come through the environment, not on the command line, where every user of the machine
could read them. SGLang spawns workers, each of which imports this module again as `__mp_main__`,
before it imports SGLang. So set-up that every process of the engine needs first is done here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.base.geometry import STATES_PER_REQUEST
from megarl.base.kept_sets import MOST_KEPT
from megarl.base.processes import FOR_LAUNCHER, end_with_parent
from megarl.base.shared_gpu import await_trainers
from megarl.config.errors import ConfigError
from megarl.generator import cpu_support, hooks, torch_kernels
from megarl.generator.completions import POLICY
from megarl.generator.hooks import GRACE_S, Children
from megarl.generator.seeds import seed_of

LOADER = "megarl.weight_sync.engine.loader.run_command"
RESTARTS = "MEGARL_ENGINE_RESTARTS"  # environment variable: how often the engine was restarted
ENGINE_SEED_BITS = 31  # of random_seed, which NumPy takes too
SLOW_FAMILY = "qwen3_5"  # its module takes seconds to import, since it also imports vision models
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = re.compile(r"(expandable_segments\s*:)\s*true", re.IGNORECASE)
_GPU_ARGUMENTS = {
    # SGLang's choice on Hopper; its choice on Blackwell would store up before gate
    "moe_runner_backend": "triton",
    # The trainer's logits are float32. Rounded to bfloat16, logits of 16 to 32 are multiples of
    # 1/8, and many would be equal. (0.5.23 computes float32 logits from bfloat16 by a product with
    # float32 output, without more memory for weights: layers/logits_processor.py:1172.)
    "enable_fp32_lm_head": True,
    "sampling_backend": "pytorch",  # flashinfer takes no seeds with top_p, top_k or min_p
}
_API_KEY = "MEGARL_ENGINE_API_KEY"
_ADMIN_KEY = "MEGARL_ENGINE_ADMIN_KEY"
_LAUNCHER = "MEGARL_ENGINE_LAUNCHER"


@dataclass(frozen=True)
class EngineKeys:
    """`api` allows generation; `admin` allows everything that can change weights or settings."""

    api: str
    admin: str

    @classmethod
    def generate(cls) -> EngineKeys:
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))


@dataclass(frozen=True)
class ServedAdapter:
    """The adapter that updates write to. It is empty at first."""

    folder: str  # the folder of its settings in PEFT's format
    rank: int
    targets: tuple[str, ...]  # linear layers, by their names in HF checkpoints
    shared: bool = False  # whether all experts of a layer share the outer factor of their adapters


@dataclass(frozen=True)
class EngineSettings:
    """The settings of one engine, mostly under SGLang's own names."""

    model_path: str
    dtype: str  # float32 | bfloat16
    port: int
    context_length: int  # most tokens of prompt and response together
    max_running_requests: int
    tp: int = 1
    ep: int = 1  # divides the tp ranks: the number of ranks that the experts are spread over
    # divides the tp ranks: the number of attention replicas, each with its own requests and KV
    # cache
    dp_attention: int = 1
    host: str = "127.0.0.1"
    quantization: str | None = None  # generator.quantization
    kv_cache_tokens: int | None = None  # KV cache of the engine
    mem_fraction: float = 0.85  # share of GPU memory
    device: str | None = None  # None: cuda if there is a GPU, otherwise cpu
    # CPU only: one core per TP rank; (): the last `tp` cores that this process may use, after
    # skipping
    cores: Sequence[int] = ()
    cores_taken: int = 0  # this many cores, which other engines on this host use
    base_gpu: int = 0
    parts: int = 1  # nodes that the engine spans; each starts a part, and part 0 answers requests
    part: int = 0
    group_address: str | None = None  # host:port where the parts meet
    return_routing: bool = False  # whether requests may ask which experts were chosen
    # most tokens that a truncated distribution keeps, not counting ties with the last
    most_kept: int = MOST_KEPT
    tokenizer: str | None = None  # needed if requests have stop strings
    seed: int = 0
    # whether a request's numbers are independent of the other requests of its batch
    deterministic: bool = False
    # whether the folder has weights; if not, the engine starts with dummy weights and serves after
    # an update
    holds_weights: bool = True
    frozen: bool = False  # whether the weights never change: nobody can write to them
    family: str = ""  # family in megarl.models; empty: unknown
    # whether the checkpoint has a vision tower, which the engine leaves out
    text_only: bool = False
    classifies: bool = False  # whether the model scores its input instead of generating text
    adapter: ServedAdapter | None = None
    # SGLang's arguments for generator.speculative
    speculative: Mapping[str, Any] = field(default_factory=dict)
    log_level: str = "warning"


def drawing_anew(arguments: Mapping[str, Any], restarts: int) -> dict[str, Any]:
    """SGLang's arguments for an engine after this many restarts, with a new seed for requests
    without one. With its first seed it would answer them again with the same tokens.
    """
    if not restarts:
        return dict(arguments)
    return {
        **arguments,
        "random_seed": seed_of(arguments["random_seed"], restarts, bits=ENGINE_SEED_BITS),
    }


def server_command(
    settings: EngineSettings, keys: EngineKeys, extra: Mapping[str, Any] = {}
) -> tuple[list[str], dict[str, str]]:
    """Returns the argument vector of one engine's process, and the environment variables to add.

    `extra` (`generator.server_args`) is passed to SGLang as it is, and overrides the arguments
    chosen here. The engine ends with the process that calls this function, so that process must
    start it. Raises ConfigError for a dtype in which SGLang cannot compute on GPUs.
    """
    device = settings.device or ("cuda" if cpu_support.cuda_available() else "cpu")
    _check_dtype(settings, device, extra)
    of_device = _cpu_arguments(settings) if device == "cpu" else _gpu_arguments()
    arguments = {**_common_arguments(settings, device), **of_device, **extra}
    environment = {_API_KEY: keys.api, _ADMIN_KEY: keys.admin, _LAUNCHER: str(os.getpid())}
    environment[hooks.SOCKET_KEY] = hooks.socket_key(keys.admin)
    # it is not used, and would publish on a port without a key
    environment["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "megarl.generator.architectures"
    if settings.family not in ("", SLOW_FAMILY):
        environment["SGLANG_DISABLED_MODEL_ARCHS"] = SLOW_FAMILY
    # seconds, so that the client closes idle connections first, never the engine
    environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = "3600"
    environment |= _cpu_environment(settings) if device == "cpu" else _gpu_environment()
    return [sys.executable, "-P", "-m", __spec__.name, json.dumps(arguments)], environment


def _common_arguments(settings: EngineSettings, device: str) -> dict[str, Any]:
    arguments = {
        "model_path": settings.model_path,
        "dtype": settings.dtype,
        "device": device,
        "tp_size": settings.tp,
        "ep_size": settings.ep,
        "host": settings.host,
        "port": settings.port,
        "base_gpu_id": settings.base_gpu,
        "context_length": settings.context_length,
        "max_running_requests": settings.max_running_requests,
        # only for models with gated delta nets
        "max_mamba_cache_size": STATES_PER_REQUEST * settings.max_running_requests,
        "max_total_tokens": settings.kv_cache_tokens
        and settings.kv_cache_tokens // settings.dp_attention,
        "mem_fraction_static": settings.mem_fraction,
        "random_seed": settings.seed,
        "load_format": None if settings.holds_weights else "dummy",
        **_replicated(settings),
        "enable_return_routed_experts": settings.return_routing or None,
        # with room for equal logits; a request with more fails
        "sampling_mask_max_tokens": 2 * max(settings.most_kept, 128),
        **_spanning(settings),
        **_adapter_arguments(settings, device),
        **settings.speculative,
        "enable_deterministic_inference": settings.deterministic or None,
        "log_level": settings.log_level,
        "custom_weight_loader": None if settings.frozen else [LOADER],
        "is_embedding": settings.classifies or None,
        "weight_version": "-1",  # not a version of a run, so that a restarted engine is recognised
        # shared experts are written separately from routed ones
        "disable_shared_experts_fusion": True,
        "skip_tokenizer_init": settings.tokenizer is None,  # token ids in, token ids out
        "tokenizer_path": settings.tokenizer,
        # not generation_config.json: only the request defines the policy's distribution
        "sampling_defaults": "openai",
        **hooks.server_arguments(settings.quantization, settings.text_only),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _replicated(settings: EngineSettings) -> dict[str, Any]:
    return {"attn_dp_size": settings.dp_attention} if settings.dp_attention > 1 else {}


def _adapter_arguments(settings: EngineSettings, device: str) -> dict[str, Any]:
    """The pool has one slot for the adapter, and one for requests without it, such as SGLang's
    own.
    """
    adapter = settings.adapter
    if adapter is None:
        return {}
    arguments = {
        "enable_lora": True,
        "lora_paths": [{"lora_name": POLICY, "lora_path": adapter.folder, "pinned": True}],
        "max_loras_per_batch": 2,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": list(adapter.targets),
        "experts_shared_outer_loras": adapter.shared,
    }
    if device == "cpu":
        arguments["lora_backend"] = "torch_native"
    return arguments


def _spanning(settings: EngineSettings) -> dict[str, Any]:
    if settings.parts == 1:
        return {}
    return {
        "nnodes": settings.parts,
        "node_rank": settings.part,
        "dist_init_addr": settings.group_address,
    }


def _check_dtype(settings: EngineSettings, device: str, extra: Mapping[str, Any]) -> None:
    is_of_host = not settings.device  # not one that a dry run assumes
    in_float32 = settings.dtype == "float32" and "attention_backend" not in extra
    if device == "cuda" and is_of_host and in_float32:
        raise ConfigError(
            "model.dtype=float32: must be bfloat16 for engines on GPUs: SGLang's kernels there "
            "compute in 16 bits"
        )
    if device == "cpu" and extra.get("kv_cache_dtype", "auto") != "auto":
        key = f"generator.server_args.kv_cache_dtype={extra['kv_cache_dtype']}"
        raise ConfigError(
            f"{key}: must be auto for engines on CPUs: their attention computes in the model's "
            "dtype alone"
        )


def growing_segments() -> str:
    """The setting, NAME=VALUE, that switches on torch's expandable segments here; empty if they are
    off, as by default.

    Memory in such segments is mapped in pieces of 20 MiB. Other processes cannot always open it
    (pytorch/pytorch issues 179220, 198305), and network cards cannot be given more than one piece
    at a time (kvcache-ai/Mooncake issue 2511).
    """
    return next(
        (
            f"{name}={os.environ[name]}"
            for name in _ALLOCATOR
            if _GROWING.search(os.environ.get(name, ""))
        ),
        "",
    )


def _gpu_arguments() -> dict[str, Any]:
    return _GPU_ARGUMENTS | (torch_kernels.ARGUMENTS if torch_kernels.enabled() else {})


def _gpu_environment() -> dict[str, str]:
    """Switches off expandable segments, which many users set for the trainer.

    Other processes must open an engine's parameters.
    """
    fixed = {
        name: _GROWING.sub(r"\1False", os.environ[name])
        for name in _ALLOCATOR
        if _GROWING.search(os.environ.get(name, ""))
    }
    return fixed | (torch_kernels.ENVIRONMENT if torch_kernels.enabled() else {})


def _cpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    tokens = settings.kv_cache_tokens or settings.max_running_requests * settings.context_length
    return {
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        # torch_native has no second pool for layers with windows (torch_native_backend.py:392)
        "disable_hybrid_swa_memory": True,
        "max_total_tokens": tokens // settings.dp_attention,
        # where a prompt is cut depends on others
        **({"chunked_prefill_size": -1} if settings.deterministic else {}),
        "sleep_on_idle": True,  # otherwise every idle worker spins on a core
        # nothing must be compiled, and SGLang checks for readiness only once a second
        "skip_server_warmup": True,
    }


def _cpu_environment(settings: EngineSettings) -> dict[str, str]:
    allowed = sorted(os.sched_getaffinity(0))
    ranks = settings.tp // settings.parts
    first_core = settings.cores_taken + settings.part * ranks
    cores = settings.cores or [
        allowed[-1 - (first_core + rank) % len(allowed)] for rank in range(ranks)
    ]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        torch_kernels.TORCH_KERNELS: "",  # only for GPUs
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        # dtype of the convolution states of gated delta nets; by default bfloat16
        "SGLANG_MAMBA_CONV_DTYPE": settings.dtype,
        # a torch for CUDA includes NCCL, which SGLang (0.5.23) would use here too
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so.2",
    }


def main() -> None:
    """The entry point of the engine's first process."""
    launcher = int(os.environ[_LAUNCHER])
    os.environ[_LAUNCHER] = str(os.getpid())  # the parent of the workers that this process spawns
    end_with_parent(launcher)
    for number in (signal.SIGUSR1, *FOR_LAUNCHER):  # its workers inherit this
        signal.signal(number, signal.SIG_IGN)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    children = Children()
    children.watch()
    # without CUDA, workers are forked (cpu_support)
    os.register_at_fork(after_in_child=lambda: Children().watch())
    load_plugins()
    hooks.check_hooks()
    await_trainers()
    arguments = drawing_anew(json.loads(sys.argv[1]), int(os.environ.pop(RESTARTS, "0")))
    # ranks meet through a file, since the port of a store would be open to everybody
    if "nnodes" not in arguments:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = "file://" + os.path.join(
            tempfile.mkdtemp(prefix="engine-"), "store"
        )
    keys = {"api_key": os.environ.pop(_API_KEY), "admin_api_key": os.environ.pop(_ADMIN_KEY)}
    with _ending_at_the_end(children):
        launch_server(ServerArgs(**arguments, **keys))


@contextlib.contextmanager
def _ending_at_the_end(children: Children) -> Iterator[None]:
    """Ends this process and its children, however the body ends.

    Python itself would wait for the children.
    """
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        children.end_with_the_dead(GRACE_S)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ in ("__main__", "__mp_main__"):
    cpu_support.install()
if __name__ == "__mp_main__":
    end_with_parent(int(os.environ[_LAUNCHER]))
    Children().watch()
    # a worker may spawn others: with data-parallel attention, all workers that use GPUs
    os.environ[_LAUNCHER] = str(os.getpid())
    from sglang.srt.plugins import load_plugins

    load_plugins()  # SGLang itself does this only in its schedulers
if __name__ == "__main__":
    main()
