"""Embedding, final norm and output layer, the same in all families.

Megatron and SGLang shard the vocabulary by rows and pad it.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.parameters import (
    FIRST,
    LAST,
    LogicalTensor,
    Parameter,
    Part,
    padded_vocab_size,
    round_up,
    whole,
)
from megarl.models.spec import SCALAR, ModelSpec

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
SGLANG_PADDING = 64  # rows; sglang/srt/layers/vocab_parallel_embedding.py


def logical(spec: ModelSpec, layers: list[LogicalTensor]) -> tuple[LogicalTensor, ...]:
    """All logical tensors of the model, including `layers`.

    A tied model has no `lm_head.weight`; a scalar head is `score.weight`.
    """
    embed = LogicalTensor(EMBED, (spec.vocab_size, spec.hidden_size), FIRST)
    tensors = [embed, *layers, LogicalTensor(NORM, (spec.hidden_size,), LAST)]
    if spec.head == SCALAR:
        tensors.append(LogicalTensor(SCORE, (1, spec.hidden_size), LAST))
    elif not spec.tie_word_embeddings:
        tensors.append(LogicalTensor(HEAD, embed.shape, LAST))
    return tuple(tensors)


def megatron(
    spec: ModelSpec, topology: TrainerTopology, layers: list[Parameter]
) -> tuple[Parameter, ...]:
    """All of Megatron's parameters.

    With tied embeddings and pp > 1, the last stage has a copy of the embedding,
    `output_layer.weight`.
    """
    tp = topology.tp
    padded = padded_vocab_size(spec.vocab_size, topology.tp)
    parameters = [
        Parameter(
            "embedding.word_embeddings.weight", FIRST, (Part(EMBED, padded),), dim=0, groups=tp
        )
    ]
    parameters += [*layers, whole("decoder.final_layernorm.weight", LAST, NORM)]
    if spec.head == SCALAR:
        parameters.append(whole("output_layer.weight", LAST, SCORE))
    elif not spec.tie_word_embeddings or topology.pp > 1:
        output = EMBED if spec.tie_word_embeddings else HEAD
        parameters.append(
            Parameter("output_layer.weight", LAST, (Part(output, padded),), dim=0, groups=tp)
        )
    return tuple(parameters)


def sglang_of_whole(layers: list[Parameter]) -> tuple[Parameter, ...]:
    """All of SGLang's parameters of a tied model in which every rank has the whole embedding
    without padding (Gemma 3).
    """
    return (whole(EMBED, FIRST, EMBED), *layers, whole(NORM, LAST, NORM))


def sglang(
    spec: ModelSpec, topology: GeneratorTopology, device: str, layers: list[Parameter]
) -> tuple[Parameter, ...]:
    """All of SGLang's parameters. CPU engines pad the vocabulary further."""
    tp = topology.tp
    padded = round_up(spec.vocab_size, SGLANG_PADDING)
    if device == "cpu":
        padded = padded if padded % tp == 0 else round_up(spec.vocab_size, SGLANG_PADDING * tp)
    units = (("vocabulary rows, padded", padded),)
    embed = Parameter(
        EMBED,
        FIRST,
        (Part(EMBED, padded),),
        dim=0,
        groups=topology.attention_tp,
        of_attention=True,
        units=units,
    )
    parameters = [embed, *layers, whole(NORM, LAST, NORM)]
    if spec.head == SCALAR:
        parameters.append(whole(SCORE, LAST, SCORE))
    elif not spec.tie_word_embeddings:
        # if tied, lm_head is embed_tokens: one parameter under its first name
        parameters.append(
            Parameter(HEAD, LAST, (Part(HEAD, padded),), dim=0, groups=tp, units=units)
        )
    return tuple(parameters)
