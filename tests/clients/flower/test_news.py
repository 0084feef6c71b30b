"""For whom messages have come, and whoever waits for it."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.clients.flower.news import ANYBODY, LONGEST_HOLD, News, seconds_to_hold


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0.0), ("20", 20.0), ("1e9", LONGEST_HOLD), ("-3", 0.0), ("nan", 0.0), ("soon", 0.0)]
)
def test_a_call_is_held_as_long_as_it_allows_and_never_for_ever(text: str, seconds: float):
    assert seconds_to_hold(text) == seconds


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_news_after_a_number_are_those_that_came_after_it(before: list[str], after: list[str]):
    news = News()
    news.note(before)
    serial = news.serial
    news.note(after)
    assert sorted(news.since(serial)) == sorted(set(after))
    assert {name for name in "abc" if news.last(name) > serial} == set(after)


@pytest.mark.parametrize("name", ["a", ANYBODY])
def test_whoever_waits_is_woken_by_its_own_news_alone(name: str):
    async def play() -> list[float]:
        news, begun = News(), time.monotonic()
        news.note(["a"])
        await news.wait(name, 0, 60)  # It has come already.
        serial = news.serial
        asyncio.get_running_loop().call_later(0.05, news.note, ["b"])
        asyncio.get_running_loop().call_later(0.2, news.note, ["a"])
        await news.wait(name, serial, 60)
        woken = time.monotonic() - begun
        await news.wait("nobody", news.serial, 0.01)
        return [woken, time.monotonic() - begun]

    woken, ended = asyncio.run(play())
    assert woken >= (0.2 if name else 0.05) * 0.9
    assert ended < 30
