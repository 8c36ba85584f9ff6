"""The operator graph: how it is built, shown as text, verified, interpreted and measured in bytes.

`verify`, `traffic` and `interpret` are functions of the modules of those names; `sdfg` imports DaCe and is never
imported from here.
"""

from daceml_train.graph.graph import Graph, Input, Node, Role
from daceml_train.graph.text import canonical_text, parse, show

__all__ = ["Graph", "Input", "Node", "Role", "canonical_text", "parse", "show"]
