"""Results of kernels that lie in a concatenation from the beginning: the same numbers, no copy, and why not."""

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.analysis.memory import memory
from daceml_train.analysis.traffic import traffic
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.lowering.lower import lower
from daceml_train.ops.movement import Concat
from daceml_train.transformations.global_movement.concatenate_in_place import ConcatenateInPlace
from tests.analysis.test_memory import check_model
from tests.driver.conformity import assert_conforms, through_optimize, through_step
from tests.driver.networks import Problem
from tests.transformations.checking import Golden, check_pass, check_same, program

TWO = "%a = exp(%x)\n%b = sin(%z)\n"
SIGNATURE = "x: f32[4, 6], z: f32[4, 6]"


def reasons(graph: Graph) -> list[list[str | None]]:
    return [joined.reasons for joined in ConcatenateInPlace().matches(graph)]


def promised(graph: Graph) -> int:
    """What the matches promise together; none of them is refused."""
    return sum(joined.traffic for joined in ConcatenateInPlace().matches(graph) if joined.refusal is None)


@pytest.mark.parametrize("dim", [0, 1])
def test_results_of_kernels(dim: int, golden: Golden) -> None:
    graph = program(SIGNATURE, TWO + f"%c = concat(%a, %b, dim={dim})\n%y = neg(%c)", "%y")
    after = check_pass(graph, ConcatenateInPlace())
    golden(str(after))
    assert traffic(after).bytes - traffic(graph).bytes == promised(graph) == -2 * 2 * 24 * 4
    assert len(lower(after).launches) == 3, "nothing is copied"


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_through_views_and_permutations(dim: int) -> None:
    body = "%a = exp(%x)\n%v = view(%a, shape=(4, 1, 6))\n%p = permute(%v, dims=(1, 2, 0))\n%b = sin(%w)\n"
    graph = program("x: f32[4, 6], w: f32[1, 6, 4]", body + f"%c = concat(%p, %b, dim={dim})\n%y = neg(%c)", "%y")
    after = ConcatenateInPlace().run(graph)
    assert reasons(graph) == [[None, None]]
    check_same(graph, after)
    assert traffic(after).bytes - traffic(graph).bytes == promised(graph)


def test_memory_may_not_allow_it() -> None:
    body = "%a = exp(%x)\n%v = view(%a, shape=(4, 3, 2))\n%p = permute(%v, dims=(1, 0, 2))\n%b = sin(%w)\n"
    graph = program("x: f32[4, 6], w: f32[3, 4, 2]", body + "%c = concat(%p, %b, dim=0)\n%y = neg(%c)", "%y")
    assert reasons(graph) == [["%p is an alias whose strides do not exist in %c", None]]


def test_the_rest_is_copied() -> None:
    graph = program(SIGNATURE, TWO + "%c = concat(%a, %z, %b, dim=0)\n%y = neg(%c)", "%y")
    after = ConcatenateInPlace().run(graph)
    assert reasons(graph) == [[None, "%z is not produced by a kernel in memory of its own", None]]
    assert [n.op.placed for n in after.nodes if isinstance(n.op, Concat)] == [(0, 2)]
    assert traffic(after).bytes - traffic(graph).bytes == promised(graph)
    assert len(lower(after).launches) == 4


def test_a_concatenation_within_another() -> None:
    body = TWO + "%c = concat(%a, %b, dim=1)\n%d = exp(%w)\n%e = concat(%c, %d, dim=0)\n%y = neg(%e)"
    graph = program(f"{SIGNATURE}, w: f32[4, 12]", body, "%y")
    after = ConcatenateInPlace().run(graph)
    assert [n.op.placed for n in after.nodes if isinstance(n.op, Concat)] == [(0, 1), (0, 1)]
    program_ = lower(after)
    assert len(program_.launches) == 4
    assert len({launch.places[-1].slot for launch in program_.launches}) == 2


def test_memory_is_that_of_the_program() -> None:
    body = TWO + "%c = concat(%a, %z, %b, dim=0)\n%d = neg(%c)\n%y = matmul(%d, %w)"
    graph = program(f"{SIGNATURE}, w: f32[6, 3]", body, "%y")
    after = ConcatenateInPlace().run(graph)
    check_model(after)
    assert memory(after).live[2] < memory(graph).live[2], "no second copy of the pieces"


