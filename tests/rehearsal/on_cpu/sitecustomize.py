"""On PYTHONPATH, this folder makes every Python process take its CPU for a GPU (cuda_on_cpu.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import cuda_on_cpu

cuda_on_cpu.install()
