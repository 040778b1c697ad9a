"""Helpers of the tests that run a real SGLang engine: tiny checkpoints, an engine process, trainer
ranks played by processes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from nursery import PARENT, Nursery

from megarl.generator import cpu_support
from megarl.generator.client import EngineClient
from megarl.generator.completions import Completion
from megarl.generator.server import (
    LOADER,
    EngineKeys,
    EngineSettings,
    ServedAdapter,
    server_command,
)
from megarl.messaging.rendezvous import free_ports
from megarl.models.registry import load_spec
from megarl.models.routing import RoutingFormat
from megarl.weight_sync.audit import packed_shares

ENGINES = Nursery(
    "setproctitle:getproctitle",
    "megarl.generator.cpu_support:install",
    "sglang.srt.entrypoints.http_server",
    SGLANG_USE_CPU_ENGINE="1",  # SGLang reads it once, at its import
)
WRITER = Path(__file__).with_name("sglang_writer.py")
CONTEXT = 96
VOCABULARY = 500
SIGMOID_ROUTER: dict[str, Any] = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 64,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "rms_norm_eps": 1e-6,
    **SIGMOID_ROUTER, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
        "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 0.7,
    },
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
        "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False,
    },
}  # fmt: skip
SECTIONED: dict[str, Any] = {  # for texts beside images
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
}  # fmt: skip
MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
OWN: dict[str, dict[str, Any]] = {  # keys of config.json, by family
    "gemma3": {
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8, "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "pad_token_id": 0,
    },
    "gpt_oss": GPT_OSS,
    "mistral": {"sliding_window": None},
    "olmo2": {"pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": {
        "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        **SIGMOID_ROUTER, "n_group": 1,  # with these, every rank's experts get tokens
    },
    "qwen3_next": {
        "full_attention_interval": 2, "partial_rotary_factor": 0.25, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "num_hidden_layers": 4,
    },
}  # fmt: skip
OWN["qwen3_5_moe"] = OWN["qwen3_next"] | {
    "rope_parameters": SECTIONED,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
OWN["qwen3_5"] = {key: value for key, value in OWN["qwen3_5_moe"].items() if "expert" not in key}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip


def make_checkpoint(
    folder: Path, seed: int, dtype: torch.dtype, tied: bool, family: str = "llama", **shape: Any
) -> Path:
    """A random model of `family`. Its vocabulary is not a multiple of SGLang's padding (64)."""
    cpu_support.install()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    values = {**common, **OWN.get(family, {}), **shape}
    if family == "qwen3_5_moe":  # published checkpoints also have a vision tower
        values = {"text_config": values, "vision_config": VISION, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **values)
    model = (
        AutoModelForImageTextToText if family == "qwen3_5_moe" else AutoModelForCausalLM
    ).from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    for name, parameter in model.named_parameters():
        # otherwise all ones or zeros, so that a missing write would go unnoticed
        if "norm" in name or name.endswith("bias"):
            parameter.data.uniform_(0.5, 1.5)
        if name.endswith("sinks"):
            parameter.data.uniform_(-1, 2)
    model.to(dtype).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # the name in transformers 5; other checkpoints say num_experts
    if family == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
        (folder / "config.json").write_text(json.dumps(config))
    if family == "qwen3_next":  # transformers 5 leaves it out, and SGLang asks for it
        config["full_attention_interval"] = OWN[family]["full_attention_interval"]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def hf_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    cpu_support.install()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def hf_logprobs(
    model: torch.nn.Module, tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[L - 1, vocabulary]: log-probs of every candidate for tokens 1 to L - 1."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float() / temperature, -1)


@torch.no_grad()
def hf_experts(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[L, layers, experts per token]: the experts that a Qwen3-MoE's routers choose for the tokens,
    in ascending order.
    """
    experts: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    hooks = [
        router.register_forward_hook(lambda _, __, output: experts.append(output[2]))
        for router in routers
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(experts, dim=1).sort(dim=-1)[0]


@torch.no_grad()
def sampled_by(
    models: Sequence[torch.nn.Module], prompt: list[int], completion: Completion, tolerance: float
) -> list[int]:
    """Which of `models` sampled each token.

    The models take over from each other in this order, each with the keys and values so far.

    A model sampled the tokens whose log-probs by it equal the completion's, up to the first that
    differs. Every token must belong to a model.
    """
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    versions = []
    cache = None
    cached = 0  # the number of cached tokens
    for number, model in enumerate(models):
        if len(versions) == len(completion.token_ids):
            break
        logits = (
            model(tokens[:, cached:-1], past_key_values=copy.deepcopy(cache), use_cache=True)
            .logits[0]
            .float()
        )
        logprobs_here = torch.log_softmax(logits, -1).gather(-1, tokens[0, cached + 1 :, None])[
            :, 0
        ]
        position = len(prompt) + len(versions)
        wrong = (
            logprobs_here[position - cached - 1 :]
            - torch.tensor(completion.logprobs[len(versions) :])
        ).abs() > tolerance
        count = wrong.int().argmax().item() if wrong.any() else len(wrong)
        versions += [number] * count
        if count:  # the model that samples the next token computes this one's keys and values
            cache = model(
                tokens[:, cached : position + count - 1], past_key_values=cache, use_cache=True
            ).past_key_values
            cached = position + count - 1
    assert len(versions) == len(completion.token_ids), (
        f"token {len(versions)} is none's, after {Counter(versions)} of each"
    )
    return versions


def hf_difference(
    sequences: list[list[int]], logprobs: list[list[float]], checkpoint: Path
) -> float:
    """The mean over tokens of the difference between an engine's log-probs of `sequences` and HF's
    in float32.

    It is not the largest difference, because of near ties between experts. There rounding sends a
    token to another expert, in the engine, in HF or in neither, and its log-prob moves by 0.1 to
    0.3. That happens to one token in fifty. Wrong weights or wrong routing change most tokens.
    """
    return _mean_difference(
        [torch.tensor(row) for row in logprobs],
        _token_logprobs(sequences, checkpoint, torch.float32),
    )


def hf_rounding(sequences: list[list[int]], checkpoint: Path, dtype: str) -> float:
    """The allowed difference of an engine of `dtype` from HF in float32: 1e-5, or three times the
    effect of rounding on HF itself in that dtype.

    With random weights after one step of training that effect varies with the weights: 0.01 to 0.1
    in bfloat16.
    """
    if dtype == "float32":
        return 1e-5
    rounded, exact = (
        _token_logprobs(sequences, checkpoint, dtype_of_run)
        for dtype_of_run in (getattr(torch, dtype), torch.float32)
    )
    return 3 * _mean_difference(rounded, exact)


def _token_logprobs(
    sequences: list[list[int]], checkpoint: Path, dtype: torch.dtype
) -> list[torch.Tensor]:
    model = hf_model(checkpoint, dtype)
    return [
        hf_logprobs(model, sequence).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        for sequence in sequences
    ]


def _mean_difference(rows: list[torch.Tensor], reference_rows: list[torch.Tensor]) -> float:
    return (torch.cat(rows) - torch.cat(reference_rows)).abs().mean().item()


def free_port() -> int:
    (port,) = free_ports(1)
    return port


@dataclass
class Engine:
    process: psutil.Process
    url: str
    keys: EngineKeys
    tp: int
    log: Path
    routing: RoutingFormat | None = None  # clients ask for the experts chosen
    adapter: bool = False  # clients ask for the policy with the adapter

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, vocab_size: int = VOCABULARY) -> EngineClient:
        """A client; needs a running event loop."""
        return EngineClient(
            self.url,
            self.keys.api,
            self.keys.admin,
            request_s=60,
            routing=self.routing,
            vocab_size=vocab_size,
            adapter=self.adapter,
        )

    def died(self) -> str | None:
        return None if self.process.is_running() else "has ended"

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def start_engine(
    model: Path,
    dtype: str,
    tp: int,
    log: Path,
    ep: int = 1,
    dp_attention: int = 1,
    instead_of: Engine | None = None,
    entry: str = "megarl.generator.server:main",
    classifies: bool = False,
    frozen: bool = False,
    adapter: ServedAdapter | None = None,
    **extra: Any,
) -> Iterator[Engine]:
    """Body of a fixture.

    The engine takes port and keys of `instead_of`, which has ended. An engine that `classifies` is
    frozen.
    """
    port, keys = (
        (instead_of.port, instead_of.keys) if instead_of else (free_port(), EngineKeys.generate())
    )
    settings = EngineSettings(
        str(model), dtype, port, context_length=CONTEXT, max_running_requests=64, tp=tp, ep=ep,
        dp_attention=dp_attention,
        frozen=classifies or frozen, classifies=classifies, adapter=adapter, **_kind(model),
    )  # fmt: skip
    loaders = {} if classifies or frozen else {"custom_weight_loader": [LOADER, "pokes.arm"]}
    (*_, arguments), env = server_command(settings, keys, {**loaders, **extra})
    with open(log, "wb") as output:
        process = ENGINES.start(
            entry, [arguments], {**env, "MEGARL_ENGINE_LAUNCHER": PARENT}, output
        )
    routing = (
        RoutingFormat.of(load_spec(model)) if extra.get("enable_return_routed_experts") else None
    )
    engine = Engine(
        process, f"http://127.0.0.1:{port}", keys, tp, log, routing, adapter is not None
    )
    try:
        yield engine
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = engine.processes()
            process.kill()
            psutil.wait_procs(processes, timeout=10)


def _kind(model: Path) -> dict[str, Any]:
    """The kind of an architecture, also for models of no supported family."""
    values = json.loads((model / "config.json").read_text())
    kind = values["model_type"]
    return {
        "family": "qwen3_5" if kind.startswith("qwen3_5") else kind,
        "text_only": "vision_config" in values,
    }


def write_as_trainer(
    transport: str, model: Path, dtype: str, topology: dict[str, int], tp: int, endpoints: list[str]
) -> list[subprocess.Popen]:
    """Starts one process per trainer rank; each writes its part of `model` and prints its shares.

    See `shares_of`.
    """
    ranks = topology.get("tp", 1) * topology.get("pp", 1) * topology.get("dp", 1)
    job = {
        "transport": transport,
        "model": str(model),
        "dtype": dtype,
        "topology": topology,
        "tp": tp,
    }
    job["endpoints"] = endpoints
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WRITER.parent)}
    return [
        subprocess.Popen(
            [sys.executable, str(WRITER), json.dumps({**job, "rank": rank})],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]


def shares_of(writers: list[subprocess.Popen], timeout_s: float = 60) -> list[bytes]:
    """The shares in their packed form (weight_sync.audit.packed_shares)."""
    deadline = time.monotonic() + timeout_s
    shares = []
    try:
        for writer in writers:
            output, errors = writer.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert writer.returncode == 0, errors.decode()
            shares.append(
                packed_shares({int(rank): tensors for rank, tensors in json.loads(output).items()})
            )
    finally:
        for writer in writers:
            if writer.poll() is None:
                writer.send_signal(signal.SIGKILL)
    return shares
