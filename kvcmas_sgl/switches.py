"""What an operator can change while a server runs. A restart goes back to the flags.

``mode``    ``on``: spans are reused inside the budget; ``learn``: every span is prefilled, and learned from; ``off``:
            no request is an agent's, and nothing is learned. Requests that are under way are prefilled densely from
            the next pass on. What was learned stays.
``max_kl``  the quality budget, nats. Corrected KV that was made under a larger one is not used any more.

They travel as numbers, because that is what SGLang's own control path to its schedulers carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kvcmas_sgl.config import MAX_KL, ConfigError, KvcmasConfig

Mode = Literal["on", "learn", "off"]
PREFIX = "kvcmas_"
_MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Switches:
    """The values that hold now."""

    mode: Mode
    max_kl: float

    @classmethod
    def of(cls, config: KvcmasConfig) -> Switches:
        """As the flags have it."""
        return cls("learn" if config.policy == "learn" else "on", config.max_kl)

    def changed(self, numbers: Mapping[str, float]) -> Switches:
        """With the changes of a control message (`to_numbers`). Raises `ConfigError`."""
        values: dict[str, Any] = {name.removeprefix(PREFIX): value for name, value in numbers.items()}
        if "mode" in values:
            number = values["mode"]
            values["mode"] = _MODES[int(number)] if number in range(len(_MODES)) else number
        return replace(self, **check(values))


def check(values: Any) -> dict[str, Any]:
    """Validate changes by name. Raises `ConfigError` with one sentence."""
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"the settings are {_shown(values)}, but must be an object with mode, max_kl or both.")
    for name, value in values.items():
        if name == "mode":
            if value not in _MODES:
                raise ConfigError(f"mode is {_shown(value)}, but must be one of {', '.join(_MODES)}.")
        elif name == "max_kl":
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MAX_KL:
                raise ConfigError(f"max_kl is {_shown(value)}, but must be a number from 0 to {MAX_KL} (nats).")
        else:
            raise ConfigError(f"unknown setting {_shown(name)}; known are mode, max_kl.")
    return dict(values)


def to_numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """The control message for changes that `check` let pass."""
    return {PREFIX + name: _MODES.index(value) if name == "mode" else value for name, value in values.items()}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
