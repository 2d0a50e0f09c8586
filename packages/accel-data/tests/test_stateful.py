"""Loaders of torchdata, where it is installed (the extra `stateful`)."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_data import DataLoaderConfiguration, prepare_data_loader, skip_first_batches

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def prepare(loader, **kwargs):
    return prepare_data_loader(loader, num_processes=2, process_index=1, dispatch_batches=False, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_a_stream_is_read_through_torchdata(workers, asked):
    kind = DataLoader if asked else stateful.StatefulDataLoader
    loader = prepare(kind(Stream(23), 4, num_workers=workers), use_stateful_dataloader=asked)
    expected = [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 0]]
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == expected
    assert isinstance(loader._reads, stateful.StatefulDataLoader)
    loader.load_state_dict({**loader.state_dict(), "consumed": 8, "batches": 1})

    assert [batch.tolist() for batch in loader] == expected[1:]
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == expected[2:]


def test_a_plain_loader_that_skips_stays_one_of_torchdata():
    loader = skip_first_batches(stateful.StatefulDataLoader(range(9), 4), 1)

    assert isinstance(loader, stateful.StatefulDataLoader)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8]]


def test_the_configuration_takes_it():
    assert DataLoaderConfiguration(use_stateful_dataloader=True).use_stateful_dataloader
