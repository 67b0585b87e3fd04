"""accelerate: one import and one call are different."""

import torch
from accelerate import Accelerator
from tiny_llama import Counting, build
from torch.utils.data import DataLoader

from offbeat.integrations.accelerate import prepare  # <- new

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
loader = DataLoader(Counting(), batch_size=4)
strategy = "dreamddp:period=4"  # <- new
model, optimizer, loader = prepare(accelerator, model, optimizer, loader, strategy=strategy)  # <-

losses = []
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
model.consolidate()  # <- new: replicas are equal from here on
accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
