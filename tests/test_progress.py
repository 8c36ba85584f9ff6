import io

from rich.console import Console

from daceml_train.passes.pipeline import Pipeline
from daceml_train.progress import compilation_bar, stages_bar
from daceml_train.transformations.intra_operator.simplify import Simplify
from tests.transformations.checking import program


def test_what_is_shown_and_where() -> None:
    graph = program("x: f32[4]", "%y = neg(%x)", "%y")
    pipeline = Pipeline(intra_operator=(Simplify(),))
    for terminal in (True, False):
        text = io.StringIO()
        with compilation_bar(Console(file=text, force_terminal=terminal, width=100)) as shown:
            pipeline.run(graph, watch=shown["pass_callback"])
            shown["progress"](2, 3)
        assert ("compiling kernels" in text.getvalue()) is terminal


def test_bar_of_stages() -> None:
    for terminal in (True, False):
        text = io.StringIO()
        with stages_bar(Console(file=text, force_terminal=terminal, width=100)) as progress:
            progress(2, 14)
        assert ("2/14" in text.getvalue()) is terminal
