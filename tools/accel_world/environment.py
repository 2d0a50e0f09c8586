"""The environment that the processes of a test start from."""

from __future__ import annotations

import os
import socket

__all__ = ["base_environment"]

# Variables of a launcher, by which a process would believe that it is part of another run.
LAUNCHER_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "MEGATRON_LM_",
    "MV2_",
    "OMPI_",
    "PARALLELISM_CONFIG_",
    "PMI_",
    "TORCHELASTIC_",
)
LAUNCHER_VARIABLES = frozenset(
    {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
)
ONE_THREAD = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def base_environment() -> dict[str, str]:
    """Return this environment without any launcher's traces, one thread each, gloo on loopback."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(LAUNCHER_PREFIXES) and key not in LAUNCHER_VARIABLES
    }
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return environment | ONE_THREAD | {"GLOO_SOCKET_IFNAME": loopback}
