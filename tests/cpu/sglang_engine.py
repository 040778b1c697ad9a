"""Helpers of the tests that run a real SGLang engine: tiny Llama checkpoints, an engine process, trainer ranks played by processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import psutil
import torch

from megarl.generator import cpu_support
from megarl.generator.client import EngineClient
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.launch.rendezvous import free_ports

WRITER = Path(__file__).with_name("sglang_writer.py")
CONTEXT = 96


def make_checkpoint(folder: Path, seed: int, dtype: torch.dtype, tied: bool) -> Path:
    """A random Llama whose vocabulary (500) is not a multiple of SGLang's padding (64)."""
    cpu_support.install()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones otherwise: a norm that was not written would go unnoticed
            parameter.data.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    return folder


def hf_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    cpu_support.install()
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def hf_logprobs(model: torch.nn.Module, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[L - 1, vocabulary]: log-probs of every candidate for tokens 1 to L - 1."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float() / temperature, -1)


def free_port() -> int:
    (port,) = free_ports(1)
    return port


@dataclass
class Engine:
    process: subprocess.Popen
    url: str
    keys: EngineKeys
    tp: int
    log: Path

    def client(self) -> EngineClient:
        """Inside an event loop."""
        return EngineClient(self.url, self.keys.api, self.keys.admin, request_s=60)

    def died(self) -> str | None:
        return None if self.process.poll() is None else f"exited with {self.process.returncode}"

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]


def start_engine(model: Path, dtype: str, tp: int, log: Path, **extra: Any) -> Iterator[Engine]:
    """Body of a fixture."""
    port, keys = free_port(), EngineKeys.generate()
    settings = EngineSettings(
        model_path=str(model), dtype=dtype, port=port, context_length=CONTEXT, max_running_requests=64, tp=tp
    )
    argv, env = server_command(settings, keys, extra)
    with open(log, "wb") as output:
        process = subprocess.Popen(argv, env={**os.environ, **env}, stdout=output, stderr=subprocess.STDOUT)
    engine = Engine(process, f"http://127.0.0.1:{port}", keys, tp, log)
    try:
        yield engine
    finally:
        children = engine.processes() if process.poll() is None else []
        process.kill()
        process.wait(10)
        psutil.wait_procs(children, timeout=10)


def write_as_trainer(
    transport: str, model: Path, dtype: str, topology: dict[str, int], tp: int, endpoints: list[str]
) -> list[subprocess.Popen]:
    """Starts one process per trainer rank; each writes its part of `model` and prints its shares. See `shares_of`."""
    ranks = topology.get("tp", 1) * topology.get("pp", 1) * topology.get("dp", 1)
    job = {"transport": transport, "model": str(model), "dtype": dtype, "topology": topology, "tp": tp, "endpoints": endpoints}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WRITER.parent)}
    return [
        subprocess.Popen(
            [sys.executable, str(WRITER), json.dumps({**job, "rank": rank})], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]


def shares_of(writers: list[subprocess.Popen], timeout_s: float = 60) -> list[dict[int, dict[str, int]]]:
    deadline = time.monotonic() + timeout_s
    shares = []
    try:
        for writer in writers:
            output, errors = writer.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert writer.returncode == 0, errors.decode()
            shares.append({int(rank): tensors for rank, tensors in json.loads(output).items()})
    finally:
        for writer in writers:
            if writer.poll() is None:
                writer.send_signal(signal.SIGKILL)
    return shares
