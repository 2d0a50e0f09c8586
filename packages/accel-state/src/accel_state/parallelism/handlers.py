"""Settings of tensor, context and sequence parallelism, and the checks of their values."""

from __future__ import annotations

import dataclasses

from accel_state import env
from accel_state.env.fields import from_env, read_environment


@dataclasses.dataclass
class TorchTensorParallelConfig:
    """Settings of torch's tensor parallelism.

    Args:
        enable_async_tp: Overlap communication with the products next to it.
    """

    enable_async_tp: bool = False


@dataclasses.dataclass
class TorchContextParallelConfig:
    """Settings of torch's context parallelism.

    Args:
        cp_comm_strategy: How keys and values are exchanged: "allgather" or "alltoall". By default that of
            PARALLELISM_CONFIG_CP_COMM_STRATEGY, else "allgather".

    Raises:
        ValueError: If the strategy is neither.
    """

    cp_comm_strategy: str | None = from_env("PARALLELISM_CONFIG_CP_COMM_STRATEGY")

    def __post_init__(self) -> None:
        read_environment(self)
        check_choice("cp_comm_strategy", self.cp_comm_strategy)


@dataclasses.dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of DeepSpeed's (Ulysses) sequence parallelism.

    What is left at None is read from PARALLELISM_CONFIG_SP_SEQ_LENGTH, _SP_SEQ_LENGTH_IS_VARIABLE and
    _SP_ATTN_IMPLEMENTATION.

    Args:
        sp_seq_length: Length of every full sequence, in tokens; needed when it does not vary.
        sp_seq_length_is_variable: Whether the length may change between batches; True by default.
        sp_attn_implementation: "sdpa" (the default), "flash_attention_2" or "flash_attention_3".

    Raises:
        ValueError: If a value is not allowed, or the length is fixed but missing.
    """

    sp_seq_length: int | None = from_env("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
    sp_seq_length_is_variable: bool | None = from_env("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE")
    sp_attn_implementation: str | None = from_env("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")

    def __post_init__(self) -> None:
        read_environment(self)
        check_choice("sp_attn_implementation", self.sp_attn_implementation)
        if self.sp_seq_length is not None:
            check_count("sp_seq_length", self.sp_seq_length)
        elif not self.sp_seq_length_is_variable:
            raise ValueError(
                "sp_seq_length_is_variable=False needs sp_seq_length, the length in tokens of every "
                "sequence; pass it, or let the length vary."
            )


def check_choice(field: str, value: object) -> None:
    """Raise a ValueError unless a field's value is among the choices of its environment variable."""
    # The table has the only list of choices, for arguments and for variables.
    allowed = env.VARIABLES[f"PARALLELISM_CONFIG_{field.upper()}"].choices
    if value not in allowed:
        raise ValueError(f"{field} cannot be {value!r}; allowed: {', '.join(map(repr, allowed))}.")


def check_count(field: str, value: object) -> None:
    """Raise a TypeError or ValueError unless a field's value is an integer of 1 or more."""
    # bool is an int to isinstance, and True is not a size.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field} must be an integer, not {value!r}.")
    if value < 1:
        raise ValueError(f"{field} must be 1 or more, not {value}.")
