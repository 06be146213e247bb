"""What the page works out by itself: the marks of a correction, and which turns are one conversation."""

from __future__ import annotations

from typing import Any

from web_makers import Site, Visit

from personalpeft_app.http.own.shapes import give
from personalpeft_app.tui.conversations import conversations

_CHANGES = """async ([path, count]) => {
  const { changes } = await import(path);
  const words = ["a", "bb", "cccccccccc", " ", "\\n", "d ", "<b>", "\\u202e"];
  const draw = (n) => Math.floor(Math.random() * n);
  const text = () => Array.from({ length: draw(12) }, () => words[draw(words.length)]).join(draw(2) ? " " : "");
  for (let n = 0; n < count; n++) {
    const [before, after] = [text(), text()];
    const found = changes(before, after);
    const without = (how) => found.filter((each) => each.how !== how).map((each) => each.text).join("");
    if (without("in") !== before || without("out") !== after) return [before, after];
  }
  return null;
}"""
_THREADS = """async ([path, turns, signals]) => {
  const { threads } = await import(path);
  return threads(turns, signals).map((thread) => [thread.id, thread.exchanges.map((each) =>
    [each.turn, each.rating, each.edited, each.comments.length])]);
}"""


def _module(visit: Visit, name: str) -> str:
    source: str = visit.page.locator("script[src]").evaluate("(each) => each.src")
    return source.replace("main.js", name)


def test_without_what_came_a_marked_correction_is_the_old_text_and_without_what_went_the_new_one(visit: Visit) -> None:
    visit.come()
    assert visit.page.evaluate(_CHANGES, [_module(visit, "diff.js"), 20_000]) is None


def test_conversations_are_the_same_here_and_in_the_terminal(site: Site, visit: Visit) -> None:
    ada = site.runtime.user("ada")

    def ask(*told: str) -> Any:
        roles = ("user", "assistant")
        return ada.chat([{"role": roles[n % 2], "content": text} for n, text in enumerate(told)], temperature=0)

    first = ask("Hello")
    ada.feedback(first, rating=1)
    ada.feedback(first, edit="Good morning.")
    second = ask("Hello", "Good morning.", "And then?")
    ask("Hello", "Good morning.", "And then?", second.text, "Last one")
    again = ask("Hello", "Good morning.", "And then?")
    ada.feedback(again, comment="Be brief.")
    ask("Hello")
    ask("Hello")
    ask("Something else")
    correct = [ask(f"question {n}") for n in range(5)]
    for reply in correct:
        ada.feedback(reply, edit="Ahoy! Arrr!")
    ada.learn()
    ada.compare("Which?", "live", "base").choose(1)

    talks = conversations(ada.turns(), ada.signals())
    expected = [
        [talk.key, [[each.turn, each.rating, each.edited, each.comments] for each in talk.exchanges]] for talk in talks
    ]
    visit.come()
    asked = [_module(visit, "threads.js"), give(ada.turns()), give(ada.signals())]
    assert visit.page.evaluate(_THREADS, asked) == expected
