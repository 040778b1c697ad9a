import torch
from sglang.srt.models import qwen3, qwen3_classification


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    """Like SGLang's class (0.5.23), without its bias of the scores: checkpoints have none, so it
    would be random.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.score = torch.nn.Linear(self.score.in_features, self.score.out_features, bias=False)


EntryClass = [qwen3.Qwen3ForCausalLM, Qwen3ForSequenceClassification]
