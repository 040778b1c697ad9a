"""Ends the run when Megatron warns of corrupt data; Megatron itself would go on."""

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
    """Makes every warning of Megatron about corruption an error with its text: a RuntimeError if it is logged, the Warning itself if it is
    issued by `warnings`. Repeated calls do nothing."""
    logger = logging.getLogger("megatron")
    if not any(isinstance(handler, _Refuse) for handler in logger.handlers):
        logger.addHandler(_Refuse(logging.WARNING))
        warnings.filterwarnings("error", message=f"(?is).*{_CORRUPT.pattern}", module=r"megatron\b")
