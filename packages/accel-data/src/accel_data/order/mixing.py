"""Seeds derived from seeds: integers mixed so that neighbours are unrelated."""

from __future__ import annotations

# SplitMix64 counts modulo 2**64; Python's integers are unbounded.
_MASK = 2**64 - 1


def mix_seed(seed: int, epoch: int) -> int:
    """Return one 64-bit seed for an epoch.

    Args:
        seed: The seed of the run.
        epoch: Number of the epoch.

    Returns:
        The output of SplitMix64 (Steele, Lea and Flood 2014) at position `epoch` of the stream `seed`, so
        that (0, 1) and (1, 0) differ, which they do not in a sum.
    """
    z = (seed + (epoch + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
