from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from accel_state import env
from accel_state.process import stores
from accel_world.pool import World


def _meet_twice(init_method: str) -> tuple[bytes, bytes, bool]:
    place = (env.get("RANK"), env.get("WORLD_SIZE"))
    first = stores.open_store(init_method, *place)
    assert stores._open is not None
    kept = stores._open.store
    first.set(f"rank{place[0]}", "first")
    before = first.get(f"rank{1 - place[0]}")
    second = stores.open_store(init_method, *place, timedelta(seconds=20))
    second.set(f"rank{place[0]}", "second")
    after = second.get(f"rank{1 - place[0]}")
    return before, after, stores._open.store is kept and stores._open.store.timeout == timedelta(seconds=20)


def test_groups_meet_in_one_store_and_see_nothing_of_each_other(world: World) -> None:
    assert world.run(_meet_twice, "env://", init=False) == [(b"first", b"second", True)] * 2


def test_file_store(world: World, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"

    assert world.run(_meet_twice, url, init=False) == [(b"first", b"second", True)] * 2


def _separate(path: str) -> bool:
    first = stores.open_store(f"file://{path}", 0, 1)
    first.set("key", "value")
    second = stores.open_store(f"file://{path}", 0, 1)
    return bool(second.check(["key"]))


def test_second_store_has_no_keys_of_the_first(world: World, tmp_path: Path) -> None:
    assert world.run(_separate, str(tmp_path / "store"), size=1, init=False) == [False]
