"""Step sizes among the settings of an algorithm, and how a search scales them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP_DIGITS = 9


def step_size_level(setting: str) -> str | None:
    """Return whose step size a setting is: "x" or "y" (also for z and u), or None.

    Examples:
        >>> step_size_level("server_lr_x"), step_size_level("lr_u"), step_size_level("local_steps")
        ('x', 'y', None)
    """
    words = set(setting.split("_"))
    if "lr" not in words:
        return None
    if "x" in words:
        return "x"
    if words & {"y", "z", "u", "neumann"}:
        return "y"
    return None  # `server_lr` is for both levels


def scale_settings(settings: Mapping[str, Any], x: float, y: float) -> dict[str, Any]:
    """Return settings with their step sizes multiplied.

    Args:
        settings: The settings of an algorithm, as in TOML.
        x: The factor of the step sizes of the upper level.
        y: The factor of those of the lower level: of y, of the linear system, and of u.

    Examples:
        >>> scale_settings({"name": "simfbo", "lr_x": 0.1, "server_lr_z": 0.2}, 10.0, 0.5)
        {'name': 'simfbo', 'lr_x': 1.0, 'server_lr_z': 0.1}
    """
    scales = {"x": x, "y": y}
    scaled = dict(settings)
    for key, value in settings.items():
        level = step_size_level(key)
        if level is not None:
            scaled[key] = _multiply(value, scales[level])
    return scaled


def _multiply(step_size: Any, scale: float) -> Any:
    """Multiply a step size, its bounds or its schedule."""
    if isinstance(step_size, Mapping):
        scaled = dict(step_size)
        for key in scaled.keys() & {"start", "end"}:
            scaled[key] = _multiply(scaled[key], scale)
        return scaled
    if isinstance(step_size, (list, tuple)):
        return [_multiply(bound, scale) for bound in step_size]
    return round_to(step_size * scale, STEP_DIGITS)


def round_to(value: float, digits: int) -> float:
    """Return a number with this many significant digits.

    Examples:
        >>> round_to(0.123456, 3)
        0.123
    """
    return float(f"{value:.{digits}g}")
