"""Megatron to SGLang: every trainer layout to every engine by every transport.

After an optimizer step, the trainer exports an HF checkpoint. Every live parameter must equal, bit
for bit, what SGLang itself loads from this checkpoint, and the engine must compute the same
log-probs.

Trainer ranks over gloo (weights_worker.py), engines and weights channels are real. Noise fills the
engine's memory before each update and each load, so that a missing write shows.

Log-probs are of whole sequences, scored one by one, and compared bit for bit. There are three
comparisons. Version 0, which only the trainer has written since the noise, is compared with the
engine's start from the same checkpoint. Version 1 is compared with the engine after its own load of
the export. With `make matrix`, it is also compared with another engine that starts from an export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from multi_token_checkpoint import NAMES, take_last_layer
from sglang_engine import free_port, hf_difference, hf_rounding, make_checkpoint
from weights_rig import (
    SEQUENCES,
    TRANSPORTS,
    Generator,
    OneAtATime,
    Parameters,
    Result,
    Trainers,
    names,
    open_generator,
    receive,
    unequal,
)
from weights_worker import Job, Sync

from megarl.base.geometry import DP_ATTENTION_FAMILIES
from megarl.config.schema import GeneratorConfig, RunConfig
from megarl.messaging.link import Hub, RunKey
from megarl.speculative.plan import arguments
from megarl.speculative.settings import SpeculativeConfig

OF_EXPERTS = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
)
DENSE = ("gemma3", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_5")
# → tied embeddings
FAMILIES = {family: family in ("gemma3", "qwen2", "qwen3_5") for family in (*DENSE, *OF_EXPERTS)}
DTYPES = ("float32", "bfloat16")
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},  # the models have 2 key-value heads (multi-head latent attention has none)
    "PP2": {"pp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "VPP2": {"pp": 2, "vpp": 2},
    "DP2-zero0": {"dp": 2, "zero": 0},
    "DP2-zero1": {"dp": 2, "zero": 1},
    "TP2xDP2-zero3": {"tp": 2, "dp": 2, "zero": 3},
    "EP2": {"dp": 2, "ep": 2},
    "TP2xEP2": {"tp": 2, "ep": 2},
}
FRESH = "fresh"  # another engine that starts with the last export
EXPERT_LAYOUTS = ("EP2", "TP2xEP2")


@dataclass(frozen=True)
class Setting:
    """Of one engine."""

    family: str
    dtype: str
    tp: int
    ep: int = 1
    dp_attention: int = 1
    drafts: bool = False  # drafts with its multi-token prediction layer, which the trainer trains

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-{self.name}"

    @property
    def name(self) -> str:
        sizes = {"TP": self.tp, "EP": self.ep, "DPA": self.dp_attention}
        return (
            "x".join(f"{name}{size}" for name, size in sizes.items() if name == "TP" or size > 1)
            + "-drafting" * self.drafts
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of SGLang."""
        drafts = (
            GeneratorConfig(speculative=SpeculativeConfig(**SPECULATIVE))
            if self.drafts
            else GeneratorConfig()
        )
        return arguments(RunConfig(generator=drafts))

    @property
    def layouts(self) -> list[str]:
        return [name for name in LAYOUTS if self.family in OF_EXPERTS or name not in EXPERT_LAYOUTS]

    def trainer(self, layout: str) -> dict[str, Any]:
        """The trainer's sizes. Experts with tensor parallelism need sequence parallelism."""
        sizes = LAYOUTS[layout]
        overrides = {"mtp": "train"} if self.drafts else {}
        return {
            **sizes,
            **overrides,
            "sequence_parallel": self.family in OF_EXPERTS and sizes.get("tp", 1) > 1,
        }


SETTINGS = [
    Setting(family, dtype, tp, ep)
    for family in FAMILIES
    for dtype in DTYPES
    for tp, ep in ((1, 1), (2, 1), (2, 2))
    if ep == 1 or family in OF_EXPERTS
]
SETTINGS += [
    Setting(family, "float32", *sizes)
    for family in DP_ATTENTION_FAMILIES
    for sizes in ((2, 1, 2), (2, 2, 2))
]
SETTINGS += [Setting(family, "float32", 2, ep, drafts=True) for family in NAMES for ep in (1, 2)]
SETTINGS += [Setting(family, "bfloat16", 1, drafts=True) for family in NAMES]
SPECULATIVE = {"algorithm": "nextn", "steps": 2}
# tests that are not marked `long`: each kind of engine, and trainers that cut on different axes
SAMPLE = {
    Setting("llama", "float32", 1): ("TP2xPP2", "TP4"),
    Setting("qwen2", "bfloat16", 2): ("VPP2", "TP2xDP2-zero3"),
    Setting("qwen3_moe", "float32", 2, 2): ("EP2", "TP2xEP2"),
    Setting("deepseek_v3", "float32", 2, 1, 2): ("DP2-zero0",),
}


def marks(setting: Setting, layout: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.matrix] + [pytest.mark.sample] * (layout in SAMPLE.get(setting, ()))


CASES = [
    pytest.param(setting, layout, marks=marks(setting, layout), id=f"{setting}-from-{layout}")
    for setting in SETTINGS
    for layout in (*setting.layouts, FRESH)
]


@dataclass
class Synced:
    """One engine of the matrix, and the results so far."""

    setting: Setting
    checkpoint: Path  # it started with
    generator: Generator
    started_with: Parameters
    started_logprobs: list[list[float]]
    # the newest export, and the results of its update
    last: tuple[Path, Parameters, list[list[float]]] | None = None


