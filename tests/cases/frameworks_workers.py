"""What ranks do with frameworks; a module of its own, so that processes can import it.

All in one world, one after the other: importing the frameworks takes longer than training.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import offbeat
from cases.docs import DOCS, ROOT, blocks
from offbeat import Profile
from offbeat.profile import Bucket, Link

SCRIPTS = ROOT / "examples" / "frameworks"
DREAM = "dreamddp:period=4"
BATCH, EPOCHS, RANKS = 4, 2, 2
STRIDED, SHUFFLED, BLOCKS = "strided", "shuffled", "blocks"  # how loaders deal samples to ranks


def everything(directory: str) -> dict[str, Any]:
    """What this rank has seen, by the name of what it did."""
    torchrun_by_hand()
    where = Path(directory)
    done: list[Callable[[Path], dict[str, Any]]] = [
        accelerate_script,
        fabric_script,
        lightning_script,
        trainer_script,
        accelerate_half,
        accelerate_after,
        trainer_accumulates,
        lightning_accumulates,
        trainer_smooths_labels,
        lightning_saves_between_micro_batches,
        others,
    ]
    return {each.__name__: each(where / each.__name__) for each in done}


def torchrun_by_hand() -> None:
    """What else torchrun sets, which Lightning wants to see."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "1",
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(RANKS),
        "HF_HUB_OFFLINE": "1",
    }
    sys.path.insert(0, str(SCRIPTS))


def rank() -> int:
    return int(os.environ["RANK"])


# ---- the scripts ----------------------------------------------------------------------------


def accelerate_script(where: Path) -> dict[str, Any]:
    names = script("with_accelerate.py", where)
    accelerator, model = names["accelerator"], names["model"]
    assert accelerator.prepare(model) is model  # no DDP around it, either
    assert model.to(accelerator.device) is model
    seen = summary(names["losses"], model.module)
    with torch.no_grad():
        next(model.module.parameters()).add_(rank())  # as after a local step
    accelerator.save_state(str(where))
    seen["after_save"] = digest(model.module)
    if rank() == 0:
        seen["saved"] = same_as_saved(model.module, where / "model.safetensors")
    model.close()
    forget_accelerate()
    return seen | plain(DREAM, BLOCKS)


def fabric_script(where: Path) -> dict[str, Any]:
    names = script("with_fabric.py", where)
    fabric, model = names["fabric"], names["model"]
    seen = summary(names["losses"], model.module)
    fabric.save(where / "all.ckpt", {"model": model, "optimizer": names["optimizer"]})
    saved = fabric.load(where / "all.ckpt")
    parts = dict(model.module.named_parameters())
    seen["saved"] = all(torch.equal(saved["model"][name], p) for name, p in parts.items())
    seen["state"] = len(saved["optimizer"]["state"])
    fabric.strategy._prepared[0].close()
    return seen | plain(DREAM, STRIDED)


def lightning_script(where: Path) -> dict[str, Any]:
    names = script("with_lightning.py", where, prefix="model.")
    return summary(names["losses"], names["model"]) | plain(DREAM, SHUFFLED)


