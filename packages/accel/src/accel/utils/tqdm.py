"""A progress bar on the main process alone."""

from __future__ import annotations

from typing import Any


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Make a tqdm progress bar; the other processes of a machine get a silent one.

    Example:
        >>> for batch in tqdm(loader, desc="training"):
        ...     ...

    Args:
        *args: Arguments of `tqdm.auto.tqdm`.
        main_process_only: Show the bar on the first process of each machine alone.
        **kwargs: Further arguments of `tqdm.auto.tqdm`; `disable=True` silences it everywhere.

    Returns:
        The bar.

    Raises:
        ImportError: If tqdm is not installed; the message names the extra.
    """
    # Here, as accel.utils imports this module at once, and these import torch.
    from accel_state.imports.packages import require
    from accel_state.process.state import current_process

    bars = require("tqdm.auto", extra="progress")
    if main_process_only and not current_process().is_local_main:
        kwargs["disable"] = True
    return bars.tqdm(*args, **kwargs)
