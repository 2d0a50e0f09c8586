"""Configuration of prepared loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from accel_data.checks import check_order, check_seed


@dataclass
class DataLoaderConfiguration:
    """Settings for all the loaders that an Accelerator prepares; see `prepare_data_loader` for each.

    Args:
        split_batches: Split every batch over the processes, instead of giving each process every n-th batch.
        dispatch_batches: Read only on process 0 and send batches from there; None to do so only for iterable
            datasets.
        even_batches: Pad an incomplete last step, so that all processes get equally many samples.
        use_seedable_sampler: Also replace random samplers that have a user's generator by one whose order is
            a function of seed and epoch. (Those without a generator are always replaced.) Without data_seed
            the seed is that of the generator or of torch, the same for all loaders: two loaders over one
            dataset then have the same order, and the same `sample_seed` for a sample.
        data_seed: Seed of the shuffled orders; None to draw one from torch's generator on process 0.
        non_blocking: Do not wait for copies from pinned memory to the device.
        use_stateful_dataloader: Make prepared loaders instances of torchdata's StatefulDataLoader, too. They
            can exchange states with unprepared ones (the extra `stateful` installs torchdata).
        custom_classes: Classes to use in place of `DataLoaderShard` and `DataLoaderDispatcher`, keyed by
            these; each must be a subclass of its key.
        order: "torch" to draw shuffled orders with `torch.randperm`, which takes 4 bytes per sample; "keyed"
            to compute them from a key, which takes no memory and can start at any position immediately. By
            default keyed for datasets of at least 2**27 (134,217,728) samples.
        presharded: Whether each process already has its own shard of the data, such as a dataset that uses
            its rank in `__iter__`: then each process reads all of its data, and nothing is split.

    Raises:
        ImportError: If `use_stateful_dataloader` is set and torchdata is not installed.
        TypeError: If data_seed is not an integer.
        ValueError: If order is not one of these.
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
            # Imported only if needed; and now, so that it fails before the first loader is prepared.
            from accel_data.torchdata.stateful import loader_class

            loader_class(stateful=True)
