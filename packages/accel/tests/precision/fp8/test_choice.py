"""Which library computes in fp8, and the error if it is missing."""

from __future__ import annotations

import pytest

from accel.accelerator import Accelerator
from accel.precision.fp8 import choice
from accel.precision.fp8.recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_state.process.state import PartialState
from accel_state.train_plan import make_train_plan

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_other_precisions_have_none_and_say_that_a_recipe_is_ignored():
    assert make_train_plan(mixed_precision="bf16").fp8_backend is None
    with pytest.warns(UserWarning, match=r"AORecipeKwargs is ignored: mixed_precision is 'bf16'"):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])
    assert accelerator.fp8_backend is None


def test_torchao_is_chosen_where_nothing_else_runs():
    pytest.importorskip("torchao", reason="torchao is not installed")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert (accelerator.fp8_backend, accelerator.mixed_precision) == ("AO", "fp8")
    assert accelerator.plan.fp8_backend == "AO"
    recipe = AORecipeKwargs(pad_inner_dim=False)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert accelerator.engine.context.fp8.recipe is recipe


def test_the_launcher_chooses_and_a_recipe_comes_first(monkeypatch):
    assert make_train_plan(mixed_precision="fp8").fp8_backend is None  # what is installed decides
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "torchao")
    plan = make_train_plan(mixed_precision="fp8")
    assert (plan.fp8_backend, plan.reasons["fp8_backend"]) == ("AO", ("ACCELERATE_FP8_BACKEND",))
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.warns(UserWarning, match="ACCELERATE_FP8_BACKEND=TE is ignored: .* AORecipeKwargs"):
        plan = make_train_plan(mixed_precision="fp8", fp8_recipe=AORecipeKwargs())
    assert (plan.fp8_backend, plan.reasons["fp8_backend"]) == ("AO", ("AORecipeKwargs",))
    with pytest.warns(FutureWarning, match="FP8RecipeKwargs is the old name"):
        recipe = FP8RecipeKwargs(backend="te")
    assert make_train_plan(mixed_precision="fp8", fp8_recipe=recipe).fp8_backend == "TE"


def test_an_unknown_library_is_an_error_before_anything_is_started(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "abacus")
    with pytest.raises(ValueError, match="ACCELERATE_FP8_BACKEND has the value 'abacus'"):
        Accelerator(cpu=True, mixed_precision="fp8")
    assert not PartialState._shared_state


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (TERecipeKwargs(), r"transformer_engine\.pytorch.*'\./packages/accel\[transformer-engine\]'"),
        (
            MSAMPRecipeKwargs(),
            r"MS-AMP is not supported.*github\.com/Azure.*'\./packages/accel\[fp8\]'",
        ),
    ],
)
def test_what_is_not_installed_is_named_immediately(recipe, message):
    with pytest.raises(ImportError, match=message):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])


def test_without_any_library_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(choice, "is_torchao_available", lambda: False)
    with pytest.raises(ImportError, match=r"'\./packages/accel\[fp8\]'"):
        Accelerator(cpu=True, mixed_precision="fp8")


def test_two_recipes_are_rejected():
    with pytest.raises(ValueError, match="AORecipeKwargs and TERecipeKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs(), TERecipeKwargs()])
