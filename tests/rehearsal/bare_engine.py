"""Runs an SGLang engine on its path for GPUs, without its compiled kernels and without a GPU, and
compares its log-probs with Transformers'. With --mixture the model is a mixture of experts.

    python tests/rehearsal/bare_engine.py [--mixture] [SERVER_ARGUMENT=VALUE …]

It needs PyTorch's CUDA build, and with Triton 3.6 NumPy before 2.4, for the interpreter. The
numbers are real (cuda_on_cpu.py); the speed means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from megarl.bench.gpu.loop import TOY, TOY_MIXTURE, write_model
from megarl.bench.sync import free_port
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.generator.torch_kernels import TORCH_KERNELS

PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 12, 13, 4, 8, 9, 10]]
TOKENS = 12
LARGEST_DIFFERENCE = 0.02  # of a token's log-prob; bfloat16 beside float32
START_S = 900.0
ANSWER_S = 600.0
FOLDER = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixture", action="store_true")
    parser.add_argument("server_args", nargs="*", metavar="SERVER_ARGUMENT=VALUE")
    options = parser.parse_args()
    texts = dict(argument.split("=", 1) for argument in options.server_args)
    server_args = {name: json.loads(text) for name, text in texts.items()}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        settings = TOY_MIXTURE if options.mixture else TOY
        write_model(model, settings)
        answers = engine_answers(model, settings["model_type"], server_args, Path(folder) / "log")
        largest = 0.0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            entries = answer["meta_info"]["output_token_logprobs"]
            ids = [entry[1] for entry in entries]
            engine_logprobs = torch.tensor([entry[0] for entry in entries])
            differences = (engine_logprobs - logprobs(model, prompt, ids)).abs()
            largest = max(largest, float(differences.max()))
            print(
                f"prompt of {len(prompt)}, {len(ids)} tokens: log-probs differ by "
                f"{differences.mean():.2g}, at most {differences.max():.2g}"
            )
    return int(not largest < LARGEST_DIFFERENCE)


def engine_answers(
    model: Path, family: str, server_args: dict[str, Any], log: Path
) -> list[dict[str, Any]]:
    port = free_port()
    keys = EngineKeys.generate()
    settings = EngineSettings(
        str(model),
        "bfloat16",
        port,
        context_length=64,
        max_running_requests=4,
        kv_cache_tokens=512,
        device="cuda",
        family=family,
        log_level="warning",
    )
    os.environ[TORCH_KERNELS] = "1"
    argv, environment = server_command(
        settings, keys, {"cuda_graph_bs_decode": [4], "skip_server_warmup": True, **server_args}
    )
    path = os.pathsep.join(filter(None, (str(FOLDER / "on_cpu"), os.environ.get("PYTHONPATH"))))
    environment |= {
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    started_s = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while not ready(port, keys):
            time.sleep(1)
            if process.poll() is not None or time.monotonic() - started_s > START_S:
                raise RuntimeError(
                    f"the engine did not start:\n{log.read_text(errors='replace')[-6000:]}"
                )
        print(f"the engine answers after {time.monotonic() - started_s:.0f} s")
        sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
        request = {"input_ids": PROMPTS, "sampling_params": sampling, "return_logprob": True}
        return ask(port, keys, "/generate", request, ANSWER_S)
    except OSError as error:
        raise RuntimeError(f"{error}:\n{log.read_text(errors='replace')[-6000:]}") from error
    finally:
        Path(os.environ.get("ENGINE_LOG", os.devnull)).write_bytes(log.read_bytes())
        process.kill()
        process.wait()


def ready(port: int, keys: EngineKeys) -> bool:
    try:
        ask(port, keys, "/model_info", None, 5.0)
    except OSError:
        return False
    return True


def ask(port: int, keys: EngineKeys, path: str, body: Any, timeout_s: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {keys.api}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def logprobs(model: Path, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """[len(ids)] Transformers' log-probs, in float32."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


if __name__ == "__main__":
    sys.exit(main())
