"""An independent reference for the reshard tests: the tensors of each side, by plain slicing of the
full HF tensors.

It uses no boxes, pieces or layouts. It lists each family's tensors by name, independently of
`megarl.models`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import ModelSpec
from megarl.models.parameters import padded_vocab_size

HF = dict[str, torch.Tensor]
HYBRID = ("qwen3_next", "qwen3_5")


def expert_names(spec: ModelSpec, layer: int, expert: int) -> tuple[str, str, str]:
    """The names of gate, up and down."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    names = ("gate_proj", "up_proj", "down_proj")
    if spec.family == "mixtral":
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
        names = ("w1", "w3", "w2")
    gate, up, down = names
    return f"{prefix}{gate}.weight", f"{prefix}{up}.weight", f"{prefix}{down}.weight"


def router_name(spec: ModelSpec, layer: int) -> str:
    modules = {"gpt_oss": "mlp.router", "mixtral": "block_sparse_moe.gate"}
    return f"model.layers.{layer}.{modules.get(spec.family, 'mlp.gate')}.weight"


def layer_norms(spec: ModelSpec) -> list[str]:
    names = {
        "olmo2": ("post_attention", "post_feedforward"),
        "gemma3": ("input", "pre_feedforward", "post_attention", "post_feedforward"),
    }
    return [
        f"{name}_layernorm.weight" for name in names.get(spec.family, ("input", "post_attention"))
    ]


def shared_module(spec: ModelSpec) -> str:
    return "mlp.shared_expert" if spec.family in HYBRID else "mlp.shared_experts"


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of a gated delta net's linear layers."""
    keys = spec.linear_attention.key_heads * spec.linear_attention.key_dim
    values = spec.linear_attention.value_heads * spec.linear_attention.value_dim
    heads = spec.linear_attention.value_heads
    rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    if spec.family == "qwen3_5":
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return {
        **{f"in_proj_{kind}.weight": (count, spec.hidden_size) for kind, count in rows.items()},
        "conv1d.weight": (2 * keys + values, 1, spec.linear_attention.conv_width),
        "A_log": (spec.linear_attention.value_heads,),
        "dt_bias": (spec.linear_attention.value_heads,),
        "norm.weight": (spec.linear_attention.value_dim,),
        "out_proj.weight": (spec.hidden_size, values),
    }


def projections(spec: ModelSpec, hf: HF, a: str) -> list[torch.Tensor]:
    """The queries, keys, values, output gates, betas and alphas of all heads."""
    keys = spec.linear_attention.key_heads * spec.linear_attention.key_dim
    values = spec.linear_attention.value_heads * spec.linear_attention.value_dim
    if spec.family == "qwen3_5":
        qkv, z, beta, alpha = (hf[f"{a}in_proj_{kind}.weight"] for kind in ("qkv", "z", "b", "a"))
        return [*qkv.split([keys, keys, values]), z, beta, alpha]
    value_heads = (
        spec.linear_attention.value_heads // spec.linear_attention.key_heads
    )  # of one key head
    key = spec.linear_attention.key_dim
    value = value_heads * spec.linear_attention.value_dim
    parts = by_kind(spec, hf[a + "in_proj_qkvz.weight"], (key, key, value, value))
    return parts + by_kind(spec, hf[a + "in_proj_ba.weight"], (value_heads, value_heads))


