"""Attention over few keys becomes the kernel of our own, where that computes the same."""

import pytest

from daceml_train.transformations.forward.blocked_attention import BlockedAttention
from tests.transformations.checking import assert_text, check_refused, check_rewrite, program

HEADS = "q: f32[2, 3, 5, 4], k: f32[2, 3, 7, 4], v: f32[2, 3, 7, 4]"


def test_few_keys() -> None:
    graph = program(
        HEADS,
        "%y, %l = attention(%q, %k, %v)\n%t = permute(%y, dims=(0, 2, 1, 3))\n%z = view(%t, shape=(2, 5, 12))",
        "%z",
    )
    after = check_rewrite(graph, BlockedAttention(), exact=False)
    assert_text(
        after,
        """\
        %fused_attention, %fused_attention_1: f32[2, 3, 5, 4]@0213, f32[2, 3, 5] = fused_attention(%q, %k, %v, scale=0.5)
        %t: f32[2, 5, 3, 4] = permute(%fused_attention, dims=(0, 2, 1, 3))
        %z: f32[2, 5, 12] = view(%t, shape=(2, 5, 12))
        return %z
        """,
    )


def test_a_scale_and_a_batch_of_any_size() -> None:
    heads = HEADS.replace("[2,", "[n,")
    graph = program(
        heads,
        "%y, %l = attention(%q, %k, %v, scale=0.5)\n%t = permute(%y, dims=(0, 2, 1, 3))\n%z = view(%t, shape=(n, 5, 12))",
        "%z",
    )
    after = check_rewrite(graph, BlockedAttention(), exact=False, n=2)
    assert_text(
        after,
        """\
        %fused_attention, %fused_attention_1: f32[n, 3, 5, 4]@0213, f32[n, 3, 5] = fused_attention(%q, %k, %v, scale=0.5)
        %t: f32[n, 5, 3, 4] = permute(%fused_attention, dims=(0, 2, 1, 3))
        %z: f32[n, 5, 12] = view(%t, shape=(n, 5, 12))
        return %z
        """,
    )


@pytest.mark.parametrize(
    ("heads", "options", "sentence"),
    [
        (
            HEADS.replace("7", "5"),
            ", causal=True",
            "the library skips half of the scores of causal attention",
        ),
        (HEADS + ", m: f32[5, 7]", ", %m", "the library adds masks while it computes scores"),
        (HEADS.replace("f32", "f64"), "", "the kernel computes in float32, not in f64"),
        (HEADS.replace("7", "513"), "", "513 keys are more than 512: a row block of scores would exceed the cache"),
        (HEADS.replace("7", "s0"), "", "s0 keys are more than 512: a row block of scores would exceed the cache"),
    ],
)
def test_the_library_keeps(heads: str, options: str, sentence: str) -> None:
    graph = program(heads, f"%y, %l = attention(%q, %k, %v{options})", "%y")
    check_refused(graph, BlockedAttention(), sentence)


@pytest.mark.parametrize(
    "body",
    [
        "%z = exp(%l)",
        "%z = permute(%y, dims=(0, 2, 1, 3))",
        "%z = exp(%y)",
        "%t = permute(%y, dims=(0, 2, 1, 3))\n%z = exp(%t)",
    ],
)
def test_what_would_show_another_layout_keeps_the_library(body: str) -> None:
    graph = program(HEADS, f"%y, %l = attention(%q, %k, %v)\n{body}", "%z")
    sentence = "%y is not only reshaped with the heads of a query side by side, as the kernel lays them out"
    check_refused(graph, BlockedAttention(), sentence)
