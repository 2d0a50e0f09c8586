"""The loaders that are being iterated, and which of them the accumulation window follows."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accel_state.logging.warning import warn


@dataclass(slots=True, eq=False)
class LoaderPass:
    """One iteration over a loader. Times are counted in begins, batches and ends of all loaders.

    Attributes:
        reference: A weak one to the loader.
        began: When it began.
        previous: When it gave the batch before its last one; when it began, if there is none.
        last: When it gave its last batch; when it began, if there is none.
        ended: When it ended; 0 while it is open.
        batches: How many batches it gave.
        padded_batches: How many of them were padded, here or on other processes.
        micro_batches: How many micro-batches of the window followed it.
        is_certain: Whether it is certain that the window follows it, even if other loaders give batches too.
        is_gathered: Whether `gather_for_metrics` was called for its batches, or the user was warned of their
            padding.
    """

    reference: weakref.ref[Any]
    began: int
    previous: int
    last: int
    ended: int = 0
    batches: int = 0
    padded_batches: int = 0
    micro_batches: int = 0
    is_certain: bool = False
    is_gathered: bool = False

    @property
    def loader(self) -> Any:
        """The loader; None if it is gone."""
        return self.reference()

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return not self.ended


class OpenLoaders:
    """The loaders that are being iterated, in the order in which they began; a copy has none.

    Only weak references to them are kept. The last pass of a loader is kept after its end.
    """

    def __init__(self) -> None:
        self._passes: list[LoaderPass] = []
        self._ended: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self._followed: LoaderPass | None = None
        self._now = 0
        self._last_micro_batch = 0
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Weak references cannot be pickled, and an iteration does not continue in a copy.
        return OpenLoaders, ()

    def begin(self, loader: Any) -> None:
        """Record that iteration over a loader begins."""
        self._now += 1
        self._passes.append(LoaderPass(weakref.ref(loader), self._now, self._now, self._now))

    def record_batch(self, loader: Any) -> None:
        """Record that a loader gives a batch."""
        self._now += 1
        real = getattr(loader, "real_samples", None)
        is_padded = real is not None and real != loader.batch_rows
        # The innermost first, as a loader may be iterated inside its own loop.
        for item in reversed(self._passes):
            if item.reference() is loader:
                item.previous, item.last = item.last, self._now
                item.batches += 1
                item.padded_batches += is_padded
                return

    def end(self, loader: Any) -> None:
        """Record that iteration over a loader has ended; a no-op for unknown loaders."""
        for position in reversed(range(len(self._passes))):
            if self._passes[position].loader is loader:
                self._now += 1
                self._ended[loader] = self._passes.pop(position)
                self._ended[loader].ended = self._now
                return

    @property
    def passes(self) -> list[LoaderPass]:
        """The passes that have not ended, in the order in which they began."""
        # A loop over a loader may be abandoned, and the loader deleted.
        if any(item.loader is None for item in self._passes):
            self._passes[:] = [item for item in self._passes if item.loader is not None]
        return self._passes

    def set_open(self, loaders: Iterable[Any]) -> None:
        """Replace the loaders that are being iterated."""
        self._passes.clear()
        for loader in loaders:
            self.begin(loader)

    @property
    def active(self) -> LoaderPass | None:
        """The pass that gave the last batch, or has begun since."""
        return max(self.passes, key=lambda item: item.last, default=None)

    @property
    def current(self) -> list[LoaderPass]:
        """The passes of the current batch: the active one, interleaved ones, and one that just ended.

        Two loaders are interleaved when each gave a batch between two of the other's, as in `zip`; a loop
        inside the step of another loop is not. A pass has just ended if no loader gave a batch since.
        """
        active = self.active
        current = []
        if active is not None:
            others = (item for item in self._passes if item is not active and _are_interleaved(item, active))
            current = [active, *others]
        ended = max(self._ended.values(), key=lambda item: item.ended, default=None)
        if ended is not None and (active is None or ended.ended > active.last):
            current.append(ended)
        return current

    def find(self, loader: Any) -> LoaderPass | None:
        """The open pass over a loader, else the last one that ended."""
        is_open = (item for item in reversed(self._passes) if item.loader is loader)
        return next(is_open, None) or self._ended.get(loader)

    @property
    def loop_has_ended(self) -> bool:
        """Whether the loader that the window followed last is no longer iterated."""
        return self._followed is not None and not self._followed.is_open

    def follow(self, warns: bool) -> bool:
        """Choose the loader that the window follows in the micro-batch that begins now.

        It is the loader that gave a batch since the last micro-batch. If several did: the one that was
        followed before; else one with a new pass (an inner loop, the next epoch), of the same loader or
        else the one that gave its batch last. If none did: the previous one, while it is open or has given
        more batches than there were micro-batches, as it is being prefetched; else the active one.

        Args:
            warns: Whether to warn, once, if the choice is ambiguous.

        Returns:
            Whether that loader has given its last batch.
        """
        before = self._followed
        if before is not None and len(self._passes) == 1 and self._passes[0] is before:
            # The common case, without the expensive part.
            loader = before.reference()
            if loader is not None:
                before.micro_batches += 1
                self._last_micro_batch = self._now
                return bool(loader.end_of_dataloader)
        passes = self.passes
        candidates = [item for item in passes if item.last > self._last_micro_batch]
        new = [item for item in candidates if item.began > self._last_micro_batch]
        followed: LoaderPass | None
        if before in (candidates or passes):
            followed = before
        elif candidates:
            # The next epoch of the previous loader, else the last one.
            again = None if before is None else before.loader
            followed = max(new or candidates, key=lambda item: (item.loader is again, item.last))
            followed.is_certain = len(new) == 1
        elif before is not None and before.loader is not None and before.micro_batches < before.batches:
            followed = before
        else:
            followed = self.active
        if followed is None:
            return False
        if len(candidates) == 1:
            followed.is_certain = True
        elif candidates and warns and not (followed.is_certain or self._has_warned):
            self._check(followed, candidates)
        self._count(followed)
        is_prefetched = not followed.is_open and followed.micro_batches < followed.batches
        return bool(followed.loader.end_of_dataloader) and not is_prefetched

    def follow_loader(self, loader: Any) -> bool:
        """Follow the loader that the user passed.

        Args:
            loader: A prepared loader, or an object that reads one and has `end_of_dataloader`.

        Returns:
            Whether it has given its last batch.

        Raises:
            TypeError: If it is neither.
            ValueError: If it is a prepared loader that is not being iterated.
        """
        if not hasattr(loader, "end_of_dataloader"):
            raise TypeError(
                f"accumulate(loader=...) got a {type(loader).__name__}. Pass the loader that prepare() "
                "returned, or an object with the attribute end_of_dataloader."
            )
        inner = getattr(loader, "loader", loader)  # of a wrapper of a prepared loader
        state = getattr(inner, "gradient_state", None)
        is_open = state is None or any(item is inner for item in state.dataloader_references)
        if not (is_open or loader.end_of_dataloader):
            raise ValueError(
                f"accumulate(loader=...) got {describe(inner)}, which is not being iterated. Pass the loader "
                "that the loop reads (what skip_first_batches returns is another one)."
            )
        followed = self.find(inner)
        if followed is not None:
            followed.is_certain = True
        self._count(followed)
        return bool(loader.end_of_dataloader)

    def _count(self, followed: LoaderPass | None) -> None:
        if followed is not None:
            followed.micro_batches += 1
        self._followed, self._last_micro_batch = followed, self._now

    def _check(self, followed: LoaderPass, candidates: list[LoaderPass]) -> None:
        """Warn if it makes a difference which loader the window follows."""
        loaders = [item.loader for item in candidates]
        if len({bool(loader.end_of_dataloader) for loader in loaders}) == 1:
            # The first time it may be an inner loop; loaders of equal length end at the same time.
            lengths = {_length(loader) for loader in loaders}
            if followed is not self._followed or (len(lengths) == 1 and None not in lengths):
                return
        self._has_warned = True
        rest = " and ".join(describe(item.loader) for item in candidates if item is not followed)
        warn(
            f"Several loaders give a batch for one micro-batch. The accumulation window follows "
            f"{describe(followed.loader)}, so that its last batch ends the window, and not {rest}. Choose "
            "the loader to follow: `with accelerator.accumulate(model, loader=...):`."
        )


def describe(loader: Any) -> str:
    """Describe a loader by its dataset and length."""
    length = _length(loader)
    batches = "" if length is None else f" (length {length})"
    dataset = getattr(loader, "dataset", None)
    over = "" if dataset is None else f" over {type(getattr(dataset, 'dataset', dataset)).__name__}"
    return f"the {type(loader).__name__}{over}{batches}"


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a stream
        return None


def _are_interleaved(item: LoaderPass, active: LoaderPass) -> bool:
    return item.last > active.previous or (item.batches == active.batches == 1)