def by_kind(spec: ModelSpec, fused: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Splits a tensor by kind.

    For each key head it has `sizes` rows of each kind; a part has one kind's rows of all heads.
    """
    return [
        part.flatten(0, 1)
        for part in fused.unflatten(0, (spec.linear_attention.key_heads, -1)).split(sizes, dim=1)
    ]


def convolved(spec: ModelSpec, hf: HF, a: str) -> tuple[torch.Tensor, ...]:
    """The convolution's channels of queries, keys and values."""
    keys = spec.linear_attention.key_heads * spec.linear_attention.key_dim
    values = spec.linear_attention.value_heads * spec.linear_attention.value_dim
    return hf[a + "conv1d.weight"].split([keys, keys, values])


def is_sparse(spec: ModelSpec, layer: int) -> bool:
    return layer >= spec.dense_layers


def mlp_modules(spec: ModelSpec, layer: int) -> list[str]:
    """The MLPs that compute every token: a dense layer's, or the shared experts."""
    if not is_sparse(spec, layer):
        return ["mlp"]
    return [shared_module(spec)] if spec.experts.shared_size else []


# The multi-token prediction layer: the names of the tensors outside its decoder layer, in
# checkpoints, in Megatron and in SGLang.
BESIDE = {
    "deepseek_v3": "enorm hnorm eh_proj shared_head.norm",
    "glm4_moe": "enorm hnorm eh_proj shared_head.norm",
    "qwen3_next": "pre_fc_norm_embedding pre_fc_norm_hidden fc norm",
}
MEGATRON_BESIDE = "enorm hnorm eh_proj final_layernorm"


def predicting(spec: ModelSpec) -> tuple[str, str]:
    """The prefixes of its tensors' names: of its own tensors, and of the decoder layer's."""
    layer = f"model.layers.{spec.num_layers}."
    return ("mtp.", "mtp.layers.0.") if spec.family == "qwen3_next" else (layer, layer)


def decoder_layer_alone(spec: ModelSpec, hf: HF) -> tuple[ModelSpec, HF]:
    """A model with only the decoder layer, and its tensors."""
    one = spec.last_layer()
    _, layer = predicting(spec)
    ends = {name: values for name, values in hf.items() if ".layers." not in name}
    return one, {
        name.replace(layer, "model.layers.0."): values
        for name, values in hf.items()
        if name.startswith(layer)
    } | ends


def full_tensors(spec: ModelSpec, dtype: torch.dtype) -> HF:
    """HF names → full tensors. Every element differs from its neighbours."""
    if spec.mtp_layers:
        prefix, layer = predicting(spec)
        last = f"model.layers.{spec.num_layers}."
        one_layer_more = replace(
            spec, num_layers=spec.num_layers + 1, mtp_layers=0, mtp_drafts=False
        )
        tensors = full_tensors(one_layer_more, dtype)
        hidden = spec.hidden_size
        generator = torch.Generator().manual_seed(1)
        for suffix, shape in zip(
            BESIDE[spec.family].split(), ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))
        ):
            tensors[f"{prefix}{suffix}.weight"] = torch.randn(shape, generator=generator).to(dtype)
        return {name.replace(last, layer): values for name, values in tensors.items()}
    hidden = spec.hidden_size
    heads = spec.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }

    def mlp(prefix: str, rows: int) -> None:
        shapes.update(
            {f"{prefix}gate_proj.weight": (rows, hidden), f"{prefix}up_proj.weight": (rows, hidden)}
        )
        shapes[f"{prefix}down_proj.weight"] = (hidden, rows)

    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        shapes.update({p + name: (hidden,) for name in layer_norms(spec)})
        if i in spec.linear_layers:
            shapes.update(
                {f"{p}linear_attn.{name}": shape for name, shape in linear_shapes(spec).items()}
            )
        elif spec.family == "deepseek_v3":
            shapes[a + "q_a_proj.weight"] = (spec.attention.q_rank, hidden)
            shapes[a + "q_a_layernorm.weight"] = (spec.attention.q_rank,)
            shapes[a + "q_b_proj.weight"] = (
                heads * (spec.attention.nope_dim + spec.attention.rope_dim),
                spec.attention.q_rank,
            )
            shapes[a + "kv_a_proj_with_mqa.weight"] = (
                spec.attention.kv_rank + spec.attention.rope_dim,
                hidden,
            )
            shapes[a + "kv_a_layernorm.weight"] = (spec.attention.kv_rank,)
            shapes[a + "kv_b_proj.weight"] = (
                heads * (spec.attention.nope_dim + spec.attention.v_dim),
                spec.attention.kv_rank,
            )
            shapes[a + "o_proj.weight"] = (hidden, heads * spec.attention.v_dim)
        else:
            rows = {
                "q": heads * spec.head_dim,
                "k": spec.num_kv_heads * spec.head_dim,
                "v": spec.num_kv_heads * spec.head_dim,
            }
            for x, size in rows.items():
                shapes[f"{a}{x}_proj.weight"] = (
                    size * (2 if x == "q" and spec.attention.gated else 1),
                    hidden,
                )
                if spec.attention.qkv_bias:
                    shapes[f"{a}{x}_proj.bias"] = (size,)
            shapes[a + "o_proj.weight"] = (hidden, rows["q"])
            if spec.family == "gpt_oss":
                shapes[a + "o_proj.bias"] = (hidden,)
                shapes[a + "sinks"] = (heads,)
            if spec.attention.qk_norm:
                shapes.update(
                    {
                        f"{a}{x}_norm.weight": (
                            rows[x] if spec.family == "olmo2" else spec.head_dim,
                        )
                        for x in "qk"
                    }
                )
        if not is_sparse(spec, i):
            mlp(p + "mlp.", spec.intermediate_size)
            continue
        shapes[router_name(spec, i)] = (spec.experts.count, hidden)
        if spec.experts.router_bias:
            shapes[p + "mlp.gate.e_score_correction_bias"] = (spec.experts.count,)
        if spec.experts.shared_size:
            mlp(f"{p}{shared_module(spec)}.", spec.experts.shared_size)
        if spec.experts and spec.experts.shared_gate:
            shapes[p + "mlp.shared_expert_gate.weight"] = (1, hidden)
        if spec.family == "gpt_oss":
            shapes[p + "mlp.router.bias"] = (spec.experts.count,)
            size = spec.experts.intermediate_size
            for e in range(spec.experts.count):
                x = f"{p}mlp.experts.{e}."
                shapes[x + "gate_up_proj"] = (2 * size, hidden)
                shapes[x + "gate_up_proj_bias"] = (2 * size,)
                shapes[x + "down_proj"] = (hidden, size)
                shapes[x + "down_proj_bias"] = (hidden,)
            continue
        for e in range(spec.experts.count):
            for name, wide in zip(expert_names(spec, i, e), (True, True, False)):
                shape = (spec.experts.intermediate_size, hidden)
                shapes[name] = shape if wide else shape[::-1]
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def in_files(spec: ModelSpec, hf: HF) -> HF:
    """The tensors in the form of a checkpoint's files."""
    if spec.family == "gpt_oss":
        return stacked_experts(spec, hf)
    if spec.family == "qwen3_5":
        files = gates_above(spec, hf) if spec.experts and spec.experts.stacked else hf
        return {
            name.replace("model.", "model.language_model.") if spec.vision_tower else name: values
            for name, values in files.items()
        }
    if spec.family != "phi3":
        return hf
    files = dict(hf)
    fused = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    for i in range(spec.num_layers):
        for name, parts in fused.items():
            module = f"model.layers.{i}.{name.partition('.')[0]}."
            files[f"model.layers.{i}.{name}.weight"] = torch.cat(
                [files.pop(f"{module}{part}.weight") for part in parts]
            )
    return files


