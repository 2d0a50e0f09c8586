"""What the Accelerator's arguments mean under DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_state import env

if TYPE_CHECKING:
    from accel.plugins.deepspeed import DeepSpeedPlugin

__all__ = ["precision_under", "resolve_deepspeed", "steps_under"]


def resolve_deepspeed(plugin: Any, plugins: Any) -> Any:
    """The plugin, or several by name: as given, or the environment's; None without any.

    Raises:
        TypeError: If one is no DeepSpeedPlugin.
        ValueError: If both arguments are given.
    """
    if plugin is not None and plugins is not None:
        raise ValueError("Accelerator got deepspeed_plugin and deepspeed_plugins: pass one of them.")
    given = plugin if plugins is None else plugins
    if given is None and not env.get("ACCELERATE_USE_DEEPSPEED"):
        return None
    from accel.plugins.deepspeed import DeepSpeedPlugin

    if given is None:
        return DeepSpeedPlugin()
    for item in given.values() if isinstance(given, dict) else [given]:
        if not isinstance(item, DeepSpeedPlugin):
            raise TypeError(f"deepspeed_plugin takes a DeepSpeedPlugin, or a dict of them, not {item!r}.")
    return given


def steps_under(plugins: Any, steps: int, accumulation: Any) -> int:
    """The steps of a window: as given, or DeepSpeed's own in the place of the default, 1."""
    first = _first(plugins)
    own = None if first is None else first.gradient_accumulation_steps
    return own if steps == 1 and accumulation is None and isinstance(own, int) else steps


def precision_under(plugins: Any, mixed_precision: Any) -> Any:
    """The precision: as given, or the one that DeepSpeed's configuration switches on."""
    first = _first(plugins)
    # A launcher writes "no" where nothing was asked for.
    if first is None or mixed_precision is not None or env.get("ACCELERATE_MIXED_PRECISION") != "no":
        return mixed_precision
    return next((kind for kind in ("bf16", "fp16") if first.get_value(f"{kind}.enabled") is True), None)


def _first(plugins: Any) -> DeepSpeedPlugin | None:
    first: DeepSpeedPlugin | None = next(iter(plugins.values())) if isinstance(plugins, dict) else plugins
    return first
