"""The page's modules: the diff of a correction, Markdown and implicit feedback."""

from __future__ import annotations

import pytest
from example_counts import scale
from web_makers import Visit

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


# Texts of Markdown marks, words and lines in any order. Rendering one whole or in pieces gives the
# same elements.
_MARKDOWN = """async ([path, count]) => {
  const { render } = await import(path);
  const words = ["a", "bb ", " ", "\\n", "\\n\\n", "*", "**", "_", "__", "~~", "`", "``", "```",
    "# ", "- ", "1. ", "12) ", "> ", "---", "  ", "\\\\",
    "[x](javascript:alert(1))", "<img src=x onerror=alert(1)>", "&lt;", "\\u202e", "😀"];
  const allowed = new Set("P H3 UL OL LI SPAN BLOCKQUOTE HR PRE CODE STRONG EM S".split(" "));
  const within = (small, large) => { let at = 0; for (const each of large) if (each === small[at]) at++; return at === small.length; };
  const squeezed = (text) => [...text.replace(/\\s+/g, "")];
  const draw = (n) => Math.floor(Math.random() * n);
  for (let n = 0; n < count; n++) {
    const pieces = Array.from({ length: draw(30) }, () => words[draw(words.length)]);
    const text = pieces.join("");
    const whole = render(document.createElement("div"), text);
    for (const each of whole.querySelectorAll("*")) {
      if (!allowed.has(each.tagName)) return [text, each.tagName];
      for (const { name, value } of each.attributes) {
        if (!(name === "dir" && value === "auto") && !(name === "start" && /^[0-9]+$/.test(value))) return [text, name, value];
      }
    }
    // The elements have all words of the text and no others.
    if (!within(squeezed(whole.textContent), squeezed(text))) return [text, whole.textContent];
    const letters = (of) => of.replace(/[^ab😀]/gu, "");
    // What stands beside the mark of a code's beginning says what language it is in.
    const told = letters(text.replace(/(`{3,}|~{3,}).*$/gm, ""));
    if (letters(whole.textContent).length < told.length) return [text, "lost", whole.textContent];
    const grown = document.createElement("div");
    for (let to = 1; to <= pieces.length; to++) render(grown, pieces.slice(0, to).join(""));
    if (pieces.length && grown.innerHTML !== whole.innerHTML) return [text, "grown"];
  }
  return null;
}"""
_MARKED = "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> <em>d</em> <strong>e</strong> <s>f</s></p>"
_SHOWN = """async ([path, text]) => {
  const { render } = await import(path);
  return render(document.createElement("div"), text).innerHTML.replaceAll(' dir="auto"', "");
}"""


def _module(visit: Visit, name: str) -> str:
    source: str = visit.page.locator("script[src]").evaluate("(each) => each.src")
    return source.replace("main.js", name)


@pytest.mark.exhaustive
def test_a_diff_without_insertions_is_the_old_text_and_without_deletions_the_new(
    visit: Visit,
) -> None:
    visit.open()
    assert visit.page.evaluate(_CHANGES, [_module(visit, "diff.js"), 20_000]) is None


def test_any_reply_renders_all_its_words_in_harmless_elements(
    visit: Visit,
) -> None:
    visit.open()
    assert visit.page.evaluate(_MARKDOWN, [_module(visit, "markdown.js"), scale(1_500)]) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("One\ntwo\n\nthree", "<p>One\ntwo</p><p>three</p>"),
        (
            "**bold** and *slanted*, `a*b`",
            "<p><strong>bold</strong> and <em>slanted</em>, <code>a*b</code></p>",
        ),
        ("snake_case_name, 2*3*4, \\*not\\*", "<p>snake_case_name, 2*3*4, *not*</p>"),
        (
            "So:\n- a\n  more\n  - b\n- c\n\nend",
            "<p>So:</p><ul><li><span>a\nmore</span><ul><li><span>b</span></li></ul></li><li><span>c</span></li></ul><p>end</p>",
        ),
        (
            "3. a\n\n   b\n4. c",
            '<ol start="3"><li><span>a</span><p>b</p></li><li><span>c</span></li></ol>',
        ),
        ("In\n1986. It was", "<p>In\n1986. It was</p>"),
        ("*a* **b** ***c*** _d_ __e__ ~~f~~", _MARKED),
        ("***a** and *b** c* d", "<p><strong>*a</strong> and <em>b*</em> c* d</p>"),
        ("`` a`b `` and ```c`` \\`d`", "<p><code>a`b</code> and ```c`` `d`</p>"),
        (
            "`a``b` **`x`** `  `",
            "<p><code>a``b</code> <strong><code>x</code></strong> <code>  </code></p>",
        ),
        ("# Title\n> said\n---", "<h3>Title</h3><blockquote><p>said</p></blockquote><hr>"),
        ("```py\nx = '*a*'\n\ny\n```\nend", "<pre><code>x = '*a*'\n\ny</code></pre><p>end</p>"),
        ("```\n<b>open", "<pre><code>&lt;b&gt;open</code></pre>"),
        ("| a | b |\n|---|---|", "<p>| a | b |\n|---|---|</p>"),
    ],
)
def test_markdown_renders_as_its_elements(visit: Visit, text: str, shown: str) -> None:
    visit.open()
    assert visit.page.evaluate(_SHOWN, [_module(visit, "markdown.js"), text]) == shown


