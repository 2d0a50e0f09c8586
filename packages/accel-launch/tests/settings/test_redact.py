from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.settings.redact import is_secret, redact_command, redact_text, redact_values
from accel_launch.settings.schema import SETTINGS

Start = Callable[..., Any]
SECRET = "hf_1234abcd"

_SECRET_NAMES = [
    "WANDB_KEY",
    "AZURE_STORAGE_KEY",
    "ENCRYPTION_KEY",
    "--ssh-key",
    "DB_PASS",
    "--pass",
    "MYSQL_PWD",
    "API_KEYS",
    "CREDENTIALS",
    "SECRETS",
    "PASSWORDS",
    "HF_TOKEN_2",
    "TOKEN2",
    "API_KEY_1",
    "BACKEND_TOKEN",
    "hf_tokens",
    "wandb.key",
    "apiKey",
    "SECRET_KEY",
    "public_key_passphrase",
    "MODAL_TOKEN_ID",
]
_HARMLESS_NAMES = [
    "max_tokens",
    "TOKENIZERS_PARALLELISM",
    "--tokenizer",
    "n_tokens",
    "pad_token_id",
    "image_token_id",
    "decoder_start_token_id",
    "MASTER_PORT",
    "num_key_value_heads",
    "KEYBOARD",
    "MONKEY",
    "--key",
    "text_key",
    "--sort-key",
    "missing_keys",
    "--pass_through",
    "passes",
    "bypass",
    "compass",
    "forward_pass",
    "PWD",
    "OLDPWD",
    "keyframes",
]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("--api-key", True),
        ("aws_secret_access_key", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("DB_PASSWORD", True),
        *((name, True) for name in _SECRET_NAMES),
        *((name, False) for name in _HARMLESS_NAMES),
    ],
)
def test_secrets_are_known_by_their_names(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_text_keeps_all_but_the_secrets() -> None:
    text = """export HF_TOKEN='a'"'"'b c'; export A=1; x --hf_token="d e" --n_tokens=4 --api-key q -k v http://me:pw@host/"""

    assert redact_text(text) == (
        "export HF_TOKEN=***; export A=1; x --hf_token=*** --n_tokens=4 --api-key *** -k v http://***@host/"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"api_key": "hf_x", "n": 4}', '{"api_key": "***", "n": 4}'),
        ('{"credentials": {"a": {"b": "x"}}, "api_keys": [1]}', '{"credentials": "***", "api_keys": "***"}'),
        ('{"n":  4}', '{"n":  4}'),
        ("""cd a; s.py '{"api_key":"hf_x","n":4}'""", """cd a; s.py '{"api_key":"***","n":4}'"""),
        ('s.py "{\\"api_key\\": \\"a b\\"}"', 's.py "{\\"api_key\\": \\"***\\"}"'),
        ("s.py '{api_keys: [a, b], n: 4}'", "s.py '{api_keys: ***, n: 4}'"),
        ("api_key:hf_x tokenizer:y --key z", "api_key:*** tokenizer:y --key z"),
        ("git+https://hf_x@host/a https://host:80/a@b", "git+https://***@host/a https://host:80/a@b"),
        ("https://me:a@b@host", "https://***@host"),
        ("s.py --api_key='never closed", "s.py --api_key=***"),
        ("sh -c 's.py --api_key=x' --n 4", "sh -c 's.py --api_key=***' --n 4"),
        ("s.py {secrets: {a: {b: x}, c: y}, n: 4}", "s.py {secrets: ***, n: 4}"),
        ("s.py {secrets: [x", "s.py {secrets: ***"),
    ],
)
def test_keys_and_addresses_are_masked_in_text(text: str, shown: str) -> None:
    assert redact_text(text) == shown


_WORST = [
    *("a_", "-", "_token", "token1", "pass", "1", "a b", "\\", "'", '"'),
    *("token=", "token: ", "--token ", 'token="', "token=\\", 'token:\\"', "token:[", "token:{", "a://b"),
    *("[", '["token",'),
]


@pytest.mark.parametrize("piece", _WORST)
def test_the_time_grows_with_the_text_up_to_a_megabyte(piece: str) -> None:
    def seconds(size: int) -> float:
        text = piece * (size // len(piece)) + "=x"
        begin = time.process_time()
        redact_text(text)
        return time.process_time() - begin

    # 16 times the text: where the time grows with its square it is 256 times.
    assert any(seconds(1 << 20) < 64 * seconds(1 << 16) for _ in range(5))


def test_no_launch_setting_is_taken_for_a_secret() -> None:
    secret = {name for name in SETTINGS if is_secret(name)}

    assert secret == {"aws_access_key_id", "aws_secret_access_key"}


def test_the_word_behind_a_secret_flag_is_masked() -> None:
    words = ["s.py", "--api_key", SECRET, "--tokenizer", "x", "--hf-token", "--flag", "-q"]

    assert redact_command(words) == [*words[:2], "***", *words[3:]]


def test_all_words_behind_a_flag_for_several_secrets_are_masked() -> None:
    words = ["s.py", "--api-keys", "a", "b", "-v", "c", "--db_pass", "d", "e"]

    assert redact_command(words) == ["s.py", "--api-keys", "***", "***", "-v", "c", "--db_pass", "***", "e"]


def test_secrets_in_sections_are_masked() -> None:
    values = {"a": {"api_key": SECRET, "n": 1}, "tpu_env": [f"HF_TOKEN={SECRET}", "A=1"], "password": None}

    assert redact_values(values) == {
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
