from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from monarch._base.agents import Agents, unpacked
from monarch._base.ids import agent_at

addresses = st.lists(st.from_regex(r"(tcp|tls|ipc|inproc)://[a-z0-9./:é-]{1,30}", fullmatch=True), max_size=60)


@given(addresses)
def test_agents_arrive_as_they_were_sent(some):
    agents = Agents(some)
    unpacked.cache_clear()
    again = pickle.loads(pickle.dumps(agents))
    assert again == agents and hash(again) == hash(agents)
    assert list(again) == [agent_at(address) for address in some]


def test_equal_agents_are_unpickled_once():
    agents = Agents(f"tcp://10.0.{rank // 250}.{rank % 250}:26600" for rank in range(1000))
    assert pickle.loads(pickle.dumps(agents)) is pickle.loads(pickle.dumps(Agents(agent.address for agent in agents)))


def test_many_agents_are_few_bytes():
    agents = Agents(f"tcp://10.0.{rank // 250}.{rank % 250}:26600" for rank in range(1000))
    assert len(pickle.dumps(agents)) < 5000


def test_other_agents_are_not_equal():
    assert Agents(["tcp://a:1"]) != Agents(["tcp://a:1", "tcp://b:1"])
    assert Agents(["tcp://a:1"]) != ["tcp://a:1"]
    assert Agents([]) == Agents([])
