"""Reading, writing and patching the environment."""

from __future__ import annotations

import os
import time

import pytest

from accel_state import env

# The table's variables


def test_get_reads_this_process_by_default(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert env.get("ACCELERATE_USE_CPU") is True
    assert env.get("ACCELERATE_USE_CPU", {}) is False


def test_get_gives_the_default_for_unset_and_empty():
    assert env.get("ACCELERATE_MIXED_PRECISION", {}) == "no"
    assert env.get("ACCELERATE_MIXED_PRECISION", {"ACCELERATE_MIXED_PRECISION": ""}) == "no"
    assert env.get("ACCELERATE_DYNAMO_USE_DYNAMIC", {}) is None


def test_get_rejects_bad_text_and_unknown_names():
    name = "ACCELERATE_MIXED_PRECISION"
    with pytest.raises(ValueError, match=rf"{name} has the value 'fp7'; allowed: no, fp8, fp16"):
        env.get(name, {name: "fp7"})
    with pytest.raises(KeyError, match="ACCELERATE_USE_CPUS"):
        env.get("ACCELERATE_USE_CPUS")


def test_get_is_cheap():
    environ = {"ACCELERATE_USE_CPU": "true"}
    rounds = 2000
    best = min(_seconds(lambda: env.get("ACCELERATE_USE_CPU", environ), rounds) for _ in range(5))
    assert best / rounds < 20e-6


def _seconds(function, rounds):
    start = time.perf_counter()
    for _ in range(rounds):
        function()
    return time.perf_counter() - start


def test_put_writes_what_get_reads_and_none_removes():
    child = {}
    env.put(child, "ACCELERATE_USE_CPU", True)
    assert child == {"ACCELERATE_USE_CPU": "true"}
    assert env.get("ACCELERATE_USE_CPU", child) is True
    env.put(child, "ACCELERATE_USE_CPU", None)
    env.put(child, "ACCELERATE_USE_CPU", None)
    assert child == {}


def test_put_rejects_bad_values_and_unknown_names():
    child = {}
    with pytest.raises(ValueError, match="FSDP_VERSION has the value '3'; allowed: 1, 2"):
        env.put(child, "FSDP_VERSION", 3)
    with pytest.raises(KeyError, match="FSDP_VERSIONS"):
        env.put(child, "FSDP_VERSIONS", 1)
    assert child == {}


def test_raw_and_is_set(monkeypatch):
    monkeypatch.setenv("AA_ANYTHING", "")
    assert env.raw("AA_ANYTHING") == ""
    assert not env.is_set("AA_ANYTHING")
    assert env.raw("AA_ANYTHING", {}) is None
    assert env.is_set("AA_ANYTHING", {"AA_ANYTHING": "0"})


def test_snapshot_is_a_copy():
    copy = env.snapshot()
    assert copy == dict(os.environ)
    copy["AA_ANYTHING"] = "1"
    assert "AA_ANYTHING" not in os.environ


# The documented readers


@pytest.mark.parametrize("value", ["y", "yes", "T", "True", "ON", "1", 1, True])
def test_str_to_bool_true(value):
    assert env.str_to_bool(value) == 1
    assert env.str_to_bool(value, to_bool=True) is True


@pytest.mark.parametrize("value", ["n", "no", "F", "False", "OFF", "0", 0, False])
def test_str_to_bool_false(value):
    assert env.str_to_bool(value) == 0
    assert type(env.str_to_bool(value)) is int
    assert env.str_to_bool(value, to_bool=True) is False


def test_str_to_bool_rejects_other_words():
    with pytest.raises(ValueError, match="'maybe' is neither true nor false"):
        env.str_to_bool("maybe")


def test_parse_flag_from_env(monkeypatch):
    assert env.parse_flag_from_env("AA_FLAG") is False
    assert env.parse_flag_from_env("AA_FLAG", True) is True
    monkeypatch.setenv("AA_FLAG", "yes")
    assert env.parse_flag_from_env("AA_FLAG") is True
    monkeypatch.setenv("AA_FLAG", "0")
    assert env.parse_flag_from_env("AA_FLAG", True) is False
    monkeypatch.setenv("AA_FLAG", "maybe")
    with pytest.raises(ValueError, match="AA_FLAG has the value 'maybe'"):
        env.parse_flag_from_env("AA_FLAG")


def test_parse_choice_from_env(monkeypatch):
    assert env.parse_choice_from_env("AA_CHOICE") == "no"
    assert env.parse_choice_from_env("AA_CHOICE", 1) == "1"
    monkeypatch.setenv("AA_CHOICE", "this")
    assert env.parse_choice_from_env("AA_CHOICE") == "this"


def test_get_int_from_env(monkeypatch):
    assert env.get_int_from_env(["AA_ONE", "AA_TWO"], 7) == 7
    monkeypatch.setenv("AA_TWO", "2")
    assert env.get_int_from_env(["AA_ONE", "AA_TWO"], 7) == 2
    monkeypatch.setenv("AA_ONE", "-1")
    assert env.get_int_from_env(["AA_ONE", "AA_TWO"], 7) == 2
    monkeypatch.setenv("AA_ONE", "0")
    assert env.get_int_from_env(["AA_ONE", "AA_TWO"], 7) == 0
    monkeypatch.setenv("AA_ONE", "one")
    with pytest.raises(ValueError, match="AA_ONE has the value 'one'; allowed: an integer"):
        env.get_int_from_env(["AA_ONE", "AA_TWO"], 7)


def test_convert_dict_to_env_variables():
    assert env.convert_dict_to_env_variables({"A": "1", "B": "x/y"}) == ["A=1\n", "B=x/y\n"]
    bad = {"A;": "1", "B": "a b", "C": "a\nb", "D": "<", "E": ">", "": "1", "F": "1"}
    with pytest.warns(UserWarning, match="is left out") as caught:
        assert env.convert_dict_to_env_variables(bad) == ["F=1\n"]
    assert len(caught) == 6
    assert "'B'" in str(caught[1].message)
    assert "'a b'" in str(caught[1].message)


def test_are_libraries_initialized():
    assert env.are_libraries_initialized("os", "not_a_library_at_all", "pytest") == ["os", "pytest"]
    assert env.are_libraries_initialized() == []


# Ranks and sizes

FAMILIES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MVAPICH2": tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
}


