"""Folders of the hosts of a mesh, under one directory of this machine."""

from monarch.gather_mount.gather_mount import gather_mount

__all__ = ["gather_mount"]
