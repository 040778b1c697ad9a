"""Seconds of collectives over groups of ranks, depending on how a group is spread over nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.estimate.constants import Constants
from megarl.estimate.hardware import Cluster


@dataclass(frozen=True)
class Group:
    """`size` ranks, `stride` apart in the order in which ranks fill the nodes."""

    size: int
    stride: int
    cluster: Cluster
    constants: Constants

    @property
    def per_node(self) -> int:
        """Members on one node."""
        return min(self.size, max(1, self.cluster.gpus_per_node // self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.per_node)

    @property
    def bytes_per_s(self) -> float:
        """Ring bandwidth of a member; rings across nodes use the NICs of all members on a node."""
        gpu = self.cluster.gpu
        wire = gpu.nvlink_bytes_per_s if self.nodes == 1 else min(gpu.nvlink_bytes_per_s, gpu.nic_bytes_per_s * self.per_node)
        return wire * self.constants.link_efficiency

    @property
    def latency_s(self) -> float:
        return self.constants.latency_s + self.constants.node_latency_s * math.log2(self.nodes)

    def gather_s(self, size_bytes: float) -> float:
        """An all-gather to `size_bytes` on every member, or a reduce-scatter of as many."""
        if self.size == 1:
            return 0.0
        return self.latency_s + size_bytes * (self.size - 1) / self.size / self.bytes_per_s

    def all_reduce_s(self, size_bytes: float) -> float:
        """A reduce-scatter, then an all-gather."""
        return 2 * self.gather_s(size_bytes)

    def small_all_reduce_s(self, size_bytes: float) -> float:
        """One-shot all-reduce of the megabyte or less that a decoding step sums: too small to be spread over all NICs of a node."""
        if self.size == 1:
            return 0.0
        gpu = self.cluster.gpu
        wire = gpu.nvlink_bytes_per_s if self.nodes == 1 else gpu.nic_bytes_per_s
        return self.latency_s + 2 * size_bytes * (self.size - 1) / self.size / wire / self.constants.link_efficiency

    def all_to_all_s(self, size_bytes: float) -> float:
        """Every member sends `size_bytes`, evenly to all members; what leaves the node goes over the sender's own NIC."""
        if self.size == 1:
            return 0.0
        outside = (self.size - self.per_node) / self.size
        inside = (self.per_node - 1) / self.size
        gpu = self.cluster.gpu
        wire_s = outside / gpu.nic_bytes_per_s + inside / gpu.nvlink_bytes_per_s
        return self.latency_s + size_bytes * wire_s / self.constants.link_efficiency
