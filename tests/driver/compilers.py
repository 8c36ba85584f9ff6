"""A C++ compiler that notes what it compiles, for tests over process boundaries."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from daceml_train.runtime.native_build import executor


def noting(folder: Path) -> str:
    """A compiler that writes a checksum of each text into `folder/compiled`, and waits while there is `folder/wait`.

    Of the native executor, whose compilation takes half a minute, it gives the library that this session has built.
    """
    real = shlex.quote(shutil.which("g++") or "g++")
    script = folder / "compiler"
    wait = f"while [ -e {folder}/wait ]; do sleep 0.1; done"
    # What it compiles differs by process in its path alone: the checksum of the text says what it was.
    script.write_text(
        "#!/bin/sh\n"
        f'for word; do case "$word" in *.cpp) cat "$word" | cksum >> {folder}/compiled; {wait};; esac; done\n'
        f'case "$*" in */executor.cpp*) exec cp {executor()} "$word";; esac\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def compiled(folder: Path) -> list[str]:
    """The checksums of what the compiler has been given."""
    log = folder / "compiled"
    return log.read_text().splitlines() if log.exists() else []
