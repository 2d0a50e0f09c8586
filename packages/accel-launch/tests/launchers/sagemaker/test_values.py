from __future__ import annotations

from pathlib import Path

import pytest

from accel_launch.errors import ConfigError, LaunchError
from accel_launch.launchers.sagemaker.values import hyperparameters, read_inputs, read_metrics


def test_arguments_become_values_of_their_kind() -> None:
    arguments = ["--lr", "1e-3", "--epochs=3", "--name", "bert base", "--shuffle", "True", "--shift", "-2"]

    found = hyperparameters(arguments)

    assert found == {"lr": 1e-3, "epochs": 3, "name": "bert base", "shuffle": True, "shift": -2}
    assert [type(value) for value in found.values()] == [float, int, str, bool, int]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fp16", "--lr", "1"], "a flag without a value, such as --fp16"),
        (["--lr", "1", "--fp16"], "a flag without a value, such as --fp16"),
        (["train"], "'train' has no name"),
        (["--lr", "1", "--lr", "2"], "--lr is given twice"),
    ],
)
def test_what_cannot_be_handed_over_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(LaunchError) as error:
        hyperparameters(arguments)

    assert message in str(error.value)


@pytest.mark.parametrize("head", ["channel_name\tdata_location\n", ""])
def test_inputs_are_read_with_and_without_a_head(tmp_path: Path, head: str) -> None:
    (tmp_path / "inputs.tsv").write_text(f"{head}train\ts3://b/train\n\ntest\ts3://b/test\n")

    assert read_inputs(str(tmp_path / "inputs.tsv")) == {"train": "s3://b/train", "test": "s3://b/test"}


def test_metrics_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=(.*?);\n")

    assert read_metrics(str(tmp_path / "metrics.tsv")) == [{"Name": "loss", "Regex": "loss=(.*?);"}]


def test_wrong_tables_are_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "inputs.tsv").write_text("channel_name\tdata_location\ntrain s3://b/train\n")

    with pytest.raises(ConfigError, match=r"sagemaker_inputs_file: .*inputs.tsv, line 2 has 1 columns"):
        read_inputs(str(tmp_path / "inputs.tsv"))
    with pytest.raises(ConfigError, match="sagemaker_metrics_file: there is no file"):
        read_metrics(str(tmp_path / "none.tsv"))
