"""What a folder shows to those who look from afar: links, special files, strange names, and bytes of one version."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from monarch._mounts.folder import Folder, Found, Want, digest, kind_of_root


class Watching:
    """Watches everything, or nothing."""

    def __init__(self, answer=True):
        self.answer = answer
        self.paths = set()

    def watch(self, path):
        self.paths.add(path)
        return self.answer

    def is_watched(self, path):
        return self.answer and path in self.paths


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "file").write_bytes(b"content")
    (root / "sub" / "inner").write_bytes(b"inner")
    return root


@pytest.fixture
def folder(root):
    folder = Folder(os.fsencode(root), Watching())
    yield folder
    folder.close()


def names(listed):
    return {name: fields if isinstance(fields, int) else Found(*fields) for name, fields in listed.entries}


def read(folder, path, offset=0, length=1 << 20, **known):
    found = folder.stat(path)
    return folder.read(path, found.ident, [Want(offset, length, **known)])


def bytes_of(got):
    return b"".join(bytes(data) for _, data in got.parts)


def test_attributes_are_those_of_the_file(root, folder):
    os.chmod(root / "file", 0o751)
    found, really = folder.stat(b"file"), os.stat(root / "file")
    assert (found.mode, found.size, found.mtime_ns, found.ctime_ns) == (
        really.st_mode, really.st_size, really.st_mtime_ns, really.st_ctime_ns
    )  # fmt: skip
    assert names(folder.listing(b""))[b"file"] == found
    assert folder.stat(b"none") == folder.listing(b"none") == errno.ENOENT and folder.listing(b"file") == errno.ENOTDIR


def test_who_is_told_of_changes_knows_it(root):
    watching = Watching()
    folder = Folder(os.fsencode(root), watching)
    assert folder.stat(b"file").guarded and watching.paths == {b""}
    assert not folder.stat(b"sub").guarded  # its times change with what is in it, which nobody watches yet
    folder.listing(b"sub")
    assert folder.stat(b"sub").guarded and folder.stat(b"").guarded
    os.link(root / "file", root / "other")
    assert not folder.stat(b"file").guarded
    blind = Folder(os.fsencode(root), Watching(False))
    assert not blind.stat(b"file").guarded and not blind.listing(b"").guarded


LINKS = {
    "to a file": ("file", "sub/link", stat.S_IFREG, b""),
    "to a file outside": ("/etc/passwd", "link", stat.S_IFREG, b""),
    "to a directory": ("deep", "sub/link", stat.S_IFLNK, b"../sub/deep"),
    "absolute, to a directory": ("{root}/sub", "sub/deep/link", stat.S_IFLNK, b"../../sub"),
    "to the folder": ("{root}", "sub/link", stat.S_IFLNK, b"../"),
    "to where it is": (".", "sub/link", stat.S_IFLNK, b"../sub"),
    "to a directory outside": ("/etc", "link", stat.S_IFDIR, b""),
    "to nothing inside": ("later", "sub/link", stat.S_IFLNK, b"../sub/later"),
    "to nothing outside": ("/no/where", "link", errno.ENOENT, b""),
    "to itself": ("link", "link", errno.ELOOP, b""),
}


@pytest.mark.parametrize("case", list(LINKS))
def test_links_lead_nowhere_else_than_here(root, folder, case):
    target, name, kind, shown = LINKS[case]
    (root / "sub" / "file").write_bytes(b"content")
    os.symlink(target.format(root=root), root / name)
    found = folder.stat(os.fsencode(name))
    listed = names(folder.listing(os.path.dirname(os.fsencode(name)))).get(os.path.basename(os.fsencode(name)))
    if kind in (errno.ENOENT, errno.ELOOP):
        assert found == kind and listed is None
    else:
        assert stat.S_IFMT(found.mode) == kind and found.target == shown and not (found.guarded and kind != stat.S_IFLNK)
        assert listed == found


def test_directories_outside_are_entered_once(root, tmp_path, folder):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "link").symlink_to(tmp_path / "two")
    (tmp_path / "two" / "link").symlink_to(tmp_path / "one")
    (root / "out").symlink_to(tmp_path / "one")
    assert stat.S_ISDIR(folder.stat(b"out").mode) and folder.stat(b"out/link") == errno.ELOOP
    assert folder.listing(b"out").entries == []


def test_special_files_are_seen_and_not_opened(root, folder):
    os.mkfifo(root / "fifo")
    found = folder.stat(b"fifo")
    assert stat.S_ISFIFO(found.mode)
    assert folder.read(b"fifo", found.ident, [Want(0, 10)]) == errno.ESTALE


def test_names_are_any_bytes(root, folder):
    for name in (b"\xff\xfe", b"new\nline", b"sp ace", b"\\ \x01"):
        with open(os.fsencode(root) + b"/" + name, "wb") as file:
            file.write(name)
        assert bytes_of(read(folder, name)) == name and name in names(folder.listing(b""))


@pytest.mark.parametrize("path", [b"..", b"sub/..", b"/etc", b"a//b", b"sub/", b"./file", b"a\0b"])
def test_no_path_leads_out_of_it(folder, path):
    assert folder.stat(path) == folder.listing(path) == folder.read(path, 1, []) == errno.EINVAL


def test_ranges_are_read_and_end_with_the_file(root, folder):
    assert bytes_of(read(folder, b"file", 2, 3)) == b"nte" and bytes_of(read(folder, b"file", 5, 100)) == b"nt"
    assert bytes_of(read(folder, b"file", 100, 5)) == b""
    got = folder.read(b"file", folder.stat(b"file").ident, [Want(0, 2), Want(4, 2)])
    assert [bytes(data) for _, data in got.parts] == [b"co", b"en"] and Found(*got.found).size == 7


def test_what_is_known_is_not_sent_again(root, folder):
    with open(root / "file", "ab") as file:
        file.write(b", and more")
    [(num_known, data)] = read(folder, b"file", num_known=7, digest=digest(b"content")).parts
    assert num_known == 7 and bytes(data) == b", and more"
    [(num_known, data)] = read(folder, b"file", num_known=7, digest=digest(b"CONTENT")).parts
    assert num_known == 0 and bytes(data) == b"content, and more"
    [(num_known, data)] = read(folder, b"file", length=3, num_known=7, digest=digest(b"content")).parts
    assert num_known == 0 and bytes(data) == b"con"


def test_a_file_that_is_replaced_is_read_to_its_end_by_who_has_begun(root, folder):
    before = folder.stat(b"file")
    assert bytes_of(folder.read(b"file", before.ident, [Want(0, 3)])) == b"con"
    (root / "new").write_bytes(b"another")
    (root / "new").rename(root / "file")
    assert bytes_of(folder.read(b"file", before.ident, [Want(3, 100)])) == b"tent"
    after = folder.stat(b"file")
    assert after.ident != before.ident and bytes_of(folder.read(b"file", after.ident, [Want(0, 100)])) == b"another"
    folder.close()
    assert folder.read(b"file", before.ident, [Want(0, 3)]) == errno.ESTALE


def test_a_file_that_is_kept_can_be_read_when_it_was_replaced_at_once(root, folder):
    found = folder.stat(b"file", keep=True)
    (root / "file").unlink()
    assert bytes_of(folder.read(b"file", found.ident, [Want(0, 100)])) == b"content"
    assert folder.stat(b"none", keep=True) == errno.ENOENT and stat.S_ISDIR(folder.stat(b"sub", keep=True).mode)


def test_only_so_many_files_stay_open(root, folder):
    before = len(os.listdir("/proc/self/fd"))
    for index in range(100):
        (root / f"f{index}").write_bytes(b"1")
        read(folder, b"f%d" % index)
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


AS_NOBODY = """
import os, sys
sys.path.insert(0, sys.argv[2])
from monarch._mounts.folder import Folder, Want
class Blind:
    watch = is_watched = lambda self, path: False
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder = Folder(os.fsencode(sys.argv[1]), Blind())
print(folder.listing(b"closed"), folder.stat(b"closed/file"), folder.read(b"secret", folder.stat(b"secret").ident, [Want(0, 1)]))
print([name if isinstance(fields, int) else 0 for name, fields in folder.listing(b"names").entries], folder.stat(b"names/file"))
"""


def test_what_may_not_be_read_says_so(root):
    for name in ("closed", "names"):
        (root / name).mkdir()
        (root / name / "file").touch()
    (root / "secret").touch(mode=0)
    (root / "closed").chmod(0)
    (root / "names").chmod(0o444)
    opened = [folder for folder in root.parents if folder.stat().st_mode & 0o005 != 0o005 and folder.stat().st_uid == os.getuid()]
    for folder in opened:
        folder.chmod(folder.stat().st_mode | 0o005)
    import monarch

    package = os.path.dirname(os.path.dirname(monarch.__file__))
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, str(root), package], capture_output=True, text=True, timeout=20)
    (root / "closed").chmod(0o700)
    (root / "names").chmod(0o700)
    if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
        pytest.skip("nobody may not read this checkout")
    assert done.stdout.split("\n")[0] == "13 13 13", done.stderr
    assert done.stdout.split("\n")[1] == "[b'file'] 13"


def test_a_folder_that_is_none_is_told_apart(root):
    assert kind_of_root(os.fsencode(root)) == 0 and kind_of_root(b"/no/where") == 0
    assert kind_of_root(os.fsencode(root / "file")) == errno.ENOTDIR
