"""The runtime's own actors in every proc: the set-up that runs first, and the one that sets log levels."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from monarch.actor.base import Actor
from monarch.actor.context import context
from monarch.actor.endpoint import endpoint
from monarch.actor.mock import set_actor_mock_registry_state
from monarch.actor.process import this_process


class SetupActor(Actor):
    """Runs in each new proc before any other actor: mocks, then the user's bootstrap function."""

    _is_system_actor = True

    def __init__(self, bootstrap: Callable[[], Any] | None, mocks: dict[Any, Any]) -> None:
        self._bootstrap = bootstrap
        self._mocks = mocks

    @endpoint
    def run(self) -> bool:
        """Run the bootstrap; its failure is also that of every actor spawned here later."""
        proc = this_process().proc
        error: BaseException | None = None
        try:
            set_actor_mock_registry_state(self._mocks)
            if self._bootstrap is not None:
                result = self._bootstrap()
                if inspect.isawaitable(result):
                    asyncio.run(_finish(result))
        except BaseException as exc:
            error = exc
            raise
        finally:
            proc.set_ready(error)
            instance = context().actor_instance
            # What the bootstrap spawned stays, so its owner has to stay: it passes failures on to who spawned this proc.
            if not instance._children:
                instance.stop("the bootstrap has ended")
        return True


async def _finish(awaitable: Any) -> Any:
    return await awaitable


class SetLevel(Actor):
    """Sets the level of the root logger of its process, then ends."""

    _is_system_actor = True

    def __init__(self, level: int) -> None:
        logging.getLogger().setLevel(level)
