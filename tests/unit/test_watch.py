"""Memory that an engine's worker computes with but no update writes: what is watched, what may
change, and the reports. No engine runs here.
"""

from __future__ import annotations

import weakref

import pytest
import torch

from megarl.messaging.host import Host
from megarl.weight_sync.audit import AuditError, check_proven
from megarl.weight_sync.commands import Audit, MemoryEntry, Recall
from megarl.weight_sync.engine.loader import EngineWorker
from megarl.weight_sync.engine.watch import LAYERS, BuiltModel, MemoryWatch, inventory, live_tensors


class Config:
    """An object of SGLang's layers that is not a module."""

    __module__ = LAYERS + "moe.topk"

    def __init__(self, bias: torch.Tensor):
        self.bias = bias


class Group:
    """An object outside the layers: the memory of collectives."""

    def __init__(self):
        self.buffer = torch.zeros(4)


class Attention(torch.nn.Module):
    def __init__(self, rotary: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 6))
        self.register_buffer("rotary", rotary, persistent=False)
        self.transposed = self.weight.data.t()  # a view of the parameter
        self.made = self.weight.detach() * 2  # post-load work makes it from the parameter
        self.scales = {"k": torch.ones(1), "v": [torch.ones(1)]}
        self.config = Config(torch.randn(4))
        self.group = Group()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rotary = torch.randn(16, 4)
        self.layers = torch.nn.ModuleList(Attention(rotary) for _ in range(2))
        self.head = torch.nn.Linear(6, 8, bias=False)
        self.head.weight = self.layers[0].weight  # tied

    def post_load(self) -> None:
        for layer in self.layers:
            layer.made.copy_(layer.weight.detach() * 2)


def from_outside(values: torch.Tensor) -> None:
    """Writes like another process, so that torch does not see it."""
    values.detach().view(-1).view(torch.uint8).numpy()[1] ^= 4


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def watch(model) -> MemoryWatch:
    watch = MemoryWatch(model)
    watch.start()
    assert watch.changed() == []
    return watch


def test_shared_memory_counts_once_and_parameters_do_not(model, watch):
    """The rotary cache; and for each layer the made tensor, two scales and the bias."""
    assert watch.count == 1 + 2 * 4
    assert watch.nbytes == 4 * (64 + 2 * (48 + 1 + 1 + 4))


@pytest.mark.parametrize(
    "tensor_of, names",
    [
        (lambda layer: layer.rotary, ["layers.0.rotary", "layers.1.rotary"]),
        (lambda layer: layer.made, ["layers.0.made"]),
        (lambda layer: layer.scales["k"], ["layers.0.scales['k']"]),
        (lambda layer: layer.scales["v"][0], ["layers.0.scales['v'][0]"]),
        (lambda layer: layer.config.bias, ["layers.0.config.bias"]),
        (lambda layer: layer.weight, []),
        (lambda layer: layer.group.buffer, []),
    ],
)
def test_changed_memory_is_reported_by_all_its_names(model, watch, tensor_of, names):
    from_outside(tensor_of(model.layers[0]))
    assert watch.changed() == names


def test_replaced_tensor_is_reported(model, watch):
    model.layers[1].rotary = model.layers[1].rotary.clone()
    assert watch.changed() == [], "by its equal"
    model.layers[1].rotary = model.layers[1].rotary + 1
    assert watch.changed() == ["layers.1.rotary"]


def test_missing_and_moved_tensors_are_reported(model, watch):
    model.layers[0].scales.pop("k")
    # like a transport that moves it
    model.layers[1].weight.data = model.layers[1].weight.data.clone()
    assert watch.changed() == ["layers.0.scales['k']", "layers.1.transposed"]


def test_cache_may_be_cast_once(model, watch):
    model.layers[0].rotary = model.layers[0].rotary.to(torch.bfloat16)
    assert watch.changed() == []
    from_outside(model.layers[0].rotary)
    assert watch.changed() == ["layers.0.rotary"]


def test_tensors_made_by_forward_passes_are_not_watched(model, watch):
    model.layers[0].gathered = torch.zeros(3)
    assert watch.changed() == []
    model.layers[0].gathered += 1
    assert watch.changed() == []


