"""Fields that take their default from the environment."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from accel_state.env.fields import from_env, read_environment


@dataclass
class Settings:
    backend: str | None = from_env("ACCELERATE_DYNAMO_BACKEND")
    mode: str | None = from_env("ACCELERATE_DYNAMO_MODE", when=lambda settings: settings.backend != "no")
    dynamic: bool | None = from_env("ACCELERATE_DYNAMO_USE_DYNAMIC")
    options: dict[str, int] | None = None


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in ("BACKEND", "MODE", "USE_DYNAMIC"):
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}", raising=False)


def test_an_argument_wins_over_the_variable_and_that_over_its_default(monkeypatch):
    settings = Settings(dynamic=False)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")

    assert read_environment(settings) == {"dynamic"}

    assert settings == Settings(backend="inductor", mode="default", dynamic=False)


def test_without_defaults_what_is_not_set_stays_none(monkeypatch):
    settings = Settings(options={})
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")

    assert read_environment(settings, defaults=False) == {"options"}

    assert settings == Settings(mode="max-autotune", options={})


def test_a_variable_is_read_where_earlier_fields_say_so(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "unknown")
    settings = Settings()
    read_environment(settings)
    assert settings.mode is None

    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_MODE"):
        read_environment(Settings(backend="inductor"))