def trainer_script(where: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    names = script("with_trainer.py", where, str(where))
    seen = summary(names["losses"], names["model"])
    again = LlamaForCausalLM.from_pretrained(where / "checkpoint-12")
    seen["loaded"] = digest(again) == digest(names["model"])
    seen["tied"] = again.lm_head.weight is again.model.embed_tokens.weight
    trainer = names["trainer"]
    trainer.model_wrapped.close()
    forget_accelerate()
    return seen | resumed(names, where) | plain(DREAM, BLOCKS, consolidate_at=(6, 12))


def resumed(names: dict[str, Any], where: Path) -> dict[str, Any]:
    """One more epoch, from the last checkpoint."""
    from offbeat.integrations.transformers import Trainer

    names["arguments"].num_train_epochs = EPOCHS + 1
    described(where, "")
    trainer = Trainer(
        model=names["build"](),
        args=names["arguments"],
        train_dataset=names["Counting"](),
        eval_dataset=names["Counting"](),
        strategy=DREAM,
    )
    trainer.train(resume_from_checkpoint=True)
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    seen = {"resumed": digest(trainer.model), "steps": steps}
    trainer.model_wrapped.close()
    forget_accelerate()
    return seen


# ---- what else their users do ---------------------------------------------------------------


def accelerate_half(where: Path) -> dict[str, Any]:
    """Mixed precision is the accelerator's own."""
    from accelerate import Accelerator
    from tiny_llama import Counting, build

    from offbeat.integrations.accelerate import prepare

    described(where, "")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    bare = build()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    dtypes = []
    layer = bare.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    model, optimizer = prepare(accelerator, bare, optimizer, strategy="wfbp")
    batch = {name: tokens[None] for name, tokens in Counting()[rank()].items()}
    output = model(**batch)
    accelerator.backward(output.loss)
    optimizer.step()
    model.consolidate()
    seen = {"inside": dtypes, "outside": output.logits.dtype, "digest": digest(bare)}
    model.close()
    forget_accelerate()
    return seen


def accelerate_after(where: Path) -> dict[str, Any]:
    """offbeat.prepare first, then accelerate's own."""
    from accelerate import Accelerator
    from tiny_llama import Counting, build
    from torch.utils.data import DataLoader

    described(where, "")
    accelerator, bare = Accelerator(cpu=True, gradient_accumulation_steps=2), build()
    names = {
        "offbeat": offbeat,
        "accelerator": accelerator,
        "model": bare,
        "optimizer": torch.optim.AdamW(bare.parameters(), lr=1e-2, weight_decay=0.0),
        "loader": DataLoader(Counting(), batch_size=BATCH),
    }
    os.environ["OFFBEAT_STRATEGY"] = "wfbp"
    execute_snippet(DOCS / "frameworks.md", "model, optimizer = offbeat.prepare(", names)
    del os.environ["OFFBEAT_STRATEGY"]
    model, optimizer, loader = (names[name] for name in ("model", "optimizer", "loader"))
    assert isinstance(model, offbeat.core.runtime.prepared.Model)  # not wrapped in DDP
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.consolidate()
    seen = summary([], bare)
    model.close()
    forget_accelerate()
    return seen | plain("wfbp", BLOCKS, epochs=1, accumulate=2)


def trainer_accumulates(where: Path) -> dict[str, Any]:
    from tiny_llama import Counting, build
    from transformers import Seq2SeqTrainingArguments

    described(where, "")
    names: dict[str, Any] = {}
    execute_snippet(DOCS / "frameworks.md", "from transformers import Seq2SeqTrainer", names)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(where),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = names["MyTrainer"](
        model=build(), args=arguments, train_dataset=Counting(), strategy="wfbp", options=quiet()
    )
    trainer.train()
    seen = summary([], trainer.model)
    trainer.model_wrapped.close()
    forget_accelerate()
    return seen | plain("wfbp", BLOCKS, epochs=1, accumulate=2)


def lightning_accumulates(where: Path) -> dict[str, Any]:
    """Checkpoints and validation between; a second fit goes on from the first's checkpoint."""
    import lightning
    from tiny_llama import Counting, build
    from torch.utils.data import DataLoader

    from offbeat.integrations.lightning import OffbeatStrategy

    class Language(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        validation_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)

    language = Language()
    described(where, "model.")
    loader, common = DataLoader(Counting(), batch_size=BATCH), {"accelerator": "cpu", "devices": 2}
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    before: Path | None = None
    for epochs in (1, 2):
        trainer = lightning.Trainer(
            max_epochs=epochs,
            strategy=OffbeatStrategy("wfbp", options=quiet()),
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir=where,  # for checkpoints after every epoch
            **common,
            **off,
        )
        trainer.fit(language, loader, loader, ckpt_path=before)
        before = where / f"{epochs}.ckpt"
        trainer.save_checkpoint(before)
    seen = summary([], language.model)
    return seen | plain("wfbp", SHUFFLED, accumulate=2)


def trainer_smooths_labels(where: Path) -> dict[str, Any]:
    """Weights after training with label smoothing, under offbeat and under DDP."""
    import transformers
    from tiny_llama import Counting, build

    arguments = transformers.TrainingArguments(
        output_dir=str(where),
        per_device_train_batch_size=BATCH,
        max_steps=3,
        label_smoothing_factor=0.1,
        learning_rate=1e-2,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    described(where, "")
    names = {"model": build(), "args": arguments, "data": Counting()}
    os.environ["OFFBEAT_STRATEGY"] = "wfbp"
    execute_snippet(ROOT / "docs" / "using.md", "from offbeat.integrations.transformers", names)
    trainer = names["trainer"]
    trainer.train()
    del os.environ["OFFBEAT_STRATEGY"]
    seen = {"weights": weights(trainer.model)}
    unwrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    seen["unwrapped"] = unwrapped is trainer.model
    trainer.model_wrapped.close()
    under_ddp = transformers.Trainer(model=build(), args=arguments, train_dataset=Counting())
    under_ddp.train()
    forget_accelerate()
    return seen | {"ddp": weights(under_ddp.model)}


def lightning_saves_between_micro_batches(where: Path) -> dict[str, Any]:
    """The checkpoint that a callback saves while gradients accumulate, and this rank's weights
    before it."""
    import lightning
    from tiny_llama import Counting, build
    from torch.utils.data import DataLoader

    from offbeat.integrations.lightning import OffbeatStrategy

    class Language(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    seen: dict[str, Any] = {}

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 2:  # the first of two micro-batches
                seen["before"] = weights(module.model)
                trainer.save_checkpoint(where / "middle.ckpt")

    described(where, "model.")
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=2,
        strategy=OffbeatStrategy("local-sgd:period=100"),
        accumulate_grad_batches=2,
        callbacks=[Save()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(), DataLoader(Counting(), batch_size=BATCH))
    saved = torch.load(where / "middle.ckpt", weights_only=False)["state_dict"]
    return seen | {"saved": {name.removeprefix("model."): t for name, t in saved.items()}}


def others(_: Path) -> dict[str, Any]:
    """What is refused; and the other package of Lightning."""
    import pytorch_lightning
    from accelerate import Accelerator, DistributedType
    from lightning.pytorch.strategies import DDPStrategy
    from tiny_llama import build

    from offbeat.integrations.accelerate import prepare
    from offbeat.integrations.lightning import OffbeatFabricStrategy, OffbeatStrategy
    from offbeat.integrations.pytorch_lightning import OffbeatStrategy as OtherStrategy

    accelerator, model = Accelerator(cpu=True), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fabric = OffbeatFabricStrategy()
    sharding: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    refused = [
        refusal(lambda: prepare(accelerator, model)),
        refusal(lambda: fabric.setup_module(model)),
        refusal(lambda: fabric.setup_module_and_optimizers(model, [])),
        refusal(lambda: prepare(sharding, model, optimizer)),
    ]
    forget_accelerate()
    kinds = {OffbeatStrategy: DDPStrategy, OtherStrategy: pytorch_lightning.strategies.DDPStrategy}
    subclasses = all(issubclass(*pair) for pair in kinds.items())
    return {"refused": refused, "subclasses": subclasses and DDPStrategy not in OtherStrategy.mro()}


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


# ---- plain offbeat --------------------------------------------------------------------------


def plain(
    strategy: str,
    order: str,
    *,
    epochs: int = EPOCHS,
    accumulate: int = 1,
    consolidate_at: Sequence[int] = (),
) -> dict[str, Any]:
    """The same training in a loop of one's own."""
    from tiny_llama import Counting, build

    os.environ.pop("OFFBEAT_JOB", None)
    bare, data = build(), Counting()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2, weight_decay=0.0)
    known = profile("")
    model, optimizer = offbeat.prepare(bare, optimizer, strategy, profile=known, timeout_s=60)
    losses, steps = [], 0
    batches = [batch for epoch in range(epochs) for batch in batches_of(len(data), order, epoch)]
    for at, indices in enumerate(batches, 1):
        rows = [data[i] for i in indices]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        with nullcontext() if at % accumulate == 0 else model.no_sync():
            loss = model(**batch).loss
            (loss / accumulate).backward()
        losses.append(loss.item())
        if at % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps in consolidate_at:
                model.consolidate()
    model.consolidate()
    seen = {"plain_losses": losses, "plain": weights(bare)}
    model.close()
    return seen


def batches_of(size: int, order: str, epoch: int) -> list[list[int]]:
    """This rank's samples, batch by batch: every other one, or those of every other batch. The
    Trainer of Lightning shuffles."""
    if order != BLOCKS:
        sampler = DistributedSampler(range(size), RANKS, rank(), shuffle=order == SHUFFLED)
        sampler.set_epoch(epoch)
        mine = list(sampler)
        return [mine[i : i + BATCH] for i in range(0, len(mine), BATCH)]
    starts = range(rank() * BATCH, size, RANKS * BATCH)
    return [list(range(start, start + BATCH)) for start in starts]


def profile(prefix: str) -> Profile:
    """Of the tiny Llama, in made-up times; `prefix` stands before its parameters' names."""
    from tiny_llama import build

    names: dict[str, list[str]] = {}
    model = build()
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    for name in reversed(sizes):
        layer = name.split(".")[2] if ".layers." in name else name
        names.setdefault(layer, []).append(name)
    buckets = tuple(
        Bucket(
            prefix + layer,
            0.01,
            0.02,
            sum(sizes[name] for name in mine),
            state_bytes=2 * sum(sizes[name] for name in mine),
            tensors=tuple(prefix + name for name in mine),
        )
        for layer, mine in names.items()
    )
    return Profile(buckets, (Link("net", 0.001, 1e6),), world_size=RANKS)


# ---- helpers --------------------------------------------------------------------------------


def script(name: str, where: Path, *arguments: str, prefix: str = "") -> dict[str, Any]:
    """The names of a script of the examples after it has run as users run it, but planned from a
    profile, so that plans are the same."""
    described(where, prefix)
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        return runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    finally:
        sys.argv = before
        del os.environ["OFFBEAT_JOB"]


def execute_snippet(page: Path, begin: str, names: dict[str, Any]) -> None:
    """Execute the block of a page that begins with `begin`, with and into these names."""
    (block,) = (block for block in blocks(page) if block.text.startswith(begin))
    exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


def described(where: Path, prefix: str) -> None:
    """As a launcher would: the profile of whatever is prepared next."""
    where.mkdir(exist_ok=True)
    profile(prefix).save(where / f"profile{rank()}.json")
    job = {"schema": 1, "profile": str(where / f"profile{rank()}.json"), "timeout_s": 60.0}
    (where / f"job{rank()}.json").write_text(json.dumps(job))
    os.environ["OFFBEAT_JOB"] = str(where / f"job{rank()}.json")


def quiet() -> Any:
    """Options, to see that they are handed on."""
    return {"compare_every": 2}


def forget_accelerate() -> None:
    """Its singletons are those of the script before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def summary(losses: list[float], model: nn.Module) -> dict[str, Any]:
    return {"losses": losses, "weights": weights(model), "digest": digest(model)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, p in model.named_parameters():
        found.update(name.encode() + p.detach().numpy().tobytes())
    return found.hexdigest()


def same_as_saved(model: nn.Module, file: Path) -> bool:
    """Whether a file has every parameter of a model, one of those that are tied."""
    from safetensors.torch import load_file

    saved = load_file(file)
    return all(torch.equal(saved[name], p) for name, p in model.named_parameters())
