"""Lightning's Trainer: one import is different, and one argument."""

import lightning
import torch
from tiny_llama import Counting, build
from torch.utils.data import DataLoader

from offbeat.integrations.lightning import OffbeatStrategy  # <- new


class Language(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = build(), []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


language = Language()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=2,
    strategy=OffbeatStrategy("dreamddp:period=4"),  # <- instead of "ddp"
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(language, DataLoader(Counting(), batch_size=4))
losses, model = language.losses, language.model
