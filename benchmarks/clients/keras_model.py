"""Keras 3 on its PyTorch backend."""

from __future__ import annotations

import keras
import numpy as np
import torch

from benchmarks.clients.way import Program, Way

PACKAGE = "keras"


def data(width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Random rows and classes; the last batch is smaller."""
    generator = np.random.default_rng(0)
    return generator.normal(size=(40, width)).astype(np.float32), generator.integers(0, 4, size=40)


def fit(way: Way, model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    """`compile`, `fit` with validation, `evaluate`, `predict`."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-4), loss=loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, validation_data=(x, y))
    for name, values in history.history.items():
        for value in values:
            way.note(name, float(value))
    way.note("evaluated", float(model.evaluate(x, y, verbose=0)[0]))
    way.note("predicted", keras.ops.convert_to_tensor(model.predict(x, verbose=0)))
    for number, weights in enumerate(model.get_weights()):
        way.note(f"weights {number}", torch.from_numpy(weights))


def sequential(way: Way) -> None:
    """A Sequential model."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    model = way.optimize(keras.Sequential(layers))  # changed
    fit(way, model, *data())


def functional(way: Way) -> None:
    """A functional model with two branches, batch normalization, and a convolution."""
    keras.utils.set_random_seed(1)
    given = keras.Input((16,))
    image = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(keras.layers.Reshape((4, 4, 1))(given))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8)(given))
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(image), hidden])
    model = way.optimize(keras.Model(given, keras.layers.Dense(4)(joined)))  # changed
    fit(way, model, *data(16))


class Subclassed(keras.Model):
    """A model with a `call` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)
        self.norm = keras.layers.LayerNormalization()

    def call(self, x, training=False):  # type: ignore[no-untyped-def]
        """The logits."""
        return self.last(self.norm(self.first(x)))


def subclassed(way: Way) -> None:
    """A subclass of `keras.Model`."""
    keras.utils.set_random_seed(1)
    model = way.optimize(Subclassed())  # changed
    fit(way, model, *data())


PROGRAMS: dict[str, Program] = {"sequential": sequential, "functional": functional, "subclass": subclassed}
