"""The operator graph: its construction and its text form.

Functions of a graph such as `verify`, `traffic` and `interpret` are in `analysis`; `sdfg` imports DaCe and is never
imported from here.
"""

from daceml_train.expressions.operator import Expression as Expression  # which registers it: texts name it
from daceml_train.graph.graph import Graph, Input, Node, Role
from daceml_train.graph.text import canonical_text, parse, show

__all__ = ["Graph", "Input", "Node", "Role", "canonical_text", "parse", "show"]
