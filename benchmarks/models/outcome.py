"""Outcome: what came of one model; without PyTorch, so that the process which reports needs none."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What came of one model.

    `kind` is `right`, `wrong`, `raised`, or `timed out`; `detail` says what differs or was raised. `graphs` and
    `breaks` are those of `optimize`; `share` is the share of eager's operators, of the forward pass, that run in
    graphs; `native` the share of the graphs' operators that have a rule of ours, `fallbacks` names the others. `whole`
    says why the training step is not one program. `noise` is what differs by more than plain eager runs do, but not by
    more than noise in eager execution's last bit makes. `sizes` are the batch sizes it
    trained on, `dynamic` says what fell back with `dynamic=True`. `seconds` are those of the first call, by stage.
    """

    name: str
    kind: str
    detail: str = ""
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)
    operators: int = 0
    share: float = 0.0
    native: float = 1.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    whole: str = ""
    noise: str = ""
    control_flow: str = ""
    sizes: str = ""
    dynamic: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    commit: str = ""
