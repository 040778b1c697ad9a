"""The plan of a run: its topologies and layouts, or all that is wrong with its settings.

`megarl.plan(config)` is megarl.api.plan.
"""

import sys

import megarl

sys.modules[__name__].__class__ = megarl.CallableRoom
