"""`make gpu`: checks and times kernels, trainer and direct writes on one NVIDIA GPU.

Writes a JSON file and a page. See docs/gpu.md.
"""
