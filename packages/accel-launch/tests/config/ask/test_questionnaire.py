from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.config import LaunchConfig
from accel_launch.config.ask.prompt import Back
from accel_launch.config.ask.questionnaire import answers_of, ask_all
from accel_launch.plan.machine import Machine
from accel_launch.plan.make import make_plan
from accel_launch.settings.resolve import resolve


class Script:
    """Answers by a word of the question; everything else takes the default."""

    hint = ""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.seen: list[str] = []

    def _answer(self, title: str) -> Any:
        self.seen.append(title)
        found = next((key for key in self.answers if key.replace("_", " ") in title.lower()), None)
        answer = None if found is None else self.answers[found]
        if isinstance(answer, list):
            answer = answer.pop(0) if answer else None
        if answer is Back:
            raise Back
        return answer

    def choose(self, title: str, labels: Sequence[str], default: int) -> int:
        answer = self._answer(title)
        return default if answer is None else next(i for i, text in enumerate(labels) if answer in text)

    def text(self, title: str, default: str, check: Callable[[str], Any]) -> str:
        while True:
            answer = self._answer(title)
            try:
                check(default if answer is None else answer)
            except ValueError as error:
                self.seen.append(str(error))
                continue
            return default if answer is None else answer


def test_all_gpus_by_default_and_no_question_about_their_number() -> None:
    script = Script()
    values = ask_all(script, gpus=4)

    assert values is not None
    assert (values["num_processes"], values["distributed_type"]) == (4, "MULTI_GPU")
    assert "gpu_ids" not in values
    assert not any("processes" in title for title in script.seen)


def test_one_gpu_needs_no_question_about_spreading_a_model() -> None:
    script = Script()
    values = ask_all(script, gpus=1)

    assert values is not None
    assert (values["num_processes"], values["distributed_type"]) == (1, "NO")
    assert not any("distributed" in title for title in script.seen)


def test_some_gpus_count_the_processes() -> None:
    script = Script(train_on="some", which_gpus=["0,4", "1,3"])
    values = ask_all(script, gpus=4)

    assert values is not None
    assert (values["num_processes"], values["gpu_ids"]) == (2, "1,3")
    assert "0,4 is not allowed; allowed: 0 to 3, each once, e.g. 0,1." in script.seen


def test_several_machines_must_be_reachable_and_counted() -> None:
    script = Script(
        where="several",
        how_many_machines=["1", "3"],
        which_of_them=["3", "2"],
        host_name=["", "node0"],
        how_do="c10d",
    )
    values = ask_all(script, gpus=2)

    assert values is not None
    LaunchConfig.from_values(values)
    assert (values["num_machines"], values["machine_rank"], values["num_processes"]) == (3, 2, 6)
    assert (values["main_process_ip"], values["main_process_port"]) == ("node0", 29500)
    assert values["rdzv_backend"] == "c10d"
    assert "1 is not allowed; allowed: 2 or more machines." in script.seen
    assert "3 is not allowed; allowed: 0 to 2." in script.seen
    assert "The address of machine 0 is needed." in script.seen


def test_cpu_processes_are_a_multiple_of_the_machines() -> None:
    script = Script(where="several", host_name="a", how_many_processes=["3", "4"])
    values = ask_all(script, gpus=0)

    assert values is not None
    assert (values["num_processes"], values["use_cpu"], values["distributed_type"]) == (4, True, "MULTI_CPU")
    assert "3 is not allowed; allowed: a multiple of 2, the machines." in script.seen


