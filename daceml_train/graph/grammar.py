"""Grammar: names, types and attribute values in graph texts, and the reader that splits a text into tokens.

    names     x, layer.0_weight; any other name as a JSON string: "a b"
    types     f32[8, 2*s0 + 1], i64[], f32[8, 3, 4, 4]@0231 (with the order of its dimensions in memory)
    values    1, -2.5, inf, nan, True, None, "text", (1, 2), (1,), f32 (an element type), a type,
              a size (s0 // 2 is written floor(s0/2)), operand(0) (an operand in a fallback's arguments),
              complex(0.0, 1.0)

A size symbol whose name has another meaning in this grammar is written symbol("f32").
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import sympy
from sympy.printing.str import StrPrinter

from daceml_train.errors import DacemlError, Invalid
from daceml_train.ops.fallback import Operand
from daceml_train.tensor import Dim, DType, Tensor, simplify, symbol

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+) | (?P<newline>\n) | (?P<comment>\#[^\n]*) | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?) | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
      | (?P<sign><-|\*\*|//|[-+*/%(){}\[\],=:@])""",
    re.VERBOSE,
)
_DTYPES = {dtype.short: dtype for dtype in DType}
_CONSTANTS: dict[str, Any] = {"True": True, "False": False, "None": None, "inf": math.inf, "nan": math.nan}
_FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "Mod": sympy.Mod,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Abs": sympy.Abs,
    "sqrt": sympy.sqrt,
}
_TAKEN = {*_DTYPES, *_CONSTANTS, *_FUNCTIONS, "symbol", "operand", "complex", "body"}
_LARGEST_POWER = 64


# ---- writing --------------------------------------------------------------------------------------------------------
def show_name(name: str) -> str:
    """A name as texts show it: quoted unless it is plain."""
    return name if _NAME.fullmatch(name) else json.dumps(name)


class _SizePrinter(StrPrinter):  # type: ignore[misc]
    """SymPy's notation, restricted to forms that `Reader.value` reads back."""

    def _print_Symbol(self, expression: sympy.Symbol) -> str:
        name = str(expression.name)
        plain = _NAME.fullmatch(name) and name not in _TAKEN
        return name if plain else f"symbol({json.dumps(name)})"

    def _print_Float(self, expression: sympy.Float) -> str:
        return repr(float(expression))

    def _print_Function(self, expression: sympy.Function) -> str:
        if type(expression).__name__ not in _FUNCTIONS:
            raise Invalid(f"a size uses {type(expression).__name__}, which graph texts cannot show: {expression!r}")
        return f"{type(expression).__name__}({', '.join(map(self._print, expression.args))})"

    def emptyPrinter(self, expr: Any) -> NoReturn:
        raise Invalid(f"a size uses {type(expr).__name__}, which graph texts cannot show: {expr!r}")


@functools.lru_cache(maxsize=1 << 12, typed=True)
def show_size(size: Dim) -> str:
    """A size, or an attribute computed from sizes."""
    return str(size) if isinstance(size, int) else str(_SizePrinter().doprint(simplify(size)))


@functools.lru_cache(maxsize=1 << 12)
def show_type(tensor: Tensor) -> str:
    """A type, such as `f32[8, s0]`; with its memory order unless that is row-major: `f32[2, 3]@10`."""
    order = "" if tensor.order is None else "@" + "".join(map(str, tensor.order))
    return f"{tensor.dtype.short}[{', '.join(map(show_size, tensor.shape))}]{order}"


def show_value(value: Any) -> str:
    """An attribute value. Raises `Invalid` for one that texts cannot show."""
    match value:
        case None | bool() | int() if not isinstance(value, sympy.Basic):
            return repr(value)
        case float():
            return float.__repr__(value)
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case str():
            return json.dumps(value)
        case tuple():
            return f"({', '.join(map(show_value, value))}{',' if len(value) == 1 else ''})"
        case DType():
            return value.short
        case Tensor():
            return show_type(value)
        case sympy.Expr():
            return show_size(value)
        case Operand(index=index):
            return f"operand({index})"
    raise Invalid(f"an attribute holds a {type(value).__name__}, which graph texts cannot show: {value!r}")


# ---- reading --------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int
    comment: str


def _tokens(source: str) -> Iterator[_Token]:
    """Tokens with the comment that follows each on its line; comments on lines of their own are dropped."""
    position, line = 0, 1
    held: _Token | None = None
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise Invalid(f"unexpected character {source[position]!r}", where=f"line {line}")
        position = match.end()
        kind = str(match.lastgroup)
        if kind == "newline":
            line += 1
        elif kind == "comment" and held and held.line == line:
            held = dataclasses.replace(held, comment=match[0].removeprefix("#").strip(" "))
        elif kind not in ("space", "comment"):
            if held:
                yield held
            held = _Token(kind, match[0], line, "")
    if held:
        yield held
    yield _Token("end", "the end of the text", line, "")


