"""Checkpoints that do not fit the model: one message that names every tensor, before anything is
loaded.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.base.geometry import TrainerTopology
from megarl.config.errors import ConfigError
from megarl.models import load_spec
from megarl.models.attention import Attention
from megarl.models.experts import Experts
from megarl.models.latent_attention import MultiHeadLatentAttention
from megarl.models.paired_experts import PairedExperts
from megarl.models.spec import ModelSpec
from megarl.reshard.layout import hf_layout, trainer_layout
from megarl.trainer.hf_files import check_checkpoint, check_config, check_finite, fingerprint
from megarl.trainer.hf_io import _copy_configuration, load_hf

TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"
SPEC = ModelSpec("llama", 2, 16, 24, 4, 2, 4, 11, 64, False, 1e-5, 10000.0)


def load(folder: Path) -> None:
    load_hf(SPEC, trainer_layout(SPEC, TrainerTopology(), "float32"), {}, str(folder))


def test_missing_misshapen_and_quantised_tensors_are_named(tmp_path: Path) -> None:
    tensors = {t.name: torch.zeros(t.shape) for t in hf_layout(SPEC, "float32").tensors(0)}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(12, 16)
    tensors["model.norm.weight"] = torch.zeros(16).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    missing, quantised, misshapen = raised.value.problems
    assert "model.layers.1.mlp.up_proj.weight is missing" in missing
    assert "model.norm.weight is in F8_E4M3; can be read: F32, BF16, F16" in quantised
    assert "lm_head.weight has shape (12, 16), config.json says (11, 16)" in misshapen


@pytest.mark.parametrize("damage", ["cut", "no header", "long header", "index", "not in its file"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    tensors = {t.name: torch.zeros(t.shape) for t in hf_layout(SPEC, "float32").tensors(0)}
    path = tmp_path / "model-1.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.name)}))
    if damage == "not in its file":
        del tensors["model.norm.weight"]
    save_file(tensors, path)
    data = path.read_bytes()
    if damage == "index":
        index.write_text("{}")
    elif damage != "not in its file":
        path.write_bytes(
            {"cut": data[:-1], "no header": b"", "long header": b"\xff" * 7 + data[7:]}[damage]
        )
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    (problem,) = raised.value.problems
    assert {
        "index": f"{index}: is not an index",
        "not in its file": f"{tmp_path}: tensor model.norm.weight is missing in {path.name}",
    }.get(damage, f"{path}: is not a complete safetensors file: ") in problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_told_with_tensor_and_file(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    tensors = {
        t.name: torch.ones(t.shape, dtype=dtype) for t in hf_layout(SPEC, "float32").tensors(0)
    }
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((2,), float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    check_finite(SPEC, tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        check_finite(SPEC, tmp_path)
    problem = (
        f"{tmp_path}/model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds "
        "values that are not finite"
    )
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith(problem)


# no size is a multiple of a block
WIDE = ModelSpec("llama", 2, 192, 300, 4, 2, 48, 11, 64, False, 1e-5, 10000.0)


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in DeepSeek-V3's published form.

    Returns the values that it represents, element by element.
    """
    drawn = torch.Generator().manual_seed(3)
    tensors = {}
    values = {}
    for tensor in hf_layout(WIDE, "float32").tensors(0):
        weight = torch.randn(tensor.shape, generator=drawn)
        if "_proj" in tensor.name:
            codes = weight.to(torch.float8_e4m3fn)
            scales = torch.rand([-(-size // 128) for size in tensor.shape], generator=drawn)
            tensors[tensor.name] = codes
            tensors[tensor.name + "_scale_inv"] = scales
            row, column = (torch.arange(size) // 128 for size in tensor.shape)
            weight = codes.float() * scales[row[:, None], column]
        else:
            tensors[tensor.name] = weight
        values[tensor.name] = weight
    save_file(tensors, folder / "model.safetensors")
    return values


def loaded(
    folder: Path,
    topology: TrainerTopology,
    rank: int,
    dtype: str,
    monkeypatch,
    spec: ModelSpec = WIDE,
) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    layout = trainer_layout(spec, topology, dtype)
    parameters = {
        tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, dtype))
        for tensor in layout.tensors(rank)
    }
    load_hf(spec, layout, parameters, str(folder))
    return parameters


def read_by_every_rank(
    write, topology: TrainerTopology, dtype: str, tmp_path: Path, monkeypatch, spec: ModelSpec
) -> None:
    """Checks that every rank reads the same from `write`'s checkpoint as from the values that this
    represents.
    """
    packed = tmp_path / "packed"
    plain = tmp_path / "plain"
    packed.mkdir()
    plain.mkdir()
    save_file(write(packed), plain / "model.safetensors")
    check_finite(spec, packed)
    for rank in range(topology.world_size):
        from_packed = loaded(packed, topology, rank, dtype, monkeypatch, spec)
        from_plain = loaded(plain, topology, rank, dtype, monkeypatch, spec)
        assert from_packed.keys() == from_plain.keys()
        assert all(torch.equal(from_packed[name], from_plain[name]) for name in from_plain)
        assert any(values.count_nonzero() for values in from_packed.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"tp": 2, "pp": 2}])
