from hypothesis import given
from hypothesis import strategies as st

from accel_data.order.mixing import mix_seed


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_seeds_are_64_bit_and_do_not_add_up(seed, epoch):
    mixed = mix_seed(seed, epoch)

    assert 0 <= mixed < 2**64
    assert mixed != mix_seed(seed + 1, epoch)
    assert mix_seed(seed + 1, epoch) != mix_seed(seed, epoch + 1)
