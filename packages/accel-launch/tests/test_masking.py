from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.masking import is_secret, mask_command, mask_text, mask_values

Start = Callable[..., Any]
SECRET = "hf_1234abcd"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("--api-key", True),
        ("aws_secret_access_key", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("DB_PASSWORD", True),
        ("max_tokens", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("pad_token_id", False),
        ("MASTER_PORT", False),
    ],
)
def test_secrets_are_known_by_their_names(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_text_keeps_all_but_the_secrets() -> None:
    text = """export HF_TOKEN='a'"'"'b c'; export A=1; x --hf_token="d e" --n_tokens=4 --api-key q -k v http://me:pw@host/"""

    assert mask_text(text) == (
        "export HF_TOKEN=***; export A=1; x --hf_token=*** --n_tokens=4 --api-key *** -k v http://me:***@host/"
    )


def test_the_word_behind_a_secret_flag_is_masked() -> None:
    words = ["s.py", "--api_key", SECRET, "--tokenizer", "x", "--hf-token", "--flag", "-q"]

    assert mask_command(words) == [*words[:2], "***", *words[3:]]


def test_secrets_in_sections_are_masked() -> None:
    values = {"a": {"api_key": SECRET, "n": 1}, "tpu_env": [f"HF_TOKEN={SECRET}", "A=1"], "password": None}

    assert mask_values(values) == {
        "a": {"api_key": "***", "n": 1},
        "tpu_env": ["HF_TOKEN=***", "A=1"],
        "password": None,
    }


POD = ("--tpu", "--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "z", "--env", f"HF_TOKEN={SECRET}")


@pytest.mark.parametrize(
    "flags",
    [
        ("--dry_run",),
        ("--dry_run", "--num_processes", "2"),
        ("--dry_run", "--launcher", "srun"),
        ("--dry_run", *POD),
        ("--explain", *POD),
        ("--explain", "--aws_secret_access_key", SECRET),
        ("--dry_run", "--launcher", "srun", "--aws_secret_access_key", SECRET),
    ],
)
def test_what_is_shown_of_a_run_has_no_secret(start: Start, flags: tuple[str, ...]) -> None:
    run = start("launch", *flags, "script.py", "--api_key", SECRET, env={"HF_TOKEN": SECRET})
    (run.folder / "script.py").touch()
    code, out, error = run.finish()

    assert code == 0
    assert out
    assert SECRET not in out + error


def test_the_summary_of_a_failure_has_no_secret(start: Start) -> None:
    run = start("launch", "--num_processes", "2", "script.py", "--api_key", SECRET)
    (run.folder / "script.py").write_text("raise SystemExit(3)\n")
    code, _, error = run.finish()

    assert code == 3
    assert "--api_key '***'" in error
    assert SECRET not in error


def test_a_job_for_sagemaker_shows_no_secret(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3\n"
        "iam_role_name: role\npy_version: py310\nimage_uri: image\n"
        f"additional_args: {{environment: {{HF_TOKEN: {SECRET}}}}}\n"
    )
    keys = ("--aws_access_key_id", SECRET, "--aws_secret_access_key", SECRET)
    run = start("launch", "--config_file", "c.yaml", "--dry_run", *keys, "script.py", "--api_key", SECRET)
    (run.folder / "script.py").touch()
    code, out, error = run.finish()

    assert code == 0, error
    assert '"api_key": "***"' in out
    assert SECRET not in out + error


def test_a_bug_report_has_no_secret(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"tpu_env: ['HF_TOKEN={SECRET}']\n")
    run = start("env", "--json", "--config_file", "c.yaml", env={"ACCELERATE_HF_TOKEN": SECRET})
    code, out, error = run.finish(60)
    report = json.loads(out)

    assert code == 0, error
    assert report["Config"]["tpu_env"] == ["HF_TOKEN=***"]
    assert report["Variables"]["ACCELERATE_HF_TOKEN"] == "***"
    assert SECRET not in out
