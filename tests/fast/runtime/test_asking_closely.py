"""What a caller can ask beyond a plain chat: how likely each token was, what ended it, an older revision, plain text."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from runtime_makers import ask, correct, opened

from personalpeft import InvalidInput, NotFound, QueueFull, Serving


def test_logprobs_name_every_token_of_the_reply(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        reply = ask(ada, logprobs=True)
        assert "".join(token.text for token in reply.logprobs) == reply.text
        assert len(reply.logprobs) == reply.usage.completion_tokens
        assert all(token.logprob < 0 for token in reply.logprobs)
        assert ask(ada).logprobs == ()


def test_a_stream_tells_its_logprobs_as_they_come(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        stream = runtime.user("ada").stream("hello", temperature=0, logprobs=True)
        next(stream)
        assert len(stream.logprobs) == 1
        for _ in stream:
            pass
        assert stream.logprobs == stream.reply.logprobs


def test_a_reply_says_which_stop_string_ended_it(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        words = ask(ada).text.split()
        reply = ask(ada, stop=["never said", words[2]])
        assert (reply.stop, reply.finish_reason) == (words[2], "stop")
        assert reply.text.split() == words[:2]
        assert ask(ada).stop == ""


def test_an_older_revision_answers_as_it_did(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        first = ada.learn()
        then = ask(ada, "hello")
        correct(ada, first=6)
        second = ada.learn(accept=True)
        assert first.revision is not None
        assert second.revision is not None
        assert ask(ada, "hello").text != then.text
        older = ask(ada, "hello", revision=first.revision)
        assert (older.text, older.stack) == (then.text, then.stack)
        # Also where its layer is switched off: whoever names it means it.
        ada.scope("style", "never")
        assert ask(ada, "hello", revision=first.revision).text == then.text
        with pytest.raises(NotFound):
            ask(ada, revision="style@000000000000")
        with pytest.raises(InvalidInput):
            ask(ada, revision=first.revision, layers=[])


def test_without_the_template_the_text_is_read_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        ada.remember("My dog is called Biscuit.")
        plain = ask(ada, "What is my dog called?", template=False)
        assert plain.usage.prompt_tokens == len("What is my dog called?")
        assert ada.turn(plain).used == ()
        with pytest.raises(InvalidInput):
            ada.chat([{"role": "user", "content": "hello"}], template=False)


def test_streams_that_were_begun_are_written_side_by_side(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        streams = [ada.stream("hello", temperature=1, seed=seed) for seed in range(4)]
        for stream in streams:
            stream.begin()
        texts = ["".join(stream) for stream in reversed(streams)]
        assert texts == [
            ada.chat("hello", temperature=1, seed=seed).text for seed in reversed(range(4))
        ]


def test_what_finds_no_room_is_refused_before_it_begins(tmp_path: Path) -> None:
    held = threading.Event()
    with opened(tmp_path, serving=Serving(max_batch=1, max_queue=1)) as runtime:
        ada = runtime.user("ada")
        # The engine asks this before it gives a row, and goes on only when it has heard.
        first, second = (ada.stream("hello", cancelled=lambda: not held.wait(20)) for _ in range(2))
        first.begin()
        with pytest.raises(QueueFull) as refused:
            second.begin()
        held.set()
        assert refused.value.retry_after
        assert "".join(first)
        # What nobody has read a piece of was no reply.
        assert len(ada.turns()) == 1


def test_texts_that_share_words_are_near(tmp_path: Path) -> None:
    with opened(tmp_path) as runtime:
        found = runtime.embed(["the dog barks", "a dog barks", "sum of squares"])
        near, far = found.vectors[0] @ found.vectors[1], found.vectors[0] @ found.vectors[2]
        assert near > far
        assert found.tokens == 9
        with pytest.raises(InvalidInput):
            runtime.embed([])
        with pytest.raises(InvalidInput):
            runtime.embed("one text")
