"""The SGLang model classes that MegaRL's engines serve: causal models, and reward models if SGLang
has them. `unchanged` lists the classes that are SGLang's own. A family whose class is changed has a
module.

SGLang imports this package instead of all of its own model files (SGLANG_EXTERNAL_MODEL_PACKAGE),
so that engines start faster. If a family is not here, SGLang still finds it by importing all model
files.
"""
