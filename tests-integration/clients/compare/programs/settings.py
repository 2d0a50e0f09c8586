"""Pickle settings, as programs do that hand them to other processes: settings.pkl; and say what they hold."""

from __future__ import annotations

import json
import pickle
import sys
from datetime import timedelta
from pathlib import Path

from accelerate import DataLoaderConfiguration, ParallelismConfig
from accelerate.utils import (
    AutocastKwargs,
    BnbQuantizationConfig,
    CustomDtype,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

SETTINGS = [
    AutocastKwargs(cache_enabled=False),
    BnbQuantizationConfig(load_in_8bit=True),
    CustomDtype.FP8,
    DataLoaderConfiguration(split_batches=True),
    DistributedDataParallelKwargs(bucket_cap_mb=7),
    DistributedType.MULTI_CPU,
    GradientAccumulationPlugin(num_steps=3),
    GradScalerKwargs(growth_interval=5),
    InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=70)),
    ParallelismConfig(),
    PrecisionType.BF16,
    ProfileKwargs(with_flops=True),
    ProjectConfiguration("folder", total_limit=4),
    TorchDynamoPlugin(backend="eager"),
]

folder = Path(sys.argv[1])
(folder / "settings.pkl").write_bytes(pickle.dumps(SETTINGS))
(folder / "results.json").write_text(json.dumps([type(setting).__name__ for setting in SETTINGS]))
