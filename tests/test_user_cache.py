"""Files in the user's cache are replaced as a whole, and one process at a time makes them."""

import threading
from contextlib import nullcontext

import pytest

from batchgen.process.user_cache import locked, replaced


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_is_replaced_when_the_new_one_is_complete_and_stays_if_writing_it_fails(tmp_path, fails):
    file = tmp_path / "verdict.json"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), replaced(file) as new:
        new.write_text("new")
        assert file.read_text() == "old"
        if fails:
            raise ZeroDivisionError
    assert file.read_text() == ("old" if fails else "new")
    assert list(tmp_path.iterdir()) == [file]


def test_a_lock_creates_its_folder_and_has_one_holder_at_a_time(tmp_path):
    file = tmp_path / "cache" / "lock"
    order: list[str] = []
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with locked(file):
            order.append("second")

    waiting = threading.Thread(target=second)
    with locked(file):
        waiting.start()
        begun.wait()
        waiting.join(0.2)  # without the lock, it would be done by now
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
