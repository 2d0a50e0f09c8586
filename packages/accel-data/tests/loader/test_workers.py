"""Starting the workers of a loader."""

import hashlib
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from torch.utils.data import DataLoader

from accel_data import prepare_data_loader

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at through /proc")
@pytest.mark.parametrize("dispatch", [False, True])
def test_workers_are_forked_when_gloo_is_idle(dispatch):
    started = threading.Event()

    def work():  # as a thread of gloo that ends a collective does
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        started.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)

    loader = prepare_data_loader(DataLoader(range(8), 2, num_workers=1), dispatch_batches=dispatch)
    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    assert thread.is_alive()
    batches = iter(loader)
    first = next(batches)
    assert not thread.is_alive()
    assert first.tolist() == [0, 1]
    assert len(list(batches)) == 3
    thread.join()


@pytest.mark.parametrize(("live_on", "waits"), [(True, 1), (False, 2)])
def test_living_workers_are_not_waited_for(live_on, waits):
    loader = prepare_data_loader(DataLoader(range(8), 2, num_workers=1, persistent_workers=live_on))
    with mock.patch("accel_data.loader.workers.wait_for_gloo_threads") as drain:
        for _ in range(2):
            list(loader)
    assert drain.call_count == waits
