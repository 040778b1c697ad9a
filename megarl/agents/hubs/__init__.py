"""Environments of hubs, as they come from their packages: each hub's packages are in an interpreter of their own (docs/agents.md)."""

from __future__ import annotations
