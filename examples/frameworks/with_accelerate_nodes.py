"""accelerate, with FSDP2 inside nodes and offbeat between them."""

import os

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from tiny_llama import Counting, build
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from offbeat.integrations.accelerate import prepare  # <- new

inside = int(os.environ["LOCAL_WORLD_SIZE"])
nodes = int(os.environ["WORLD_SIZE"]) // inside
accelerator = Accelerator(cpu=not torch.cuda.is_available())
config = ParallelismConfig(dp_replicate_size=nodes, dp_shard_size=inside)
mesh = config.get_device_mesh(accelerator.device.type)
model = build().to(accelerator.device)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh["dp_shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
loader = DataLoader(Counting(), batch_size=4)
between = {"strategy": "dreamddp:period=4", "mesh": mesh["dp_replicate"]}  # <- new
model, optimizer, loader = prepare(accelerator, model, optimizer, loader, **between)  # <-

losses = []
for _ in range(4):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model.consolidate()  # <- new: replicas are equal from here on
accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