class Reader:
    """A text, read token by token. Every error names the line."""

    def __init__(self, source: str) -> None:
        self._rest = _tokens(source)
        self._token = next(self._rest)
        self.comment = ""
        """The comment after the token read last, without its `#`."""

    @property
    def kind(self) -> str:
        """The kind of the next token: name, number, string, sign or end."""
        return self._token.kind

    @property
    def text(self) -> str:
        """The text of the next token."""
        return self._token.text

    @property
    def line(self) -> int:
        """The line of the next token."""
        return self._token.line

    def error(self, message: str, line: int | None = None) -> Invalid:
        """An error about the text at a line, by default that of the next token."""
        return Invalid(message, where=f"line {line or self.line}")

    @contextlib.contextmanager
    def located(self, line: int | None = None) -> Iterator[None]:
        """Errors inside name the line; any exception that an operator raises on bad attributes becomes `Invalid`."""
        try:
            yield
        except DacemlError as error:
            raise self.error(error.message, line) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, NotImplementedError) as error:
            raise self.error(f"{type(error).__name__}: {error}", line) from error

    def _expected(self, what: str) -> Invalid:
        return self.error(f"expected {what}, found {self.text if self.kind == 'end' else repr(self.text)}")

    def next(self) -> str:
        """Read the next token."""
        text, self.comment = self.text, self._token.comment
        if self.kind != "end":
            self._token = next(self._rest)
        return text

    def take(self, text: str) -> bool:
        """Read the next token if it is `text`; whether it was."""
        if self.text != text or self.kind == "string":
            return False
        self.next()
        return True

    def sign(self, text: str) -> None:
        """Read exactly `text`."""
        if not self.take(text):
            raise self._expected(repr(text))

    word = sign

    def end(self) -> None:
        """Read the end of the text."""
        if self.kind != "end":
            raise self._expected("the end of the text")

    def string(self) -> str:
        """Read a quoted string."""
        if self.kind != "string":
            raise self._expected("a string")
        try:
            return str(json.loads(self.text))
        except ValueError as error:
            raise self.error(f"malformed string {self.text}: {error}") from None
        finally:
            self.next()

    def name(self) -> str:
        """Read a name, plain or quoted."""
        if self.kind == "string":
            return self.string()
        if self.kind != "name":
            raise self._expected("a name")
        return self.next()

    def array(self) -> str:
        """Read `%name`."""
        self.sign("%")
        return self.name()

    def type(self) -> Tensor:
        """Read a type."""
        if self.kind != "name" or self.text not in _DTYPES:
            raise self._expected("a type such as f32[8, s0]")
        return self._type(_DTYPES[self.next()])

    def _type(self, dtype: DType) -> Tensor:
        self.sign("[")
        shape: list[Dim] = []
        while not self.take("]"):
            shape.append(self.size())
            if not self.take(","):
                self.sign("]")
                break
        order: tuple[int, ...] | None = None
        if self.take("@"):
            digits = self.next()
            order = tuple(int(d) for d in digits) if digits.isascii() and digits.isdigit() else ()
            if sorted(order) != list(range(len(shape))):
                raise self.error(f"@{digits} is not an order of {len(shape)} dimensions")
        return Tensor(tuple(shape), dtype, order)

    def size(self) -> Dim:
        """Read a size."""
        line, value = self.line, self.value()
        if isinstance(value, bool) or not isinstance(value, int | sympy.Expr):
            raise self.error(f"{value!r} is not a size", line)
        return value

    def value(self) -> Any:
        """Read an attribute value."""
        line = self.line
        with self.located(line):
            value = self._sum()
            return simplify(value) if isinstance(value, sympy.Expr) else value

    def _sum(self) -> Any:
        value = self._product()
        while self.text in ("+", "-") and self.kind == "sign":
            plus, other = self.next() == "+", self._product()
            a, b = self._term(value), self._term(other)
            value = a + b if plus else a - b
        return value

    def _product(self) -> Any:
        value = self._signed()
        while self.text in ("*", "/", "//") and self.kind == "sign":
            sign, other = self.next(), self._signed()
            a, b = self._term(value), self._term(other)
            if sign != "*" and b == 0:
                raise self.error("division by zero")
            value = a * b if sign == "*" else a / b if sign == "/" else sympy.floor(a / b)
        return value

    def _signed(self) -> Any:
        if not self.take("-"):
            return self._power()
        value = self._signed()
        if isinstance(value, bool) or not isinstance(value, int | float | sympy.Expr):
            raise self.error(f"{value!r} cannot be negated")
        return -value

    def _power(self) -> Any:
        value = self._atom()
        if not self.take("**"):
            return value
        exponent = self._term(self._signed())
        base = self._term(value)
        if not exponent.is_Rational or abs(exponent) > _LARGEST_POWER or base.is_number:
            raise self.error(f"{base}**{exponent} is not a power of a size up to the {_LARGEST_POWER}th")
        return base**exponent

    def _term(self, value: Any) -> sympy.Expr:
        """`value` as an operand of a size expression."""
        if isinstance(value, bool) or not isinstance(value, int | float | sympy.Expr):
            raise self.error(f"{value!r} is not a number")
        return sympy.sympify(value)

    def _atom(self) -> Any:
        if self.kind == "string":
            return self.string()
        if self.kind == "number":
            text = self.next()
            return int(text) if text.isdigit() else float(text)
        if self.take("("):
            return self._parenthesis()
        if self.kind != "name":
            raise self._expected("a value")
        name = self.next()
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _DTYPES:
            return self._type(_DTYPES[name]) if self.text == "[" else _DTYPES[name]
        if name == "symbol":
            self.sign("(")
            result = symbol(self.string())
            self.sign(")")
            return result
        if name == "operand":
            self.sign("(")
            place = self.next()
            self.sign(")")
            return Operand(int(place))
        if name == "complex":
            self.sign("(")
            parts = self._parenthesis()
            if not isinstance(parts, tuple) or len(parts) != 2:
                raise self.error("a complex number has two parts")
            return complex(*map(float, parts))
        if name in _FUNCTIONS:
            self.sign("(")
            arguments = self._parenthesis()
            arguments = arguments if isinstance(arguments, tuple) else (arguments,)
            return _FUNCTIONS[name](*map(self._term, arguments))
        return symbol(name)

    def _parenthesis(self) -> Any:
        """Read what follows `(`: a tuple, or one value without a comma, up to `)`."""
        items: list[Any] = []
        while not self.take(")"):
            items.append(self.value())
            if self.take(","):
                continue
            self.sign(")")
            return items[0] if len(items) == 1 else tuple(items)
        return tuple(items)
