"""Environments from hubs, used as their packages provide them.

Each hub's packages are in a separate interpreter (docs/agents.md).
"""

from __future__ import annotations
