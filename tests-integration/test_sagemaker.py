"""A training job on Amazon SageMaker, made through boto3 against a stand-in for AWS on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_state.imports.packages import install_hint

pytest.importorskip("sagemaker", reason=install_hint("sagemaker", "accel-launch"))
pytest.importorskip("moto", reason="pip install 'moto[server]'")

pytestmark = pytest.mark.timeout(300)

CONFIG = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: 'NO'
ec2_instance_type: ml.p3.2xlarge
iam_role_name: arn:aws:iam::123456789012:role/trainer
image_uri: 123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1
py_version: py310
region: us-east-1
base_job_name: accel-test
mixed_precision: fp16
num_machines: 2
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
additional_args: {code_location: 's3://bucket/code', output_path: 's3://bucket/out'}
"""


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start moto's server on the loopback interface; yield the environment that leads to it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (tmp_path / "moto.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    (tmp_path / "sdk.yaml").write_text(
        "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.fail(f"moto does not listen: {(tmp_path / 'moto.log').read_text()}")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "sdk.yaml"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.kill()
        server.wait()
        log.close()


def client(service: str, aws: dict[str, str]) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=aws["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )


def test_a_job_is_made_from_the_config(aws: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/train\n")
    (tmp_path / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train.py").write_text("print('loss=0.5')\n")
    storage = client("s3", aws)
    storage.create_bucket(Bucket="bucket")
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith(("ACCELERATE_", "AWS_"))
    }
    keys = ("--aws_access_key_id", "key", "--aws_secret_access_key", "secret")
    command = [sys.executable, "-m", "accel_launch", "launch", "--config_file", "config.yaml", *keys]
    run = subprocess.run(
        [*command, "source/train.py", "--lr", "0.1", "--epochs", "2", "--shuffle", "true"],
        cwd=tmp_path,
        env={**environ, **aws, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr

    (summary,) = client("sagemaker", aws).list_training_jobs()["TrainingJobSummaries"]
    job = client("sagemaker", aws).describe_training_job(TrainingJobName=summary["TrainingJobName"])
    assert summary["TrainingJobName"].startswith("accel-test-")
    assert f"Training job: {summary['TrainingJobName']}" in run.stdout
    assert job["RoleArn"] == "arn:aws:iam::123456789012:role/trainer"
    machines = job["ResourceConfig"]
    assert (machines["InstanceType"], machines["InstanceCount"]) == ("ml.p3.2xlarge", 2)
    assert job["AlgorithmSpecification"]["TrainingImage"].endswith("/train:1")
    (channel,) = job["InputDataConfig"]
    assert channel["ChannelName"] == "train"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/train"
    # moto keeps neither the metrics nor the environment; test_estimator.py has those.
    given = {name: json.loads(text) for name, text in job["HyperParameters"].items()}
    assert given.items() >= {"lr": 0.1, "epochs": 2, "shuffle": True, "sagemaker_program": "train.py"}.items()
    bucket, _, key = given["sagemaker_submit_directory"].removeprefix("s3://").partition("/")
    storage.download_file(bucket, key, str(tmp_path / "code.tar.gz"))
    with tarfile.open(tmp_path / "code.tar.gz") as code:
        assert "train.py" in code.getnames()
