"""The interface of a tracker, and the rule that logging happens on the main process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from accel.trackers.values import table_rows
from accel_state.logging.warning import warn
from accel_state.process.state import current_process

_F = TypeVar("_F", bound=Callable[..., Any])


def on_main_process(function: _F) -> _F:
    """Run a tracker's method on the main process alone, unless it has `main_process_only = False`."""

    @functools.wraps(function)
    def run(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and not current_process().is_main:
            return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class GeneralTracker:
    """Base class of all trackers; subclass it to write your own.

    A subclass sets `name` and `requires_logging_directory`, gives the property `tracker` (its library's
    run object), and overrides `store_init_configuration` and `log`. Its constructor takes the
    project's name first.

    Attributes:
        name: What `log_with` and `get_tracker` call it.
        requires_logging_directory: Whether it needs `logging_dir`.
        main_process_only: Whether it logs on the main process alone (default) or on every process.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:  # stands for a tracker that is not on this process
            return
        missing = [
            attribute
            for attribute in ("name", "requires_logging_directory", "tracker")
            if attribute not in vars(self)
            # The base class only annotates names, and has the property that a subclass overrides.
            and getattr(type(self), attribute, None) is getattr(GeneralTracker, attribute, None)
        ]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}: a tracker sets `name` and "
                "`requires_logging_directory` and gives the property `tracker`."
            )

    @property
    def tracker(self) -> Any:
        """The library's run object."""
        raise NotImplementedError(f"{type(self).__name__} must give the property `tracker`.")

    def start(self) -> None:
        """Begin the run; called by `init_trackers` after the tracker is made."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's configuration (hyper-parameters)."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values` at `step`."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; a tracker that does not override this leaves them out, with a warning."""
        self._warn_absent("images")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a DataFrame of pandas; see the tracker for `kwargs`.

        A tracker that has no tables leaves it out, with a warning.

        Raises:
            ValueError: If neither rows nor a DataFrame are given, or a row has not one value per column.
        """
        names, rows = table_rows(columns, data, dataframe)
        self._log_rows(table_name, names, rows, step, **kwargs)

    def finish(self) -> None:
        """End the run, and flush what is not written yet."""

    def _log_rows(
        self, table_name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        self._warn_absent("tables")

    def _warn_absent(self, things: str) -> None:
        name = getattr(self, "name", None)
        if name is not None:  # the blank one of other processes has none
            warn(f"The {name} tracker has no {things}: they are not logged there.")


class BlankTracker(GeneralTracker):
    """Stands for a tracker that is not on this process, and for its library's run object.

    Whatever is read from it or called does nothing, and gives the same object again: what a script does with
    the tracker on the main process needs no `if` on the others.
    """

    def __init__(self) -> None:
        super().__init__(_blank=True)

    @property
    def tracker(self) -> Any:
        """The same object."""
        return self

    def __getattr__(self, name: str) -> Any:
        # Without a name there are no warnings; copy, pickle and numpy look for names with underscores.
        if name == "name" or name.startswith("__"):
            raise AttributeError(f"A tracker that is not on this process has no {name!r}.")
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        # Else Python would ask for items without end.
        return iter(())
