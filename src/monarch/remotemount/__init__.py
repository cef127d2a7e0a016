"""A directory of this machine, read-only on every host of a mesh."""

from monarch.remotemount.remotemount import remotemount

__all__ = ["remotemount"]
