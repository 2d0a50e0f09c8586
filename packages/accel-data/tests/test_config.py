import pytest

from accel_data import DataLoaderConfiguration


def test_defaults():
    config = DataLoaderConfiguration()

    assert (config.split_batches, config.dispatch_batches, config.even_batches) == (False, None, True)
    assert (config.use_seedable_sampler, config.data_seed, config.non_blocking) == (False, None, False)
    assert (config.use_stateful_dataloader, config.custom_classes, config.order) == (False, None, None)


@pytest.mark.parametrize("seed", ["1", 1.0, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(TypeError, match=f"data_seed must be an integer or None, but it is {seed!r}"):
        DataLoaderConfiguration(data_seed=seed)


def test_stateful_loaders_need_torchdata(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ImportError, match=r"'\./packages/accel-data\[stateful\]'"):
        DataLoaderConfiguration(use_stateful_dataloader=True)
