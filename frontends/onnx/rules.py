"""The table of ONNX operators, each defined by PyTorch's.

A rule is a function. Its parameters are the node's operands in ONNX's order, an absent one being None; its
keyword-only parameters are the node's attributes, with ONNX's defaults. So a node becomes one call:

    Softmax(x) {axis: 1}   =>   softmax(x, axis=1)

Operands such as shapes, axes and repeats are named in `host`: a rule gets them as Python numbers or nested lists of
them, which keeps shape arithmetic out of tensors and sizes symbolic. Five keyword-only parameters are not attributes:
`outputs`, the number of requested results, `opset`, the version of the operator's domain, `element`, the first
operand's element type, `types`, ONNX's numbers of all operands' element types (0 where unknown), and `training`,
whether the module trains and was imported with `train_mode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from daceml_train.errors import Duplicate

Meaning = TypeVar("Meaning", bound=Callable[..., Any])

_ASKED = ("outputs", "opset", "training", "element", "types")


@dataclass(frozen=True)
class Rule:
    """One operator, from the domain's version `since` on."""

    operator: str
    domain: str
    since: int
    function: Callable[..., Any]
    host: frozenset[str] = frozenset()
    shape_only: bool = False
    """The result depends on the operand's shape, not on its elements, and is a value of the host."""
    random: bool = False
    accepts: Callable[[Any], bool] = field(default=lambda node: True)
    """Whether the rule covers a node; otherwise the standard's own definition by a function is used."""
    operands: tuple[str, ...] = field(init=False)
    variadic: bool = field(init=False)
    attributes: frozenset[str] = field(init=False)
    asks: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        object.__setattr__(self, "operands", tuple(positional))
        object.__setattr__(self, "variadic", any(p.kind is p.VAR_POSITIONAL for p in parameters))
        object.__setattr__(self, "attributes", frozenset(keywords) - {*_ASKED})
        object.__setattr__(self, "asks", tuple(name for name in keywords if name in _ASKED))


_RULES: dict[tuple[str, str], list[Rule]] = {}
_HOST: dict[str, Rule] = {}


def rule(
    *operators: str,
    since: int = 1,
    domain: str = "",
    host: str = "",
    shape_only: bool = False,
    random: bool = False,
    accepts: Callable[[Any], bool] = lambda node: True,
) -> Callable[[Meaning], Meaning]:
    """Register a function as the meaning of `operators` from version `since` on; `host` names operands, with spaces."""

    def register(function: Meaning) -> Meaning:
        for operator in operators:
            result = Rule(operator, domain, since, function, frozenset(host.split()), shape_only, random, accepts)
            known = _RULES.setdefault((domain, operator), [])
            for other in known:
                if other.since == since:
                    name = f"{domain or 'ai.onnx'}:{operator} since version {since}"
                    raise Duplicate("the ONNX operator", name, other.function.__module__, function.__module__)
            known.append(result)
            known.sort(key=lambda other: -other.since)
        return function

    return register


def on_host(*operators: str) -> Callable[[Meaning], Meaning]:
    """Register a function as the meaning of `operators` on Python numbers and nested lists."""

    def register(function: Meaning) -> Meaning:
        for operator in operators:
            _HOST[operator] = Rule(operator, "", 1, function)
        return function

    return register


def find(domain: str, operator: str, version: int) -> Rule | None:
    """The rule of an operator at a version of its domain; None if there is none."""
    domain = "" if domain == "ai.onnx" else domain
    return next((known for known in _RULES.get((domain, operator), ()) if known.since <= version), None)


def find_on_host(domain: str, operator: str) -> Rule | None:
    """The rule of an operator whose operands are all values of the host."""
    return _HOST.get(operator) if domain in ("", "ai.onnx") else None


def table() -> list[Rule]:
    """All rules, by domain and name."""
    return [known for key in sorted(_RULES) for known in _RULES[key]]