@pytest.fixture
def no_ranks(monkeypatch):
    for names in FAMILIES.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_ranks")
class TestCPUInformation:
    def test_alone(self):
        found = env.get_cpu_distributed_information()
        assert found == (0, 1, 0, 1)
        assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (0, 1, 0, 1)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_launchers_names(self, monkeypatch, family):
        for name, value in zip(FAMILIES[family], ("5", "8", "1", "4"), strict=True):
            monkeypatch.setenv(name, value)
        assert env.get_cpu_distributed_information() == (5, 8, 1, 4)

    def test_torchs_names_win_over_mpis(self, monkeypatch):
        for family, values in {"torchrun": "1213", "Open MPI": "7924"}.items():
            for name, value in zip(FAMILIES[family], values, strict=True):
                monkeypatch.setenv(name, value)
        assert env.get_cpu_distributed_information() == (1, 2, 1, 3)

    def test_a_rank_beyond_the_world_is_rejected(self, monkeypatch):
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"rank 2 of 2 processes.*RANK.*WORLD_SIZE.*unset both"):
            env.get_cpu_distributed_information()

    def test_a_rank_that_is_no_number_is_rejected(self, monkeypatch):
        monkeypatch.setenv("RANK", "first")
        with pytest.raises(ValueError, match="RANK has the value 'first'"):
            env.get_cpu_distributed_information()


# Patching


def test_patch_environment_upper_cases_and_restores(monkeypatch):
    monkeypatch.setenv("AA_OLD", "old")
    before = dict(os.environ)
    with env.patch_environment(aa_new=1, aa_old="new", AA_FLAG=True):
        assert (os.environ["AA_NEW"], os.environ["AA_OLD"], os.environ["AA_FLAG"]) == ("1", "new", "True")
        assert "aa_new" not in os.environ
        del os.environ["AA_FLAG"]
    assert dict(os.environ) == before


def test_patch_environment_restores_after_an_exception(monkeypatch):
    monkeypatch.setenv("AA_OLD", "old")
    before = dict(os.environ)

    def fail():
        with env.patch_environment(aa_new=1, aa_old="new"):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert dict(os.environ) == before


def test_patch_environment_nests():
    with env.patch_environment(aa_new=1):
        with env.patch_environment(aa_new=2):
            assert os.environ["AA_NEW"] == "2"
        assert os.environ["AA_NEW"] == "1"


def test_clear_environment_restores_after_an_exception():
    before = dict(os.environ)

    def fail():
        with env.clear_environment():
            assert not os.environ
            os.environ["AA_NEW"] = "1"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert dict(os.environ) == before
