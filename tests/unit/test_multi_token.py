"""The multi-token prediction layer in configurations, and the requirements of speculative decoding."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import (
    ClusterConfig,
    GeneratorConfig,
    LoraConfig,
    ModelConfig,
    PlanConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megarl.generator.cpu_support import speculative as kernels
from megarl.models import multi_token
from megarl.models.registry import family, load_spec, logical_tensors
from megarl.plan.checks import check_sizes
from megarl.plan.resolve import find_spec
from megarl.reshard.layout import generator_layout, hf_layout, parameter_count, trainer_layout
from megarl.speculative.plan import (
    Acceptance,
    arguments,
    check_draft_model,
    check_speculative,
    never_trained,
)
from megarl.speculative.settings import SpeculativeConfig
from megarl.trainer.hf_files import check_checkpoint
from megarl.trainer.hf_io import load_hf
from megarl.trainer.microbatch import MicroBatch, MicrobatchPlan, predicted_tokens, predicting

GLM = Path(__file__).parents[2] / "configs/models/glm-4.6"


def config_of(algorithm: str, mtp: str = "keep", **settings: object) -> RunConfig:
    trainer = TrainerConfig(mtp=mtp)
    drafts = SpeculativeConfig(algorithm)
    return RunConfig(
        model=ModelConfig(path=str(GLM)),
        trainer=trainer,
        generator=GeneratorConfig(speculative=drafts),
        **settings,
    )


def drafting(
    algorithm: str, quantization: str | None = None, path: str = "owner/draft"
) -> RunConfig:
    generator = GeneratorConfig(
        quantization=quantization, speculative=SpeculativeConfig(algorithm, path)
    )
    return replace(config_of(algorithm), generator=generator)


def test_mtp_layer_is_loaded_only_with_mtp() -> None:
    without = load_spec(GLM)
    with_layer = load_spec(GLM, mtp=True)
    assert (without.mtp_layers, with_layer.mtp_layers) == (0, 1)
    assert replace(with_layer, mtp_layers=0) == without
    added = {t.name for t in hf_layout(with_layer, "bfloat16").tensors(0)} - {
        t.name for t in hf_layout(without, "bfloat16").tensors(0)
    }
    assert {
        f"model.layers.92.{name}.weight"
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj")
    } <= added
    assert all(name.startswith("model.layers.92.") for name in added)
    assert len(logical_tensors(without)) < len(logical_tensors(with_layer))
    assert parameter_count(with_layer) == 356_785_898_816  # 357B, as published


def test_mtp_layer_is_on_the_last_stage_and_in_drafting_engines() -> None:
    spec = load_spec(GLM, mtp=True)
    pp = 4
    layout = trainer_layout(spec, TrainerTopology(pp=pp), "bfloat16")
    holders = [
        rank
        for rank in range(pp)
        if any(tensor.name.startswith("mtp_layer.") for tensor in layout.tensors(rank))
    ]
    assert holders == [pp - 1]
    for drafts in (False, True):
        names = [
            t.name
            for t in generator_layout(
                replace(spec, mtp_drafts=drafts), GeneratorTopology(tp=8), "bfloat16"
            ).tensors(0)
        ]
        assert ("draft.model.eh_proj.weight" in names) == drafts


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "attention_bias": False,
                "partial_rotary_factor": 1.0,
            },
            "must be ignore for a llama model",
        ),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0; exactly 1"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers = 3; exactly 1"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers = '1'; exactly 1"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers = True; exactly 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
    ],
)
def test_checkpoints_without_such_a_layer_are_refused(
    change: dict[str, object], problem: str
) -> None:
    values = json.loads((GLM / "config.json").read_text()) | change
    with pytest.raises(ConfigError, match=problem):
        load_spec(values, mtp=True)


def test_engines_have_the_layer_if_they_draft_with_it() -> None:
    assert [
        find_spec(config_of(algorithm)).mtp_drafts for algorithm in ("none", "ngram", "nextn")
    ] == [False, False, True]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (config_of("nextn", "ignore"), "needs trainer.mtp to be keep or train"),
        (config_of("eagle"), "path=null: must be set for eagle and eagle3 alone"),
        (
            drafting("eagle", "fp8_block"),
            "must be none, ngram or nextn with generator.quantization=fp8_block",
        ),
        (drafting("eagle", path=f"{GLM}/"), "must be another model than model.path"),
        (
            config_of("ngram", rollout=RolloutConfig(max_tokens=3)),
            "generator.speculative.steps=3: must be less than rollout.max_tokens=3",
        ),
        (
            config_of("ngram", plan=PlanConfig(accept_length=4.5)),
            "plan.accept_length=4.5: must be at most 4",
        ),
        (
            config_of("ngram", rollout=RolloutConfig(top_p=0.9)),
            "must be none with top_p, top_k or min_p of rollout or eval",
        ),
        (config_of("ngram", lora=LoraConfig(rank=4)), "must be none with lora.rank=4"),
        (
            replace(config_of("ngram"), trainer=TrainerConfig(routing_replay=True)),
            "must not be ngram with trainer.routing_replay",
        ),
        (
            replace(
                config_of("ngram"),
                generator=GeneratorConfig(dp_attention=2, speculative=SpeculativeConfig("ngram")),
            ),
            "dp_attention=2",
        ),
    ],
)
def test_settings_that_exclude_drafts_are_refused(config: RunConfig, problem: str) -> None:
    [message] = check_speculative(config, load_spec(GLM))
    assert problem in message


def test_a_draft_model_is_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    of_folder = drafting("eagle", path=str(folder))
    assert ["no such folder" in problem for problem in check_draft_model(of_folder)] == [True]
    folder.mkdir()
    assert ["holds no config.json" in problem for problem in check_draft_model(of_folder)] == [True]
    (folder / "config.json").write_text("{}")
    assert not [
        *check_draft_model(of_folder),
        *check_draft_model(drafting("eagle")),
        *check_draft_model(config_of("ngram")),
    ]


def test_an_export_without_the_layer_is_named_in_one_line(tmp_path: Path) -> None:
    values = json.loads((GLM / "config.json").read_text())
    small = dict.fromkeys(
        (
            "num_hidden_layers",
            "n_routed_experts",
            "num_experts_per_tok",
            "hidden_size",
            "vocab_size",
        ),
        2,
    )
    spec = load_spec(values | small | {"first_k_dense_replace": 1}, mtp=True)
    without = hf_layout(replace(spec, mtp_layers=0), "float32").tensors(0)
    save_file(
        {tensor.name: torch.zeros(tensor.shape) for tensor in without},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ConfigError) as raised:
        check_checkpoint(spec, tmp_path)
    assert [
        f"{tmp_path}: has no layer for multi-token prediction" in problem
        for problem in raised.value.problems
    ] == [True]
    assert "trainer.mtp must be ignore" in str(raised.value)


@pytest.mark.parametrize(
    "repeated",
    [("model.layers.2.embed_tokens.weight", 0), ("model.layers.2.shared_head.head.weight", 1)],
)
def test_copy_that_differs_is_refused_by_the_rank_that_holds_it(
    repeated: tuple[str, int], tmp_path: Path, monkeypatch
) -> None:
    """It is not silently replaced.

    With two stages the first holds the embedding, and the second the output layer.
    """
    name, stage = repeated
    values = json.loads((GLM / "config.json").read_text())
    values |= dict.fromkeys(
        (
            "num_hidden_layers",
            "n_routed_experts",
            "num_experts_per_tok",
            "n_shared_experts",
            "n_group",
            "topk_group",
        ),
        2,
    )
    values |= {
        "hidden_size": 8,
        "intermediate_size": 8,
        "moe_intermediate_size": 8,
        "vocab_size": 11,
        "num_attention_heads": 2,
    }
    values |= {
        "num_key_value_heads": 2,
        "head_dim": 4,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    spec = load_spec(values, mtp=True)
    topology = TrainerTopology(pp=2)
    layout = trainer_layout(spec, topology, "bfloat16")
    tensors = {
        tensor.name: torch.randn(tensor.shape) for tensor in hf_layout(spec, "float32").tensors(0)
    }
    tensors |= {
        copy: tensors[original].clone()
        for copy, original in multi_token.copies(spec, family(spec)).items()
    }
    for changed in (False, True):
        tensors[name][-1, -1] += changed
        save_file(tensors, tmp_path / "model.safetensors")
        for rank in range(2):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            parameters = {
                tensor.name: torch.zeros(tensor.shape, dtype=torch.bfloat16)
                for tensor in layout.tensors(rank)
            }
            refused = pytest.raises(
                ConfigError, match=f"trainer.mtp: must be ignore: .*: {name} differs from "
            )
            with refused if changed and rank == stage else contextlib.nullcontext():
                load_hf(spec, layout, parameters, str(tmp_path))


def test_arguments_of_the_engine() -> None:
    assert arguments(config_of("none")) == {}
    row = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    assert arguments(config_of("nextn")) == row | {"speculative_algorithm": "EAGLE"}
    assert arguments(config_of("ngram"))["speculative_ngram_max_bfs_breadth"] == 1
    assert arguments(drafting("eagle"))["speculative_draft_load_format"] == "auto", (
        "weights of engines may be dummies"
    )
    assert never_trained(config_of("nextn", "train")) == never_trained(config_of("ngram")) == ""
    assert "trainer.mtp=keep" in never_trained(config_of("nextn"))


def test_a_warning_once_where_what_drafts_grows_stale() -> None:
    stale = Acceptance("the layer")
    trained = Acceptance()
    warnings = []
    for version, accepted in enumerate((60, 58, 40, 30), start=1):
        metrics = [acceptance.metrics(version, 90, accepted, 30) for acceptance in (stale, trained)]
        assert metrics[0]["speculative/accept_length"] == pytest.approx(1 + accepted / 30)
        assert (
            "speculative/untrained_versions" in metrics[0],
            "speculative/untrained_versions" in metrics[1],
        ) == (True, False)
        warnings.append(
            [acceptance.warning(version, accepted / 90) for acceptance in (stale, trained)]
        )
    assert [bool(of_stale) for of_stale, _ in warnings] == [False, False, True, False]
    assert not any(of_trained for _, of_trained in warnings)
    assert "engines keep 44% of what is drafted, at first 67%" in warnings[2][0]
    assert stale.metrics(5, 0, 0, 0) == {}
    with pytest.raises(
        RunError, match="weights version 6: engines say that they kept 91 of 90 drafted tokens"
    ):
        trained.metrics(6, 90, 91, 30)


def test_nothing_is_predicted_beyond_the_end_of_a_sequence() -> None:
    scored = np.array([0, 1, 1, 1, 1, 0, 1], bool)  # sequences of 3, 1 and 3 positions
    fields = dict.fromkeys(MicroBatch.__dataclass_fields__)
    fields |= {
        "targets": torch.arange(7),
        "loss_mask": torch.from_numpy(scored),
        "scored": scored,
        "kept": None,
    }
    microbatch = MicroBatch(**fields | {"plan": MicrobatchPlan((0, 1, 2), (0, 3, 4, 7))})
    prediction = predicting(microbatch)
    assert (
        prediction.scored.tolist()
        == prediction.loss_mask.tolist()
        == [True, True, False, False, False, True, False]
    )
    assert prediction.targets[prediction.scored].tolist() == [1, 2, 6]
    assert (
        predicted_tokens(
            [SimpleNamespace(loss_mask=[0, 0, 1, 1]), SimpleNamespace(loss_mask=[0, 1])]
        )
        == 2
    )


def test_a_row_is_kept_as_far_as_it_was_drawn() -> None:
    n = 4
    lengths = torch.tensor([10, 20])
    mask = torch.zeros(2 * n * n, dtype=torch.bool)
    positions = torch.zeros(2 * n, dtype=torch.long)
    places, children, siblings = torch.zeros(3, 2, n, dtype=torch.long)
    empty = torch.empty(0)
    kernels.build_tree_kernel_efficient_cpu(
        empty, empty, lengths, mask, positions, places, children, siblings, 1, n - 1, n, None
    )
    assert positions.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert children.tolist() == [[1, 2, 3, -1]] * 2
    assert (siblings == -1).all()
    assert places.flatten().tolist() == [*range(8)]
    candidates = torch.tensor([[7, 1, 2, 3], [7, 4, 5, 6]])
    drawn = torch.tensor([[1, 2, 9, 8], [4, 5, 6, 7]])
    predicts = torch.zeros(8, dtype=torch.int32)
    accepted = torch.full((2, n), -1, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=counts, candidates=candidates,
        retrive_index=places,
        retrive_next_token=children, retrive_next_sibling=siblings, target_predict=drawn,
    )  # fmt: skip
    assert counts.tolist() == [2, 3]
    assert accepted.tolist() == [[0, 1, 2, -1], [4, 5, 6, 7]]
    assert predicts[accepted[0, :3].long()].tolist() == [1, 2, 9]
    assert predicts[accepted[1].long()].tolist() == [4, 5, 6, 7]


def test_a_branch_is_found_among_siblings() -> None:
    """Token 0 has the children 1 and 3; 2 follows 1."""
    before = torch.tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool
    )
    positions = torch.zeros(4, dtype=torch.long)
    places, children, siblings = torch.zeros(3, 1, 4, dtype=torch.long)
    kernels.reconstruct_indices_from_tree_mask(
        before.flatten(), torch.tensor([5]), positions, places, children, siblings, 1, 4
    )
    assert positions.tolist() == [5, 6, 7, 6]
    assert children.tolist() == [[1, 2, -1, -1]]
    assert siblings.tolist() == [[-1, 3, -1, -1]]


@pytest.mark.parametrize("algorithm", ["ngram", "nextn"])
def test_gated_delta_nets_cannot_draft_on_cpus(algorithm: str) -> None:
    config = replace(config_of(algorithm), cluster=ClusterConfig(gpu="cpu"))
    [problem] = check_speculative(config, load_spec(GLM.parent / "qwen3-next-80b-a3b"))
    assert "must be none for a qwen3_next model on CPUs" in problem


def test_the_norm_of_all_keys_bounds_the_ranks_of_an_engine() -> None:
    spec = replace(load_spec(GLM.parent / "olmo-2-7b"), num_kv_heads=2)
    for tp, refused in ((2, False), (4, True)):
        config = RunConfig(model=ModelConfig(path="m"), generator=GeneratorConfig(tp=tp))
        assert (
            any(
                "at most the model's 2 key-value heads: SGLang" in problem
                for problem in check_sizes(config, spec)
            )
            == refused
        )
