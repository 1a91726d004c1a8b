"""One writer at a time for a folder."""

import errno
import fcntl
import subprocess
import sys
import threading

import pytest

from scaleinv import files

HOLD = """
import sys
from scaleinv.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_process_is_told_who_holds_the_folder(tmp_path, holder):
    told = rf"{tmp_path} is in use by process {holder.pid} on \S+: wait"
    with pytest.raises(files.FolderInUse, match=told), files.locked(tmp_path):
        pass
    holder.communicate()
    with files.locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_dies_with_its_process(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / files.LOCK).exists()
    with files.locked(tmp_path):
        pass


def test_one_process_cannot_hold_a_folder_twice(tmp_path):
    with files.locked(tmp_path), pytest.raises(files.FolderInUse), files.locked(tmp_path):
        pass


def test_there_is_never_more_than_one_holder(tmp_path):
    """Holders that come and go quickly, and remove the file each time, never overlap."""
    inside, most, entered = 0, 0, 0
    counting = threading.Lock()

    def work():
        nonlocal inside, most, entered
        for _ in range(300):
            try:
                with files.locked(tmp_path):
                    with counting:
                        inside += 1
                        entered += 1
                        most = max(most, inside)
                    with counting:
                        inside -= 1
            except files.FolderInUse:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entered > 0
    assert most == 1


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with files.locked(tmp_path):
        assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / ("." + "0" * 32 + ".model.safetensors")).write_text("half")
    (tmp_path / ".hidden.json").write_text("mine")
    files.remove_leftovers(tmp_path, tmp_path / "missing")
    assert [path.name for path in tmp_path.iterdir()] == [".hidden.json"]