def test_refused() -> None:
    handed = program(SIGNATURE, TWO + "%c = concat(%a, %b, dim=0)\n%y = neg(%c)", "%y, %a")
    assert reasons(handed) == [["%a is a result of the graph", None]]
    twice = program(SIGNATURE, TWO + "%c = concat(%a, %a, dim=0)\n%y = neg(%c)", "%y")
    assert reasons(twice) == [["%a already lies in a concatenation"] * 2]
    library = program("x: f32[4, 6], z: f32[6, 6]", "%a = matmul(%x, %z)\n%c = concat(%a, %x, dim=0)", "%c")
    assert reasons(library)[0][0] == "%a is not produced by a kernel in memory of its own"
    constant = program("x: f32[4]", "%a = full(value=1.0, shape=(2,), dtype=f32)\n%c = concat(%x, %a, dim=0)", "%c")
    assert reasons(constant)[0][1] == "%a is not produced by a kernel in memory of its own"
    part = program(
        "x: f32[4]", "%a = exp(%x)\n%p = slice(%a, dim=0, start=0, stop=2)\n%c = concat(%p, %p, dim=0)", "%c"
    )
    assert "strides do not exist" in reasons(part)[0][0]
    read = program(
        SIGNATURE, TWO + "%c = concat(%a, %b, dim=1)\n%t = permute(%z, dims=(1, 0))\n%m = matmul(%a, %t)", "%c, %m"
    )
    assert reasons(read) == [["a library call reads %a, which would not be dense", None]]
    dense = program(
        SIGNATURE, TWO + "%c = concat(%a, %b, dim=0)\n%t = permute(%z, dims=(1, 0))\n%m = matmul(%a, %t)", "%c, %m"
    )
    assert reasons(dense) == [[None, None]]


def test_an_array_in_two_concatenations_has_one_place() -> None:
    body = TWO + "%c = concat(%a, %b, dim=0)\n%d = concat(%b, %a, dim=0)\n%y = mul(%c, %d)"
    graph = program(SIGNATURE, body, "%y")
    after = ConcatenateInPlace().run(graph)
    assert [n.op.placed for n in after.nodes if isinstance(n.op, Concat)] == [(), (0, 1)]


@pytest.mark.parametrize(
    ("signature", "body", "result", "sentence"),
    [
        (SIGNATURE, "%c = concat(%x, %z, dim=0, placed=(0,))", "%c", "which no kernel produces"),
        (SIGNATURE, TWO + "%c = concat(%a, %b, dim=0, placed=(0,))", "%c, %a", "which lies elsewhere, too"),
        (SIGNATURE, TWO + "%c = concat(%a, %b, dim=0, placed=(2,))", "%c", "cannot have (2,) in place"),
    ],
)
def test_the_verifier_knows(signature: str, body: str, result: str, sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        program(signature, body, result)


class Gates(nn.Module):
    """A recurrent cell by hand: gradients of gates are concatenated, and those of all steps again."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state, self.head = nn.Linear(6, 32), nn.Linear(8, 32), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = x.new_zeros(x.shape[0], 8)
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.of_input(x[:, t]) + self.of_state(state)).chunk(4, 1)
            memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(memory)
            states.append(state)
        return self.head(torch.stack(states, 1)).flatten(0, 1)


@pytest.mark.compiled
@pytest.mark.parametrize("run", [through_step, through_optimize])
def test_trains_to_the_same_numbers(run) -> None:
    gates = Problem(Gates, lambda: (torch.randn(3, 5, 6), torch.randint(0, 3, (15,))), nn.functional.cross_entropy)
    assert_conforms(gates, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), run, steps=3)


@pytest.mark.compiled
def test_a_recurrent_layer_has_its_gates_in_place() -> None:
    model = Gates()
    step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    text = str(dt.TRAINING.run(step.graph(torch.randn(3, 5, 6), torch.randint(0, 3, (15,)))))
    assert text.count("placed=(0, 1, 2, 3)") >= 4
