"""Graphs with control flow that several tests use."""

from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse

BRANCH = """
graph branch(c: b1[] input, x: f32[3, 4] input, w: f32[4, 4] parameter) {
  %y = cond(%c, %x, %w, then=body(a, b) {
    %m = matmul(%a, %b)
    %r = tanh(%m)
    yield %r
  }, orelse=body(a, b) {
    %s = sin(%a)
    yield %s
  })
  return %y
}
"""
LOOP = """
graph loop(h: f32[3, 4] input, x: f32[s0, 3, 4] input, w: f32[4, 4] parameter) {
  %last, %all = scan(%h, %x, %w, body=body(c, a, b) {
    %m = matmul(%c, %b)
    %n = add(%m, %a)
    %r = tanh(%n)
    %q = mul(%r, %a)
    yield %r, %q
  }, carried=1, sliced=1, trips=s0)
  return %last, %all
}
"""
RECURRENT = """
graph recurrent(h: f32[2, 4] input, x: f32[s0, 2, 3] input, wi: f32[4, 3] parameter, wh: f32[4, 4] parameter,
    b: f32[4] parameter) {
  %last, %all = scan(%h, %x, %wi, %wh, %b, body=body(h, x, wi, wh, b) {
    %ti = permute(%wi, dims=(1, 0))
    %th = permute(%wh, dims=(1, 0))
    %m = matmul(%x, %ti)
    %n = matmul(%h, %th)
    %s = add(%m, %n)
    %p = add(%s, %b)
    %r = tanh(%p)
    yield %r, %r
  }, carried=1, sliced=1, trips=s0)
  return %last, %all
}
"""
"""A recurrent network of PyTorch's layout: weights are transposed, and a bias is added to each row."""
UNTIL = """
graph until(i: i64[] input, h: f32[3, 4] input, n: i64[] input, w: f32[4, 4] parameter) {
  %count, %last = while(%i, %h, %n, %w, condition=body(i, h, n, w) {
    %more = lt(%i, %n)
    yield %more
  }, body=body(i, h, n, w) {
    %one = full(value=1, dtype=i64)
    %next = add(%i, %one)
    %m = matmul(%h, %w)
    %t = tanh(%m)
    yield %next, %t
  }, carried=2)
  return %count, %last
}
"""
NESTED = """
graph nested(h: f32[4] input, x: f32[5, 4] input, limit: f32[] input, w: f32[4] parameter) {
  %last, %all = scan(%h, %x, %limit, %w, body=body(c, a, limit, w) {
    %sum = reduce(%a, kind="sum", dims=(0,))
    %large = gt(%sum, %limit)
    %y = cond(%large, %c, %a, %w, then=body(c, a, w) {
      %p = mul(%c, %w)
      %q = add(%p, %a)
      yield %q
    }, orelse=body(c, a, w) {
      %t = tanh(%a)
      %u = mul(%t, %c)
      yield %u
    })
    yield %y, %y
  }, carried=1, sliced=1, trips=5, reverse=True)
  return %last, %all
}
"""


def branch() -> Graph:
    """A branch of which one side reads a parameter."""
    return parse(BRANCH)


def loop() -> Graph:
    """A recurrent loop of a symbolic number of steps."""
    return parse(LOOP)


def recurrent() -> Graph:
    """A loop with two weights and a bias."""
    return parse(RECURRENT)


def until() -> Graph:
    """A loop whose number of steps is data."""
    return parse(UNTIL)


def nested() -> Graph:
    """A branch in a loop that runs backwards."""
    return parse(NESTED)


ALL = (branch, loop, until, nested)
