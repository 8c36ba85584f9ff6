"""Random fusion groups: whatever is not refused computes what its body says."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daceml_train.errors import Refused
from daceml_train.ops.operator import Value, make
from tests.codegen.running import Case, check, describe, kernel_of

pytestmark = pytest.mark.compiled
UNARY = ["tanh", "square", "neg", "sigmoid", "abs", "relu"]
BINARY = ["add", "sub", "mul", "maximum"]


def operands(r: Random) -> list[torch.Tensor]:
    """Arrays that broadcast with one another, some of them permuted or strided in memory."""
    shape = [r.choice([1, 2, 3, 5, 8, 17, 40]) for _ in range(r.randint(1, 4))]
    results = []
    for position in range(r.randint(1, 4)):
        dims = [s if position == 0 or r.random() < 0.7 else 1 for s in shape]
        dims = dims[r.choice([0, 0, 0, len(dims) - 1]) :]
        x = torch.randn(dims)
        match r.randint(0, 5):
            case 0 if x.dim() > 1:
                order = r.sample(range(x.dim()), x.dim())
                x = x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
            case 1 if x.dim() > 0:
                x = torch.randn([*dims[:-1], dims[-1] * 2])[..., ::2]
        results.append(x)
    return results


def body(r: Random, steps: int):
    """A random program: elementwise operators, reductions that keep their dimensions, movement."""

    def build(*arguments: Value) -> list[Value]:
        values = list(arguments)
        for _ in range(steps):
            x = r.choice(values[-4:])
            rank = len(x.shape)
            try:
                match r.randint(0, 9):
                    case 0 | 1:
                        result = x.unary(r.choice(UNARY))
                    case 2 | 3 | 4:
                        result = x.apply(make(r.choice(BINARY)), r.choice(values))
                    case 5 | 6 if rank:
                        dims = r.choice([(rank - 1,), tuple(range(rank - 1)) or (0,), tuple(range(rank))])
                        result = x.reduce(r.choice(["sum", "sum", "max"]), dims, r.random() < 0.7)
                        result = result.unary("tanh")
                    case 7 if rank > 1:
                        result = x.permute((*range(rank - 2), rank - 1, rank - 2)).unary("neg")
                    case 8 if rank > 1:
                        result = x.view((*x.shape[:-2], x.shape[-2] * x.shape[-1]))
                    case _:
                        result = x.compare("gt", 0.25).where(x, 0.5)
            except Exception as error:  # shapes that do not broadcast
                if "broadcast" not in str(error):
                    raise
                continue
            values.append(result)
        results = values[len(arguments) :][-3:]
        return r.sample(results, r.randint(1, len(results))) if results else [values[0].unary("neg")]

    return build


def group(seed: int) -> Case | None:
    """The case of a seed, or None if it is refused. Some results are stored over a state that they add up in."""
    r = Random(seed)
    torch.manual_seed(seed)
    inputs = operands(r)
    steps, chosen = r.randint(1, 12), r.randint(0, 1 << 30)
    kernel = kernel_of(body(Random(chosen), steps), *map(describe, inputs))
    types = kernel.infer(*map(describe, inputs))
    stored = [i for i, t in enumerate(types) if t.rank and r.random() < 0.4]
    for updated in dict.fromkeys((tuple(stored), ())):
        states = [in_some_order(r, torch.randn(tuple(map(int, types[i].shape)))) for i in updated]
        kernel = kernel_of(with_states(body(Random(chosen), steps), updated), *map(describe, [*inputs, *states]))
        pairs = tuple((result, len(inputs) + k) for k, result in enumerate(updated))
        try:
            name, blocks = f"seed {seed}, {len(updated)} updates", r.choice([1, 2, 3])
            return Case(name, replace(kernel, updates=pairs), [*inputs, *states], blocks=blocks, tolerance=1e-5)
        except Refused:
            continue
    return None


def in_some_order(r: Random, x: torch.Tensor) -> torch.Tensor:
    """The array with its dimensions in some order in memory."""
    order = r.choice([[*range(x.dim())], r.sample(range(x.dim()), x.dim())])
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def with_states(build, updated: Sequence[int]):
    """The body, with these results averaged into further arguments."""

    def stepped(*arguments: Value) -> list[Value]:
        split = len(arguments) - len(updated)
        values = build(*arguments[:split])
        for position, state in zip(updated, arguments[split:], strict=True):
            values[position] = state * 0.5 + values[position]
        return values

    return stepped


@pytest.mark.parametrize("first", [0, 60])
def test_results_are_stored_over_states(first: int) -> None:
    """Elements, rows and columns; the plan refuses what would be read after it is overwritten."""
    cases = [c for c in map(group, range(first, first + 60)) if c is not None and c.kernel.updates]
    assert len(cases) >= 15
    check(cases)


def mean_and_columns(x: Value, m: Value, w: Value) -> list[Value]:
    """A new mean, and columns that need the old one."""
    return [m + x.sum((0, 1)), w - x.sum((0,)) * m]


def test_a_number_is_not_overwritten_before_columns_have_read_it() -> None:
    inputs = [torch.randn(20, 6), torch.randn(()), torch.randn(6)]
    kernel = kernel_of(mean_and_columns, *map(describe, inputs))
    check([Case("columns", replace(kernel, updates=((1, 2),)), inputs)])
    with pytest.raises(Refused, match="read after its new value is stored"):
        Case("number", replace(kernel, updates=((0, 1),)), inputs)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1_000_000))
def test_random_groups(seed):
    check([c for c in map(group, range(seed, seed + 10)) if c is not None])
