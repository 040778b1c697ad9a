"""Sends bytes to an engine's workers in the only form that SGLang passes on: a named tensor in its own pickle format."""

from __future__ import annotations

import base64
import pickle

import torch

# The function that makes a storage of bytes. Where Megatron (0.19.2) is imported, it has put its own in place of torch's, and so into what
# is pickled; SGLang accepts torch's alone.
_TORCHS, _MEGATRONS = b"ctorch.storage\n_load_from_bytes\n", b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"


def tensor_payload(content: bytes) -> str:
    """Encodes `content` as an entry of SGLang's `serialized_named_tensors`: one uint8 tensor named "command", base64 of a plain pickle.

    Plain pickle puts the values into the message itself. SGLang's own helper would pass a handle to shared memory, and start a manager
    process to keep it.
    """
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    pickled = pickle.dumps([("command", tensor)], protocol=3)  # in which names of functions are plain lines
    return base64.b64encode(pickled.replace(_MEGATRONS, _TORCHS, 1)).decode()


def content_of(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Unwraps the content of `tensor_payload`, which SGLang has put on the worker's device by then."""
    [(_, tensor)] = named_tensors
    return tensor.cpu().numpy().tobytes()
