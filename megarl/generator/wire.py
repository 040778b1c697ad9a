"""Bytes into an engine's workers, by the one door SGLang has: a named tensor in its own pickle format."""

from __future__ import annotations

import base64
import pickle

import torch


def tensor_payload(content: bytes) -> str:
    """`content` as SGLang's `serialized_named_tensors` entry: one uint8 tensor named "command", base64 of a plain pickle.

    Plain pickle puts the values into the message itself; SGLang's own helper would pass a handle to shared memory, and start
    a manager process to keep it.
    """
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("command", tensor)])).decode()


def content_of(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """What `tensor_payload` wrapped. SGLang has put it on the worker's device by then."""
    [(_, tensor)] = named_tensors
    return tensor.cpu().numpy().tobytes()
