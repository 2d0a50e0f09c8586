"""Constants under their documented path."""

from __future__ import annotations

import torch

from accel.engines.fsdp_plugin import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_SHARDING_STRATEGY",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
]

BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.10.0"
"""The oldest torch that tensor parallelism takes: the oldest that accel takes."""

BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "5.23.0"
"""The oldest transformers whose models' plans were tried."""

BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.10.0"
"""The oldest torch that context parallelism takes: the oldest that accel takes."""

BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.19.0"
"""The oldest DeepSpeed that sequence parallelism takes."""

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: tuple[type[torch.nn.Module], ...] = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
    torch.nn.Linear,
)
"""Layers that may keep weights in a smaller dtype than the one that they compute in."""
