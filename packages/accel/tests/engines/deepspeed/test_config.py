"""DeepSpeed's configuration by dotted names."""

from __future__ import annotations

import pytest

from accel.engines.deepspeed.config import HfDeepSpeedConfig, autos, put


def test_settings_are_found_by_dotted_names(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"a": {"b": {"c": 1}, "on": true, "off": false}, "x": "auto"}')

    for given in (str(file), file, {"a": {"b": {"c": 1}, "on": True, "off": False}, "x": "auto"}):
        config = HfDeepSpeedConfig(given)
        assert config.get_value("a.b.c") == 1
        assert config.get_value("a.b.d", 4) == config.get_value("a.x.d", 4) == config.get_value("x.y", 4) == 4
        assert config.find_config_node("a.b.c") == ({"c": 1}, "c")
        assert config.find_config_node("a.q.c") == (None, "c")
        assert config.is_true("a.on")
        assert config.is_false("a.off")
        assert not config.is_true("a.off")
        assert not config.is_false("a.on")
        assert not config.is_false("a.none")


def test_sections_are_taken_out():
    config = HfDeepSpeedConfig({"a": {"b": 1, "c": 2}})

    config.del_config_sub_tree("a.b")
    config.del_config_sub_tree("a.b")
    with pytest.raises(ValueError, match=r"has no a\.b"):
        config.del_config_sub_tree("a.b", must_exist=True)

    assert config.config == {"a": {"c": 2}}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 2}, (True, False, False)),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, (False, True, True)),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, (False, True, True)),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, (True, False, False)),
    ],
)
def test_stages_and_offloading(zero, expected):
    config = HfDeepSpeedConfig({"zero_optimization": zero})

    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == expected


def test_what_is_no_configuration_is_rejected(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("[1]")
    with pytest.raises(ValueError, match="has a list"):
        HfDeepSpeedConfig(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        HfDeepSpeedConfig(file)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        HfDeepSpeedConfig("nowhere.json")
    with pytest.raises(ValueError, match="not NoneType"):
        HfDeepSpeedConfig(None)  # type: ignore[arg-type]


def test_settings_are_put_into_sections_that_are_made():
    config: dict[str, object] = {"a": {"b": 1}}

    put(config, "a.c", "auto")
    put(config, "x.y.z", 2)

    assert config == {"a": {"b": 1, "c": "auto"}, "x": {"y": {"z": 2}}}
    assert list(autos(config)) == ["a.c"]
