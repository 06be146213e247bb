/**
 * Replies as a small part of Markdown: paragraphs, headings, lists, quotes, rules, code, bold, italics and what is struck.
 *
 * Invariants: what is not a mark of these stands as it was written, HTML, links and tables too; each text becomes a text, never
 * markup, and no attribute of what is made comes from it but the number that a list begins with; how deep and how long it is
 * bounds the work.
 */

import { h } from "./dom.js";

/** @typedef {{ kind: string, lines: string[], start?: number, items?: string[][] }} Block */

const DEEPEST = 6;
// Characters of a block in which marks are looked for.
const LONGEST = 5000;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}#{1,6} +(?=\S)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
// A list begins in the middle of a paragraph only where that is no number that a line of it happens to begin with.
const INTERRUPTS = /^ {0,3}(?:[-*+] +\S|1[.)] +\S)/;
const MARK = /(`+)([^]*?[^`])\1(?!`)|(\*\*\*|\*\*|~~)(?=\S)([^]*?\S)\3|(?<![\p{L}\p{N}_*])(__|\*|_)(?=[^\s*_])([^]*?\S)\5(?![\p{L}\p{N}_*])|\\([\\`*_~#>+.!-])/gu;
/** @type {Record<string, ("strong" | "em" | "s")[]>} */
const TAGS = { "***": ["em", "strong"], "**": ["strong"], "__": ["strong"], "*": ["em"], "_": ["em"], "~~": ["s"] };

/** @type {WeakMap<Element, string[]>} */
const drawn = new WeakMap();

/**
 * Shows a text in an element. Where it has grown since the last time, what stays as it was is left alone.
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
  element.replaceChildren(...[...element.children].slice(0, same), ...blocks.slice(same).map((block) => made(block, 0)));
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
      const close = new RegExp(`^ {0,3}${fence[0]}{${fence.length},} *$`);
      blocks.push({ kind: "code", lines: until((each) => !close.test(each)).slice(1) });
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
 * The list that begins in a line. To an item belongs what is indented under it, and a line that goes on with its words.
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
      items.at(-1)?.push(...Array(blank).fill(""));
      blank = 0;
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
  if (depth < DEEPEST && items.length) return h(kind === "ol" ? "ol" : "ul", { start }, items.map((item) => h("li", { dir: "auto" }, ...listed(item, depth + 1))));
  return h("p", { dir: "auto" }, inline(lines.join("\n"), depth));
}

/** @param {string[]} lines of an item @param {number} depth */
function listed(lines, depth) {
  const blocks = split(lines);
  // The words of an item stand beside its mark; only what follows them is set apart.
  return blocks.map((block, n) => (n === 0 && block.kind === "text" ? h("span", {}, inline(block.lines.join("\n"), depth)) : made(block, depth)));
}

/** @param {string} text @param {number} depth @returns {(string | HTMLElement)[]} */
function inline(text, depth) {
  if (depth > DEEPEST || text.length > LONGEST) return [text];
  /** @type {(string | HTMLElement)[]} */
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(MARK)) {
    const [all, ticks, code, strong, bold, slight, slanted, plain] = found;
    parts.push(text.slice(from, found.index));
    from = found.index + all.length;
    if (ticks) parts.push(h("code", {}, code.replace(/^ ([^]*\S[^]*) $/, "$1")));
    else if (plain) parts.push(plain);
    else {
      const [first, ...rest] = TAGS[strong ?? slight];
      parts.push(rest.reduce((within, tag) => h(tag, {}, within), h(first, {}, inline(bold ?? slanted, depth + 1))));
    }
  }
  return [...parts, text.slice(from)];
}
