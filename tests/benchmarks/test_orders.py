import pytest

from benchmarks.orders import check, prefixes, shuffled
from daceml_train.transformations.pipelines import TRAINING


@pytest.mark.parametrize("name", ["gpt2", "dlrm"])
def test_every_order_gives_the_same_numbers(name: str) -> None:
    """Some prefixes of the pipeline and some random ones; the command takes all."""
    told = check(name, [*list(prefixes())[2::6], *map(shuffled, range(3))])
    assert not told["failures"]


def test_prefixes_end_with_the_whole_pipeline() -> None:
    *_, last = prefixes()
    assert last == TRAINING


def test_shuffled_pipelines_are_subsets() -> None:
    assert set(shuffled(1)) <= set(TRAINING)
    assert str(shuffled(1)) == str(shuffled(1)) != str(shuffled(2))
