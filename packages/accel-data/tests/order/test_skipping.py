import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from accel_data.order.global_order import SeedableRandomSampler
from accel_data.order.samplers import BatchSamplerShard
from accel_data.order.skipping import SkipBatchSampler


@given(st.integers(0, 30), st.integers(1, 4), st.integers(0, 12))
def test_skipping_leaves_out_the_first_batches(length, size, skip):
    batches = BatchSampler(SequentialSampler(range(length)), size, False)
    skipped = SkipBatchSampler(batches, skip)

    assert list(skipped) == list(batches)[skip:]
    assert len(skipped) == len(list(skipped))
    assert skipped.total_length == len(batches)
    assert (skipped.batch_size, skipped.drop_last, skipped.sampler) == (size, False, batches.sampler)


def test_the_epoch_reaches_the_sampler():
    shard = BatchSamplerShard(BatchSampler(SeedableRandomSampler(range(20), data_seed=0), 4, False), 2, 0)
    first = list(shard)
    shard.set_epoch(1)
    assert list(shard) != first
    SkipBatchSampler(shard, 1).set_epoch(0)
    assert list(shard) == first


@pytest.mark.parametrize(("skip", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_number_of_batches_to_skip_is_a_number(skip, error):
    with pytest.raises(error, match=str(skip)):
        SkipBatchSampler([[0]], skip)
