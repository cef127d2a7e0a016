from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from monarch.testing import LeakError, Snapshot, no_leaks
from monarch.testing.leaks import mark_session, marked


def test_a_clean_block_passes():
    with no_leaks():
        socket.socketpair()[0].close()
        subprocess.run([sys.executable, "-c", ""], check=True)


def test_a_socket_is_a_leak():
    left = []
    with pytest.raises(LeakError, match=r"fds: \d+ -> socket:"), no_leaks(grace_s=0):
        left.append(socket.socket())
    left[0].close()


def test_a_thread_is_a_leak():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(LeakError, match="threads: forgotten"), no_leaks(grace_s=0):
        thread.start()
    stop.set()
    thread.join()


def test_a_process_is_a_leak_also_when_its_parent_has_ended():
    code = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""
    read, write = os.pipe()
    pids = []
    with pytest.raises(LeakError, match="processes: pid"), no_leaks(grace_s=0):
        done = subprocess.run([sys.executable, "-c", code], stdin=read, capture_output=True, text=True, check=False)
        pids.append(int(done.stdout))
    assert pids[0] in marked(f"MONARCH_TEST_SESSION={mark_session()}")
    os.close(read)
    os.close(write)


def test_an_exception_of_the_block_comes_first():
    with pytest.raises(KeyError), no_leaks(grace_s=0):
        raise KeyError


def test_a_snapshot_tells_what_is_new():
    before = Snapshot.quick()
    pair = socket.socketpair()
    grown = before.growth(Snapshot.quick())
    assert len(grown) == 2
    for end in pair:
        end.close()
    assert before.growth(Snapshot.quick()) == []
