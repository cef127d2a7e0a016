"""Mounts of a job: opened once for a configuration, and whatever fails is told, tried again, and keeps nothing else from being done."""

from __future__ import annotations

import pickle

import pytest

from monarch._mounts.mount_config import GatherMountEntry, Mounts, MountsHandle, OpenMounts, RemoteMountEntry


class Mounted:
    """A mount that fails at what it is told to."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.log = []

    def refresh(self):
        self._do("refresh")

    def close(self, **options):
        self._do("close", **options)

    def _do(self, what, **options):
        self.log.append(what)
        if what in self.failures:
            self.failures.remove(what)
            raise OSError(f"{what}: mount busy")


def handle_of(remote=(), gather=()):
    handle = MountsHandle(Mounts(), {})
    handle._active_remote, handle._active_gather = list(remote), list(gather)
    return handle


class Configuration(Mounts):
    """Opens what the test says."""

    def __init__(self, *handles):
        super().__init__()
        self.handles = list(handles)
        self.remote_mount("/source", handles=len(handles))

    def open(self, host_meshes):
        handle = self.handles.pop(0)
        if isinstance(handle, Exception):
            raise handle
        return handle


def test_entries_are_data_that_travels_with_the_job():
    mounts = Mounts()
    mounts.remote_mount("/source", "/there", ["a"], mode="copy")
    mounts.gather_mount("/remote", "/local")
    travelled = pickle.loads(pickle.dumps(mounts))
    assert travelled._remote_entries == [RemoteMountEntry("/source", "/there", ["a"], {"mode": "copy"})]
    assert travelled._gather_entries == [GatherMountEntry("/remote", "/local", None)]
    assert not travelled._remote_entries[0].via_gateway


@pytest.mark.parametrize("entry", [RemoteMountEntry("/s", meshes=["trainer"]), GatherMountEntry("/r", "/l", ["trainer"])])
def test_a_mesh_that_the_job_does_not_have_is_named(entry):
    match = r"the mesh 'trainer', which the job does not have; did you mean 'trainers'\?\n  where: its meshes: trainers"
    with pytest.raises(ValueError, match=match):
        entry.apply({"trainers": None})


def test_an_option_that_remotemount_does_not_have_is_a_type_error():
    mounts = Mounts()
    mounts.remote_mount("/source", nonsense=1)
    with pytest.raises(TypeError, match="nonsense"):
        mounts.open({"hosts": None})


def test_what_can_not_be_closed_is_tried_again_and_the_rest_is_not(capsys):
    good, bad, gathered = Mounted(), Mounted("close"), Mounted("close")
    handle = handle_of([good, bad], [gathered])
    with pytest.raises(RuntimeError, match=r"failed to close 2 mounts\n(.*\n)*    \| close: mount busy"):
        handle.close()
    assert capsys.readouterr().err.count("[job_sidecar pid=") == 2
    handle.close()
    handle.close()
    assert (good.log, bad.log, gathered.log) == (["close"], ["close"] * 2, ["close"] * 2)


def test_one_mount_that_fails_does_not_keep_others_from_being_refreshed(capsys):
    bad, good, gathered = Mounted("refresh"), Mounted(), Mounted()
    handle = handle_of([bad, good], [gathered])
    with pytest.raises(RuntimeError, match=r"failed to refresh 1 mount\n"):
        handle.refresh()
    assert good.log == ["refresh"] and not gathered.log
    assert "failed to refresh mount: refresh: mount busy" in capsys.readouterr().err


def test_an_equal_configuration_is_refreshed_another_one_replaces_it_an_empty_one_clears_it():
    first, second = Mounted(), Mounted()
    state = OpenMounts()
    state.ensure(Configuration(handle_of([first])), {"hosts": None})
    state.ensure(Configuration("not opened"), {"hosts": None})
    assert first.log == ["refresh"]
    state.ensure(Configuration(handle_of([second])), {"hosts": None, "more": None})
    assert first.log == ["refresh", "close"] and not second.log
    state.ensure(Mounts(), {"hosts": None})
    state.clear()
    assert second.log == ["close"]


def test_what_was_changed_after_it_was_mounted_is_another_configuration():
    first, second = Mounted(), Mounted()
    mounts = Configuration(handle_of([first]), handle_of([second]))
    state = OpenMounts()
    state.ensure(mounts, {})
    mounts._remote_entries[0].kwargs["mode"] = "copy"
    state.ensure(mounts, {})
    assert first.log == ["close"] and not second.log


def test_nothing_is_opened_before_what_was_there_is_closed(capsys):
    busy, fresh = Mounted("close", "close"), Mounted()
    state = OpenMounts()
    mounts = Configuration(handle_of([busy]), handle_of([fresh]))
    state.ensure(mounts, {})
    mounts.remote_mount("/more")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed to close 1 mount"):
            state.ensure(mounts, {})
    state.ensure(mounts, {})
    state.ensure(mounts, {})
    assert busy.log == ["close"] * 3 and fresh.log == ["refresh"]


def test_a_configuration_that_could_not_be_opened_is_opened_the_next_time():
    mounted = Mounted()
    mounts = Configuration(RuntimeError("no FUSE"), handle_of([mounted]))
    state = OpenMounts()
    with pytest.raises(RuntimeError, match="no FUSE"):
        state.ensure(mounts, {})
    state.ensure(mounts, {})
    state.ensure(mounts, {})
    assert mounted.log == ["refresh"]
