"""Transformer Engine without Transformer Engine: what its settings mean, and what is said without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.precision.fp8 import te
from accel.precision.fp8.recipes import TERecipeKwargs

DELAYED = ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax")  # as of 2.20


def test_settings_become_arguments_of_the_recipe():
    handler = TERecipeKwargs(margin=1, amax_history_len=8, amax_compute_algo="max")
    assert te.recipe_arguments(handler, DELAYED) == {
        "margin": 1,
        "amax_history_len": 8,
        "amax_compute_algo": "max",
    }
    older = (*DELAYED, "interval", "override_linear_precision")
    assert te.recipe_arguments(TERecipeKwargs(interval=4), older)["interval"] == 4
    blocks = TERecipeKwargs(margin=1, use_mxfp8_block_scaling=True)
    assert te.recipe_arguments(blocks, ("margin", "fp8_format")) == {"margin": 1}


def test_a_setting_that_the_version_does_not_know_is_reported_as_ignored():
    with pytest.warns(UserWarning, match=r"interval=4\) is ignored"):
        te.recipe_arguments(TERecipeKwargs(interval=4), DELAYED)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: te.convert_model(model),
        lambda model: te.apply_fp8_autowrap(model, TERecipeKwargs()),
        lambda model: te.contextual_fp8_autocast(model.forward, None),
    ],
)
def test_without_the_library_the_error_names_what_to_install(call):
    with pytest.raises(ImportError, match=r"'\./packages/accel\[transformer-engine\]'.*accel\[fp8\]"):
        call(torch.nn.Sequential(torch.nn.Linear(16, 16)))


class Linear(torch.nn.Linear):
    def __init__(self, *sizes: int, params_dtype: torch.dtype, **options: Any) -> None:
        super().__init__(*sizes, dtype=params_dtype, **options)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, shape: Any, params_dtype: torch.dtype, **options: Any) -> None:
        super().__init__(shape, dtype=params_dtype, **options)


def test_layers_are_replaced_and_put_back_with_their_parameters_and_mode(monkeypatch):
    monkeypatch.setattr(te, "library", lambda: SimpleNamespace(Linear=Linear, LayerNorm=LayerNorm))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 3))
    before = list(model.eval().parameters())
    for to_te, kinds in (
        (True, [Linear, LayerNorm, torch.nn.Linear]),  # 3 is no multiple of 16
        (False, [torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Linear]),
    ):
        te.convert_model(model, to_transformer_engine=to_te)
        assert [type(part) for part in model] == kinds
        assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
        assert not any(part.training for part in model)


def test_no_layer_is_of_a_library_that_is_not_there():
    assert not te.has_transformer_engine_layers(torch.nn.Linear(16, 16))


def test_only_a_bound_forward_can_run_in_fp8():
    with pytest.raises(TypeError, match="forward method of a module"):
        te.contextual_fp8_autocast(torch.relu, None)
