"""The largest model that trains on one GPU, which both sides share: `python
tests/tools/one_card.py` prints a table of docs/gpu.md.

By `megarl plan`, for configs/one_gpu.yaml with recomputation, microbatches of one longest response,
and 32 requests at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.estimate.estimate import check_longest, estimate
from megarl.estimate.hardware import GIB
from megarl.plan.checks import refused_by_train
from megarl.plan.resolve import resolve
from megarl.reshard.layout import parameter_count

CONFIGS = Path(__file__).parents[2] / "configs"
CARDS = {"RTX4090": 24, "L40S": 48, "H100": 80, "H200": 141}  # cluster.gpu -> GB
MODELS = {  # folder in configs/models -> name, in the order of their sizes
    "qwen2.5-0.5b": "Qwen2.5 0.5B",
    "qwen2.5-1.5b": "Qwen2.5 1.5B",
    "qwen2.5-3b": "Qwen2.5 3B",
    "mistral-7b-v0.3": "Mistral 7B",
    "qwen3-8b": "Qwen3 8B",
    "phi-4": "Phi-4 15B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B",
    "llama-3.1-70b": "Llama 3.1 70B",
}
WAYS = {
    "all weights": [],
    "all weights, optimizer on the host": ["trainer.optimizer.offload=true"],
    "LoRA, rank 32": ["lora.rank=32"],
}
TOKENS = (1024, 4096)  # rollout.max_tokens
PROMPT = 256


def main() -> None:
    print(*table(), sep="\n")


def table() -> Iterator[str]:
    """The rows of the table, in Markdown."""
    columns = [f"{way}, {tokens // 1024}k" for way in WAYS for tokens in TOKENS]
    yield f"| one GPU of | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for gpu, gigabytes in CARDS.items():
        cells = [
            largest(gpu, tokens, overrides) for overrides in WAYS.values() for tokens in TOKENS
        ]
        yield f"| {gigabytes} GB (`{gpu}`) | {' | '.join(cells)} |"


def largest(gpu: str, tokens: int, overrides: list[str]) -> str:
    """The largest model that fits, and the GiB that both sides take; a dash if none fits."""
    cell = "–"
    for folder, name in MODELS.items():
        used_gib = gib(gpu, folder, tokens, overrides)
        if used_gib is not None:
            cell = f"{name}, {used_gib:.0f}"
    return cell


def gib(gpu: str, folder: str, tokens: int, overrides: list[str]) -> float | None:
    """The GiB of both sides, or None if they do not fit."""
    sizes = [
        f"cluster.gpu={gpu}",
        f"model.spec={CONFIGS / 'models' / folder / 'config.json'}",
        f"rollout.max_tokens={tokens}",
    ]
    sizes += [
        f"trainer.max_tokens_per_microbatch={tokens + PROMPT}",
        "generator.max_concurrency=32",
        f"plan.prompt_tokens={PROMPT}",
    ]
    try:
        plan = resolve(load_config(CONFIGS / "one_gpu.yaml", [*sizes, *overrides]), "plan")
        check_longest(plan.config, plan.spec)
        memory = estimate(plan.config, plan.spec)
    except ConfigError:
        return None
    return (
        None
        if memory.overfull or refused_by_train(plan.config, plan.spec)
        else memory.fullest.gpu_total / GIB
    )


def parameters(folder: str) -> int:
    """The parameters of a model of MODELS."""
    plan = resolve(
        load_config(
            CONFIGS / "one_gpu.yaml", [f"model.spec={CONFIGS / 'models' / folder / 'config.json'}"]
        ),
        "plan",
    )
    return parameter_count(plan.spec)


if __name__ == "__main__":
    main()
