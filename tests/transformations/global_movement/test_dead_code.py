import numpy as np

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.transformations.global_movement.dead_code import DeadCode
from tests.transformations.checking import assert_text, check_pass, program


def test_operators() -> None:
    body = "%a = exp(%x)\n%b = neg(%a)\n%c = sin(%x)\n%d = cos(%c)"
    after = check_pass(program("x: f32[3]", body, "%b"), DeadCode())
    assert_text(
        after,
        """\
        %a: f32[3] = exp(%x)
        %b: f32[3] = neg(%a)
        return %b
        """,
    )


def test_results_of_kernels() -> None:
    """A dropped result takes its statements, its argument, and what made that along."""
    body = """
        %a = exp(%x)
        %b = sin(%x)
        %u, %v, %w = kernel(x0=%a, x1=%b, x2=%x) {
        %v0 = neg(%x0)
        %v1 = mul(%v0, %x1)
        %v2 = cos(%x2)
        yield %v0, %v1, %v2
        }
    """
    after = check_pass(program("x: f32[3]", body, "%w, %u"), DeadCode())
    assert_text(
        after,
        """\
        %a: f32[3] = exp(%x)
        %u, %w: f32[3], f32[3] = kernel(x0=%a, x2=%x) {
          %v0 = neg(%x0)
          %v2 = cos(%x2)
          yield %v0, %v2
        }
        return %w, %u
        """,
    )
    assert traffic(after).bytes < traffic(program("x: f32[3]", body, "%w, %u, %v")).bytes


def test_updates_in_place() -> None:
    """An update stays with its argument, read or not; positions follow."""
    body = """
        %a, %b = kernel(x0=%g, x1=%p) {
        %v0 = exp(%x0)
        %v1 = neg(%x0)
        yield %v0, %v1 over %x1
        }
        write p <- %b
    """
    after = check_pass(program("p: f32[3], g: f32[3]", body), DeadCode())
    assert_text(
        after,
        """\
        %b: f32[3] = kernel(x0=%g, x1=%p) {
          %v1 = neg(%x0)
          yield %v1 over %x1
        }
        write p <- %b
        return
        """,
    )
    assert after.nodes[0].op.updates == ((0, 1),)


def test_unread_arguments() -> None:
    body = "%a = exp(%x)\n%y = kernel(x0=%a, x1=%x) {\n%v0 = neg(%x1)\nyield %v0\n}"
    after = DeadCode().run(program("x: f32[3]", body, "%y"))
    assert [node.inputs for node in after.nodes] == [("x",)]


def test_writes_that_change_nothing() -> None:
    graph = program("p: f32[3], q: f32[3]", "%a = neg(%q)\nwrite p <- %p\nwrite q <- %a")
    after = DeadCode().run(graph)
    assert after.writes == {"q": "a"}
    values = {"p": np.ones(3), "q": np.arange(3.0)}
    np.testing.assert_array_equal(interpret(after, values).writes["q"], -values["q"])


def test_a_kernel_that_is_all_needed_is_kept_as_it_is() -> None:
    graph = program("x: f32[3]", "%y = kernel(x0=%x) {\n%v0 = neg(%x0)\nyield %v0\n}", "%y")
    assert DeadCode().run(graph).nodes[0] is graph.nodes[0]
