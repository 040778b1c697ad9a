from sglang.srt.layers.attention.linear import gdn_backend  # noqa: F401  on CPUs it brings operators that the next import asks for
from sglang.srt.models import qwen3_5, qwen3_5_text

EntryClass = [*qwen3_5.EntryClass, *qwen3_5_text.EntryClass]
