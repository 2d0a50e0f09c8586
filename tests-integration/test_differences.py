"""Differences from Accelerate that docs/migrate.md names, where no other test shows them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_each_pass_of_a_seedable_sampler_is_an_epoch():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(torch.arange(100), batch_size=100, shuffle=True))

    (first,), (second,) = list(loader), list(loader)
    assert first.tolist() != second.tolist()
    loader.set_epoch(0)
    (again,) = list(loader)
    assert again.tolist() == first.tolist()


def test_a_loop_that_skips_by_itself_continues_as_it_did(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    folder = accelerator.save_state(str(tmp_path / "saved"))
    batches.close()

    for skipped in (1, 2, 3):
        accelerator.load_state(folder)
        rest = [batch.tolist() for batch in accelerator.skip_first_batches(loader, skipped)]
        assert rest == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]][skipped:]


def test_a_loop_that_passes_over_batches_by_continue_passes_over_them_twice(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    folder = accelerator.save_state(str(tmp_path / "saved"))
    batches.close()

    accelerator.load_state(folder)
    seen = []
    for step, batch in enumerate(loader):
        if step < 2:
            continue
        seen.append(batch.tolist())
    assert seen == [[8, 9]]
    accelerator.load_state(folder)  # as is right in both
    rest = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    assert rest == [[4, 5], [6, 7], [8, 9]]


def test_what_is_no_tensor_is_gathered_into_a_list():
    accelerator = Accelerator(cpu=True)

    assert accelerator.gather_for_metrics(3) == [3]
    assert accelerator.gather(torch.tensor(1.0)).tolist() == [1.0]


def test_save_hooks_write_where_the_folder_is_made(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    given = []

    def hook(models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        given.append(Path(folder).name)
        (Path(folder) / "note.txt").write_text("")

    accelerator.register_save_state_pre_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = accelerator.save_state(str(tmp_path / "saved"))

    assert given[0].startswith(".saved.staging-")
    assert folder == str(tmp_path / "saved")
    assert (tmp_path / "saved/note.txt").is_file()
