"""Hugging Face Trainer: one import is different, and one argument."""

import sys

import torch
from tiny_llama import Counting, build
from transformers import TrainingArguments

from offbeat.integrations.transformers import Trainer  # <- instead of transformers.Trainer

arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/trainer",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_steps=6,
    eval_strategy="steps",
    eval_steps=6,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=build(),
    args=arguments,
    train_dataset=Counting(),
    eval_dataset=Counting(),
    strategy="dreamddp:period=4",  # <- new
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
model = trainer.model
