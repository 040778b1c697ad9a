"""Reads a config.json with Transformers' own class, and prints its values as JSON: python
auto_config.py FILE

`base/without_torch.py` runs this file as a program of its own, which hides torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """All values that Transformers' class for `model_type` has for a config.json. Only a "problem"
    if it has no class, or refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return {"problem": ""}
    try:
        config = CONFIG_MAPPING[model_type].from_dict({**values})
    except Exception as error:  # classes raise any kind
        return {"problem": f"{type(error).__name__}: {error}"}
    return json.loads(config.to_json_string(use_diff=False))


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # to the import system: there is no such module
    print(json.dumps(read(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
