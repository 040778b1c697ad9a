"""The SGLang model classes that MegaRL's engines serve: causal models, and reward models if SGLang has them. `unchanged` lists those that
are SGLang's own; a family with a change has a module.

SGLang imports this package instead of all of its own model files (SGLANG_EXTERNAL_MODEL_PACKAGE), so that engines start faster. It still
finds a family that is not here, by importing all of them.
"""
