/** The timeline view: a chart of the scores, and each learn and each move of a head, newest first. */

import { chart } from "./chart.js";
import { button, h } from "./dom.js";
import { coalesce } from "./coalesce.js";
import { headline, reportParts } from "./report.js";
import * as notify from "./notify.js";
import { layerName, moment, shortId } from "./format.js";

/** @typedef {import("./user.js").Revision} Revision */
/** @typedef {{ at: string, revision: string | null, draw: () => HTMLElement }} Entry */

const PAGE = 25;

/**
 * @param {import("./user.js").User} user
 * @param {{ compare: (layer: string, revision: string) => void }} go
 */
export function timelineView(user, go) {
  const title = h("h1", { tabindex: "-1" }, "Timeline");
  const charts = h("div", { class: "charts" });
  const list = h("ol", { class: "timeline", "aria-label": "Events, newest first" });
  const more = button("Show older", () => show(shown + PAGE), { hidden: true });
  const element = h("div", { class: "view" }, title,
    h("p", { class: "lead" }, "Every revision of your model. Rolling back keeps all of them."), charts, list, more);
  /** @type {Entry[]} */
  let entries = [];
  let shown = PAGE;

  const load = coalesce(async () => {
    const [revisions, reports, history, layers] = await Promise.all([user.revisions(), user.reports(), user.history(), user.layers()]);
    const heads = new Map(layers.map((layer) => [layer.name, layer.head]));
    draw(revisions, heads);
    entries = timeline(revisions, reports, history, heads);
    show(PAGE);
  });

  /** @param {number} count */
  function show(count) {
    shown = count;
    list.replaceChildren(...entries.slice(0, count).map((entry) => entry.draw()));
    if (!entries.length) list.replaceChildren(h("li", { class: "empty" }, "There are no revisions yet. Correct a few replies, then press Learn."));
    more.hidden = entries.length <= count;
  }

  /** @param {Revision[]} revisions @param {Map<string, string | null>} heads */
  function draw(revisions, heads) {
    charts.replaceChildren();
    for (const [layer, own] of Map.groupBy(revisions, (revision) => revision.layer)) {
      const drawing = chart(layer, own, heads.get(layer) ?? null, pick, charts.clientWidth);
      if (!drawing) continue;
      charts.append(h("figure", {},
        h("figcaption", {}, h("strong", {}, layerName(layer)), h("span", { class: "dim" }, " likelihood of the held-out answers, per token")),
        h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Chart of ${layerName(layer)}` }, drawing)));
    }
  }

  /** @param {string} revision */
  function pick(revision) {
    const at = entries.findIndex((entry) => entry.revision === revision);
    if (at < 0) return;
    if (at >= shown) show(at + 1);
    const entry = /** @type {HTMLElement} */ (list.children[at]);
    entry.scrollIntoView({ block: "center" });
    entry.focus({ preventScroll: true });
  }

  /**
   * @param {Revision[]} revisions
   * @param {import("./user.js").Report[]} reports
   * @param {import("./user.js").Move[]} history
   * @param {Map<string, string | null>} heads
   * @returns {Entry[]} newest first
   */
  function timeline(revisions, reports, history, heads) {
    const reported = new Set(reports.map((report) => report.revision));
    const known = new Set(revisions.map((revision) => revision.id));
    const imported = revisions.filter((revision) => !reported.has(revision.id));
    // Moves by a learn are part of its report.
    const moves = history.filter((move) => !["learn", "accepted", "withdrawn", "retracted", "import"].includes(move.cause));
    return [
      ...reports.map((report) => ({ at: report.at, revision: ["withdrawn", "confirmed", "retracted"].includes(report.outcome) ? null : report.revision,
        draw: () => entry(report.at, headline(report), reportParts(report), report.revision, report.layer, known, heads, report.verdict ?? "unjudged") })),
      ...imported.map((revision) => ({ at: revision.at, revision: revision.id,
        draw: () => entry(revision.at, `${layerName(revision.layer)}: imported`, [h("p", { class: "dim" }, revision.reason)], revision.id, revision.layer, known, heads, revision.verdict) })),
      ...moves.map((move) => ({ at: move.at, revision: null, draw: () => moved(move) })),
    ].sort((one, other) => other.at.localeCompare(one.at));
  }

  /**
   * @param {string} at
   * @param {string} text
   * @param {HTMLElement[]} parts
   * @param {string | null} revision
   * @param {string} layer
   * @param {Set<string>} known
   * @param {Map<string, string | null>} heads
   * @param {string} verdict
   */
  function entry(at, text, parts, revision, layer, known, heads, verdict) {
    const live = revision !== null && heads.get(layer) === revision;
    const there = revision !== null && known.has(revision);
    const name = revision ? shortId(revision) : "";
    return h("li", { class: `entry ${verdict} ${live ? "is-live" : ""}`, tabindex: "-1" },
      h("div", { class: "when" }, h("time", { datetime: at }, moment(at)), revision ? h("span", { class: "id" }, name) : null,
        live ? h("span", { class: "badge" }, "live") : null),
      h("div", { class: "what" }, h("h2", {}, text), parts,
        there ? h("div", { class: "row" },
          live ? button("Roll back", () => back(layer, "previous"), { "aria-label": `Roll back ${layerName(layer)} to what was live before` })
            : button("Make live", () => back(layer, revision), { "aria-label": `Make ${layerName(layer)} ${name} live` }),
          button("Compare blind", () => go.compare(layer, revision), { class: "quiet", "aria-label": `Compare ${layerName(layer)} ${name} blind` })) : null));
  }

  /** @param {string} layer @param {string} to */
  const back = (layer, to) => notify.attempt(async () => {
    const move = await user.rollback(layer, to);
    notify.toast(`${layerName(layer)}: ${move.after ? `${shortId(move.after)} is live` : "the bare base is live"}.`);
  });

  return {
    element,
    title,
    shown: load,
    /** @param {string} about */
    changed: (about) => void (about !== "chat" && about !== "feedback" && load()),
  };
}

/** @param {import("./user.js").Move} move */
function moved(move) {
  const name = (/** @type {string | null} */ id) => (id ? shortId(id) : "the bare base");
  const how = move.cause === "rollback" ? "rolled back by you" : move.cause.replaceAll("_", " ");
  return h("li", { class: "entry move", tabindex: "-1" },
    h("div", { class: "when" }, h("time", { datetime: move.at }, moment(move.at))),
    h("div", { class: "what" }, h("h2", {}, `${layerName(move.layer)}: ${how}`), h("p", { class: "dim" }, `${name(move.before)} → ${name(move.after)}`)));
}
