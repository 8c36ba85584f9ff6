from pathlib import Path

import pytest

from benchmarks import data, demo, figures
from benchmarks.demo import Run, Training, failed
from daceml_train.reporting import Change, Compiled


def training(ours: list[float], accuracies: tuple[float, float] = (0.99, 0.99)) -> Training:
    eager = [2.0 / (i + 1) for i in range(20)]
    level = Change("fusion", 2_000_000, 500_000, (9, 3), 0.1)
    moved = Compiled("m", 1, 2_000_000, 500_000, 0, (level,), (), 3, 2, {}, (), {}, False, 0, {})
    runs = Run("PyTorch eager", eager, [0.01] * 20), Run("daceml_train", ours, [0.005] * 20)
    return Training("Digits", *runs, moved, 1.0, accuracies)


EQUAL = [2.0 / (i + 1) for i in range(20)]


def test_nothing_is_wrong_with_equal_runs() -> None:
    assert list(failed(training(EQUAL))) == []


def test_losses_that_come_apart_are_found() -> None:
    assert list(failed(training([2.1, *EQUAL[1:]]))) == ["Digits: in step 0 the losses are 2.0 and 2.1"]
    assert "the losses end at" in next(failed(training([*EQUAL[:10], *[1.0] * 10])))
    assert "losses are" in next(failed(training([float("nan")] * 20)))


def test_low_accuracy_is_found() -> None:
    assert list(failed(training(EQUAL, (0.99, 0.97)))) == [
        "Digits, daceml_train: 97.0 % of the test images, expected at least 98 %"
    ]


def test_figures(tmp_path: Path) -> None:
    result = training(EQUAL)
    for path in (figures.losses(result, tmp_path), figures.bytes_per_level([result, result], tmp_path)):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_digits_are_split_once() -> None:
    found = data.digits()
    assert len(found.images) + len(found.test_images) == 1797
    batches = list(found.batches(30))
    assert len(batches) == 30 and {len(x) for x, _ in batches} == {64}
    train = {tuple(image.flatten().tolist()) for image in found.images}
    assert not any(tuple(image.flatten().tolist()) in train for image in found.test_images)


def test_text() -> None:
    text = data.standard_library()
    assert text.modules == len(data.MODULES) and len(text.characters) > 10**6
    ((x, y),) = text.batches(1, 4, 32)
    assert (x.shape, y.shape) == ((4, 32), (4, 32)) and bool((x[:, 1:] == y[:, :-1]).all())
    assert int(text.characters.max()) < len(text.alphabet)


@pytest.mark.compiled
@pytest.mark.slow
def test_demonstration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of it: the losses agree, and the accuracy that so few steps reach is refused."""
    assert demo.main(["--steps", "8", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().out
    assert "of the test images, expected at least 98 %" in message and "the losses are" not in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bytes_per_level.png", "digits_loss.png", "text_loss.png"]
