/**
 * A drawing of a layer's revisions, oldest first: how likely the held-out answers were before and after each. The list beside it
 * says the same in words.
 */

import { s } from "./dom.js";
import { layerName, likely, percent, shortId } from "./format.js";

/** @typedef {import("./user.js").Revision} Revision */

const HEIGHT = 200;
const WIDEST = 760;
const TOP = 22;
const BOTTOM = 30;
const LEFT = 60;
const RIGHT = 48;

/**
 * @param {string} layer
 * @param {Revision[]} revisions of that layer, oldest first
 * @param {string | null} head
 * @param {(revision: string) => void} pick
 * @param {number} available how wide it may be without being scrolled
 * @returns {SVGElement | null} null where nothing was measured
 */
export function chart(layer, revisions, head, pick, available) {
  const points = revisions.map(measured).filter((point) => point !== null);
  if (!points.length) return null;
  const width = Math.max(Math.min(WIDEST, available), LEFT + RIGHT + points.length * 56);
  // A logarithmic scale: equal gains have equal lengths.
  const ends = points.flatMap((point) => [point.before, point.after]);
  const room = Math.max(0.05, 0.12 * (Math.max(...ends) - Math.min(...ends)));
  const [least, most] = [Math.min(...ends) - room, Math.min(0, Math.max(...ends) + room)];
  const x = (/** @type {number} */ n) => LEFT + (n + 0.5) * ((width - LEFT - RIGHT) / points.length);
  const y = (/** @type {number} */ logprob) => HEIGHT - BOTTOM - ((logprob - least) / (most - least)) * (HEIGHT - TOP - BOTTOM);
  const drawing = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, class: "chart", role: "img", "aria-label": summary(layer, points, head) });
  for (const part of [least, (least + most) / 2, most]) {
    drawing.append(
      s("line", { x1: LEFT, x2: width - RIGHT + 12, y1: y(part), y2: y(part), class: "grid" }),
      s("text", { x: LEFT - 10, y: y(part) + 4, class: "scale", "text-anchor": "end" }, percent(likely(part))));
  }
  // A line through the promoted revisions, in order.
  const way = points.map((point, n) => ({ ...point, n })).filter((point) => point.revision.verdict === "promoted");
  if (way.length > 1) drawing.append(s("polyline", { points: way.map((point) => `${x(point.n)},${y(point.after)}`).join(" "), class: "way" }));
  for (const [n, point] of points.entries()) drawing.append(mark(point, x(n), y(point.before), y(point.after), point.revision.id === head, pick));
  return drawing;
}

/**
 * What the gate measured of it, in nats a token; null where it measured nothing.
 * @param {Revision} revision
 * @returns {{ revision: Revision, before: number, after: number } | null}
 */
export function measured(revision) {
  const target = revision.scores?.target;
  if (!target?.asked || target.before === null || target.after === null) return null;
  return { revision, before: target.before, after: target.after };
}

/**
 * @param {{ revision: Revision, before: number, after: number }} point
 * @param {number} x
 * @param {number} from
 * @param {number} to
 * @param {boolean} live
 * @param {(revision: string) => void} pick
 */
function mark({ revision, before, after }, x, from, to, live, pick) {
  const promoted = revision.verdict === "promoted";
  const shown = s("g", { class: `mark ${promoted ? "" : "not"} ${live ? "live" : ""}`, onclick: () => pick(revision.id) },
    s("title", {}, `${shortId(revision.id)}: ${percent(likely(before))} → ${percent(likely(after))}`),
    s("rect", { x: x - 18, y: 0, width: 36, height: HEIGHT, class: "touch" }),
    s("line", { x1: x, x2: x, y1: from, y2: to, class: "gain" }),
    s("line", { x1: x - 5, x2: x + 5, y1: from, y2: from, class: "gain" }),
    s("circle", { cx: x, cy: to, r: live ? 6 : 4.5, class: "after" }),
    s("text", { x, y: HEIGHT - 8, class: "scale", "text-anchor": "middle" }, shortId(revision.id).slice(0, 6)));
  if (live) shown.append(s("text", { x: x + 12, y: to + 4, class: "live-name" }, "live"));
  return shown;
}

/**
 * @param {string} layer
 * @param {{ revision: Revision, before: number, after: number }[]} points
 * @param {string | null} head
 */
function summary(layer, points, head) {
  const live = points.find((point) => point.revision.id === head);
  const now = live ? ` Live is ${shortId(live.revision.id)}, with ${percent(likely(live.after))}.`
    : head ? ` Live is ${shortId(head)}, which was not measured.` : " The bare base is live.";
  return `${layerName(layer)}: how likely the held-out answers were, before and after each of ${points.length} revisions.${now} The list below says the same in words.`;
}