def test_fsdp_asks_for_what_its_version_has() -> None:
    script = Script(distributed="FSDP", layer_classes="Block,Head")
    values = ask_all(script, gpus=2)

    assert values is not None
    config = LaunchConfig.from_values(values)
    assert (config.distributed_type, config.settings["fsdp_version"]) == ("FSDP", 2)
    assert config.settings["fsdp_transformer_layer_cls_to_wrap"] == ["Block", "Head"]
    assert not any("What is sharded" in title for title in script.seen)

    first = ask_all(Script(distributed="FSDP", which_fsdp="1:", wrapped="SIZE"), gpus=2)
    assert first is not None
    assert first["fsdp_config"]["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert first["fsdp_config"]["fsdp_min_num_params"] == 100_000_000


def test_deepspeed_asks_for_what_its_stage_has() -> None:
    script = Script(
        distributed="DeepSpeed", sharded="3:", optimizer_states_kept="nvme", folder=["", "/nvme"], norm="1.0"
    )
    values = ask_all(script, gpus=2)

    assert values is not None
    config = LaunchConfig.from_values(values)
    assert config.distributed_type == "DEEPSPEED"
    assert values["deepspeed_config"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/nvme",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": False,
    }
    assert "The folder is needed." in script.seen
    assert not any("reached" in title for title in script.seen)

    own = ask_all(Script(distributed="DeepSpeed", json="ds.json"), gpus=2)
    assert own is not None
    assert own["deepspeed_config"] == {"deepspeed_config_file": "ds.json"}


def test_deepspeed_on_several_machines_asks_how_they_are_reached() -> None:
    script = Script(
        where_do_you="several", host_name="a", distributed="DeepSpeed", reached="pdsh", hostfile=["", "hosts"]
    )
    values = ask_all(script, gpus=2)

    assert values is not None
    assert values["deepspeed_config"]["deepspeed_multinode_launcher"] == "pdsh"
    assert values["deepspeed_config"]["deepspeed_hostfile"] == "hosts"
    assert "The hostfile is needed." in script.seen


def test_the_degrees_of_megatron_divide_the_processes() -> None:
    script = Script(distributed="Megatron", tensor=["3", "2"])
    script.answers["pipeline-parallel"] = ["8", "2"]
    values = ask_all(script, gpus=8)

    assert values is not None
    assert LaunchConfig.from_values(values).distributed_type == "MEGATRON_LM"
    assert values["megatron_lm_config"] == {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_sequence_parallelism": False,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_num_micro_batches": 1,
        "megatron_lm_use_distributed_optimizer": False,
        "megatron_lm_recompute_activations": False,
        "megatron_lm_gradient_clipping": 1.0,
    }
    assert "3 is not allowed; allowed: a divisor of 8, the processes for it." in script.seen
    assert "8 is not allowed; allowed: a divisor of 4, the processes for it." in script.seen


def test_a_tpu_is_offered_where_there_is_one() -> None:
    values = ask_all(Script(train_on="TPU", mixed="bf16", double="yes", function="train"), gpus=0, tpu=True)

    assert values == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "XLA",
        "downcast_bf16": True,
        "main_training_function": "train",
        "mixed_precision": "bf16",
        "num_machines": 1,
    }
    assert not any("train on" in title for title in _titles(gpus=0))


def _titles(gpus: int) -> list[str]:
    script = Script()
    ask_all(script, gpus=gpus)
    return script.seen


def test_a_pod_is_named_and_prepared() -> None:
    script = Script(where="pod", variables="A=1 B='x y'", zone="z")
    script.answers |= {"pod's": ["", "pod"], "separated by ;": "git pull; pip install x"}
    values = ask_all(script, gpus=0)

    assert values is not None
    LaunchConfig.from_values(values)
    assert (values["tpu_name"], values["tpu_zone"], values["tpu_use_cluster"]) == ("pod", "z", True)
    assert values["tpu_env"] == ["A=1", "B=x y"]
    assert values["commands"] == ["git pull", "pip install x"]
    assert "The name is needed." in script.seen


def test_sagemaker_requests_a_job() -> None:
    script = Script(
        where="SageMaker", iam=["", "role"], instances=[None, "2"], together="data parallel", mixed="fp16"
    )
    script.answers |= {"pytorch": ["", "2.3"], "transformers": "4.49", "inputs": "in.tsv"}
    values = ask_all(script, gpus=4)

    assert values == {
        "base_job_name": "accel",
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "ml.p3.2xlarge",
        "iam_role_name": "role",
        "mixed_precision": "fp16",
        "num_machines": 2,
        "py_version": "py310",
        "pytorch_version": "2.3",
        "region": "us-east-1",
        "sagemaker_inputs_file": "in.tsv",
        "transformers_version": "4.49",
    }
    assert LaunchConfig.from_values(values).compute_environment == "AMAZON_SAGEMAKER"
    assert "The role is needed." in script.seen
    assert not any("processes" in title or "train on" in title for title in script.seen)


def test_each_fp8_library_has_its_own_questions() -> None:
    def asked(library: str, **answers: Any) -> dict[str, Any]:
        values = ask_all(Script(mixed="fp8", fp8_library=library, **answers), gpus=2)
        assert values is not None
        return dict(values["fp8_config"])

    assert asked("TE", number_format="E4M3", higher="true,false,false") == {
        "fp8_backend": "TE",
        "fp8_format": "E4M3",
        "fp8_margin": 0,
        "fp8_interval": 1,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "most_recent",
        "fp8_use_autocast_during_eval": False,
        "fp8_override_linear_precision": [True, False, False],
    }
    assert asked("MSAMP", optimization="O1") == {"fp8_backend": "MSAMP", "fp8_opt_level": "O1"}
    assert asked("AO") == {"fp8_backend": "AO", "fp8_pad_inner_dim": True}
    assert asked("AO", distributed="FSDP")["fp8_enable_fsdp_float8_all_gather"] is True


def test_compiling_asks_how() -> None:
    values = ask_all(Script(compile_the_model="inductor", dynamic="yes", repeated="yes"), gpus=1)

    assert values is not None
    assert values["dynamo_config"] == {
        "dynamo_backend": "inductor",
        "dynamo_mode": "default",
        "dynamo_use_fullgraph": False,
        "dynamo_use_dynamic": True,
        "dynamo_use_regional_compilation": True,
    }


