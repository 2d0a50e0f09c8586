"""Workers that are not forked: Python 3.14 on Linux, macOS and Windows start them so without being asked."""

import pytest

pytestmark = pytest.mark.long

SCRIPT = """
import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader, skip_first_batches


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(13))


def pairs(items):
    return torch.tensor([[item, int(torch.randint(1000, ()))] for item in items])


def loader(dataset, workers, dispatch, **settings):
    kept = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": pairs}
    given = DataLoader(dataset, 2, **kept, **settings)
    return prepare_data_loader(given, dispatch_batches=dispatch, num_processes=1, process_index=0, data_seed=3)


def read(loader):
    return [batch.tolist() for batch in loader]


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    for dispatch in (False, True):
        shuffled = [loader(range(13), workers, dispatch, shuffle=True) for workers in (2, 0)]
        for _ in range(2):
            items, alone = ([[item for item, _ in batch] for batch in read(each)] for each in shuffled)
            assert sorted(sum(items, [])) == list(range(13)), items
            assert items == alone, (items, alone)
        left, alone = ([[item for item, _ in batch] for batch in read(skip_first_batches(each, 3))] for each in shuffled)
        assert left == alone and len(left) == 4, (left, alone)
        stream = [[item for item, _ in batch] for batch in read(loader(Stream(), 1, dispatch))]
        assert stream == [[item for item, _ in batch] for batch in read(loader(Stream(), 0, dispatch))], stream
    print("the same")
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_read_what_one_process_reads(launched, method):
    run = launched(SCRIPT, method, launcher="python", env={"PYTHONWARNINGS": "error"})

    assert (run.returncode, run.stdout) == (0, "the same\n"), run.stderr
