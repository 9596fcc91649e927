"""Agents without a hint are named by the prefix that nobody shares, and keep their names across a restart."""

from __future__ import annotations

import numpy as np
import pytest
from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.sources import token_digest
from kvcmas_sgl.radix_ext.state_file import State, StateError

SYSTEM = [1, 2, 3, 4]


def test_the_longest_known_prefix_names_the_agent() -> None:
    known = AgentPrefixes()
    first = known.find("s", np.array([*SYSTEM, 5, 6, 7]), 4)
    assert first == (4, token_digest(np.array(SYSTEM)))
    # Later on other shared content starts further back; the agent is the same.
    assert known.find("s", np.array([*SYSTEM, 8, 9, 10]), 6) == first
    # Nothing shared yet: a known prefix still names it, an unknown one is not remembered.
    assert known.find("s", np.array([*SYSTEM, 11]), None) == first
    stranger = known.find("s", np.array([30, 31, 32]), None)
    assert stranger[0] == 3 and known.find("s", np.array([30, 31, 32, 33]), 3 + 1)[0] == 4
    assert known.find("other", np.array([*SYSTEM, 5]), 5)[0] == 5


def test_a_new_process_knows_the_names_of_the_old_one() -> None:
    known, later = AgentPrefixes(), AgentPrefixes()
    first = known.find("s", np.array([*SYSTEM, 5, 6, 7]), 4)
    later.load(known.state())
    assert later.find("s", np.array([*SYSTEM, 8, 9, 10]), 6) == first
    assert later.find("tenant", np.array([*SYSTEM, 8, 9, 10]), 6)[0] == 6
    later.drop_scope("s")
    assert later.scopes() == {"tenant"}


@pytest.mark.parametrize("row", [["s", -1, "d"], ["s", 1.5, "d"], [3, 1, "d"]])
def test_broken_rows_are_refused_and_change_nothing(row: list[object]) -> None:
    known = AgentPrefixes()
    first = known.find("s", np.array(SYSTEM), 4)
    with pytest.raises(StateError):
        known.load(State({}, [["s", 2, "d"], row]))
    assert known.find("s", np.array([*SYSTEM, 9]), 5) == first
