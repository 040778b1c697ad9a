"""`make gpu`: what one NVIDIA GPU makes of the kernels, the trainer and direct writes, as one JSON and one page. See docs/gpu.md."""
