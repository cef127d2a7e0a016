"""Programs for PyTorch Monarch that mount, send blocks and prepare transfers by its private names: what they observe."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from monarch._mounts import mounting
from monarch._mounts.mount_config import _allocations
from monarch._rust_bindings.monarch_extension.chain_broadcast import connect, send_block
from monarch._rust_bindings.monarch_extension.chunked_fuse import mount_chunked_fuse
from monarch._rust_bindings.monarch_extension.readonly_fuse import mount_read_only_filesystem
from monarch._rust_bindings.rdma import RdmaInitError, _RdmaManager, rdma_supported
from monarch._src.job.mount_config import Mounts
from monarch._src.rdma.rdma import _ensure_init_rdma_manager, _ensure_init_rdma_manager_on_mesh
from monarch.actor import Actor, context, endpoint, this_host
from monarch.config import configured
from monarch.remotemount.remotemount import BLOCK_SIZE, CBC_CHUNK, FUSEActor, MountHandlerClient, RemoteMountLeader
from system.waiting import WAIT_S, wait_until

pytest_plugins = ["system.recorder"]
needs_fuse = pytest.mark.skipif(bool(mounting.fuse_problem()), reason=f"no FUSE here: {mounting.fuse_problem()}")


def attr(mode, size=0, mtime=1.0):
    times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), mtime)
    return {"st_mode": mode, "st_size": size, "st_nlink": 1, "st_uid": os.getuid(), "st_gid": os.getgid(), **times}


def index_of(length, mtime=1.0, names=("f",)):
    """Files of these names, all with the same bytes."""
    file = {"attr": attr(stat.S_IFREG | 0o644, length, mtime), "global_offset": 0, "file_len": length}
    root = {"attr": attr(stat.S_IFDIR | 0o755), "children": list(names), "total_size": length}
    return {"/": root, **{f"/{name}": file for name in names}}


def deliver(handle, block, data, stale=()):
    (ctypes.c_char * BLOCK_SIZE).from_address(handle.block_ptr(block))[: len(data)] = data
    handle.receive_block(block, list(stale))


class Reading(threading.Thread):
    """Reads a file once, while others deliver it."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path = path
        self.outcome = None
        self.start()

    def run(self):
        try:
            self.outcome = Path(self.path).read_bytes()
        except OSError as exc:
            self.outcome = exc.errno

    def result(self):
        self.join(WAIT_S)
        return self.outcome


@pytest.fixture
def chunked(tmp_path):
    made = []

    def make(index, on_fault=None):
        made.append(mount_chunked_fuse(index, index["/"]["total_size"], str(tmp_path), on_fault))
        return made[-1]

    yield make
    for handle in made:
        handle.unmount()
    assert not mounting.is_mounted(str(tmp_path))


# --- chunked mounts ----------------------------------------------------------------------------------------------


@needs_fuse
def test_a_reader_faults_a_block_and_gets_what_the_callback_delivers(chunked, tmp_path):
    asked = []

    def on_fault(block):
        asked.append(block)
        if len(asked) == 1:
            raise ValueError("not this time")
        deliver(handle, block, b"content")

    handle = chunked(index_of(7, names=["f", "g"]), on_fault)
    first = Reading(tmp_path / "f")
    wait_until(lambda: asked and not handle._files._asked)
    assert Reading(tmp_path / "g").result() == first.result() == b"content" and asked == [0, 0]
    assert {entry.name: entry.stat().st_size for entry in os.scandir(tmp_path)} == {"f": 7, "g": 7}


@needs_fuse
def test_who_has_a_file_open_sees_the_next_version(chunked, tmp_path):
    handle = chunked(index_of(3))
    deliver(handle, 0, b"old")
    with open(tmp_path / "f", "rb", buffering=0) as file:
        assert file.read() == b"old"
        deliver(handle, 0, b"longer")
        handle.refresh(index_of(6, mtime=2.0), 6)
        file.seek(0)
        assert file.read() == b"longer" and os.stat(tmp_path / "f").st_size == 6
        with pytest.raises(RuntimeError, match=r"can't be unmounted: busy\n  next:  close what is open there"):
            handle.unmount()
    for version in range(3, 8):
        deliver(handle, 0, b"number%d" % version)
        handle.refresh(index_of(7), 7)  # the same size and times as before
        assert (tmp_path / "f").read_bytes() == b"number%d" % version
    handle.refresh({"/": {**index_of(0)["/"], "children": []}}, 7)
    assert os.listdir(tmp_path) == [] and not (tmp_path / "f").exists()


@needs_fuse
def test_a_stale_file_is_eio_also_to_who_waits_for_it(chunked, tmp_path):
    handle = chunked(index_of(7))
    waiting = Reading(tmp_path / "f")
    wait_until(lambda: handle._files._readers)
    deliver(handle, 0, b"garbage", stale=["/f"])
    assert waiting.result() == errno.EIO
    handle.refresh(index_of(7), 7)
    assert (tmp_path / "f").read_bytes() == b"garbage"


