"""MegaRL: asynchronous RL post-training of large language models (after LlamaRL, Meta 2025)."""

__version__ = "0.1.0"
