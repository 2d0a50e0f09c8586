"""The settings of fp8: arguments before environment before defaults, and errors that name what is allowed."""

from __future__ import annotations

import pytest

from accel.precision.fp8.recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs


def te_fields(recipe: TERecipeKwargs) -> tuple:
    return (
        recipe.use_autocast_during_eval,
        recipe.margin,
        recipe.interval,
        recipe.fp8_format,
        recipe.amax_history_len,
        recipe.amax_compute_algo,
        recipe.override_linear_precision,
        recipe.use_mxfp8_block_scaling,
    )


def test_defaults_are_the_documented_ones():
    none = (False, False, False)
    assert te_fields(TERecipeKwargs()) == (False, 0, 1, "HYBRID", 1024, "most_recent", none, False)
    assert MSAMPRecipeKwargs().opt_level == "O2"
    assert AORecipeKwargs().asks_for("pad_inner_dim") is False  # on by default, and not requested


def test_the_environment_reaches_every_setting_and_arguments_come_first(monkeypatch):
    for name, text in {
        "USE_AUTOCAST_DURING_EVAL": "true",
        "MARGIN": "2",
        "INTERVAL": "3",
        "FORMAT": "e4m3",
        "AMAX_HISTORY_LEN": "16",
        "AMAX_COMPUTE_ALGO": "max",
        "OVERRIDE_LINEAR_PRECISION": "true,false,true",
        "USE_MXFP8_BLOCK_SCALING": "true",
        "OPT_LEVEL": "O1",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", text)
    assert te_fields(TERecipeKwargs()) == (True, 2, 3, "E4M3", 16, "max", (True, False, True), True)
    assert MSAMPRecipeKwargs().opt_level == "O1"
    assert TERecipeKwargs(margin=5, fp8_format="hybrid").fp8_format == "HYBRID"
    assert TERecipeKwargs(margin=5).margin == 5


def test_single_overrides_of_the_environment(monkeypatch):
    monkeypatch.setenv("FP8_OVERRIDE_WGRAD", "true")
    assert TERecipeKwargs().override_linear_precision == (False, False, True)
    assert TERecipeKwargs(override_linear_precision=(True, False, False)).override_linear_precision[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TERecipeKwargs(fp8_format="E3M4"), "E3M4.*HYBRID, E4M3, E5M2"),
        (lambda: TERecipeKwargs(amax_compute_algo="mean"), "mean.*most_recent, max"),
        (lambda: TERecipeKwargs(override_linear_precision=(True,)), "three flags"),
        (lambda: MSAMPRecipeKwargs(opt_level="O3"), "O3.*O1, O2"),
    ],
)
def test_unknown_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_old_name_has_the_settings_of_both_and_says_what_to_write():
    with pytest.warns(FutureWarning, match="TERecipeKwargs or MSAMPRecipeKwargs") as told:
        recipe = FP8RecipeKwargs(backend="te", margin=1)
    assert told[0].filename == __file__
    assert (recipe.backend, recipe.margin, recipe.opt_level) == ("TE", 1, "O2")
    with (
        pytest.warns(FutureWarning, match="old name"),
        pytest.raises(ValueError, match="AORecipeKwargs"),
    ):
        FP8RecipeKwargs(backend="AO")


def test_torchao_configuration_from_arguments_environment_and_its_own(monkeypatch):
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    built = AORecipeKwargs().build(gathers=True)
    assert (built.pad_inner_dim, built.enable_fsdp_float8_all_gather) == (True, True)
    assert AORecipeKwargs().build(gathers=False).enable_fsdp_float8_all_gather is False
    assert AORecipeKwargs(pad_inner_dim=False).build(gathers=False).pad_inner_dim is False
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true")
    assert AORecipeKwargs().build(gathers=True).pad_inner_dim is False
    assert AORecipeKwargs().asks_for("enable_fsdp_float8_all_gather")
    rowwise = float8.Float8LinearConfig.from_recipe_name("rowwise")
    assert AORecipeKwargs(config=rowwise).build(gathers=True) is rowwise
    with pytest.raises(ValueError, match="config alone"):
        AORecipeKwargs(config=rowwise, enable_fsdp_float8_all_gather=True)
