"""`concurrent_endpoint` under the name that scripts import it by."""

from monarch.actor.endpoint import concurrent_endpoint

__all__ = ["concurrent_endpoint"]