def test_fp8_blocks_are_read_dequantised_by_every_rank(
    axes: dict[str, int], dtype: str, tmp_path: Path, monkeypatch
) -> None:
    read_by_every_rank(in_fp8, TrainerTopology(**axes), dtype, tmp_path, monkeypatch, WIDE)


PAIRED = ModelSpec(  # gpt-oss; no size is a multiple of a block
    "gpt_oss", 2, 72, 0, 4, 2, 16, 11, 64, False, 1e-5, 10000.0,
    attention=Attention(qkv_bias=True, output_bias=True, sinks=True),
    experts=PairedExperts(count=4, per_token=2, intermediate_size=40),
)  # fmt: skip


def in_fp4(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in gpt-oss's published form.

    Returns the values that it represents, as computed by Hugging Face.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    drawn = torch.Generator().manual_seed(3)
    tensors = {}
    values = {}
    for tensor in hf_layout(PAIRED, "float32", fused=True).tensors(0):
        if not tensor.transposed:
            tensors[tensor.name] = values[tensor.name] = torch.randn(tensor.shape, generator=drawn)
            continue
        blocks = (*tensor.shape[:-1], -(-tensor.shape[-1] // 32))
        codes = torch.randint(0, 256, (*blocks, 16), generator=drawn, dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks, generator=drawn, dtype=torch.uint8)
        tensors |= {tensor.name + "_blocks": codes, tensor.name + "_scales": scales}
        dequantised = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
        # transposed, as in a checkpoint's files
        values[tensor.name] = dequantised[:, : tensor.shape[-1]].contiguous()
    save_file(tensors, folder / "model.safetensors")
    return values


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp": 2, "ep": 2, "pp": 2}])
def test_mxfp4_is_read_dequantised_by_every_rank(
    axes: dict[str, int], tmp_path: Path, monkeypatch
) -> None:
    read_by_every_rank(in_fp4, TrainerTopology(**axes), "float32", tmp_path, monkeypatch, PAIRED)


def test_mxfp4_without_its_scales_is_refused(tmp_path: Path, monkeypatch) -> None:
    in_fp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for change, message in (
        (
            {name + "_scales": torch.ones(4, 72, 3, dtype=torch.uint8)},
            f"{name}_scales has shape (4, 72, 3), config.json says (4, 72, 2)",
        ),
        (
            {name + "_blocks": tensors[name + "_blocks"].int()},
            f"{name}_blocks is in I32; can be read",
        ),
        ({name + "_scales": torch.full((4, 72, 2), 255, dtype=torch.uint8)}, "not finite"),
    ):
        save_file(tensors | change, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=re.escape(message)):
            loaded(tmp_path, TrainerTopology(), 0, "float32", monkeypatch, PAIRED)
    save_file(
        {key: values for key, values in tensors.items() if key != name + "_scales"},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ConfigError, match=f"{name}_scales is missing"):
        loaded(tmp_path, TrainerTopology(), 0, "float32", monkeypatch, PAIRED)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda tensors, name: tensors.pop(name + "_scale_inv"),
            "is in F8_E4M3, but model.layers.1.mlp.up_proj.weight_scale_inv is missing",
        ),
        (
            lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(2, 2)}),
            "is F32 of shape (2, 2); must be F32 of shape (3, 2)",
        ),
        (
            lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(3, 2).half()}),
            "is F16 of shape (3, 2)",
        ),
        (lambda tensors, name: tensors[name + "_scale_inv"].fill_(float("nan")), "not finite"),
        (
            lambda tensors, name: tensors.update(
                {name: tensors[name].float().fill_(float("nan")).to(torch.float8_e4m3fn)}
            ),
            "not finite",
        ),
    ],
)
def test_fp8_without_its_scales_is_refused(harm, message: str, tmp_path: Path, monkeypatch) -> None:
    in_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    harm(tensors, "model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    for read in (
        lambda: loaded(tmp_path, TrainerTopology(), 0, "float32", monkeypatch),
        lambda: check_finite(WIDE, tmp_path),
    ):
        with pytest.raises(ConfigError) as raised:
            read()
        assert any(
            message in problem and "model.layers.1.mlp.up_proj.weight" in problem
            for problem in raised.value.problems
        )


