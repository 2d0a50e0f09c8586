from __future__ import annotations

import threading

from accel_state.process.shared_dict import ThreadLocalSharedDict, shared_dict


class Holder:
    state = ThreadLocalSharedDict()


def test_instances_of_one_thread_share_it() -> None:
    Holder().state["a"] = 1

    assert Holder.state == Holder().state == {"a": 1}

    Holder().state = {"b": 2}

    assert Holder.state == {"b": 2}
    Holder.state.clear()


def test_threads_do_not_share_it() -> None:
    Holder().state["here"] = True
    seen: list[dict[str, bool]] = []

    def look() -> None:
        seen.append(dict(Holder.state))
        Holder().state["there"] = True

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert seen == [{}]
    assert Holder.state == {"here": True}
    Holder.state.clear()


def test_argument_of_the_documented_interface_is_taken() -> None:
    assert isinstance(ThreadLocalSharedDict(thread_local=True), threading.local)


def test_processes_with_one_device_use_a_plain_dictionary() -> None:
    assert shared_dict() == {}