# Each text is twice as long as the one before, so that superlinear time is noticed early.
_TIMED = """async ([path, which, most]) => {
  const module = await import(path);
  const run = {
    markdown: (text) => {
      // As it is on the page: seen, and with a direction by its text.
      const place = Object.assign(document.createElement("div"), { dir: "auto" });
      document.body.append(place);
      module.render(place, text);
      place.remove();
    },
    reader: (text) => module.reader().add(text),
    marked: (text) => module.marked(text, text + "!"),
    excerpt: (text) => module.excerpt(text),
  }[which];
  const hostile = {
    ticks: "`", "ticks and letters": "`a", "ticks by twos": "`a ``b ", "open code": " `` `", stars: "*", "open stars": "*a ",
    "closed stars": "a* ", "tight stars": "**a", "three stars": "***a ", "crossed marks": "*a_ ", "crossed pairs": "**a~~ __b ",
    lines: "_", "open lines": "_a ", "double lines": "__a ", waves: "~", "open waves": "~~a ", "closed bold": "**a** ",
    brackets: "[", links: "[a](", quotes: ">", "spaced quotes": "> ", "lines of quotes": "> a\\n", bullets: "- ", rules: "---\\n",
    items: "- a\\n", "lists in turn": "- a\\n1. b\\n", "nested items": "- a\\n  - b\\n    - c\\n", numbers: "1. ", pipes: "|",
    "rows of a table": "|a|b|\\n", hashes: "#", "spaced hashes": "# ", backslashes: "\\\\", fences: "```\\n", paragraphs: "a\\n\\n",
    "empty lines": "\\n", spaces: " ", dots: ".", "dots and spaces": ". ", thanks: "ok, ", word: "a", words: "ab ",
  };
  const late = [];
  for (const [name, piece] of Object.entries(hostile)) {
    for (const [begin, end] of [["", ""], ["a ", " a"], ["- a", "\\n  b"], ["` ", "`"], ["# a ", "#a"]]) {
      for (let length = 1000; length <= most; length *= 2) {
        const text = begin + piece.repeat(length / piece.length) + end;
        const began = performance.now();
        try {
          run(text);
        } catch (error) {
          late.push([name, begin, length, String(error)]);
        }
        const took = performance.now() - began;
        if (took > 2000) late.push([name, begin, length, took]);
        if (late.length) return late;
      }
    }
  }
  return late;
}"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("which", "module"),
    [
        ("markdown", "markdown.js"),
        ("reader", "notify.js"),
        ("marked", "diff.js"),
        ("excerpt", "format.js"),
    ],
)
def test_rendering_is_fast_for_any_text(visit: Visit, which: str, module: str) -> None:
    visit.open()
    assert visit.page.evaluate(_TIMED, [_module(visit, module), which, scale(3_200)]) == []


@pytest.mark.exhaustive
def test_an_unclosed_mark_is_shown_as_written(visit: Visit) -> None:
    visit.open()
    text = "***a *b __c ~~d `e ``f"
    assert visit.page.evaluate(_SHOWN, [_module(visit, "markdown.js"), text]) == f"<p>{text}</p>"
