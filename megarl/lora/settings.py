"""The schema's section on low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.limits import INPUT, Limit, above, between, one_of, setting


@dataclass
class LoraConfig:
    """The policy is trained by adapters, W + alpha / rank * B A, while its own weights W stay as
    they are.
    """

    rank: int | None = setting(
        None,
        "rank of the adapters that megarl sft and megarl train learn in place of the policy's "
        "weights; null or 0: none (docs/lora.md)",
        Limit("at least 0", lambda value: value >= 0, {"0": None}),
    )
    alpha: float = setting(32.0, "what the adapters add is multiplied by alpha / rank", above(0))
    targets: list[str] = field(
        default_factory=lambda: ["all"],
        metadata={
            "meaning": "linear layers that get an adapter, by their names in HF checkpoints "
            "(q_proj, gate_proj; in every layer and expert that has one); all: every linear "
            "layer. The router, the embedding and the output layer never do",
            "limit": Limit("a list of at least one name, or all", bool, {"all": ["all"]}),
        },
    )
    experts: str = setting(
        "own",
        "own: every expert has adapters of its own; shared: all experts of a layer share the "
        "outer factor, which is A of gate and up, and B of down",
        one_of("own", "shared"),
    )
    dropout: float = setting(
        0.0,
        "share of the adapters' inputs that a training step sets to zero; the parallel sizes "
        "also decide which ones",
        between(0, 1, open_high=True),
    )
    init: str | None = setting(
        None,
        "folder of a PEFT adapter that a run begins with; null: A is drawn by `seed`, B is zero. "
        "The reference model of the KL penalty, "
        "unless `roles` has one, is the model without adapters in any case",
        path=INPUT,
    )
    sync: str = setting(
        "auto",
        "how adapters reach the engines. adapter: A and B alone, into the memory that SGLang "
        "serves adapters from; merge: each trainer "
        "rank adds its part of them to its part of the weights in float32, and sends the sum; "
        "auto: adapter if SGLang can serve all of "
        "them, otherwise merge (the run says which, and why)",
        one_of("auto", "adapter", "merge"),
    )