def test_export_is_not_in_fp8(tmp_path: Path) -> None:
    source = tmp_path / "published"
    folder = tmp_path / "exported"
    source.mkdir()
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "fp8"},
        "torch_dtype": "float16",
    }
    (source / "config.json").write_text(json.dumps(config))
    _copy_configuration(source, folder, "bfloat16", scores=False, mtp=False)
    written = json.loads((folder / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert not {"quantization_config", "torch_dtype"} & written.keys()


@pytest.mark.parametrize(
    "changed", [{"hidden_size": 32}, {"model_type": None}, {"architectures": None}, None]
)
def test_config_that_no_engine_can_read_is_refused(
    changed: dict[str, object] | None, tmp_path: Path
) -> None:
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_config(load_spec(TINY), tmp_path)
    (tmp_path / "config.json").write_text("{" if changed is None else json.dumps(config | changed))
    with pytest.raises(ConfigError) as raised:
        check_config(load_spec(TINY), tmp_path)
    (problem,) = raised.value.problems
    assert problem.startswith(f"{tmp_path}/config.json: ")


def test_fingerprint_depends_on_weights_and_not_on_the_folder(tmp_path: Path) -> None:
    first = tmp_path / "a"
    second = tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        # larger than all samples together
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    before = fingerprint(first)
    assert before == fingerprint(second)
    with open(second / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.truncate()
    assert fingerprint(second) != before
    (first / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 40_000)
    assert fingerprint(first) != before


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither model.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2, "dp": 2}])
def test_export_writes_every_element_once(tied: bool, axes: dict[str, int]) -> None:
    spec = ModelSpec(
        *[
            *(getattr(SPEC, name) for name in list(ModelSpec.__dataclass_fields__)[:9]),
            tied,
            1e-5,
            10000.0,
        ]
    )
    topology = TrainerTopology(**axes)
    layout = trainer_layout(spec, topology, "float32")
    written = {t.name: torch.zeros(t.shape) for t in hf_layout(spec, "float32").tensors(0)}
    for rank in range(topology.world_size):
        for _, piece in layout.owned_pieces(rank):
            written[piece.logical_name][piece.logical.slices()] += 1
    for name, count in written.items():
        assert (count == 1).all(), name


def test_tensors_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    tensors = {
        tensor.name: torch.ones(tensor.file_shape)
        for tensor in hf_layout(SPEC, "float32").tensors(0)
    }
    idle = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.0.mlp.shared_experts.up_proj.weight": torch.ones(0, 16),
    }
    save_file(tensors | idle, tmp_path / "model.safetensors")
    check_checkpoint(SPEC, tmp_path)
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        f"model.layers.{SPEC.num_layers}.mlp.up_proj.weight",
    ):
        save_file(tensors | {name: torch.ones(4)}, tmp_path / "model.safetensors")
        with pytest.raises(
            ConfigError, match=f"the model of config.json has no {name}. Correct config.json"
        ):
            check_checkpoint(SPEC, tmp_path)


DEEPSEEK = ModelSpec(
    "deepseek_v3", 2, 16, 24, 4, 4, 8, 11, 64, False, 1e-5, 10000.0,
    attention=MultiHeadLatentAttention(q_rank=6, kv_rank=5, nope_dim=4, rope_dim=4, v_dim=4),
    experts=Experts(
        count=2, per_token=1, intermediate_size=8, shared_size=8, first_layer=1,
        score_function="sigmoid", router_bias=True,
    ),
)  # fmt: skip


