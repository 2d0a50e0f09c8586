from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt import hashing
from accel_ckpt.hashing import ALGORITHMS, digest_chunk

PAGES = random.Random(0).randbytes(40_000)


@pytest.mark.parametrize("cached", [True, False])
@given(start=st.integers(0, 50_000), size=st.integers(1, 50_000))
def test_it_is_the_digest_of_the_part_however_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, cached: bool, start: int, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pages"
    path.write_bytes(PAGES)
    part = PAGES[start : start + size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_READ_BYTES", 1000)
        patch.setattr(hashing, "_is_cached", lambda pages, length: cached)
        assert digest_chunk(path, start, size) == xxhash.xxh3_128_hexdigest(part)
        assert digest_chunk(path, start, size, "sha256") == hashlib.sha256(part).hexdigest()


def test_what_was_just_written_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages").write_bytes(PAGES)
    monkeypatch.setattr(hashing, "_READ_BYTES", 0)  # nothing could be read
    assert digest_chunk(tmp_path / "pages", 5, 30_000) == xxhash.xxh3_128_hexdigest(PAGES[5:30_005])


def test_a_file_system_that_maps_nothing_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(19, "No such device")

    (tmp_path / "pages").write_bytes(PAGES)
    monkeypatch.setattr(hashing.mmap, "mmap", refuse)
    assert digest_chunk(tmp_path / "pages", 0, 9) == xxhash.xxh3_128_hexdigest(PAGES[:9])


def test_an_empty_part_has_the_digest_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "pages").touch()
    for name, algorithm in ALGORITHMS.items():
        assert digest_chunk(tmp_path / "pages", 0, 100, name) == algorithm().hexdigest()
