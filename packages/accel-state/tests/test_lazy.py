"""Lazy exports."""

from __future__ import annotations

import sys
import types

import pytest

from accel_state.lazy import attach


@pytest.fixture
def package(monkeypatch, tmp_path):
    module = types.ModuleType("lazy_sample")
    monkeypatch.setitem(sys.modules, "lazy_sample", module)
    file = tmp_path / "__init__.py"
    file.with_suffix(".pyi").write_text(
        "from fractions import Fraction as Fraction\n"
        "from json.decoder import (\n    JSONDecoder as JSONDecoder,\n)\n"
        "from lazy_sample import part as part\n"
    )
    module.__getattr__, module.__dir__, module.__all__ = attach("lazy_sample", str(file))
    return module


def test_names_come_from_their_modules_once(package):
    import fractions

    assert package.Fraction is fractions.Fraction
    assert vars(package)["Fraction"] is fractions.Fraction
    assert package.__all__ == ["Fraction", "JSONDecoder"]
    assert {"Fraction", "JSONDecoder", "part"} <= set(dir(package))


def test_unknown_names_and_missing_submodules_say_so(package):
    with pytest.raises(AttributeError, match="'lazy_sample' has no attribute 'nothing'"):
        _ = package.nothing
    with pytest.raises(ModuleNotFoundError, match=r"lazy_sample\.part"):
        _ = package.part
