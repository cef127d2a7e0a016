"""Which transports the configuration allows."""

import pytest

from monarch.config import configured
from monarch.rdma import RdmaInitError
from monarch.rdma.backend import allowed_transports


@pytest.mark.parametrize(
    ("setting", "names"), [("cma,ipc,nixl,tcp", ["cma", "ipc", "nixl", "tcp"]), ("tcp, cma", ["tcp", "cma"]), ("tcp", ["tcp"]), ("", [])]
)
def test_transports_are_named_with_and_without_spaces(setting, names):
    with configured(rdma_transports=setting):
        assert allowed_transports() == names


@pytest.mark.parametrize("setting", ["tpc", "cma,tpc"])
def test_a_transport_that_does_not_exist_is_refused_with_the_one_that_was_meant(setting):
    wanted = r"'tpc'; did you mean 'tcp'\?\n  next:  name some of cma, ipc"
    with configured(rdma_transports=setting), pytest.raises(RdmaInitError, match=wanted):
        allowed_transports()
