import torch
from sglang.srt.models import qwen2, qwen2_classification, qwen2_rm


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    """Like SGLang's class (0.5.23), without its bias of the scores: checkpoints have none, so it
    would be random.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.score = torch.nn.Linear(self.score.in_features, self.score.out_features, bias=False)


EntryClass = [qwen2.Qwen2ForCausalLM, Qwen2ForSequenceClassification, *qwen2_rm.EntryClass]
