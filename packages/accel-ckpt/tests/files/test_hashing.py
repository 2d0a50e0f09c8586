from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.files import hashing
from accel_ckpt.files.hashing import ALGORITHMS, digest_chunk
from accel_ckpt.files.mapped_file import MappedFile

PAGES = random.Random(0).randbytes(40_000)


@pytest.mark.parametrize("is_mapped", [True, False])
@given(start=st.integers(0, 50_000), size=st.integers(1, 50_000))
def test_it_is_the_digest_of_the_part_however_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, is_mapped: bool, start: int, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pages"
    path.write_bytes(PAGES)
    part = PAGES[start : start + size]
    mapped = MappedFile(path) if is_mapped else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_READ_BYTES", 1000)
        assert digest_chunk(path, start, size, mapped=mapped) == xxhash.xxh3_128_hexdigest(part)
        assert digest_chunk(path, start, size, "sha256", mapped) == hashlib.sha256(part).hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="what is in the cache is asked of Linux alone")
def test_what_is_mapped_and_in_the_cache_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages"
    path.write_bytes(PAGES)
    monkeypatch.setattr(hashing, "_READ_BYTES", 0)  # nothing could be read
    found = digest_chunk(path, 5, 30_000, mapped=MappedFile(path))
    assert found == xxhash.xxh3_128_hexdigest(PAGES[5:30_005])


def test_an_empty_part_has_the_digest_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "pages").touch()
    for name, algorithm in ALGORITHMS.items():
        assert digest_chunk(tmp_path / "pages", 0, 100, name) == algorithm().hexdigest()
