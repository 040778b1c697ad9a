"""The SGLang model classes that MegaRL's engines serve, one module per family: causal models, and reward models if SGLang has them.

SGLang imports this package instead of all of its own model files (SGLANG_EXTERNAL_MODEL_PACKAGE), so that engines start faster. It still
finds a family that is not here, by importing all of them.
"""
