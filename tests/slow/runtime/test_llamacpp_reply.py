"""One conversation with the real base on llama.cpp, through the library alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import personalpeft

pytestmark = pytest.mark.slow

QUESTION = "What is 2 + 2?"


def test_llamacpp_answers_correctly_and_repeats_its_reply(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="llamacpp") as runtime:
        ada = runtime.user("ada")
        reply = ada.chat(QUESTION, temperature=0, max_tokens=24)
        assert "4" in reply.text
        assert reply.stack == ada.stack()
        assert ada.chat(QUESTION, temperature=0, max_tokens=24).text == reply.text
        assert ada.turns()[-1].id == reply.turn_id
        assert runtime.verify() == ()
