"""The map of a weight update from trainer to engines.

`megarl.reshard(config)` is megarl.api.reshard.
"""

import sys

import megarl

sys.modules[__name__].__class__ = megarl.CallableRoom
