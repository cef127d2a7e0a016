"""Folders of several machines under one mount, each in a directory of its own, whatever happens to the others."""

from __future__ import annotations

import errno
import os

import pytest

from monarch._mounts.mounting import fuse_problem, is_mounted
from monarch.actor import attach_to_workers
from monarch.gather_mount import gather_mount
from system.remote import TRUST, workers
from system.waiting import wait_until

pytest_plugins = ["system.recorder"]
pytestmark = [pytest.mark.skipif(bool(fuse_problem()), reason=fuse_problem() or "FUSE is here"), pytest.mark.usefixtures("faults")]
WAIT_S = 20.0
SEEN_S = 1.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder that all hosts see: their temporary ones are their own."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="monarch-gather-", dir="/var/tmp")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(hosts):
    with workers(hosts[:3]) as addresses:
        mesh = attach_to_workers(ca=TRUST, workers=addresses)
        assert mesh.initialized.get(WAIT_S) is True
        yield mesh
        mesh.shutdown().get(20)


def fill(shared, index):
    folder = os.path.join(shared, f"hosts_{index}")
    os.makedirs(os.path.join(folder, "sub"), exist_ok=True)
    for name in ("log", "sub/inner"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(b"%s of %d\n" % (name.encode(), index))
    return folder


def read(*parts):
    with open(os.path.join(*parts), "rb") as file:
        return file.read()


def test_every_host_has_its_own_directory(cluster, shared, tmp_path):
    folders = [fill(shared, index) for index in range(3)]
    big = os.urandom(9 << 20)
    with open(f"{folders[1]}/big", "wb") as file:
        file.write(big)
    point = str(tmp_path / "mnt")
    with gather_mount(cluster, f"{shared}/$SUBDIR", point) as mounted:
        assert sorted(os.listdir(point)) == ["hosts_0", "hosts_1", "hosts_2"]
        for index in range(3):
            assert read(point, f"hosts_{index}", "log") == b"log of %d\n" % index
            assert read(point, f"hosts_{index}", "sub/inner") == b"sub/inner of %d\n" % index
        assert read(point, "hosts_1", "big") == big
        assert not os.path.exists(f"{point}/hosts_3")
        with open(f"{folders[2]}/log", "ab") as file:
            file.write(b"more")
        wait_until(lambda: read(point, "hosts_2", "log") == b"log of 2\nmore", SEEN_S)
        with pytest.raises(OSError):
            open(f"{point}/hosts_0/log", "w").close()
        assert mounted.statistics().lost == []
    assert not is_mounted(point)


def test_a_slice_of_the_hosts_is_gathered_as_what_it_is(cluster, shared, tmp_path):
    for index in range(3):
        fill(shared, index)
    with gather_mount(cluster.slice(hosts=1), f"{shared}/hosts_1", str(tmp_path / "one")):
        assert read(str(tmp_path / "one"), "log") == b"log of 1\n"


def test_a_host_that_goes_leaves_the_others(hosts, shared, tmp_path):
    for index in range(2):
        fill(shared, index)
    point = str(tmp_path / "mnt")
    with workers(hosts[3:4], port=26700) as [dying], workers(hosts[:1], port=26700) as [staying]:
        goes = attach_to_workers(ca=TRUST, workers=[staying, dying])
        assert goes.initialized.get(WAIT_S) is True
        mounted = gather_mount(goes, f"{shared}/$SUBDIR", point)
        assert read(point, "hosts_0", "log") == b"log of 0\n" and read(point, "hosts_1", "log") == b"log of 1\n"
        goes.slice(hosts=1)
        single = attach_to_workers(ca=TRUST, workers=[dying])
        assert single.initialized.get(WAIT_S) is True
        single.shutdown().get(WAIT_S)
        wait_until(lambda: mounted.statistics().lost == [1], WAIT_S)
        with pytest.raises(OSError) as caught:
            read(point, "hosts_1", "log")
        assert caught.value.errno == errno.EIO and sorted(os.listdir(point)) == ["hosts_0", "hosts_1"]
        assert read(point, "hosts_0", "log") == b"log of 0\n"
        mounted.close()
        assert not is_mounted(point)
        goes.shutdown().get(20)
