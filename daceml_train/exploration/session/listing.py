"""The list of matches: its passes, its filter, its order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from daceml_train.errors import message_of
from daceml_train.exploration.session.state import State
from daceml_train.exploration.session.steps import Match, counted
from daceml_train.passes.base import Pass, Rewrite
from daceml_train.transformations import catalog
from daceml_train.transformations.at_place import AtPlace


def every_pass() -> Iterator[Pass]:
    """Every pass, plugins included, with default options; without the one that represents single matches."""
    for kind in catalog.passes().values():
        if kind is not AtPlace:
            yield kind()


def quick_first(passes: Iterable[Pass]) -> list[Pass]:
    """Passes in the order of what a search costs: one sweep, a search of its own, the whole pass."""

    def effort(transformation: Pass) -> int:
        if isinstance(transformation, Rewrite):
            return 0
        return 2 if type(transformation).matches is Pass.matches else 1

    return sorted(passes, key=effort)


def listed(
    passes: Iterable[Pass],
    state: State,
    steps: int,
    selection: Collection[str] | None,
    module_path: str | None,
    refused: bool,
) -> tuple[list[Match], dict[str, str]]:
    """Matches, those that save the most bytes first and refused ones last; and the messages of passes that raised."""
    wanted = frozenset(selection) if selection is not None else None
    found: list[Match] = []
    failing: dict[str, str] = {}
    for transformation in passes:
        try:
            candidates = state.matches(transformation)
        except Exception as error:
            failing[transformation.name] = message_of(error)
            continue
        for candidate in candidates:
            if wanted is not None and wanted.isdisjoint(candidate.arrays):
                continue
            known = counted(len(candidates), len(state.graph.nodes), candidate)
            match = Match(candidate, state, steps, known)
            if module_path is not None and not _within(match, module_path):
                continue
            if refused or match.refusal is None:
                found.append(match)
    return sorted(found, key=rank), failing


def _within(match: Match, module: str) -> bool:
    """Whether one of a match's operators belongs to a module or to one below it."""
    return any(_below(node.origin.module, module) for node in match.nodes)


def _below(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def rank(match: Match) -> tuple[bool, bool, int]:
    """The place of a match in a list: the largest savings first, unknown ones after them, refused ones last."""
    return match.refusal is not None, match.bytes is None, match.bytes or 0
