import torch
from sglang.srt.models import qwen2, qwen2_classification, qwen2_rm


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    """SGLang's (0.5.23) adds a bias to the scores, of random numbers, since checkpoints have none."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.score = torch.nn.Linear(self.score.in_features, self.score.out_features, bias=False)


EntryClass = [qwen2.Qwen2ForCausalLM, Qwen2ForSequenceClassification, *qwen2_rm.EntryClass]
