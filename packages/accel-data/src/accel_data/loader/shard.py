"""The loader that reads its own shard on every process."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from accel_data.loader.iteration import PreparedLoader


class DataLoaderShard(PreparedLoader):
    """A DataLoader that yields the shard of one process, on its device.

    Its batch sampler (a `BatchSamplerShard`) or its dataset (an `IterableDatasetShard`) shards the data; with
    others it reads everything. `prepare_data_loader` assembles them.

    Args:
        dataset: The dataset.
        device: Where batches are moved; None leaves them where they are.
        rng_types: Random generators to synchronise with process 0 when an iteration begins: "torch", "cuda"
            or another device's name, "generator".
        synchronized_generator: The generator that "generator" stands for.
        skip_batches: Number of batches to skip at the beginning of every iteration.
        use_stateful_dataloader: Make this an instance of torchdata's StatefulDataLoader, too, which can
            exchange states with it.
        _drop_last: Whether an incomplete last step is dropped, so that there is no remainder.
        _non_blocking: Do not wait for copies from pinned memory to the device.
        torch_device_mesh: The device mesh of the processes.
        iteration: Number of the first epoch.
        gradient_state: The state that is notified when iteration begins and ends; by default the newest.
        **kwargs: Further arguments of `torch.utils.data.DataLoader`.

    Attributes:
        total_batch_size: Samples of one step over all processes.
        total_dataset_length: Length of the full dataset.
    """


class SkipDataLoader(DataLoaderShard):
    """An unsharded DataLoader that skips its first batches.

    A stream stays in the epoch set by its own `set_epoch`, as in a plain DataLoader, until that of this
    loader is called.

    Args:
        dataset: The dataset.
        skip_batches: Number of batches to skip.
        use_stateful_dataloader: Make this an instance of torchdata's StatefulDataLoader, too, which can
            exchange states with it.
        **kwargs: Further arguments of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )
        self._sets_epochs = not isinstance(dataset, IterableDataset)