def stacked_experts(spec: ModelSpec, hf: HF) -> HF:
    """Stacks the experts. (Only reading and writing of files transposes them.)"""
    files = dict(hf)
    for i in range(spec.num_layers):
        module = f"model.layers.{i}.mlp.experts."
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            files[module + name] = torch.stack(
                [files.pop(f"{module}{e}.{name}") for e in range(spec.experts.count)]
            )
    return files


def gates_above(spec: ModelSpec, hf: HF) -> HF:
    """The tensors with a layer's experts in one tensor for gate and up, and one for down."""
    files = dict(hf)
    for i in range(spec.num_layers):
        gates_and_ups = []
        downs = []
        for e in range(spec.experts.count):
            gate, up, down = (files.pop(name) for name in expert_names(spec, i, e))
            gates_and_ups.append(torch.cat([gate, up]))
            downs.append(down)
        files[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.stack(gates_and_ups)
        files[f"model.layers.{i}.mlp.experts.down_proj"] = torch.stack(downs)
    return files


def pad(tensor: torch.Tensor, size: int, dim: int, value: float = 0.0) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, torch.full(shape, value, dtype=tensor.dtype)], dim)


def layers_of_stage(spec: ModelSpec, t: TrainerTopology, stage: int) -> list[int]:
    """In Megatron's order: first every stage's first chunk, then every stage's second, ….

    The sizes of first and last stage may be set.
    """
    set_sizes = {0: t.first_stage_layers}
    set_sizes.setdefault(t.pp - 1, t.last_stage_layers)
    set_sizes = {s: size for s, size in set_sizes.items() if size is not None}
    unset_layers = spec.num_layers - sum(set_sizes.values())
    even = unset_layers // max(1, t.pp - len(set_sizes))
    sizes = [set_sizes.get(s, even) for s in range(t.pp)]
    result = []
    layer = 0
    for _ in range(t.vpp):
        for s in range(t.pp):
            if s == stage:
                result += range(layer, layer + sizes[s] // t.vpp)
            layer += sizes[s] // t.vpp
    return result


def megatron(
    spec: ModelSpec, hf: HF, t: TrainerTopology, rank: int, fill: float, names: str = "local"
) -> HF:
    """One rank of a trainer: with zero=3, its rows of what data-parallel ranks share."""
    local = megatron_replica(spec, hf, t, rank, fill, names)
    if t.zero < 3:
        return local
    within = rank % (t.tp * t.cp * t.dp)
    sharded = {}
    for name, values in local.items():
        count = t.dp * t.cp
        index = within // t.tp
        if ".experts." in name:
            count = t.tp * t.cp * t.dp // (t.ep * t.etp)
            index = within // (t.ep * t.etp)
        if name.endswith("router.expert_bias"):
            count = 1
            index = 0
        rows = math.ceil(len(values) / count)
        sharded[name] = values[index * rows : (index + 1) * rows].clone()
    return sharded


def megatron_replica(
    spec: ModelSpec, hf: HF, t: TrainerTopology, rank: int, fill: float, names: str = "local"
) -> HF:
    """One rank of a trainer whose data-parallel ranks have the same.

    Vocabulary padding holds `fill`. The order of ranks is tp, cp, dp, pp; for experts etp, ep,
    their replicas, pp.
    """
    if spec.mtp_layers:
        local = megatron_replica(
            replace(spec, mtp_layers=0, mtp_drafts=False), hf, t, rank, fill, names
        )
        stage_ranks = t.tp * t.cp * t.dp
        if rank // stage_ranks < t.pp - 1:
            return local
        one_stage = replace(t, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
        one_layer, layer_hf = decoder_layer_alone(spec, hf)
        layer = megatron_replica(one_layer, layer_hf, one_stage, rank % stage_ranks, fill, names)
        for name, values in layer.items():
            if ".layers." in name:
                local[name.replace("decoder.layers.0.", "mtp_layer.mtp_model_layer.")] = values
        for hf_name, megatron_name in zip(BESIDE[spec.family].split(), MEGATRON_BESIDE.split()):
            values = hf[f"{predicting(spec)[0]}{hf_name}.weight"]
            if megatron_name == "eh_proj":
                values = values.chunk(t.tp)[rank % t.tp]
            local[f"mtp_layer.{megatron_name}.weight"] = values.clone()
        return local
    stage, within = divmod(rank, t.tp * t.cp * t.dp)
    tp_rank = within % t.tp
    etp_rank = within % t.etp
    ep_rank = within // t.etp % t.ep
    te = names == "te"

    def rows(tensor: torch.Tensor, count: int = t.tp, index: int = tp_rank) -> torch.Tensor:
        return tensor.chunk(count, 0)[index].clone()

    def columns(tensor: torch.Tensor, count: int = t.tp, index: int = tp_rank) -> torch.Tensor:
        return tensor.chunk(count, 1)[index].clone()

    vocab = padded_vocab_size(spec.vocab_size, t.tp)
    head = hf["model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]
    local = {}
    if stage == 0:
        local["embedding.word_embeddings.weight"] = rows(
            pad(hf["model.embed_tokens.weight"], vocab, 0, fill)
        )
    if stage == t.pp - 1:
        local["decoder.final_layernorm.weight"] = hf["model.norm.weight"].clone()
        if not spec.tie_word_embeddings or t.pp > 1:
            local["output_layer.weight"] = rows(pad(head, vocab, 0, fill))
    for i in layers_of_stage(spec, t, stage):
        p = f"model.layers.{i}."
        m = f"decoder.layers.{i}."
        a = p + "self_attn."
        s = m + "self_attention."
        linear = i in spec.linear_layers
        if linear:
            a = p + "linear_attn."
            local[s + "in_proj.weight"] = torch.cat(
                [rows(part) for part in projections(spec, hf, a)]
            )
            local[s + "conv1d.weight"] = torch.cat([rows(part) for part in convolved(spec, hf, a)])
            for name in ("A_log", "dt_bias"):
                local[s + name] = rows(hf[a + name])
            local[s + "out_norm.weight"] = hf[a + "norm.weight"].clone()
            local[s + "out_proj.weight"] = columns(hf[a + "out_proj.weight"])
        elif spec.family == "deepseek_v3":
            for x, down, norm, up in (
                ("q", "q_a_proj", "q_a_layernorm", "q_b_proj"),
                ("kv", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
            ):
                full = hf[f"{a}{down}.weight"]
                local[f"{s}linear_{x}_down_proj.weight"] = full.clone() if te else rows(full)
                norm_name = (
                    f"linear_{x}_up_proj.layer_norm_weight" if te else f"{x}_layernorm.weight"
                )
                local[s + norm_name] = hf[f"{a}{norm}.weight"].clone()
                local[f"{s}linear_{x}_up_proj.weight"] = rows(hf[f"{a}{up}.weight"])
        else:
            for suffix in ("weight", "bias") if spec.attention.qkv_bias else ("weight",):
                q, k, v = (
                    hf[f"{a}{x}_proj.{suffix}"].unflatten(0, (spec.num_kv_heads, -1)) for x in "qkv"
                )
                if spec.attention.gated:  # for each head its queries, then their gate
                    heads = q.unflatten(1, (-1, 2, spec.head_dim))
                    q = torch.cat([heads[:, :, 0].flatten(1, 2), heads[:, :, 1].flatten(1, 2)], 1)
                local[f"{s}linear_qkv.{suffix}"] = rows(torch.cat([q, k, v], 1).flatten(0, 1))
            if spec.attention.qk_norm:
                for x in "qk":
                    local[f"{s}{x}_layernorm.weight"] = hf[f"{a}{x}_norm.weight"].clone()
        if not linear:
            local[s + "linear_proj.weight"] = columns(hf[a + "o_proj.weight"])
        if spec.family == "gpt_oss":
            local[s + "linear_proj.bias"] = hf[a + "o_proj.bias"].clone()
            local[s + "core_attention.softmax_offset"] = rows(hf[a + "sinks"])
        sparse = is_sparse(spec, i)
        projection = "in_proj" if linear else "linear_qkv"
        norms = []
        if spec.family != "olmo2":
            fused = te and spec.family != "deepseek_v3"
            norms.append(
                f"self_attention.{projection}.layer_norm_weight"
                if fused
                else "input_layernorm.weight"
            )
            fused = te and not sparse
            norms.append(
                "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
            )
        if spec.family in ("olmo2", "gemma3"):
            norms += ["self_attn_bda.norm.weight", "mlp_bda.norm.weight"]
        for name, hf_name in zip(norms, layer_norms(spec), strict=True):
            local[m + name] = hf[p + hf_name].clone()
        for module in mlp_modules(spec, i):
            gate, up, down = (hf[f"{p}{module}.{x}_proj.weight"] for x in ("gate", "up", "down"))
            prefix = m + ("mlp" if module == "mlp" else "mlp.shared_experts")
            local[f"{prefix}.linear_fc1.weight"] = torch.cat([rows(gate), rows(up)])
            local[f"{prefix}.linear_fc2.weight"] = columns(down)
        if spec.experts and spec.experts.shared_gate:
            gate = hf[p + "mlp.shared_expert_gate.weight"]
            local[m + "mlp.shared_experts.gate_weight"] = gate.clone()
        if not sparse:
            continue
        local[m + "mlp.router.weight"] = hf[router_name(spec, i)].clone()
        if spec.experts.router_bias:
            local[m + "mlp.router.expert_bias"] = hf[p + "mlp.gate.e_score_correction_bias"].float()
        per_rank = spec.experts.count // t.ep
        for e in range(ep_rank * per_rank, (ep_rank + 1) * per_rank):
            experts = f"{m}mlp.experts."
            fc1 = experts + f"local_experts.{e}.linear_fc1.weight"
            fc2 = experts + f"local_experts.{e}.linear_fc2.weight"
            if te:
                fc1 = experts + f"linear_fc1.weight{e}"
                fc2 = experts + f"linear_fc2.weight{e}"
            if spec.family == "gpt_oss":
                local[m + "mlp.router.bias"] = hf[p + "mlp.router.bias"].clone()
                x = f"{p}mlp.experts.{e}."
                local[fc1] = rows(hf[x + "gate_up_proj"], t.etp, etp_rank)
                local[fc1.replace("weight", "bias")] = rows(
                    hf[x + "gate_up_proj_bias"], t.etp, etp_rank
                )
                local[fc2] = columns(hf[x + "down_proj"], t.etp, etp_rank)
                local[fc2.replace("weight", "bias")] = hf[x + "down_proj_bias"].clone()
                continue
            gate, up, down = (hf[name] for name in expert_names(spec, i, e))
            local[fc1] = torch.cat([rows(gate, t.etp, etp_rank), rows(up, t.etp, etp_rank)])
            local[fc2] = columns(down, t.etp, etp_rank)
    return local


def sglang(spec: ModelSpec, hf: HF, g: GeneratorTopology, rank: int, device: str) -> HF:
    """The tensors of TP rank `rank` of an engine."""
    if spec.mtp_layers:
        local = sglang(replace(spec, mtp_layers=0, mtp_drafts=False), hf, g, rank, device)
        if not spec.mtp_drafts:
            return local
        qwen = spec.family == "qwen3_next"
        one_layer, layer_hf = decoder_layer_alone(spec, hf)
        for name, values in sglang(one_layer, layer_hf, g, rank, device).items():
            if ".layers." in name:
                draft = name if qwen else name.replace("model.layers.0.", "model.decoder.")
                local["draft." + draft] = values
        for suffix in BESIDE[spec.family].split():
            prefix = "model." if not qwen or suffix == "norm" else ""
            local[f"draft.{prefix}{suffix}.weight"] = hf[f"{predicting(spec)[0]}{suffix}.weight"]
        return local
    tp = g.tp
    vocab = -(-spec.vocab_size // 64) * 64
    attn_tp = tp // g.dp_attention  # this many consecutive ranks share attention and embedding
    attn_rank = rank % attn_tp
    heads = spec.num_attention_heads
    kv = spec.num_kv_heads
    kv_rank = attn_rank
    kv_parts = attn_tp
    if device == "cpu":
        if heads % tp or kv % tp:
            heads = -(-kv // tp) * tp * (heads // kv)
            kv = -(-kv // tp) * tp
        if vocab % tp:
            vocab = -(-spec.vocab_size // (64 * tp)) * 64 * tp
    elif attn_tp > kv:
        kv_rank = attn_rank // (attn_tp // kv)
        kv_parts = kv

    def rows(tensor: torch.Tensor, size: int, parts: int = tp, index: int = rank) -> torch.Tensor:
        return pad(tensor, size, 0).chunk(parts, 0)[index]

    def columns(
        tensor: torch.Tensor, size: int, parts: int = tp, index: int = rank
    ) -> torch.Tensor:
        return pad(tensor, size, 1).chunk(parts, 1)[index]

    def padded(size: int) -> int:
        return -(-size // (32 * tp)) * 32 * tp if device == "cpu" else size

    embed = hf["model.embed_tokens.weight"]
    if spec.family != "gemma3":
        embed = rows(embed, vocab, attn_tp, attn_rank)
    local = {"model.embed_tokens.weight": embed, "model.norm.weight": hf["model.norm.weight"]}
    if not spec.tie_word_embeddings:
        local["lm_head.weight"] = rows(hf["lm_head.weight"], vocab)
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        if i in spec.linear_layers:
            a = p + "linear_attn."
            for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "dt_bias"):
                if a + name in hf:
                    local[a + name] = hf[a + name].chunk(attn_tp, 0)[attn_rank]
            if spec.family == "qwen3_5":
                chunks = [part.chunk(attn_tp, 0)[attn_rank] for part in projections(spec, hf, a)]
                local[a + "in_proj_qkvz.weight"] = torch.cat(chunks[:4])
                local[a + "in_proj_ba.weight"] = torch.cat(chunks[4:])
            local[a + "A_log"] = hf[a + "A_log"].chunk(attn_tp, 0)[attn_rank].float()
            local[a + "conv1d.weight"] = torch.cat(
                [part.chunk(attn_tp, 0)[attn_rank] for part in convolved(spec, hf, a)]
            )
            local[a + "norm.weight"] = hf[a + "norm.weight"]
            local[a + "out_proj.weight"] = hf[a + "out_proj.weight"].chunk(attn_tp, 1)[attn_rank]
        elif spec.family == "deepseek_v3":
            local[a + "fused_qkv_a_proj_with_mqa.weight"] = torch.cat(
                [hf[a + "q_a_proj.weight"], hf[a + "kv_a_proj_with_mqa.weight"]]
            )
            for x in ("q_a", "kv_a"):
                local[f"{a}{x}_layernorm.weight"] = hf[f"{a}{x}_layernorm.weight"]
            for x in ("q_b", "kv_b"):
                name = f"{a}{x}_proj.weight"
                local[name] = hf[name].chunk(attn_tp, 0)[attn_rank]
            local[a + "o_proj.weight"] = hf[a + "o_proj.weight"].chunk(attn_tp, 1)[attn_rank]
        else:
            for suffix in ("weight", "bias") if spec.attention.qkv_bias else ("weight",):
                q_size = heads * spec.head_dim * (2 if spec.attention.gated else 1)
                kv_size = kv * spec.head_dim
                q = rows(hf[f"{a}q_proj.{suffix}"], q_size, attn_tp, attn_rank)
                k = rows(hf[f"{a}k_proj.{suffix}"], kv_size, kv_parts, kv_rank)
                v = rows(hf[f"{a}v_proj.{suffix}"], kv_size, kv_parts, kv_rank)
                local[f"{a}qkv_proj.{suffix}"] = torch.cat([q, k, v])
            local[a + "o_proj.weight"] = columns(
                hf[a + "o_proj.weight"], heads * spec.head_dim, attn_tp, attn_rank
            )
            if spec.family == "gpt_oss":
                local[a + "o_proj.bias"] = hf[a + "o_proj.bias"]
                local[a + "sinks"] = rows(hf[a + "sinks"], heads, attn_tp, attn_rank)
            if spec.attention.qk_norm:
                for x in "qk":
                    local[f"{a}{x}_norm.weight"] = hf[f"{a}{x}_norm.weight"]
        for name in layer_norms(spec):
            local[p + name] = hf[p + name]
        sparse = is_sparse(spec, i)
        if spec.experts and spec.experts.shared_gate:
            local[p + "mlp.shared_expert_gate.weight"] = hf[p + "mlp.shared_expert_gate.weight"]
        for module in mlp_modules(spec, i):
            size = padded(hf[f"{p}{module}.gate_proj.weight"].shape[0])
            gate, up = (rows(hf[f"{p}{module}.{x}_proj.weight"], size) for x in ("gate", "up"))
            local[f"{p}{module}.gate_up_proj.weight"] = torch.cat([gate, up])
            local[f"{p}{module}.down_proj.weight"] = columns(
                hf[f"{p}{module}.down_proj.weight"], size
            )
        if not sparse:
            continue
        router = hf[router_name(spec, i)]
        local[router_name(spec, i)] = router.float() if spec.family == "glm4_moe" else router
        if spec.experts.router_bias:
            bias = p + "mlp.gate.e_score_correction_bias"
            local[bias] = hf[bias].float()
        moe_tp = tp // g.ep
        per_rank = spec.experts.count // g.ep
        size = padded(spec.experts.intermediate_size)
        if spec.family == "gpt_oss":
            experts = range(rank // moe_tp * per_rank, (rank // moe_tp + 1) * per_rank)
            local |= paired_experts(p, hf, experts, size, moe_tp, rank % moe_tp)
            continue
        w13 = []
        w2 = []
        for e in range(rank // moe_tp * per_rank, (rank // moe_tp + 1) * per_rank):
            gate, up, down = (hf[name] for name in expert_names(spec, i, e))
            w13.append(torch.cat([rows(x, size, moe_tp, rank % moe_tp) for x in (gate, up)]))
            w2.append(columns(down, size, moe_tp, rank % moe_tp))
        module = router_name(spec, i).removesuffix("gate.weight")
        local[module + "experts.w13_weight"] = torch.stack(w13)
        local[module + "experts.w2_weight"] = torch.stack(w2)
    if spec.family in HYBRID:  # SGLang has no module for attention itself
        return {name.replace(".self_attn.", "."): values for name, values in local.items()}
    return local


def paired_experts(p: str, hf: HF, experts: range, rows: int, parts: int, part: int) -> HF:
    """The experts of gpt-oss in an engine: rows of gate and up alternate, biases are float32, and
    only the first part has down's bias.
    """

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([hf[f"{p}mlp.experts.{e}.{name}"] for e in experts])

    down_bias = stacked("down_proj_bias").float()
    w13 = pad(stacked("gate_up_proj"), 2 * rows, 1).chunk(parts, 1)[part]
    w13_bias = pad(stacked("gate_up_proj_bias"), 2 * rows, 1).chunk(parts, 1)[part]
    return {
        p + "mlp.router.bias": hf[p + "mlp.router.bias"],
        p + "mlp.experts.w13_weight": w13,
        p + "mlp.experts.w13_weight_bias": w13_bias.float(),
        p + "mlp.experts.w2_weight": pad(stacked("down_proj"), rows, 2).chunk(parts, 2)[part],
        p + "mlp.experts.w2_weight_bias": torch.zeros_like(down_bias) if part else down_bias,
    }
