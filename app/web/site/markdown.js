/**
 * Render replies as a small part of Markdown: paragraphs, headings, lists, quotes, rules, code, bold, italics and strikethrough.
 *
 * Invariants: all other marks stay as they were written, such as HTML, links and tables. Text becomes text nodes, never markup. The
 * only attribute taken from it is the number that a list begins with. The work grows in proportion to the text's length.
 */

import { h } from "./dom.js";

/** @typedef {{ kind: string, lines: string[], start?: number, items?: string[][] }} Block */

const DEEPEST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const FENCE_END = /^ {0,3}(`{3,}|~{3,}) *$/;
const HEADING = /^ {0,3}#{1,6} +(?=\S)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
// Inside a paragraph only 1 begins a numbered list, since a line may begin with another number by chance.
const INTERRUPTS = /^ {0,3}(?:[-*+] +\S|1[.)] +\S)/;
// What can open a mark. No expression here searches for the other end, since each opener would search the rest of the text again.
const OPENER = /`+|(\*{2,3}|~~)(?=\S)|(?<![\p{L}\p{N}_*])(__|\*|_)(?=[^\s*_])|\\([\\`*_~#>+.!-])/gu;
/** @type {Record<string, RegExp>} */
const CLOSERS = {
  "***": /(?<=\S)\*{3}/g, "**": /(?<=\S)\*{2}/g, "~~": /(?<=\S)~~/g,
  "__": /(?<=\S)__(?![\p{L}\p{N}_*])/gu, "*": /(?<=\S)\*(?![\p{L}\p{N}_*])/gu, "_": /(?<=\S)_(?![\p{L}\p{N}_*])/gu,
};
/** @type {Record<string, ("strong" | "em" | "s")[]>} */
const TAGS = { "***": ["em", "strong"], "**": ["strong"], "__": ["strong"], "*": ["em"], "_": ["em"], "~~": ["s"] };

/** @type {WeakMap<Element, string[]>} */
const drawn = new WeakMap();

/**
 * Show a text in an element. Where the text has grown since the last call, unchanged blocks are left alone.
 * @template {HTMLElement} E
 * @param {E} element
 * @param {string} text
 * @returns {E}
 */
export function render(element, text) {
  const blocks = split(text.split("\n"));
  const now = blocks.map((block) => JSON.stringify(block));
  const before = drawn.get(element) ?? [];
  let same = 0;
  while (same < before.length && before[same] === now[same]) same += 1;
  // Without dir="auto" meanwhile: the browser would read the whole text again for each block.
  const { dir } = element;
  element.removeAttribute("dir");
  for (const old of [...element.childNodes].slice(same)) old.remove();
  for (const block of blocks.slice(same)) element.append(made(block, 0));
  if (dir) element.dir = dir;
  drawn.set(element, now);
  return element;
}

/** @param {string[]} lines @returns {Block[]} */
function split(lines) {
  /** @type {Block[]} */
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = FENCE.exec(line)?.[1];
    let to = at + 1;
    /** @param {(line: string) => boolean} goesOn */
    const until = (goesOn) => {
      while (to < lines.length && goesOn(lines[to])) to += 1;
      return lines.slice(at, to);
    };
    if (!line.trim()) to = at + 1;
    else if (fence) {
      // A fence ends with one of the same kind that is at least as long.
      blocks.push({ kind: "code", lines: until((each) => !FENCE_END.exec(each)?.[1].startsWith(fence)).slice(1) });
      to += 1;
    } else if (HEADING.test(line)) blocks.push({ kind: "heading", lines: [line.replace(HEADING, "").trimEnd().replace(/ #+$/, "")] });
    else if (RULE.test(line)) blocks.push({ kind: "rule", lines: [] });
    else if (QUOTE.test(line)) blocks.push({ kind: "quote", lines: until((each) => QUOTE.test(each)).map((each) => each.replace(QUOTE, "")) });
    else if (ITEM.test(line)) {
      const list = listAt(lines, at);
      blocks.push(list);
      to = at + list.lines.length;
    } else blocks.push({ kind: "text", lines: until((each) => Boolean(each.trim()) && !beginsAnother(each)) });
    at = to;
  }
  return blocks;
}

/** @param {string} line */
const beginsAnother = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || INTERRUPTS.test(line);

/**
 * The list that begins in a line. Lines indented under an item belong to it, and so do lines that continue its words.
 * @param {string[]} lines
 * @param {number} from
 * @returns {Block}
 */
function listAt(lines, from) {
  const first = /** @type {Item} */ (itemOf(lines[from]));
  /** @type {string[][]} */
  const items = [];
  let width = 0;
  let to = from;
  let blank = 0;
  for (; to < lines.length; to += 1) {
    const line = lines[to];
    const item = itemOf(line);
    const depth = line.search(/\S/);
    if (depth < 0) blank += 1;
    else {
      const next = item && item.depth <= first.depth + 1;
      if (next ? item.ordered !== first.ordered : depth < first.depth + 2 && (blank || beginsAnother(line))) break;
      for (; blank; blank -= 1) items.at(-1)?.push("");
      if (next) items.push([line.slice(width = item.width)]);
      else items.at(-1)?.push(line.slice(Math.min(depth, width)));
    }
  }
  return { kind: first.ordered ? "ol" : "ul", lines: lines.slice(from, to - blank), items, start: first.ordered ? first.number : undefined };
}

/** @typedef {{ depth: number, width: number, ordered: boolean, number: number }} Item */

/** @param {string} line @returns {Item | null} */
function itemOf(line) {
  const found = RULE.test(line) ? null : ITEM.exec(line);
  return found && { depth: found[1].length, width: found[0].length, ordered: /\d/.test(found[2]), number: parseInt(found[2], 10) };
}

/** @param {Block} block @param {number} depth @returns {HTMLElement} */
function made({ kind, lines, items = [], start }, depth) {
  if (kind === "rule") return h("hr");
  if (kind === "code") return h("pre", { dir: "auto" }, h("code", {}, lines.join("\n")));
  if (kind === "heading") return h("h3", { dir: "auto" }, inline(lines[0], depth));
  if (depth < DEEPEST && kind === "quote") return h("blockquote", {}, split(lines).map((block) => made(block, depth + 1)));
  if (depth < DEEPEST && items.length) return h(kind === "ol" ? "ol" : "ul", { start }, items.map((item) => h("li", { dir: "auto" }, listed(item, depth + 1))));
  return h("p", { dir: "auto" }, inline(lines.join("\n"), depth));
}

/** @param {string[]} lines of an item @param {number} depth */
function listed(lines, depth) {
  const blocks = split(lines);
  // The first text of an item is on the line of its mark. Further blocks are elements of their own.
  return blocks.map((block, n) => (n === 0 && block.kind === "text" ? h("span", {}, inline(block.lines.join("\n"), depth)) : made(block, depth)));
}

/** @param {string} text @param {number} depth @returns {(string | HTMLElement)[]} */
function inline(text, depth) {
  if (depth > DEEPEST) return [text];
  const closerOf = closers(text);
  /** @type {(string | HTMLElement)[]} */
  const parts = [];
  let from = 0;
  for (let at = 0; ;) {
    OPENER.lastIndex = at;
    const found = OPENER.exec(text);
    if (!found) return [...parts, text.slice(from)];
    const [opener, strong, slight, plain] = found;
    const start = found.index;
    // Three stars that nothing closes may be two stars and a star.
    const mark = plain ? opener : [opener, ...(opener === "***" ? ["**"] : [])].find((each) => closerOf(each, start + each.length) >= 0);
    if (!mark) {
      // A run of backticks that nothing closes is text as a whole.
      at = start + (strong || slight ? 1 : opener.length);
      continue;
    }
    const begin = start + mark.length;
    const end = plain ? begin : closerOf(mark, begin);
    parts.push(text.slice(from, start));
    from = at = plain ? end : end + mark.length;
    const within = text.slice(begin, end);
    if (plain) parts.push(plain);
    else if (mark in TAGS) {
      const [first, ...rest] = TAGS[mark];
      parts.push(rest.reduce((inner, tag) => h(tag, {}, inner), h(first, {}, inline(within, depth + 1))));
    } else parts.push(h("code", {}, within.startsWith(" ") && within.endsWith(" ") && within.trim() ? within.slice(1, -1) : within));
  }
}

/**
 * Find where a mark is closed. The text is searched once for each kind of mark. A mark that is missing after one place is
 * missing after all later ones.
 * @param {string} text
 * @returns {(mark: string, begin: number) => number} the first place after `begin`, or -1. Calls must not lower `begin`.
 */
function closers(text) {
  /** @type {Map<string, number>} the closer of each mark that was found last; -1 for none */
  const last = new Map();
  /** @type {Map<number, number[]> | undefined} the places of the runs of backticks by their lengths, last first */
  let runs;
  /** @param {number} length @param {number} begin */
  const run = (length, begin) => {
    if (!runs) {
      runs = new Map();
      for (const { 0: { length }, index } of [...text.matchAll(/`+/g)].reverse()) {
        const places = runs.get(length);
        if (places) places.push(index);
        else runs.set(length, [index]);
      }
    }
    const places = runs.get(length) ?? [];
    while (places.length && places[places.length - 1] < begin) places.pop();
    return places.at(-1) ?? -1;
  };
  return (mark, begin) => {
    if (mark[0] === "`") return run(mark.length, begin);
    const before = last.get(mark) ?? 0;
    // At least one character lies between the two.
    if (before < 0 || before > begin) return before;
    CLOSERS[mark].lastIndex = begin + 1;
    const found = CLOSERS[mark].exec(text)?.index ?? -1;
    last.set(mark, found);
    return found;
  };
}
