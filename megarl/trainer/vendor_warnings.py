"""Megatron warns that data may be corrupt, and goes on. Here that ends the run."""

from __future__ import annotations

import logging
import re
import warnings

_CORRUPT = re.compile("corrupt", re.IGNORECASE)


class _Refuse(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _CORRUPT.search(text := record.getMessage()):
            raise RuntimeError(f"{record.name} warns of corruption: {text}")


def refuse_corruption() -> None:
    """From now on a warning of Megatron's that speaks of corruption, logged or raised as one, is a RuntimeError or a Warning with its text,
    where it was given. Repeated calls do nothing."""
    logger = logging.getLogger("megatron")
    if not any(isinstance(handler, _Refuse) for handler in logger.handlers):
        logger.addHandler(_Refuse(logging.WARNING))
        warnings.filterwarnings("error", message=f"(?is).*{_CORRUPT.pattern}", module=r"megatron\b")
