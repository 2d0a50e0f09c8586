from __future__ import annotations

import weakref

import pytest
import torch

from accel_ops.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)


def out_of_memory() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.int8)
    return caught.value


def test_what_torch_says_when_memory_is_short_is_recognised():
    assert should_reduce_batch_size(out_of_memory())
    assert should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert should_reduce_batch_size(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."))
    assert should_reduce_batch_size(MemoryError())
    assert not should_reduce_batch_size(RuntimeError("shapes do not match"))
    assert not should_reduce_batch_size(ValueError("out of memory"))


def test_batch_sizes_shrink_until_one_fits():
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, factor, *, extra):
        tried.append(batch_size)
        if batch_size > 75:
            raise out_of_memory()
        return batch_size * factor + extra

    assert train(2, extra=1) == 145
    assert tried == [100, 90, 81, 72]
    assert train(2, extra=1) == 145  # each call starts again


def test_the_next_size_may_be_the_callers():
    sizes = iter([8, 4])

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        if batch_size > 4:
            raise out_of_memory()
        return batch_size

    assert train() == 4


def test_bare_decorator_starts_at_128():
    @find_executable_batch_size
    def train(batch_size, *args):
        return batch_size, args

    assert train(1, 2) == (128, (1, 2))


def test_nothing_that_fits_is_an_error_and_other_errors_pass():
    @find_executable_batch_size(starting_batch_size=4)
    def hopeless(batch_size):
        raise out_of_memory()

    @find_executable_batch_size
    def broken(batch_size):
        raise KeyError("bug")

    with pytest.raises(RuntimeError, match=r"No executable batch size.*from 4 down to zero"):
        hopeless()
    with pytest.raises(KeyError, match="bug"):
        broken()


def test_calls_that_do_not_fit_say_how():
    @find_executable_batch_size
    def train(batch_size, model):
        return batch_size

    @find_executable_batch_size
    def nothing():
        return None

    with pytest.raises(TypeError, match="batch size as its first parameter"):
        train(32, "model")
    with pytest.raises(TypeError, match="batch size as its first parameter"):
        nothing()


def test_a_failed_call_does_not_keep_its_tensors():
    kept = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        if kept:
            assert kept[0]() is None
            return batch_size
        local = torch.zeros(4)
        kept.append(weakref.ref(local))
        raise out_of_memory()

    assert train() == 1


def test_release_memory_gives_as_many_none_and_drops_the_objects():
    a, b = torch.zeros(2), torch.zeros(2)
    reference = weakref.ref(a)

    a, b = release_memory(a, b)

    assert a is None
    assert b is None
    assert reference() is None
    clear_device_cache()
