"""skorch: scikit-learn's interface to PyTorch modules."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.model_selection import cross_val_score
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from benchmarks.clients.way import Program, Way

PACKAGE = "skorch"


def module(outputs: int = 3) -> nn.Module:
    """A small model."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Random rows and classes."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)


def classifier(way: Way) -> None:
    """`fit`, the history, `predict_proba`, saved and loaded parameters."""
    x, y = rows()
    net = NeuralNetClassifier(
        way.optimize(module()),  # changed
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        max_epochs=3,
        batch_size=16,
        verbose=0,
        iterator_train__shuffle=False,
    )
    net.fit(x, y)
    for entry in net.history:
        way.note("train loss", float(entry["train_loss"]))
        way.note("valid loss", float(entry["valid_loss"]))
        way.note("accuracy", float(entry["valid_acc"]))
    way.note("probabilities", torch.from_numpy(net.predict_proba(x)))
    net.save_params(f_params=f"{way.folder}/parameters.pt")
    net.load_params(f_params=f"{way.folder}/parameters.pt")
    way.parameters(net.module_)


def cross_validation(way: Way) -> None:
    """Copies of the net by scikit-learn."""
    x, y = rows()
    net = NeuralNetRegressor(
        way.optimize(module(1)),  # changed
        max_epochs=2,
        batch_size=16,
        train_split=None,
        verbose=0,
        iterator_train__shuffle=False,
    )
    scores = cross_val_score(net, x, y[:, None].astype(np.float32), cv=2, scoring="r2")
    way.note("scores", torch.from_numpy(scores))


PROGRAMS: dict[str, Program] = {"classifier": classifier, "cross-validation": cross_validation}
