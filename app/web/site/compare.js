/** The view to compare blind: two revisions answer the same prompt, and their names are shown after the choice. */

import { button, h } from "./dom.js";
import { fit, reply } from "./exchange.js";
import { coalesce } from "./coalesce.js";
import * as notify from "./notify.js";
import { keepDraft } from "./session.js";
import { layerName, moment, shortId } from "./format.js";

/** @param {import("./user.js").User} user */
export function compareView(user) {
  const title = h("h1", { tabindex: "-1" }, "Compare");
  const field = h("textarea", { id: "compare-ask", rows: 2, dir: "auto" });
  keepDraft(field, "compare");
  const layer = h("select", { id: "compare-layer" });
  const other = h("select", { id: "compare-other" });
  const ask = h("button", { type: "submit", class: "go" }, "Ask both");
  const answers = h("div", { class: "answers", "aria-live": "polite" });
  const form = h("form", { class: "part", onsubmit: compare },
    h("div", { class: "field" }, h("label", { for: field.id }, "A question"), field),
    h("div", { class: "two field" },
      h("div", {}, h("label", { for: layer.id }, "Layer"), layer),
      h("div", {}, h("label", { for: other.id }, "Compare the live one with"), other)),
    h("div", { class: "row" }, ask));
  const nothing = h("p", { class: "empty" }, "There is no revision to compare yet. Press Learn first.");
  const element = h("div", { class: "view" }, title,
    h("p", { class: "lead" }, "Two answers in random order. Choose the better one; then their revisions are shown. The choice is recorded as a preference."),
    nothing, form, answers);
  /** @type {import("./user.js").Revision[]} */
  let revisions = [];
  /** @type {import("./user.js").Layer[]} */
  let layers = [];

  field.addEventListener("input", () => fit(field));
  layer.addEventListener("change", () => offer());

  const load = coalesce(async () => {
    [layers, revisions] = await Promise.all([user.layers(), user.revisions()]);
    const before = layer.value;
    nothing.hidden = layers.length > 0;
    form.hidden = !layers.length;
    layer.replaceChildren(...layers.map((each) => h("option", { value: each.name, selected: each.name === before }, layerName(each.name))));
    offer(other.value);
    fit(field);
  });

  /** @param {string} [wanted] */
  function offer(wanted = "previous") {
    const head = layers.find((each) => each.name === layer.value)?.head ?? null;
    const own = revisions.filter((each) => each.layer === layer.value && each.id !== head).reverse();
    const options = [["previous", "what was live before"], ...(head ? [["base", "the bare base"]] : []), ...own.map((each) => [each.id, `${shortId(each.id)}, ${moment(each.at)}, ${each.verdict}`])];
    other.replaceChildren(...options.map(([value, text]) => h("option", { value, selected: value === wanted }, text)));
  }

  /** @param {Event} event */
  async function compare(event) {
    event.preventDefault();
    const prompt = field.value.trim();
    if (!prompt) return field.focus();
    ask.disabled = true;
    answers.replaceChildren(h("p", { class: "dim" }, "Both are answering …"));
    const asked = await notify.attempt(async () => show(await user.compare({ prompt, layer: layer.value, a: "live", b: other.value })));
    if (!asked) answers.replaceChildren();
    ask.disabled = false;
    return undefined;
  }

  /** @param {{ id: string, same: boolean, answers: { number: 1 | 2, name: string, text: string }[] }} found */
  function show(found) {
    const [first, second] = found.answers.map((answer) => h("section", { class: "answer", "aria-label": answer.number === 1 ? "First answer" : "Second answer" },
      h("h2", {}, answer.number === 1 ? "First" : "Second"), reply(answer.text || "(nothing)"),
      found.same ? null : button(answer.number === 1 ? "The first is better" : "The second is better", () => choose(answer.number))));
    const neither = found.same ? h("p", { class: "dim" }, "Both say the same. Try another question.")
      : h("div", { class: "row" }, button("Neither", () => answers.replaceChildren(), { class: "quiet" }));
    answers.replaceChildren(first, second, neither);
    /** @param {1 | 2} which */
    const choose = (which) => notify.attempt(async () => {
      reveal([first, second], which, await user.choose(found.id, which));
      neither.remove();
    });
  }

  /** @param {HTMLElement[]} sections @param {1 | 2} which @param {{ chosen: string, other: string }} choice */
  function reveal(sections, which, choice) {
    for (const [n, section] of sections.entries()) {
      const chosen = n + 1 === which;
      section.querySelector("button")?.replaceWith(h("p", { class: chosen ? "yours" : "dim" }, `${name(chosen ? choice.chosen : choice.other)}${chosen ? ", which you chose" : ""}`));
      section.classList.toggle("chosen", chosen);
    }
    notify.announce(`You chose ${name(choice.chosen)}.`);
  }

  return {
    element,
    title,
    shown: load,
    /** @param {string} about */
    changed: (about) => void (["stack", "learn", "forget"].includes(about) && load()),
    /** @param {string} name @param {string} revision */
    async choose(name, revision) {
      await load();
      layer.value = name;
      const head = layers.find((each) => each.name === name)?.head;
      offer(revision === head ? "previous" : revision);
      field.focus();
    },
  };
}

/** @param {string} revision */
const name = (revision) => (revision === "base" ? "The bare base" : `${layerName(revision.split("@")[0])} ${shortId(revision)}`);
