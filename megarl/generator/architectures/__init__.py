"""The SGLang model classes that engines of ours serve, one module per family.

SGLang imports this package instead of all of its own model files (SGLANG_EXTERNAL_MODEL_PACKAGE): faster to start, and a
family that is not here is still found, by the slow way.
"""