@needs_fuse
def test_an_unmounted_handle_says_so_and_leaves_what_is_mounted_there_later(chunked, tmp_path):
    handle = chunked(index_of(1))
    handle.unmount()
    later = chunked(index_of(1, names=["later"]))
    handle.unmount()
    handle.close()
    assert os.listdir(tmp_path) == ["later"]
    later.unmount()
    handle = chunked(index_of(1))
    with pytest.raises(ValueError, match="there is no block -1"):
        handle.block_ptr(-1)
    handle.unmount()
    handle.unmount()
    with pytest.raises(RuntimeError, match="this mount has been unmounted"):
        handle.receive_block(0, [])


@needs_fuse
def test_a_mount_goes_with_its_handle_and_with_its_process(tmp_path, run_script):
    script = f"""
        import gc
        from monarch._mounts.mounting import is_mounted
        from monarch._rust_bindings.monarch_extension.chunked_fuse import mount_chunked_fuse
        index = {index_of(1)!r}
        handle = mount_chunked_fuse(index, 1, {str(tmp_path)!r}, None)
        assert is_mounted({str(tmp_path)!r})
        del handle
        gc.collect()
        assert not is_mounted({str(tmp_path)!r})
        left = mount_chunked_fuse(index, 1, {str(tmp_path)!r}, print)
    """
    run_script(script).check()
    assert not mounting.is_mounted(str(tmp_path))


# --- chains ------------------------------------------------------------------------------------------------------


class Enqueuer(Actor):
    """Hears what readers wait for."""

    def __init__(self):
        self.blocks = []

    @endpoint
    def enqueue(self, block: int) -> None:
        self.blocks.append(block)

    @endpoint
    def heard(self) -> list[int]:
        return self.blocks


@needs_fuse
def test_blocks_come_down_a_chain_to_the_mounts_of_all_processes(tmp_path):
    content = os.urandom(3 * CBC_CHUNK + 17)
    index = index_of(len(content))
    procs = this_host().spawn_procs({"procs": 3})
    client = procs.slice(procs=0).spawn("client", Enqueuer)
    leader = procs.slice(procs=0).spawn("leader", RemoteMountLeader, client)
    mounts = procs.spawn("mounts", FUSEActor, leader)
    places = [str(tmp_path / f"rank{rank}") for rank in range(3)]
    for rank, place in enumerate(places):
        mounts.slice(procs=rank).mkdir.call_one(place).get()
        mounts.slice(procs=rank).mount.call_one(place, index).get()
    leader.set_fuse_actors.call_one(mounts).get()
    addresses = [address for _, address in sorted((rank, address) for _, (rank, address) in mounts.cbc_listen.call().get().items())]
    mounts.cbc_start.call(addresses).get()
    reading = [Reading(place + "/f") for place in places[1:]]
    wait_until(lambda: client.heard.call_one().get() == [0])
    assert send_block(connect(addresses[0]), content, CBC_CHUNK, 0) == len(content)
    leader.await_block.call_one(0, [], len(content)).get()
    assert [Path(places[0], "f").read_bytes(), *(one.result() for one in reading)] == [content] * 3
    assert client.heard.call_one().get() == [0]
    mounts.refresh_mount.call({"/": {**index["/"], "children": []}}).get()
    assert os.listdir(places[0]) == []
    for rank, place in enumerate(places):
        one = mounts.slice(procs=rank)
        assert [one.unmount.call_one(place).get() for _ in range(2)] == [("ok", ""), ("not_mounted", "")]
    procs.stop().get(timeout=WAIT_S)


@needs_fuse
def test_a_chunked_mount_goes_with_its_actor(tmp_path):
    procs = this_host().spawn_procs()
    mount = procs.spawn("mount", FUSEActor, "any object")
    mount.mount.call_one(str(tmp_path), index_of(1)).get()
    assert mounting.is_mounted(str(tmp_path))
    procs.stop().get(timeout=WAIT_S)
    assert not mounting.is_mounted(str(tmp_path))


@needs_fuse
def test_a_mount_handler_may_be_an_actor(tmp_path):
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    (source / "f").write_text("one")
    procs = this_host().spawn_procs()
    client = procs.spawn("client", MountHandlerClient, this_host(), str(source), str(place))
    client.open.call_one(client).get()
    assert (place / "f").read_text() == "one"
    (source / "f").write_text("second")
    client.refresh.call_one().get()
    assert (place / "f").read_text() == "second"
    client.close.call_one().get()
    assert not mounting.is_mounted(str(place))
    procs.stop().get(timeout=WAIT_S)


# --- files of an actor -------------------------------------------------------------------------------------------


