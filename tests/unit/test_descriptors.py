"""The descriptor budget: least recently used out first, never under a user."""

import os
from pathlib import Path

import pytest

from tierfs.tiers.descriptors import Descriptors
from tierfs.tiers.objects import OpenObject


def is_open(opened: OpenObject) -> bool:
    try:
        os.fstat(opened.fd)
    except OSError:
        return False
    return True


@pytest.fixture
def fresh(tmp_path: Path):  # type: ignore[no-untyped-def]
    made: list[OpenObject] = []

    def make() -> OpenObject:
        made.append(OpenObject(os.open(tmp_path, os.O_RDONLY), None, 0))
        return made[-1]

    return make


def test_least_recently_used_is_closed_first(fresh) -> None:  # type: ignore[no-untyped-def]
    descriptors = Descriptors(2, on_idle=lambda opened: None)
    opened = {}
    for owner in ("a", "b"):
        opened[owner] = descriptors.add(owner, fresh())
        descriptors.give_back(opened[owner])
    again = descriptors.borrow("a")
    assert again is opened["a"]
    descriptors.give_back(again)
    descriptors.give_back(descriptors.add("c", fresh()))
    assert not is_open(opened["b"])
    assert is_open(opened["a"])
    assert descriptors.borrow("b") is None
    descriptors.close()
    assert not is_open(opened["a"])


def test_what_is_in_use_is_not_closed_even_over_the_limit(fresh) -> None:  # type: ignore[no-untyped-def]
    descriptors = Descriptors(1, on_idle=lambda opened: None)
    used = [descriptors.add(owner, fresh()) for owner in "abc"]
    assert all(is_open(opened) for opened in used)
    for opened in used:
        descriptors.give_back(opened)
    descriptors.give_back(descriptors.add("d", fresh()))
    assert len(descriptors) == 1
    assert not any(is_open(opened) for opened in used)


def test_retired_object_is_told_when_its_last_user_leaves(fresh) -> None:  # type: ignore[no-untyped-def]
    idle: list[OpenObject] = []
    descriptors = Descriptors(4, on_idle=idle.append)
    first = descriptors.add("a", fresh())
    second = descriptors.borrow("a")
    assert second is first
    assert descriptors.retire("a") is first
    assert descriptors.borrow("a") is None
    descriptors.give_back(first)
    assert idle == []
    descriptors.give_back(first)
    assert idle == [first]
    assert is_open(first)
    first.close()


def test_the_slower_of_two_openers_uses_the_other_s(fresh) -> None:  # type: ignore[no-untyped-def]
    descriptors = Descriptors(4, on_idle=lambda opened: None)
    mine, theirs = fresh(), fresh()
    assert descriptors.add("a", theirs) is theirs
    assert descriptors.add("a", mine) is theirs
    assert not is_open(mine)
    assert theirs.users == 2


class Lender:
    """Remembers what was taken back, and whether it was open then."""

    def __init__(self) -> None:
        self.back: list[Lent] = []

    async def lend(self, fd: int, size_bytes: int) -> None:
        raise AssertionError

    def take_back(self, lent: "Lent") -> None:
        assert is_open(lent.opened)
        self.back.append(lent)

    async def offer(self, inode: int, lent: object) -> bool:
        raise AssertionError


class Lent:
    def __init__(self, slot: int, opened: OpenObject) -> None:
        self.slot, self.generation, self.opened = slot, 7, opened


def test_what_was_lent_is_taken_back_before_it_is_closed(fresh) -> None:  # type: ignore[no-untyped-def]
    descriptors = Descriptors(2, on_idle=lambda opened: descriptors.take_back(opened))
    lender = descriptors.lender = Lender()
    lent = []
    for slot, owner in enumerate("abcd"):
        opened = descriptors.add(owner, fresh())
        opened.lent = Lent(slot, opened)
        lent.append(opened.lent)
        assert descriptors.owner(Lent(slot, opened)) == owner
        if owner != "d":
            descriptors.give_back(opened)
    assert lender.back == lent[:2]  # a and b made room
    assert descriptors.owner(lent[0]) is None
    assert descriptors.retire("d") is lent[3].opened
    assert descriptors.owner(lent[3]) is None
    assert lender.back == lent[:2]  # somebody holds d
    descriptors.give_back(lent[3].opened)
    assert lender.back == [*lent[:2], lent[3]]
    descriptors.close()
    assert lender.back == [*lent[:2], lent[3], lent[2]]
