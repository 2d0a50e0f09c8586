"""How DeepSpeed's sequence parallelism is requested; that it trains is in tests-integration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.engines.deepspeed import ulysses
from accel_state.parallelism.config import ParallelismConfig
from accel_state.parallelism.handlers import DeepSpeedSequenceParallelConfig


@pytest.mark.parametrize("is_variable", [True, False])
def test_every_setting_reaches_deepspeed(monkeypatch, is_variable):
    asked: dict[str, Any] = {}
    attention = SimpleNamespace(register_with_transformers=lambda **given: asked.update(given))
    parts = {  # of its modules; CPUs have neither the kernel nor a second process here
        "comm": SimpleNamespace(init_distributed=lambda dist_backend: None),
        "runtime.sequence_parallel.parallel_state_sp": SimpleNamespace(
            _release_sequence_parallel_groups=lambda: None
        ),
        "runtime.sequence_parallel.ulysses_sp": SimpleNamespace(UlyssesSPAttentionHF=attention),
    }
    monkeypatch.setattr(ulysses, "import_deepspeed", parts.__getitem__)
    functions = SimpleNamespace(ALL_ATTENTION_FUNCTIONS={})
    monkeypatch.setattr(ulysses, "import_module", lambda name: functions)
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=64, sp_seq_length_is_variable=is_variable, sp_attn_implementation="flash_attention_2"
    )
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace()  # type: ignore[assignment]

    ulysses.register(model, ParallelismConfig(sp_size=4, sp_handler=handler), batch_size=3)

    assert asked == {
        "model_name_or_path": model,
        "core_attn_implementation": "flash_attention_2",
        "sequence_parallel_size": 4,
        "micro_batch_size": 3,
        "seq_length": 64,
        "seq_length_is_variable": is_variable,
    }


def test_parts_of_sequences_can_be_flattened(monkeypatch):
    """Models of transformers flatten labels with view(), which takes no slices of longer sequences."""

    class Adapter:
        def __init__(self, loader: Any, **options: Any) -> None:
            self.micro_batches: list[Any] = []

        def __iter__(self):
            yield {"shift_labels": torch.arange(12).view(2, 6)[:, :3], "note": "whole"}

    monkeypatch.setattr(
        ulysses, "import_deepspeed", lambda name: SimpleNamespace(UlyssesSPDataLoaderAdapter=Adapter)
    )
    groups = SimpleNamespace(
        get_sequence_parallel_rank=lambda: 0,
        get_sequence_parallel_group=lambda: None,
        get_sequence_parallel_world_size=lambda: 2,
    )
    loader = SimpleNamespace(end_of_dataloader=True)

    (batch,) = ulysses.SequenceParallelLoader(loader, groups, torch.device("cpu"))

    assert batch["shift_labels"].view(-1).tolist() == [0, 1, 2, 6, 7, 8]
    assert batch["note"] == "whole"
