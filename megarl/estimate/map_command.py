"""`megarl reshard`: prints, writes and draws the map of a resolved config, and proves it."""

from __future__ import annotations

import json
from dataclasses import asdict

from megarl.config.errors import ConfigError
from megarl.estimate.hardware import Cluster
from megarl.estimate.sides import describe, gpus, layouts, sizes
from megarl.estimate.times import adapters_s, link_bytes_per_s
from megarl.plan.resolve import RunPlan
from megarl.reshard.forwarding import foreseen
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.report import copies_of, copy_fields, dump_lines, own_part_s, render, render_copies, to_json


def run(
    plan: RunPlan,
    *,
    delta: float,
    link: float | None = None,
    dump: str | None = None,
    picture: str | None = None,
    rank: str | None = None,
    as_json: bool = False,
) -> None:
    """The arguments are the options of the command line, which explains them. Raises ConfigError for impossible ones."""
    config = plan.config
    if not 0 <= delta <= 1:
        raise ConfigError(f"--delta {delta:g}: must be at least 0 and at most 1")
    if link is not None and not link > 0:
        raise ConfigError(f"--link {link:g}: must be more than 0")
    reshard_map, forwarding = foreseen(ReshardMap.build(*layouts(plan)), config.weights.relay, config.generator.tp)
    rate = link * 1e9 if link else link_bytes_per_s(gpus(plan), Cluster.of(config))  # as for megarl plan
    facts = to_json(reshard_map, forwarding, rate, delta) if as_json else None
    alone = {"lora_predicted_s": adapters_s(plan.spec, config, Cluster.of(config).gpu.device, rate)} if config.lora.rank else {}
    if facts is None:
        prove_exactly_once(reshard_map)
    if dump:
        with open(dump, "w") as file:
            file.writelines(f"{line}\n" for line in dump_lines(reshard_map))
    if picture:
        from megarl.reshard.picture import draw  # not at the top: it imports matplotlib

        title = f"{plan.spec.family}, {sizes(asdict(plan.trainer_topology))} to {sizes(describe(plan)['generator'])}"
        draw(reshard_map, picture, title, forwarding)
    if rank:
        copies, part_s = copies_of(reshard_map, rank), own_part_s(reshard_map, rank)
        if facts is None:
            print(*render_copies(rank, copies, part_s), sep="\n")
            return
        facts |= {"rank": rank, "rank_part_s": part_s, "rank_copies": [copy_fields(copy) for copy in copies]}
    if facts is not None:
        print(json.dumps(facts | alone))
        return
    print(render(reshard_map, rate, forwarding, delta))
    if any(alone.values()):  # the engines can serve the adapters
        print(f"{alone['lora_predicted_s']:.3g} s for an update of the adapters alone (lora.sync=adapter)")
    print("proven: every destination byte is written exactly once")
