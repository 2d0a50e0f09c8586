"""Finding packages and comparing versions."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import pytest
import torch
from packaging.version import Version

from accel_state.imports import packages
from accel_state.imports.packages import (
    compare_versions,
    install_hint,
    is_package_available,
    is_torch_version,
    require,
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path; what is found in it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    is_package_available.cache_clear()
    packages._compare_library.cache_clear()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("aa_"):
            del sys.modules[name]
    is_package_available.cache_clear()
    packages._compare_library.cache_clear()


def add_package(site, name, version=None, body=""):
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(body)
    if version is not None:
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    importlib.invalidate_caches()


def test_an_installed_package_is_found_but_not_imported(site):
    add_package(site, "aa_there", body="raise RuntimeError('imported')")
    assert is_package_available("aa_there")
    assert not is_package_available("aa_missing")
    assert "aa_there" not in sys.modules


def test_a_folder_that_a_tool_left_is_not_a_package(site):
    (site / "aa_runs").mkdir()
    importlib.invalidate_caches()
    assert not is_package_available("aa_runs")


def test_submodules(site):
    add_package(site, "aa_there")
    (site / "aa_there" / "core.py").write_text("")
    assert is_package_available("aa_there.core")
    assert not is_package_available("aa_there.other")
    assert not is_package_available("aa_missing.core")


def test_a_module_that_was_blocked_is_not_available(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "aa_blocked", None)
    assert not is_package_available("aa_blocked")


def test_the_answer_is_kept(site):
    assert not is_package_available("aa_late")
    add_package(site, "aa_late")
    assert not is_package_available("aa_late")


def test_require_returns_the_module(site):
    add_package(site, "aa_there", body="value = 3")
    assert require("aa_there", "there").value == 3


def test_install_hint_names_what_a_package_needs_of_this_repository():
    assert install_hint("it", "accel-state") == (
        "pip install './packages/accel-state[it]' (in a checkout of accel)"
    )
    assert install_hint("it", "accel-data") == (
        "pip install ./packages/accel-state ./packages/accel-ops './packages/accel-data[it]' "
        "(in a checkout of accel)"
    )
    assert install_hint(None, "accel-launch") == (
        "pip install ./packages/accel-state ./packages/accel-launch (in a checkout of accel)"
    )
    assert install_hint(None) == "pip install ./packages/* (in a checkout of accel)"
    assert install_hint("it") == "pip install ./packages/* './packages/accel[it]' (in a checkout of accel)"


def test_require_says_what_to_install():
    with pytest.raises(ImportError) as caught:
        require("aa_missing", "it", "accel-ops")
    assert caught.value.name == "aa_missing"
    assert str(caught.value) == (
        "aa_missing is needed here, but is not installed. Install it with: "
        "pip install ./packages/accel-state './packages/accel-ops[it]' (in a checkout of accel)"
    )
    with pytest.raises(ImportError, match=r"'\./packages/accel\[it\]'"):
        require("aa_missing.core", "it")


def test_require_tells_why_an_installed_module_fails(site):
    add_package(site, "aa_broken", body="import aa_missing")
    with pytest.raises(
        ImportError, match=r"aa_broken .* cannot be imported \(No module named 'aa_missing'\)"
    ):
        require("aa_broken", "it")


@pytest.mark.parametrize(
    ("operation", "requirement", "truth"),
    [
        (">", "1.2.2", True),
        (">", "1.2.3", False),
        (">=", "1.2.3", True),
        ("==", "1.2.3", True),
        ("==", "1.2", False),
        ("!=", "1.2.3", False),
        ("<=", "1.10.0", True),
        ("<", "1.2.3", False),
        ("<", "1.2.3.post1", True),
        (">", "1.2.3rc1", True),
    ],
)
def test_compare_versions(site, operation, requirement, truth):
    add_package(site, "aa_there", "1.2.3")
    assert compare_versions("aa_there", operation, requirement) is truth
    assert compare_versions(Version("1.2.3"), operation, requirement) is truth
    assert compare_versions(Version("1.2.3+cpu"), operation, requirement) is truth


def test_a_local_suffix_counts_where_it_is_requested():
    assert compare_versions(Version("1.2.3+cpu"), "==", "1.2.3+cpu")
    assert not compare_versions(Version("1.2.3+cpu"), "==", "1.2.3+cu126")


def test_compare_versions_rejects_what_it_cannot_compare():
    with pytest.raises(ValueError, match="'=>' is not a comparison; use one of >, >=, ==, !=, <=, <"):
        compare_versions("torch", "=>", "2.0")
    with pytest.raises(ValueError, match="two"):
        compare_versions("torch", ">=", "two")
    with pytest.raises(PackageNotFoundError, match="aa_missing"):
        compare_versions("aa_missing", ">=", "1.0")


def test_is_torch_version():
    assert Version(torch.__version__).public == Version(installed_version("torch")).public
    assert is_torch_version(">=", "2.10.0")
    assert is_torch_version("==", Version(torch.__version__).public)
    assert not is_torch_version("<", "2.10.0")
