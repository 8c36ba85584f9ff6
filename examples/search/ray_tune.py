"""A search by stages that Ray places: `python ray_tune.py`. Digits to at least 93 % on images that are held out."""

import tempfile
from pathlib import Path

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

import daceml_train as dt

torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
X, Y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
HELD_OUT = 300


def data(step, settings):
    """The batch of a step."""
    order = torch.Generator().manual_seed(step)
    chosen = torch.randint(0, len(X) - HELD_OUT, (64,), generator=order)
    return X[chosen], Y[chosen]


def accuracy(model):
    """The share of held-out digits that are classified correctly."""
    model.eval()
    with torch.no_grad():
        return (model(X[-HELD_OUT:]).argmax(1) == Y[-HELD_OUT:]).float().mean()


model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = dt.training_step(model, nn.functional.cross_entropy, optimizer)

folder = Path(tempfile.mkdtemp())
stages = dt.Stages(step, data=data, evaluate=accuracy, storage=folder / "stages", seed=0, name="digits")
rates = [
    dt.schedule.steps(lr, {280: first, 350: second})
    for lr in (0.1, 0.05)
    for first in (0.5, 0.1)
    for second in (0.5, 0.1)
]
tuner = tune.Tuner(
    stages.trainable,
    param_space={"until": (100, 400), "lr": tune.grid_search(rates)},
    tune_config=tune.TuneConfig(metric="value", mode="max", reuse_actors=True),
    run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0),
)
best = tuner.fit().get_best_result()
report = stages.report()
report.save(folder / "search.html")
print(f"best accuracy {best.metrics['value']:.3f} with {best.config['lr']}")
print(f"{report.requested} steps asked for, {report.steps} trained; the tree is in {folder / 'search.html'}")
assert best.metrics["value"] >= 0.93
