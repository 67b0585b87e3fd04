"""Lightning's Trainer, with FSDP2 inside nodes and offbeat between them."""

import os

import lightning
import torch
from tiny_llama import Counting, build
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from offbeat.integrations.lightning import OffbeatModelParallelStrategy  # <- new


class Language(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = build(), []

    def configure_model(self):
        mesh = self.device_mesh["tensor_parallel"]  # the ranks of a node
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


inside = int(os.environ["LOCAL_WORLD_SIZE"])
nodes = int(os.environ["WORLD_SIZE"]) // inside
language = Language()
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=inside,
    num_nodes=nodes,
    strategy=OffbeatModelParallelStrategy(  # <- instead of ModelParallelStrategy
        "dreamddp:period=4",  # <- between nodes
        data_parallel_size=nodes,
        tensor_parallel_size=inside,
    ),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(language, DataLoader(Counting(), batch_size=4))
losses, model = language.losses, language.model
