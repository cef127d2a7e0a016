"""Directories that appear on other machines: what is pushed, where its bytes are, and how the kernel sees them.

    where the directory is                     a host that shows it
      Source.scan() -> Snapshot   --encode-->    PushedFileSystem(snapshot, store)       a `FileSystem` for the FUSE server
      Source.read_piece()         --bytes-->     Store.put()                             or Store.failed_at() for what diverged
      Source.hashes(old, new)     --digests-->   PushedFileSystem.refresh(new, digests)  what the kernel must forget
                                  <--wanted--    Store(wanted)                           pieces that somebody waits for, or soon will
                                                 copy_mode.copy(snapshot, store, path)   plain files instead

Nothing here knows how bytes travel. An address of the store belongs to one version of one file for ever, on every host: that is what
makes it safe to send pieces in any order, twice, late, or from one host to the next.
"""