def test_post_load_work_may_remake_tensors_and_change_no_other(model, watch):
    from_outside(model.layers[0].weight)
    with watch.rewriting():
        model.post_load()
        model.layers[1].packed = torch.ones(2)  # a new tensor
        from_outside(model.layers[1].rotary)  # at the same time
    assert watch.changed() == ["layers.0.rotary", "layers.1.rotary"]
    from_outside(model.layers[1].rotary)
    from_outside(model.layers[1].packed)
    from_outside(model.layers[0].made)
    assert watch.changed() == ["layers.0.made", "layers.1.packed"]


def build() -> tuple[Model, BuiltModel]:
    """A model, and what the watch knows of the tensors that were alive before it was built."""
    before = [weakref.ref(values) for values in live_tensors()]
    model = Model()
    return model, BuiltModel(model, before)


def kinds_by_name(watch: MemoryWatch) -> dict[str, str]:
    return {entry.name: entry.kind for entry in inventory(watch)}


def test_tensors_made_by_loading_must_be_remade_by_updates():
    model, built = build()
    first, second = model.layers
    second.scales["k"] *= 3
    first.renamed = first.rotary  # the same memory, unchanged
    first.repacked = first.weight.detach() * 3
    first.hidden = [torch.nn.Linear(2, 2, bias=False)]
    watch = MemoryWatch(model, built)
    watch.start()
    with watch.rewriting():
        model.post_load()
        first.made = first.weight.detach() * 2
    # on a GPU graphs that were captured before would read the old one: there it is unproven too
    assert watch.moved == {"layers.0.made"}
    first.gathered = torch.zeros(3)
    kinds: dict[str, set[str]] = {}
    for entry in inventory(watch):
        kinds.setdefault(entry.kind, set()).add(
            entry.name if "outside" not in entry.kind else entry.detail
        )
    assert kinds["unproven"] == {"layers.1.scales['k']", "layers.0.repacked"}
    assert kinds["unproven outside"] == {
        "made or changed while weights were loaded, in a dict under 'weight'"
    }
    assert kinds["derived"] == {"layers.0.made", "layers.1.made"}
    assert kinds["working"] == {"layers.0.gathered"}
    assert kinds["constant"] >= {
        "layers.0.rotary",
        "layers.0.scales['v'][0]",
        "layers.1.config.bias",
    }
    assert kinds["written"] == {
        "layers.0.weight",
        "layers.1.weight",
        "layers.0.transposed",
        "layers.1.transposed",
    }


def test_moved_copy_of_weights_is_still_unproven():
    """A forward pass may cast or move it. It may also have the name of an adapter's wrapper."""
    model, built = build()
    for layer in model.layers:
        layer.repacked = layer.weight.detach() * 3
    watch = MemoryWatch(model, built)
    model.layers[1] = Wrapper(model.layers[1])
    watch.pool_added([])
    for layer in (model.layers[0], model.layers[1].base_layer):
        layer.repacked = layer.repacked.to(torch.bfloat16)
        layer.rotary = layer.rotary.to(torch.bfloat16)
    watch.start()
    kinds = kinds_by_name(watch)
    assert kinds["layers.0.repacked"] == kinds["layers.1.base_layer.repacked"] == "unproven"
    assert kinds["layers.0.rotary"] == "constant"


