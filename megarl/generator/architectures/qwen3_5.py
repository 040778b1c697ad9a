# on CPUs this import defines operators that the next one needs
from sglang.srt.layers.attention.linear import gdn_backend  # noqa: F401
from sglang.srt.models import qwen3_5, qwen3_5_text

EntryClass = [*qwen3_5.EntryClass, *qwen3_5_text.EntryClass]
