"""Random models that PyTorch takes, from seeds."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random

import daceml_train as dt
from benchmarks.fuzz.case import LOSSES, OPTIMIZERS, Case
from benchmarks.fuzz.drawing import Draw, Layer
from benchmarks.fuzz.layers import PROPOSALS

INPUTS = ([6], [4, 5], [3, 8], [2, 6, 6], [4, 5, 7], [3, 4], [1, 9])
LARGEST = 3000
"""Elements of the largest activation."""


def random_case(seed: int, most: int) -> Case:
    """A random model that PyTorch takes, for two batch sizes."""
    random = Random(str(seed))
    tokens = random.random() < 0.12
    shape = (random.choice([3, 5]),) if tokens else tuple(random.choice(INPUTS))
    sizes = tuple(random.sample([1, 2, 3, 4, 5], 2))
    names = sorted({type(p).__name__ for p in dt.TRAINING} - {"Decompose"})
    without = () if random.random() < 0.6 else tuple(random.sample(names, random.randrange(1, len(names))))
    case = Case(
        seed,
        (),
        shape,
        tokens,
        random.random() < 0.4,
        random.choice(LOSSES),
        random.choice(OPTIMIZERS),
        (sizes[0], sizes[1]),
        random.choice([1, 1, 2]),
        without,
    )
    wanted = random.randrange(2, most + 1)
    weights = [w for w, _ in PROPOSALS]
    if tokens:
        options = random.choice(["", ", padding_idx=0"])
        case = replace(case, layers=(Layer("h = self.e{n}(h)", (f"self.e{{n}} = nn.Embedding(7, 6{options})",)),))
    shapes = shapes_of(case) or []
    for _ in range(200):
        if len(case.layers) >= wanted:
            break
        number = len(case.layers)
        saved = {f"a{i}": s for i, s in enumerate(shapes[:-1]) if not (tokens and i == 0)}
        linears = {
            f"l{i}": (int(m[1]), int(m[2]))
            for i, layer in enumerate(case.layers)
            for line in layer.init
            if (m := re.search(r"Linear\((\d+), (\d+)", line)) and line.startswith("self.l")
        }
        if not shapes[-1]:
            break
        layer = random.choices(PROPOSALS, weights)[0][1](Draw(random, shapes[-1], number, saved, linears))
        if layer is None or (not layer.init and not any(x.init for x in case.layers)):  # parameters first
            continue
        grown = replace(case, layers=(*case.layers, layer))
        found = shapes_of(grown)
        if found is not None and math.prod(found[-1]) <= LARGEST and len(found[-1]) <= 5 and 0 not in found[-1]:
            case, shapes = grown, found
    return _widened(random, _called(random, case), shapes[-1])


def _called(random: Random, case: Case) -> Case:
    """The case with what decides how it is called; drawn last, so that the models of earlier seeds stay as they are."""
    numbers = range(len(case.layers))
    chosen = random.sample(numbers, min(random.choice([0, 0, 1, 2, 3]), len(numbers)))
    results = tuple((i, random.random() < 0.5) for i in sorted(chosen))
    dynamic, backend = random.choice([None, None, True]), random.random() < 0.2
    return replace(case, results=results, dynamic=dynamic, backend=backend, unlimited=random.random() < 0.4)


def _widened(random: Random, case: Case, shape: tuple[int, ...]) -> Case:
    """Some models of images end with 3x3 convolutions of as many channels as kernels of this package expect."""
    if len(shape) != 4 or random.random() < 0.5:
        return case
    use = random.choice(["", "h + ", "h * "])
    text = f"h = {use}self.v{{n}}(F.relu(self.w{{n}}(F.relu(self.u{{n}}(h)))))"
    convolutions = (("u", shape[1], 32), ("w", 32, 32), ("v", 32, shape[1]))
    init = tuple(f"self.{name}{{n}} = nn.Conv2d({c}, {k}, 3, padding=1)" for name, c, k in convolutions)
    return replace(case, layers=(*case.layers, Layer(text, init)))


def shapes_of(case: Case) -> list[tuple[int, ...]] | None:
    """Shapes of `h` before and after each layer, with the first batch size; None where either size fails."""
    try:
        for number in (3, 0):
            found: list[tuple[int, ...]] = []
            every = replace(case, layers=tuple(_recorded(layer) for layer in case.layers), results=())
            model = every.built()
            model.seen = found
            x = case.inputs(number)
            found.append(tuple(x.shape))
            output = model(x)
            if not output.isfinite().all() or (case.layers and not output.dtype.is_floating_point):
                return None
    except Exception:
        return None
    return found


def _recorded(layer: Layer) -> Layer:
    return replace(layer, forward=f"{layer.forward}; self.seen.append(tuple(h.shape))")
