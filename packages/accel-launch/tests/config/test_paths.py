from __future__ import annotations

from pathlib import Path

from accel_launch.config import config_path, default_config_file


def test_the_place_follows_hf_home_then_the_cache_folder(tmp_path: Path) -> None:
    end = Path("accelerate/default_config.yaml")

    assert config_path({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/x"}) == Path("/hf") / end
    assert config_path({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface") / end
    assert config_path({}) == Path.home() / ".cache/huggingface" / end
    assert config_path({"HF_HOME": "~/hf"}) == Path.home() / "hf" / end


def test_json_counts_only_where_there_is_no_yaml(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.json").touch()
    assert config_path(environ).suffix == ".json"

    (folder / "default_config.yaml").touch()
    assert config_path(environ).suffix == ".yaml"


def test_clients_get_the_path_as_text() -> None:
    assert isinstance(default_config_file, str)
    assert default_config_file.endswith(("default_config.yaml", "default_config.json"))