def engine_of(
    setting: Setting, checkpoint: Path, folder: Path
) -> contextlib.AbstractContextManager[Generator]:
    return open_generator(
        checkpoint,
        setting.dtype,
        tp=setting.tp,
        ep=setting.ep,
        folder=folder,
        dp_attention=setting.dp_attention,
        **setting.arguments,
    )


@contextlib.contextmanager
def open_synced(setting: Setting, folder: Path, key_file: Path) -> Iterator[Synced]:
    folder = folder / str(setting)
    dtype = getattr(torch, setting.dtype)
    model: dict[str, Any] = {
        "seed": 1,
        "dtype": dtype,
        "tied": FAMILIES[setting.family],
        "family": setting.family,
    }
    if setting.drafts:
        kinds = (
            {"layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]}
            if setting.family == "qwen3_next"
            else {}
        )
        make_checkpoint(folder / "whole", **model, num_hidden_layers=5, **kinds)
        checkpoint = take_last_layer(setting.family, folder)
    else:
        checkpoint = make_checkpoint(folder / "model", **model, num_hidden_layers=4)
    with engine_of(setting, checkpoint, folder) as generator:
        logprobs = generator.score(SEQUENCES)
        generator.map_memory(key_file)
        yield Synced(setting, checkpoint, generator, generator.memory(), logprobs)


@pytest.fixture(scope="module")
def engines(trainers, key_file, tmp_path_factory) -> Iterator[OneAtATime[Setting, Synced]]:
    """Started after `trainers`, so that all start together."""
    folder = tmp_path_factory.mktemp("engines")
    with contextlib.closing(
        OneAtATime(lambda setting: open_synced(setting, folder, key_file))
    ) as engines:
        yield engines


@pytest.mark.parametrize("setting, layout", CASES)
def test_engine_is_as_if_it_had_loaded_the_export(
    setting, layout, engines, trainers, key_file, tmp_path, record_property
):
    record_property("matrix", (str(setting), layout, () if layout == FRESH else TRANSPORTS))
    synced = engines.of(setting)
    if layout == FRESH:
        compare_with_fresh(synced, key_file, tmp_path)
    else:
        compare(synced, *updated(synced, layout, trainers, key_file, tmp_path))


def updated(
    synced: Synced, layout: str, trainers: Trainers, key_file: Path, folder: Path
) -> tuple[Job, list[Result]]:
    """Version 0 by one transport, an optimizer step, then version 1 by each transport in turn."""
    turn = synced.setting.layouts.index(layout)
    kinds = [(0, TRANSPORTS[turn % len(TRANSPORTS)]), *((1, kind) for kind in TRANSPORTS)]
    with contextlib.ExitStack() as stack:
        hubs = [
            stack.enter_context(contextlib.closing(Hub("generator.0", RunKey.load(key_file))))
            for _ in kinds
        ]
        job = Job(
            model=str(synced.checkpoint),
            dtype=synced.setting.dtype,
            trainer=synced.setting.trainer(layout),
            tp=synced.setting.tp,
            ep=synced.setting.ep,
            dp_attention=synced.setting.dp_attention,
            speculative=SPECULATIVE if synced.setting.drafts else {},
            syncs=[Sync(version, kind, hub.address) for (version, kind), hub in zip(kinds, hubs)],
            key_file=str(key_file),
            port=free_port(),
            folder=str(folder),
        )
        stack.enter_context(trainers.kept())
        trainers.begin(job)
        return job, [
            receive(synced.generator, job, sync, hub) for sync, hub in zip(job.syncs, hubs)
        ]


def compare(synced: Synced, job: Job, results: list[Result]) -> None:
    generator = synced.generator
    initial, *after = results
    generator.scramble()
    noise = generator.memory()
    generator.load(job.export)
    loaded = generator.memory()
    logprobs = generator.score(SEQUENCES)
    assert unequal(noise, loaded) == names(loaded)
    # only another rank has this bias (gpt-oss)
    zeros = [(rank, name) for rank, name in names(loaded) if not loaded[rank][name].any()]
    trained = [
        loaded_name
        for loaded_name in names(loaded)
        if not loaded_name[1].endswith("e_score_correction_bias") and loaded_name not in zeros
    ]
    assert unequal(loaded, synced.started_with) == trained  # the step changed every parameter

    assert unequal(initial[0], synced.started_with) == []
    assert initial[1] == synced.started_logprobs
    for sync, (parameters, scored) in zip(job.syncs[1:], after):
        assert unequal(parameters, loaded) == [], sync.transport
        assert scored == logprobs, sync.transport
    rounding = hf_rounding(SEQUENCES, job.export, job.dtype)
    assert (
        hf_difference(SEQUENCES, logprobs, job.export)
        < rounding
        < hf_difference(SEQUENCES, logprobs, synced.checkpoint)
    )
    synced.last = (job.export, *after[-1])


def compare_with_fresh(synced: Synced, key_file: Path, folder: Path) -> None:
    """Compares with an engine that starts from the previous layout's export."""
    assert synced.last is not None, "no case before this one has passed"
    setting = synced.setting
    export, parameters, logprobs = synced.last
    with engine_of(setting, export, folder) as fresh:
        assert fresh.score(SEQUENCES) == logprobs
        fresh.map_memory(key_file)
        assert unequal(fresh.memory(), parameters) == []
