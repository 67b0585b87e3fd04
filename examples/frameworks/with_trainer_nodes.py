"""Hugging Face Trainer, with FSDP2 inside nodes and offbeat between them."""

import os
import sys

import torch
from tiny_llama import Counting, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from offbeat.integrations.transformers import Trainer  # <- instead of transformers.Trainer

arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/trainer",
    per_device_train_batch_size=4,
    num_train_epochs=4,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
inside = int(os.environ["LOCAL_WORLD_SIZE"])
shape = arguments.world_size // inside, inside
mesh = init_device_mesh(arguments.device.type, shape, mesh_dim_names=("between", "inside"))
model = build().to(arguments.device)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh["inside"])
fully_shard(model, mesh=mesh["inside"])
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Counting(),
    strategy="dreamddp:period=4",  # <- new
    options={"mesh": mesh["between"]},  # <- new
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
