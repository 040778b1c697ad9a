from sglang.srt.models import llama, llama_reward

EntryClass = [*llama.EntryClass, *llama_reward.EntryClass]
