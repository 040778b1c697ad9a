from sglang.srt.layers.attention.linear import gdn_backend  # noqa: F401  on CPUs it defines operators that the next import needs
from sglang.srt.models import qwen3_5, qwen3_5_text

EntryClass = [*qwen3_5.EntryClass, *qwen3_5_text.EntryClass]
