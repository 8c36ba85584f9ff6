"""Progress and failure of a command."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from daceml_train.errors import DacemlError


class Failure(Exception):
    """Ends the command with this message and a status: 1, or one that the command chooses."""

    def __init__(self, sentence: str, status: int = 1) -> None:
        super().__init__(sentence)
        self.status = status


def write(path: Path, text: str) -> None:
    """Write a file that the user named. Raises `Failure` where that is not possible, such as on a full disk."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror or error}", 2) from None


def say(text: str) -> None:
    """Progress, on a terminal only; nothing clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if text.endswith(".") else "", file=sys.stderr, flush=True)


def in_file_of_user(error: BaseException, place: str) -> str | None:
    """An error in the file that a command was given, as a sentence with its line, and the lines from there on.

    What called the user's file is left out. None for an error that has nothing to do with it.
    """
    path = Path(place.rpartition(":")[0] or place).resolve()
    tail = error.__traceback__
    while tail is not None and Path(tail.tb_frame.f_code.co_filename).resolve() != path:
        tail = tail.tb_next
    if tail is not None:
        inner = [f.lineno for f in traceback.extract_tb(tail) if Path(f.filename).resolve() == path]
        line, shown = inner[-1], traceback.format_exception(type(error), error, tail)
    elif isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == path:
        line, shown = error.lineno, traceback.format_exception_only(error)
    else:
        return None
    where = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{where}:{line}: {type(error).__name__}: {error}\n{''.join(shown).rstrip()}"


def in_call_of_model(error: BaseException, place: str) -> str | None:
    """An error of this package's own, or one that PyTorch raised in a call of the model, as a sentence.

    None for a defect: an error that neither the model nor what it was given explains.
    """
    if isinstance(error, DacemlError):
        return str(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    noted = [note for note in getattr(error, "__notes__", ()) if note.startswith("daceml_train: the ")]
    called = noted or any("/torch/nn/" in file for file in files)
    if not called or (_ours(files[-1]) and not isinstance(error, TypeError)):
        return None
    return "\n".join([f"{type(error).__name__}: {error} (in a call of the model of {place})", *noted])


def _ours(file: str) -> bool:
    return "/daceml_train/" in file and "/onnx/" not in file
