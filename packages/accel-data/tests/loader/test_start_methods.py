"""Workers that are not forked: Python 3.14 on Linux, macOS and Windows start them so without being asked."""

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]  # every worker imports torch

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
    return torch.tensor([[item, -item] for item in items])


def loader(dataset, workers, dispatch, **settings):
    kept = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": pairs}
    given = DataLoader(dataset, 2, **kept, **settings)
    one = {"num_processes": 1, "process_index": 0, "data_seed": 3}
    return prepare_data_loader(given, dispatch_batches=dispatch, **one)


def items(loader):
    return [batch[:, 0].tolist() for batch in loader]


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    multiprocessing.set_forkserver_preload(["torch"])  # once for all workers, which are forked from there
    for dispatch in (False, True):
        workers, alone = (loader(range(13), number, dispatch, shuffle=True) for number in (2, 0))
        for _ in range(2):
            found = items(workers)
            assert sorted(sum(found, [])) == list(range(13)), found
            assert found == items(alone), found
        left = items(skip_first_batches(workers, 3))
        assert left == items(skip_first_batches(alone, 3)) and len(left) == 4, left
        stream = items(loader(Stream(), 1, dispatch))
        assert stream == items(loader(Stream(), 0, dispatch)) and len(stream) == 7, stream
    print("the same")
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_read_what_one_process_reads(launched, method):
    run = launched(SCRIPT, method, launcher="python", env={"PYTHONWARNINGS": "error"}, timeout_s=360)

    assert (run.returncode, run.stdout) == (0, "the same\n"), run.stderr
