from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.config import load_config_from_file
from accel_launch.errors import ConfigError
from accel_launch.settings.resolve import resolve

FULL = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: BertLayer,GPT2Block
  fsdp_version: 2
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_full_file_loads(tmp_path: Path) -> None:
    config = load_config_from_file(write(tmp_path, FULL))

    assert config.settings["num_processes"] == 8
    assert config.settings["fsdp_version"] == 2
    assert config.settings["fsdp_reshard_after_forward"] == "true"
    assert config.settings["fsdp_transformer_layer_cls_to_wrap"] == ["BertLayer", "GPT2Block"]
    assert config.settings["parallelism_config_tp_size"] == 2
    assert (config.distributed_type, config.compute_environment) == ("FSDP", "LOCAL_MACHINE")
    assert "main_process_ip" not in config.settings


def test_attributes_and_the_dictionary_show_the_content(tmp_path: Path) -> None:
    config = load_config_from_file(str(write(tmp_path, FULL)))

    assert config.mixed_precision == "bf16"
    assert config.machine_rank == 0
    assert config.use_cpu is False
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.megatron_lm_config == {}
    assert config.to_dict()["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    with pytest.raises(AttributeError, match="no_such_key"):
        _ = config.no_such_key


def test_json_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"num_processes": 2, "mixed_precision": "fp16"}), "config.json")

    assert dict(load_config_from_file(path).settings) == {"num_processes": 2, "mixed_precision": "fp16"}


def test_missing_keys_load(tmp_path: Path) -> None:
    config = load_config_from_file(write(tmp_path, "num_processes: 2\n"))

    assert dict(config.settings) == {"num_processes": 2}
    assert config.distributed_type == "NO"
    assert config.num_machines == 1


@pytest.mark.parametrize("text", ["", "\n \n", "{}\n", "# nothing but a comment\n"])
@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_an_empty_file_is_an_error_that_says_so(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, text if name == "c.yaml" else text.partition("#")[0], name)

    said = rf"{name} is empty\. Write it with `accel config --config_file .*{name}`"
    with pytest.raises(ConfigError, match=said):
        load_config_from_file(path)


def test_an_unquoted_no_is_not_false(tmp_path: Path) -> None:
    path = write(tmp_path, "distributed_type: NO\nmixed_precision: no\ndynamo_config: {dynamo_backend: NO}\n")
    config = load_config_from_file(path)

    assert config.distributed_type == "NO"
    assert dict(config.settings) == {"mixed_precision": "no", "dynamo_backend": "no"}


def test_the_default_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    write(tmp_path / "accelerate", "num_processes: 3\n", "default_config.yaml")

    assert load_config_from_file(None).num_processes == 3


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("num_proceses: 2\n", ("'num_proceses'", "Did you mean num_processes?")),
        (
            "fsdp_config:\n  fsdp_verison: 2\n",
            ("fsdp_config", "'fsdp_verison'", "Did you mean fsdp_version?"),
        ),
        ("mixed_precision: fp17\n", ("key mixed_precision", "'fp17'", "no, fp8, fp16, bf16")),
        ("fsdp_config: {fsdp_version: 3}\n", ("fsdp_config.fsdp_version", "3", "1, 2")),
        ("num_processes: 0\n", ("num_processes", "0", "at least 1")),
        ("distributed_type: MULTI_GPUS\n", ("'MULTI_GPUS'", "Did you mean MULTI_GPU?")),
        ("compute_environment: HOME\n", ("'HOME'", "LOCAL_MACHINE, AMAZON_SAGEMAKER")),
        ("fsdp_version: 2\n", ("'fsdp_version'", "It belongs in the section fsdp_config.")),
        ("fsdp_config: 3\n", ("fsdp_config", "3", "a section")),
        ("debug: false\nnum_processes: [1,\n", ("line 3", "not valid YAML")),
        ("debug: \tx\n  y: 1\n", ("line",)),
        ("- a\n- b\n", ("list", "a mapping")),
    ],
)
def test_errors_name_file_place_value_and_fix(tmp_path: Path, text: str, messages: tuple[str, ...]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config_from_file(path)

    assert [message for message in (str(path), *messages) if message not in str(error.value)] == []


def test_a_file_that_is_no_text_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load_config_from_file(path)


def test_empty_values_are_no_values(tmp_path: Path) -> None:
    text = "main_process_ip: ''\nmpirun_config: {mpirun_ccl: '1', mpirun_hostfile: ''}\n"

    assert dict(load_config_from_file(write(tmp_path, text)).settings) == {"mpirun_ccl": 1}


@pytest.mark.parametrize(
    "text", ["tpu_env: []\ntpu_vm: []\n", "fsdp_config: {}\ncommands: []\ngpu_ids: []\n"]
)
def test_an_empty_list_or_section_is_no_setting(tmp_path: Path, text: str) -> None:
    config = load_config_from_file(write(tmp_path, text))

    assert dict(config.settings) == {}
    resolve(launch_command_parser().parse_args(["x.py"]), config, {})  # a warning would be an error here


def test_broken_json_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2, column"):
        load_config_from_file(write(tmp_path, '{\n"a": }', "config.json"))


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="accel config default"):
        load_config_from_file(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["new.yaml", "new.json"])
def test_what_is_written_reads_back(tmp_path: Path, name: str) -> None:
    config = load_config_from_file(write(tmp_path, FULL))

    config.write(tmp_path / "folder" / name)

    assert load_config_from_file(tmp_path / "folder" / name).settings == config.settings


def test_sagemaker_files_load(tmp_path: Path) -> None:
    config = load_config_from_file(
        write(
            tmp_path,
            "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
            "ec2_instance_type: ml.p3\niam_role_name: role\nnum_machines: 2\nadditional_args: {a: 1}\n",
        )
    )

    assert config.compute_environment == "AMAZON_SAGEMAKER"
    assert config.ec2_instance_type == "ml.p3"
