"""`python -m megarl` is the command `megarl`."""

from __future__ import annotations

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main())
