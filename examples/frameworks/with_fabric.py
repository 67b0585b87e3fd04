"""Lightning Fabric: one import is different, and one argument."""

import torch
from lightning.fabric import Fabric
from tiny_llama import Counting, build
from torch.utils.data import DataLoader

from offbeat.integrations.lightning import OffbeatFabricStrategy  # <- new

fabric = Fabric(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=2,
    strategy=OffbeatFabricStrategy("dreamddp:period=4"),  # <- not "ddp"
)
fabric.launch()
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(Counting(), batch_size=4))

losses = []
for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
fabric.strategy.consolidate()  # <- new: replicas are equal from here on
fabric.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
