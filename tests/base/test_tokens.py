"""Tokens end with what holds them, and not before."""

from __future__ import annotations

import ctypes
import gc
import weakref

from monarch._base.tokens import new_token


class Array(ctypes.Array):
    _type_, _length_ = ctypes.c_ubyte, 8


def test_a_token_ends_behind_the_finalisers_of_a_cycle():
    told = []

    class Holder:
        def __del__(self):
            told.append("finaliser")

    holder = Holder()
    holder.array, holder.cycle = Array(), holder
    holder.array.token = new_token()
    ended = weakref.ref(holder.array.token, lambda _: told.append("token"))
    del holder
    gc.collect()
    assert told == ["finaliser", "token"] and ended() is None


def test_each_token_is_another_one():
    assert new_token() is not new_token()
