"""Somebody's Hugging Face Trainer script; the lines marked `# +` stop, save and resume it.

python jobs/hf_trainer.py                                            by itself
python -m slurmtrain +cluster=a100x4 submit -- python jobs/hf_trainer.py
"""

import argparse
import os
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from slurmtrain.integrations.transformers import SlurmtrainCallback, resume_from  # +

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=os.path.join(os.environ.get("SLURMTRAIN_RUN_DIR", "."), "trainer"))
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save-steps", type=int, default=20)
options = parser.parse_args()


class Counting(Dataset[dict[str, Any]]):
    """Texts that count upwards, each from another number and in other steps."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [(index + place * (1 + index % 7)) % 64 for place in range(16)]
        return {"input_ids": tokens, "labels": tokens}


set_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=64, attention_dropout=0.1, **shape)
arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    save_steps=options.save_steps,
    logging_steps=5,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Counting(),
    callbacks=[SlurmtrainCallback()],  # +
)
trainer.train(resume_from_checkpoint=resume_from(options.output))  # +  was: trainer.train()
trainer.save_model(os.path.join(options.output, "final"))
