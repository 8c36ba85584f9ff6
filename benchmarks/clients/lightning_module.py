"""Lightning: the module alone, and a strategy that hands the whole step over."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.clients.way import Program, Way
from daceml_train.integrations.lightning import CompiledStrategy

PACKAGE = "lightning"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(L.LightningModule):
    """A classifier that logs its loss and its accuracy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.layers(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss, and what is logged by step and by epoch."""
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"right": (logits.argmax(-1) == y).float().mean()}, on_epoch=True, on_step=False)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss."""
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        """Adam with a schedule by step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watching(Callback):
    """Keeps what Lightning counts and logs."""

    def __init__(self, way: Way) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After each step."""
        self.way.note("step", trainer.global_step)
        self.way.note("rate", trainer.optimizers[0].param_groups[0]["lr"])
        for name, value in outputs.items():
            self.way.note(name, value)
        self._logged(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After each epoch."""
        self._logged(trainer)

    def _logged(self, trainer: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            self.way.note(f"logged {name}", value)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    """Batches of eight, the last of five."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(29, 6, generator=generator), torch.randint(0, 3, (29,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(way: Way, **options: Any) -> L.Trainer:
    """A trainer without bars and files."""
    common = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    common |= {"default_root_dir": way.folder, "max_epochs": 2, "enable_checkpointing": False}
    return L.Trainer(**{**common, "callbacks": [Watching(way)], **options})


def module(way: Way) -> None:
    """`optimize` of the module: its `training_step` and `validation_step` are compiled."""
    net = way.optimize(Net())  # changed
    trainer(way).fit(net, batches(), batches())
    way.parameters(net)


def strategy(way: Way) -> None:
    """The whole step, with clipping."""
    chosen: Any = CompiledStrategy() if way.ours else "auto"  # changed
    net = Net()
    trainer(way, strategy=chosen, gradient_clip_val=0.5).fit(net, batches(), batches())
    way.parameters(net)


def resumed(way: Way) -> None:
    """A checkpoint of the first epoch, from which a fresh trainer goes on."""
    for epochs, path in ((1, None), (3, f"{way.folder}/last.ckpt")):
        chosen: Any = CompiledStrategy() if way.ours else "auto"  # changed
        saving = ModelCheckpoint(way.folder, save_last=True, monitor="val_loss")
        saving.CHECKPOINT_NAME_LAST = "last"
        net, kept = Net(), [Watching(way), saving]
        fitted = trainer(way, strategy=chosen, max_epochs=epochs, callbacks=kept, enable_checkpointing=True)
        fitted.fit(net, batches(), batches(), ckpt_path=path, weights_only=False)
        way.note("global step", fitted.global_step)
        way.note("best", saving.best_model_score)
        way.parameters(net)


def apart(way: Way) -> None:
    """Accumulation: Lightning calls backward pass and optimizer around the compiled `training_step`."""
    chosen: Any = CompiledStrategy() if way.ours else "auto"  # changed
    net = Net()
    trainer(way, strategy=chosen, accumulate_grad_batches=2).fit(net, batches(), batches())
    way.parameters(net)


PROGRAMS: dict[str, Program] = {
    "optimize": module,
    "whole step, clipping": strategy,
    "whole step, checkpoints": resumed,
    "accumulation": apart,
}
