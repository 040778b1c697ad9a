"""The vision tower of a checkpoint.

It is neither trained nor served: an export copies its tensors byte for byte.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megarl.models.spec import ModelSpec
from megarl.trainer.hf_files import VISION, header, tensor_files

FILE = "model-vision.safetensors"


def carry_through(spec: ModelSpec, source: Path, folder: Path) -> dict[str, str]:
    """Copies the tower of the checkpoint `source`, if it has one, to a separate file in `folder`.

    Returns tensor name -> file name.

    Raises ConfigError if a file of `source` is damaged.
    """
    if spec.vision_tower:
        places = {}
        for name, file in tensor_files(source).items():
            if name.startswith(VISION):
                places[name] = source / file
    else:
        places = {}
    if not places:
        return {}
    headers = {path: header(path) for path in set(places.values())}
    entries = {}
    offset = 0
    for name, path in places.items():
        begin, end = headers[path][name]["data_offsets"]
        entries[name] = headers[path][name] | {"data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / FILE, "wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for name, path in places.items():
            target.write(_data(path, *headers[path][name]["data_offsets"]))
        target.flush()
        os.fsync(target.fileno())
    return dict.fromkeys(places, FILE)


def _data(path: Path, begin: int, end: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little") + begin)
        return file.read(end - begin)