def test_machines_without_gpus_may_be_started_by_mpirun() -> None:
    values = ask_all(Script(where="several", host_name="a", hostfile_for_mpirun="hosts"), gpus=0)

    assert values is not None
    assert values["mpirun_config"] == {"mpirun_hostfile": "hosts", "mpirun_ccl": 1}


def test_ranks_that_are_handed_out_are_not_those_of_mpirun() -> None:
    script = Script(where="several", host_name="a", how_do="c10d", hostfile_for_mpirun="hosts")
    values = ask_all(script, gpus=0)

    assert values is not None
    assert "mpirun_config" not in values


@pytest.mark.parametrize(
    ("answers", "gpus", "tpu", "how"),
    [
        ({}, 0, False, "exec"),
        ({}, 4, True, "local"),
        ({"train_on": "some", "which_gpus": "1,3", "distributed": "FSDP"}, 4, False, "local"),
        ({"train_on": "CPU", "how_many_processes": "2"}, 4, False, "local"),
        ({"train_on": "TPU", "mixed": "bf16"}, 4, True, "exec"),
        ({"where": "pod", "pod's": "pod", "zone": "z"}, 0, False, "pod"),
        ({"where": "several", "host_name": "a"}, 0, True, "torchrun"),
        ({"where": "several", "host_name": "a", "distributed": "mesh"}, 4, True, "torchrun"),
        ({"where": "several", "host_name": "a", "how_do": "c10d", "hostfile_for": "hosts"}, 0, 0, "torchrun"),
        ({"where": "several", "host_name": "a", "hostfile_for": "hosts"}, 0, False, "mpirun"),
        (
            {"where": "several", "host_name": "a", "how_do": "c10d", "train_on": "CPU", "hostfile": "hosts"},
            2,
            True,
            "torchrun",
        ),
    ],
)
def test_a_file_of_answers_can_be_launched(
    answers: dict[str, Any],
    gpus: int,
    tpu: bool,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    values = ask_all(Script(**answers), gpus, tpu=tpu)
    assert values is not None

    config = LaunchConfig.from_values(values, Path("c.yaml"))
    settings = resolve(launch_command_parser().parse_args(["script.py"]), config, {})

    assert make_plan(settings, "script.py", (), {}, Machine(gpus=gpus, cores=8)).launcher == how


def test_the_tpu_is_offered_for_one_machine_alone() -> None:
    with pytest.raises(StopIteration):  # no such choice
        ask_all(Script(where="several", host_name="a", train_on="TPU"), gpus=1, tpu=True)


def test_a_mesh_must_hold_every_process() -> None:
    script = Script(distributed="mesh", replicas=["3", "2"], one_replica="2", tensor="2")
    values = ask_all(script, gpus=8)

    assert values is not None
    assert {k: v for k, v in values["parallelism_config"].items() if v not in (1, "allgather")} == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
    }
    assert any("dp_replicate(3) = 3, but there are 8 processes" in line for line in script.seen)


def test_back_forgets_the_answer_and_what_depended_on_it() -> None:
    values = ask_all(Script(distributed=["FSDP", "DDP"], which_fsdp=[Back]), gpus=2)

    assert values is not None
    assert "fsdp_config" not in values


def test_back_at_the_first_question_stays_there() -> None:
    script = Script(where=[Back, Back, "this"])

    assert ask_all(script, gpus=0) is not None
    assert script.seen[:3] == ["Where do you train?"] * 3


def test_back_from_the_confirmation() -> None:
    script = Script(write_it=[Back, "no"])

    assert ask_all(script, gpus=0) is None
    assert script.seen[-2:] == [script.seen[-4], "Write it?"]


@pytest.mark.parametrize(
    "values",
    [
        {"num_processes": 3, "use_cpu": True},
        {"num_processes": 2, "gpu_ids": "0,1", "mixed_precision": "fp16"},
        {"num_processes": 4, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}},
        {"num_processes": 4, "parallelism_config": {"parallelism_config_tp_size": 4}},
        {"num_processes": 8, "num_machines": 2, "machine_rank": 1, "main_process_ip": "a"},
        {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 3}},
        {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
        {
            "distributed_type": "XLA",
            "tpu_use_cluster": True,
            "tpu_name": "n",
            "tpu_zone": "z",
            "tpu_env": ["A=1 2"],
        },
        {
            "distributed_type": "XLA",
            "tpu_use_cluster": True,
            "tpu_name": "n",
            "tpu_zone": "z",
            "commands": ["a", "b"],
        },
        {
            "compute_environment": "AMAZON_SAGEMAKER",
            "distributed_type": "MODEL_PARALLEL",
            "iam_role_name": "r",
            "image_uri": "i",
            "num_machines": 3,
        },
    ],
)
def test_answers_of_a_file_are_the_defaults(values: dict[str, Any]) -> None:
    again = ask_all(Script(), gpus=4, before=answers_of(LaunchConfig.from_values(values)))

    assert again is not None
    assert {key: again[key] for key in values if "config" not in key} == {
        key: value for key, value in values.items() if "config" not in key
    }
    for section in [key for key in values if "config" in key]:
        assert values[section].items() <= again[section].items()