class Files(Actor):
    """Numbers of this process, as files."""

    def __init__(self):
        self.files = {"pid": b"%d" % os.getpid(), "big": bytes(range(256)) * 2000}

    @endpoint
    def getattr_path(self, path: str) -> dict[str, float] | int:
        if path == "/":
            return attr(stat.S_IFDIR | 0o755)
        content = self.files.get(path[1:])
        return errno.ENOENT if content is None else attr(stat.S_IFREG | 0o444, len(content), time.time())

    @endpoint
    def readdir_path(self, path: str) -> list[str] | int:
        return list(self.files)

    @endpoint
    def read_path(self, path: str, size: int, offset: int) -> bytes | int:
        return self.files[path[1:]][offset : offset + size]

    @endpoint
    def write(self, name: str, content: bytes) -> None:
        self.files[name] = content


@needs_fuse
def test_files_of_an_actor_are_what_it_says_now(tmp_path, faults):
    procs = this_host().spawn_procs()
    files = procs.spawn("files", Files)
    handle = mount_read_only_filesystem(files, str(tmp_path))
    pid = int((tmp_path / "pid").read_text())
    assert pid != os.getpid() and sorted(os.listdir(tmp_path)) == ["big", "pid"]
    assert (tmp_path / "big").read_bytes() == bytes(range(256)) * 2000
    files.write.call_one("pid", b"changed").get()
    assert (tmp_path / "pid").read_text() == "changed" and not (tmp_path / "none").exists()
    with pytest.raises(OSError, match="Read-only"):
        (tmp_path / "pid").write_text("no")
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as user:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError, match="Input/output error"):
            (tmp_path / "pid").read_text()
        handle.unmount()
        handle.unmount()
        assert not mounting.is_mounted(str(tmp_path))
        user.kill()


# --- mounts of a job ---------------------------------------------------------------------------------------------


@needs_fuse
def test_mounts_of_a_job_are_opened_once_refreshed_replaced_and_cleared(tmp_path):
    source, there, results, seen = (tmp_path / name for name in ("source", "there", "results", "seen"))
    for folder in (source, results):
        folder.mkdir()
    (source / "code.py").write_text("1")
    (results / "loss").write_text("0.5")
    hosts = {"trainers": this_host()}
    mounts = Mounts()
    mounts.remote_mount(str(source), str(there))
    mounts.gather_mount(str(results), str(seen))
    mounts.ensure_open("an-allocation", hosts)
    opened = _allocations["an-allocation"]._handle
    assert (there / "code.py").read_text() == "1" and (seen / "loss").read_text() == "0.5"
    (source / "code.py").write_text("22")
    mounts.ensure_open("an-allocation", hosts)
    assert _allocations["an-allocation"]._handle is opened and (there / "code.py").read_text() == "22"

    other = Mounts()
    other.remote_mount(str(source), str(tmp_path / "elsewhere"))
    other.gather_mount(str(results), "/dev/null/nowhere")
    with pytest.raises((RuntimeError, OSError)):
        other.ensure_open("an-allocation", hosts)
    assert not any(mounting.is_mounted(str(path)) for path in (there, seen, tmp_path / "elsewhere"))
    mounts.ensure_open("an-allocation", hosts)
    assert (there / "code.py").read_text() == "22"
    Mounts().ensure_open("an-allocation", hosts)
    assert not any(mounting.is_mounted(str(path)) for path in (there, seen))


@needs_fuse
def test_folders_of_several_meshes_are_gathered_by_name(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "loss").write_text("0.5")
    mounts = Mounts()
    mounts.gather_mount(str(tmp_path / "results"), str(tmp_path / "seen"))
    handle = mounts.open({"a": this_host(), "b": this_host()})
    assert [(tmp_path / "seen" / name / "loss").read_text() for name in "ab"] == ["0.5"] * 2
    handle.close()


# --- one-sided memory --------------------------------------------------------------------------------------------


class Asker(Actor):
    @endpoint
    async def ask(self) -> bool:
        return await _ensure_init_rdma_manager() is None and _ensure_init_rdma_manager() is _ensure_init_rdma_manager()


def test_a_mesh_is_made_ready_once():
    procs, others = this_host().spawn_procs({"procs": 2}), this_host().spawn_procs()
    ready = _ensure_init_rdma_manager_on_mesh(procs)
    assert ready.get() is None and ready.get() is None
    assert _ensure_init_rdma_manager_on_mesh(procs) is ready is not _ensure_init_rdma_manager_on_mesh(others)
    assert _RdmaManager.ensure_init_rdma_manager_nonblocking(others._proc_mesh, context().actor_instance).get() is None
    assert others.spawn("asker", Asker).ask.call_one().get()
    with pytest.raises(TypeError, match="expected a ProcMesh, got 'procs'"):
        _RdmaManager.ensure_init_rdma_manager_nonblocking("procs", context().actor_instance).get()


def test_a_mesh_that_can_not_be_made_ready_says_why():
    assert rdma_supported()
    with configured(rdma_allow_tcp_fallback=False):
        assert not rdma_supported()
        procs = this_host().spawn_procs({"procs": 2})
        with pytest.raises(RdmaInitError, match=r"no RDMA backend available\n(.*\n)*  where: \{'procs': 0\} of the mesh"):
            _ensure_init_rdma_manager_on_mesh(procs).get()
