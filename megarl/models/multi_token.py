"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): an extra layer that predicts
the token after the next.

Its input is the hidden states h of the model, after the last norm, and the embedding e of the next
token:

    logits = output layer(norm(decoder layer(projection([norm_e(e); norm_h(h)]))))

The embedding and the output layer are the model's own. The decoder layer is one of the family's,
with its attention and its experts. This file declares the other parts, and their names in
checkpoints and in SGLang's draft model. In layouts the extra layer has number `num_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError
from megarl.models.family import Family, Prediction
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, Part, whole
from megarl.models.spec import LM, ModelSpec
from megarl.models.vocabulary import EMBED, HEAD

COUNT = "num_nextn_predict_layers"  # key in config.json
# names of it that Transformers and SGLang read
COUNTS = (COUNT, "num_mtp_layers", "mtp_num_hidden_layers")
DRAFT = "draft."  # prefix of the names of SGLang's draft model in layouts
MEGATRON = "mtp_layer."  # Megatron's MultiTokenPredictionLayer, in the chunk that ends the model
_LAYER = "model.layers.{layer}."
_MEGATRON_LAYER = "decoder.layers.{layer}."
_OWN_LAYER = MEGATRON + "mtp_model_layer."
_MEGATRON_NAMES = ("enorm", "hnorm", "eh_proj", "final_layernorm")


NEXTN = Prediction(
    layer=_LAYER,
    names=(
        _LAYER + "enorm.weight",
        _LAYER + "hnorm.weight",
        _LAYER + "eh_proj.weight",
        _LAYER + "shared_head.norm.weight",
    ),
    draft_layer="model.decoder.",
    draft_names=(
        "model.enorm.weight",
        "model.hnorm.weight",
        "model.eh_proj.weight",
        "model.shared_head.norm.weight",
    ),
    copies=((_LAYER + "embed_tokens.weight", EMBED), (_LAYER + "shared_head.head.weight", HEAD)),
)
QWEN = Prediction(
    layer="mtp.layers.0.",
    names=(
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ),
    draft_layer="model.layers.0.",
    draft_names=(
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
        "fc.weight",
        "model.norm.weight",
    ),
    counted=False,
)


def read_layers(source: str, values: Mapping[str, Any], spec: ModelSpec, family: Family) -> int:
    """The number of such layers in the checkpoint. Raises ConfigError if it is not 1."""
    names = family.PREDICTION
    if names is None:
        raise ConfigError(
            f"trainer.mtp: must be ignore for a {spec.family} model: no layer for multi-token "
            "prediction is known of this family"
        )
    count = values.get(COUNT) or 0 if names.counted else 1
    if count != 1 or isinstance(count, bool):
        raise ConfigError(
            f"trainer.mtp: must be ignore: {source} has {COUNT} = {count!r}; exactly 1 is supported"
        )
    if spec.num_layers - 1 in spec.linear_layers:
        raise ConfigError(
            f"trainer.mtp: must be ignore: {source}: the last layer has no attention to build the "
            "layer from"
        )
    if spec.tie_word_embeddings or spec.head != LM:
        raise ConfigError(
            f"trainer.mtp: must be ignore: {source}: the layer needs an output layer of its own, "
            "for the vocabulary"
        )
    return 1


def logical(spec: ModelSpec, family: Family) -> Iterator[LogicalTensor]:
    """The layer's tensors in a checkpoint, in forward order, without `copies`."""
    if not spec.mtp_layers:
        return
    names = family.prediction
    layers = _layers(spec)
    hidden = spec.hidden_size
    embedding, states, projection, norm = names.names
    for name, shape in (
        (embedding, (hidden,)),
        (states, (hidden,)),
        (projection, (hidden, 2 * hidden)),
    ):
        yield LogicalTensor(name, shape, LAYER, layers)
    for tensor in family.logical_tensors(spec.last_layer()):
        if tensor.place == LAYER:
            yield replace(tensor, name=tensor.name.replace(_LAYER, names.layer), layers=layers)
    yield LogicalTensor(norm, (hidden,), LAYER, layers)


def copies(spec: ModelSpec, family: Family) -> dict[str, str]:
    """The tensors that a checkpoint repeats for the layer: name -> logical tensor."""
    if not spec.mtp_layers:
        return {}
    result: dict[str, str] = {}
    for name, original in family.prediction.copies:
        result[name.replace("{layer}", str(spec.num_layers))] = original
    return result


def other_copy(file: Path, name: str, original: str) -> str:
    return (
        f"trainer.mtp: must be ignore: {file}: {name} differs from {original}; a layer for "
        "multi-token prediction with an embedding or an output layer of its own is not supported"
    )


def megatron(
    spec: ModelSpec, topology: TrainerTopology, layer_spec: str, family: Family
) -> Iterator[Parameter]:
    if not spec.mtp_layers:
        return
    layers = _layers(spec)
    names = [MEGATRON + name + ".weight" for name in _MEGATRON_NAMES]
    yield from _around(spec, family, names, topology.tp)
    for parameter in family.megatron_parameters(spec.last_layer(), topology, layer_spec):
        if parameter.place == LAYER:
            yield _moved(parameter, _MEGATRON_LAYER, _OWN_LAYER, layers, family)


def sglang(
    spec: ModelSpec, topology: GeneratorTopology, device: str, family: Family
) -> Iterator[Parameter]:
    """The draft model's own parameters.

    It shares the embedding and the output layer with the engine's model.
    """
    if not spec.mtp_drafts:
        return
    layers = _layers(spec)
    names = family.prediction
    yield from _around(spec, family, [DRAFT + name for name in names.draft_names])
    for parameter in family.sglang_parameters(spec.last_layer(), topology, device):
        if parameter.place == LAYER:
            yield _moved(parameter, _LAYER, DRAFT + names.draft_layer, layers, family)


def quantised(spec: ModelSpec, family: Family) -> tuple[str, ...]:
    """The draft model's parameters that a quantised engine keeps in fp8, as in the engine's
    model.
    """
    if not spec.mtp_drafts:
        return ()
    draft_layer = DRAFT + family.prediction.draft_layer
    return tuple(
        name.replace(_LAYER, draft_layer) for name in family.quantised_parameters(spec.last_layer())
    )


def _around(spec: ModelSpec, family: Family, names: list[str], tp: int = 1) -> Iterator[Parameter]:
    """The parameters outside the decoder layer.

    If `tp` is above 1, the projection is sharded by rows.
    """
    layers = _layers(spec)
    for name, logical_name in zip(names, family.prediction.names):
        parameter = whole(name, LAYER, logical_name, layers=layers)
        if logical_name == family.prediction.names[2] and tp > 1:
            parameter = replace(
                parameter, dim=0, groups=tp, units=(("hidden size", spec.hidden_size),)
            )
        yield parameter


def _moved(
    parameter: Parameter, prefix: str, replacement: str, layers: Layers, family: Family
) -> Parameter:
    """`parameter`, moved to the layer: its name begins with `replacement` instead of `prefix`, and
    its parts are the layer's.
    """
    parts = tuple(_of_layer(part, family) for part in parameter.parts)
    return replace(
        parameter, name=parameter.name.replace(prefix, replacement), parts=parts, layers=layers
    )


def _of_layer(part: Part, family: Family) -> Part:
    return replace(part, logical_name=part.logical_name.replace(_LAYER, family.prediction.layer))


def _layers(spec: ModelSpec) -> Layers:
    return tuple(range(spec.num_layers, spec.num_layers + spec.mtp_layers))
