"""How the loaders of a run are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from accel_data.checks import check_order, check_seed


@dataclass
class DataLoaderConfiguration:
    """Settings for all the loaders that an Accelerator prepares; see `prepare_data_loader` for each.

    Args:
        split_batches: Give each process a piece of every batch, not every n-th batch.
        dispatch_batches: Read on process 0 alone and hand out from there; None for iterable datasets only.
        even_batches: Complete an incomplete last step, so that all processes get equally many samples.
        use_seedable_sampler: Also replace random samplers that have a generator of the user's by one whose
            order is a function of seed and epoch. (Those that have none are replaced in any case.) Without
            data_seed the seed is that of the generator or of torch, alike for all loaders: two over one
            dataset then have one order, and the same `sample_seed` for a sample.
        data_seed: Seed of the shuffled orders; None to draw one from torch's generator on process 0.
        non_blocking: Do not wait for copies from pinned memory to the device.
        use_stateful_dataloader: Have prepared loaders be instances of torchdata's StatefulDataLoader, too,
            which exchange states with one that is not prepared (the extra `stateful` installs it).
        custom_classes: Classes to make in place of `DataLoaderShard` and `DataLoaderDispatcher`, keyed by
            these; each must be a subclass of its key.
        order: "torch" to draw shuffled orders by `torch.randperm`, which takes 4 bytes a sample; "keyed" to
            compute them from a key, which takes no memory and begins at once at any position. By default
            keyed for datasets of at least 2**27 (134,217,728) samples.
        presharded: Whether each process has its own part of the data, as a dataset that asks for its rank in
            `__iter__`: then it reads all of it, and nothing is shared out.

    Raises:
        ImportError: If `use_stateful_dataloader` is set and torchdata is not installed.
        TypeError: If data_seed is not an integer.
        ValueError: If order is another one.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    custom_classes: Mapping[type, type] | None = None
    order: Literal["torch", "keyed"] | None = None
    presharded: bool = False

    def __post_init__(self) -> None:
        check_seed(self.data_seed)
        check_order(self.order)
        if self.use_stateful_dataloader:
            # On first use, as most never need torchdata; and now, rather than when the first loader is
            # prepared.
            from accel_data.torchdata.stateful import loader_class

            loader_class(stateful=True)
