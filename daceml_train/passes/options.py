"""Options of passes: typed fields that are checked on construction, written as text and read back exactly."""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from daceml_train.errors import Invalid, nearest


def option_types(kind: type[Any]) -> Mapping[str, Any]:
    """Option name -> annotation of a pass class, in order."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def show_annotation(annotation: Any) -> str:
    """An annotation in readable form: `int`, `str | None`, `tuple[str, ...]`."""
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


def check_names(name: str, kind: type, given: Iterable[str]) -> None:
    """Raises `Invalid` for an option that the pass named `name` does not have; the error lists its options."""
    known = option_types(kind)
    for option in given:
        if option not in known:
            close = nearest(option, known)
            raise Invalid(f"{name} has no option {option!r}{close}", advice=f"it has: {_listed(known)}")


def _listed(known: Mapping[str, Any]) -> str:
    return ", ".join(f"{option}: {show_annotation(kind)}" for option, kind in known.items()) or "none"


def checked_option(name: str, option: str, annotation: Any, value: Any) -> Any:
    """`value` in the option's type: integers become floats where required. Raises `Invalid` for another type."""
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits(value, annotation):
        raise Invalid(f"option {option} of {name} is {show_annotation(annotation)}, given {value!r}")
    if isinstance(value, float) and math.isnan(value):
        raise Invalid(f"option {option} of {name} is not a number: pipelines with it would equal no other")
    return value


def fits(value: Any, annotation: Any) -> bool:
    """Whether `value` has the annotated type; integers count as floats, booleans do not count as integers."""
    if annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(value is a or (value == a and type(value) is type(a)) for a in arguments)
    if origin in (Union, types.UnionType):
        return any(fits(value, a) for a in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(v, arguments[0]) for v in value)
        return len(value) == len(arguments) and all(fits(v, a) for v, a in zip(value, arguments, strict=True))
    if annotation in (None, types.NoneType):
        return value is None
    if annotation is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)


# ---- text and JSON --------------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """The JSON form of a value: an enumeration member by its name, a tuple as a list."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Invalid(f"an option's value is a {type(value).__name__}, which pipelines' texts cannot show: {value!r}")


def restored(value: Any, annotation: Any) -> Any:
    """A value from text or JSON, converted to the annotated type; one that does not fit is left for the check."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        candidates = (restored(value, a) for a in arguments)
        return next((c for c, a in zip(candidates, arguments, strict=True) if fits(c, a)), value)
    if isinstance(value, list | tuple):
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(restored(v, arguments[0]) for v in value)
        if origin is tuple and len(arguments) == len(value):
            return tuple(restored(v, a) for v, a in zip(value, arguments, strict=True))
        return tuple(value)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum) and isinstance(value, str):
        return annotation.__members__.get(value, value)
    return value


def show_option(value: Any) -> str:
    """An option's value as a Python literal."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show_option, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, enum.Enum):
        return repr(value.name)
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    plain(value)
    return repr(value)


def read_option(node: ast.expr, where: str) -> Any:
    """Parse a literal from `show_option`."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        kinds = "expected a number, text, True, False, None or a tuple of these"
        raise Invalid(f"{ast.unparse(node)} is not a literal", where=where, advice=kinds) from None
