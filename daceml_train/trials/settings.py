"""Settings of a step, put where they belong: options of the optimizer, the data, and what the user's code takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from daceml_train.errors import Invalid, nearest
from daceml_train.trials.schedules import of
from daceml_train.trials.values import PLAIN, same

_OWN = frozenset({"params", "initial_lr"})
_ONE = re.compile(r"(\w+)\[(\d+)\]")


class Applied:
    """The settings of trials on one optimizer; options that a trial does not name are as they were at first."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        apply: Callable[[dict[str, Any]], Any] | None,
        data_settings: Sequence[str],
    ) -> None:
        self.groups, self.function, self.of_data = optimizer.param_groups, apply, frozenset(data_settings)
        self.first = [{k: v for k, v in group.items() if k not in _OWN} for group in self.groups]
        self._set: list[dict[str, Any]] = []
        """The options of each group as `apply` left them."""
        self._further: tuple[str, ...] | None = None
        """The names that `apply` is given, which are the same in all trials."""
        self._taken = False
        """Whether `apply` took them once."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise `Invalid` for a name that nothing takes, and for a value that is none."""
        if not isinstance(settings, Mapping):
            raise Invalid(f"the settings of a trial are a dictionary by name, given {type(settings).__name__}")
        for name, value in settings.items():
            if not isinstance(name, str):
                raise Invalid(f"settings have names, given {name!r}")
            of(value, name)
        further = tuple(sorted(self._further_of(settings)))
        if further and self.function is None:
            known = [*self.of_data, *(name for group in self.first for name in group)]
            raise Invalid(
                f"nothing takes the setting {further[0]!r}{nearest(further[0], known)}",
                advice="options of the optimizer are set by name, data_settings=(...) names what data reads, and "
                "apply=function is handed all others",
            )
        if self._further is None:
            self._further = further
        if further != self._further:
            raise Invalid(
                f"a trial has the settings {_listed(further)} for apply, earlier ones had {_listed(self._further)}",
                advice="name the same ones in all trials: what a trial leaves out would be what another one set",
            )

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Set all options of the optimizer, and hand on what neither it nor the data takes."""
        for position, (group, first) in enumerate(zip(self.groups, self.first, strict=True)):
            group.update(first)
            for name, value in settings.items():
                if name in first:
                    group[name] = _like(group[name], value)
                elif (one := _ONE.fullmatch(name)) and int(one[2]) == position and one[1] in first:
                    group[one[1]] = _like(group[one[1]], value)
        further = {name: settings[name] for name in self._further_of(settings)}
        if further and self.function is not None:
            try:
                self.function(further)
            except Exception:
                if not self._taken:
                    self._further = None  # a name may be mistyped
                raise
            self._taken = True
        self._set = [{k: v for k, v in group.items() if k not in _OWN} for group in self.groups]

    def check_kept(self) -> None:
        """Raise `Invalid` if steps have changed an option: it is set by settings, and no snapshot has another one."""
        for group, before in zip(self.groups, self._set, strict=True):
            for name in group.keys() - _OWN:
                if name not in before or not _equal(group[name], before[name]):
                    advice = "keep counts and sums in optimizer.state; rates are settings: dt.schedule"
                    raise Invalid(f"a step changed {name!r} in a parameter group of the optimizer", advice=advice)

    def _further_of(self, settings: Iterable[str]) -> list[str]:
        return [name for name in settings if name not in self.of_data and not self._is_option(name)]

    def _is_option(self, name: str) -> bool:
        if any(name in group for group in self.first):
            return True
        one = _ONE.fullmatch(name)
        return one is not None and int(one[2]) < len(self.first) and one[1] in self.first[int(one[2])]


def _like(before: Any, value: Any) -> Any:
    """The value as the option is kept: a tensor of the same type, or a number."""
    return torch.full_like(before, value) if isinstance(before, torch.Tensor) else value


def _equal(value: Any, before: Any) -> bool:
    return value is before or (isinstance(value, (*PLAIN, list, tuple, dict, torch.Tensor)) and same(value, before))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


__all__ = ["Applied"]