def written(folder: Path, spec: ModelSpec, **further: torch.Tensor) -> Path:
    """A folder with the tensors of `spec`, and `further` by names with __ for dots."""
    tensors = {
        tensor.name: torch.ones(tensor.file_shape)
        for tensor in hf_layout(spec, "float32", fused=True).tensors(0)
    }
    save_file(
        tensors | {name.replace("__", "."): values for name, values in further.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("spec", "name", "values"),
    [
        (SPEC, "model__norm__weight_scale_inv", torch.ones(1)),  # the weight is in float32
        # without its codes
        (
            PAIRED,
            "model__layers__0__mlp__experts__down_proj_scales",
            torch.ones(4, 72, 2, dtype=torch.uint8),
        ),
        (SPEC, "mtp__norm__weight", torch.ones(16)),
        (SPEC, "model__layers__0__self_attn__attention__bias", torch.ones(4)),
        (SPEC, "model__layers__0__self_attn__masked_bias", torch.ones(1)),
        # of other heads
        (SPEC, "model__layers__0__self_attn__rotary_emb__inv_freq", torch.ones(3)),
        (SPEC, "model__visual__patch_embed__bias", torch.ones(4)),
        (SPEC.with_scalar_head(), "lm_head__weight", torch.ones(12, 16)),
        # one more decoder layer
        (DEEPSEEK, "model__layers__2__input_layernorm__weight", torch.ones(16)),
    ],
)
def test_tensor_without_use_is_refused(
    spec: ModelSpec, name: str, values: torch.Tensor, tmp_path: Path
) -> None:
    check_checkpoint(spec, written(tmp_path, spec))
    with pytest.raises(
        ConfigError, match=f"the model of config.json has no {name.replace('__', '.')}"
    ):
        check_checkpoint(spec, written(tmp_path, spec, **{name: values}))


def test_mxfp4_beside_plain_experts_is_refused(tmp_path: Path) -> None:
    in_fp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {name: torch.ones(4, 40, 72)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"the model of config.json has no {name}. Correct"):
        check_checkpoint(PAIRED, tmp_path)


def test_ignored_prediction_layer_is_idle_if_whole(tmp_path: Path) -> None:
    extended = replace(DEEPSEEK, mtp_layers=1)
    layer = "model.layers.2."
    copies = {
        layer + "embed_tokens.weight": torch.ones(11, 16),
        layer + "shared_head.head.weight": torch.ones(11, 16),
    }
    tensors = {
        tensor.name: torch.ones(tensor.file_shape)
        for tensor in hf_layout(extended, "float32").tensors(0)
    } | copies
    weight = layer + "mlp.experts.0.up_proj.weight"
    tensors |= {
        weight: tensors[weight].to(torch.float8_e4m3fn),
        weight + "_scale_inv": torch.ones(1, 1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(DEEPSEEK, tmp_path)
    check_checkpoint(DEEPSEEK.with_scalar_head(), tmp_path, without=("score.weight",))
    del tensors[layer + "eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"has no {layer}"):
        check_checkpoint(DEEPSEEK, tmp_path)


def test_output_layer_must_equal_tied_embeddings(tmp_path: Path) -> None:
    tied = replace(SPEC, tie_word_embeddings=True)
    tensors = {}
    for tensor in hf_layout(tied, "float32").tensors(0):
        tensors[tensor.name] = torch.arange(math.prod(tensor.shape)).view(tensor.file_shape) / 4
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    check_checkpoint(tied, tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        save_file(
            tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].to(dtype)},
            tmp_path / "model.safetensors",
        )
        check_checkpoint(tied, tmp_path)
    save_file(
        tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ConfigError,
        match="tie_word_embeddings = true in config.json, but lm_head.weight has other values",
    ):
        check_checkpoint(tied, tmp_path)


def test_exports_have_all_files_but_weights(tmp_path: Path) -> None:
    source = tmp_path / "published"
    folder = tmp_path / "exported"
    for subfolder in (source / "additional_chat_templates", source / ".git", folder):
        subfolder.mkdir(parents=True)
    config = json.loads((TINY / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    copied = {
        "modeling_own.py",
        "additional_chat_templates/tool_use.jinja",
        "vocab.bpe",
        "qwen.tiktoken",
    }
    for name in (
        *copied,
        "pytorch_model.bin",
        "model.safetensors",
        "model.safetensors.index.json",
        ".git/HEAD",
        "warm_start.json",
    ):
        (source / name).write_text("x")
    _copy_configuration(source, folder, "bfloat16", scores=False, mtp=False)
    assert {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    } == copied | {"config.json"}
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 0