class Wrapper(torch.nn.Module):
    """A layer with an adapter, wrapped as by SGLang."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.base_layer = layer
        self.weight = layer.weight
        self.pool = torch.zeros(2, 3)
        self.offsets = torch.tensor([0, 8])


def test_memory_of_layer_wrappers_is_not_constant():
    """Updates write the adapters' memory.

    A wrapper's copy of weights is not proved. Neither is a parameter that the wrapper still holds
    although post-load work has replaced it.
    """
    model, built = build()
    watch = MemoryWatch(model, built)
    layer = model.layers[1]
    wrapper = Wrapper(model.layers[1])
    wrapper.transposed = layer.weight.detach().t().contiguous()
    model.layers[1] = wrapper
    watch.pool_added([wrapper.pool], slot=1)
    watch.start()
    with watch.rewriting():
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        layer.transposed = layer.weight.data.t()
    kinds = kinds_by_name(watch)
    assert (kinds["layers.1.transposed"], kinds["layers.1.offsets"]) == ("unproven", "constant")
    assert (kinds["layers.1.pool[0]"], kinds["layers.1.pool[1]"]) == ("working", "written"), (
        "updates write one slot of two"
    )
    assert [entry.kind for entry in inventory(watch) if entry.name == "layers.1.weight"] == [
        "written",
        "unproven",
    ]


@pytest.mark.parametrize("dummy, kind", [(True, "unproven"), (False, "constant")])
def test_dummy_weights_prove_nothing_of_checkpoint_buffers(dummy, kind):
    before = [weakref.ref(values) for values in live_tensors()]
    model = Model()
    model.register_buffer("table", torch.zeros(4, dtype=torch.int64))
    watch = MemoryWatch(model, BuiltModel(model, before), dummy)
    watch.start()
    kinds = kinds_by_name(watch)
    assert kinds["table"] == kind
    assert kinds["layers.0.rotary"] == "constant"


def test_unproven_memory_of_a_model_ends_a_strict_run(capsys):
    """Unproven memory elsewhere is a warning."""
    of_model = MemoryEntry("layers.0.packed", (2, 3), "float32", 24, "unproven", "made")
    elsewhere = MemoryEntry(
        "outside the model, 0", (2,), "uint8", 2, "unproven outside", "made, in a list"
    )
    line = "layers.0.packed [2, 3] float32 (made) on generator rank 0, 2"
    with pytest.raises(AuditError) as failure:
        check_proven({of_model: [0, 2], elsewhere: [1]}, strict=True)
    assert str(failure.value).startswith("weights.audit=strict: engines hold memory")
    assert line in str(failure.value).splitlines()
    check_proven({of_model: [0, 2]}, strict=False)
    assert line in capsys.readouterr().out.splitlines()
    check_proven({elsewhere: [1]}, strict=True)
    assert (
        "outside the model, 0 [2] uint8 (made, in a list) on generator rank 1"
        in capsys.readouterr().out
    )
    check_proven({MemoryEntry("weight", (2,), "float32", 8, "written", ""): [0]}, strict=True)
    assert not capsys.readouterr().out


def test_a_worker_recalls_what_its_last_audit_found(model):
    worker = EngineWorker(lambda: 0, Host)
    parameters = dict(model.named_parameters())
    assert worker.recall(parameters, Recall()).tensors == [], "nothing was audited yet"
    worker.audit(parameters, Audit(version=3))
    from_outside(model.layers[1].weight)
    changes = worker.recall(parameters, Recall())
    assert (changes.tensors, changes.since) == (["layers.1.weight"], 3)
    assert worker.recall(parameters, Recall()).tensors == [], (
        "half-written by now, for all that is known"
    )


def test_last_recall_compares_all_that_audits_compare(model):
    """No later audit would compare the memory that no update writes."""
    worker = EngineWorker(lambda: 0, Host)
    parameters = dict(model.named_parameters())
    worker.unwritten = MemoryWatch(model, None)
    worker.unwritten.start()
    worker.audit(parameters, Audit(version=3))
    assert worker.recall(parameters, Recall(unwritten=True)).tensors == []
    worker.audit(parameters, Audit(version=4))
    from_outside(model.layers[1].weight)
    from_outside(model.layers[0].rotary)
    assert worker.recall(parameters, Recall()).tensors == ["layers.1.weight"], (
        "an audit will follow"
    )
    worker.audit(parameters, Audit(version=5))
    from_outside(model.layers[1].weight)
    changes = worker.recall(parameters, Recall(unwritten=True))
    assert (changes.tensors, changes.since) == (
        ["layers.1.weight", "layers.0.rotary", "layers.1.rotary"],
        5,
    )


def test_sglang_is_told_that_parameters_were_written(model):
    """Otherwise it keeps its copy of a router's bias in another dtype
    (TopKConfig.correction_bias_for_dtype).
    """
    worker = EngineWorker(lambda: 0, Host)
    weight = model.layers[0].weight
    version = model.layers[0].weight._version
    worker.finish(lambda part, device: None, model, torch.device("cpu"))
    assert weight._version > version
