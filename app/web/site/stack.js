/** The stack view: the base and the user's layers, each with its weight, its scope and its live revision. */

import { button, h, downloadFile } from "./dom.js";
import { coalesce } from "./coalesce.js";
import * as notify from "./notify.js";
import { rebasePart } from "./rebase.js";
import { layerName, moment, shortId } from "./format.js";

/** @typedef {import("./user.js").Layer} Layer */
/** @typedef {import("./user.js").Revision} Revision */

// Milliseconds.
const SETTLE_MS = 300;
/** @type {Record<string, string>} */
const SCOPES = { always: "always", near: "for prompts similar to its lessons", never: "never" };

/**
 * @param {import("./user.js").User} user
 * @param {string} base
 * @param {{ follow: (job: any) => Promise<import("./user.js").Job> }} learning
 */
export function stackView(user, base, learning) {
  const title = h("h1", { tabindex: "-1" }, "Stack");
  const peft = button("Download the layers for PEFT", () => take(() => user.exportPeft(null), `${user.id}.zip`), { hidden: true });
  const list = h("ol", { class: "stack", "aria-label": "The stack, topmost first" });
  const another = rebasePart(user, learning);
  const element = h("div", { class: "view" }, title,
    h("p", { class: "lead" }, "One shared base and your own layers. A changed weight applies from the next reply on."), list,
    another.element,
    h("section", { class: "part" }, h("h2", {}, "Take it with you"),
      h("p", { class: "lead" }, "All of your feedback and adapters in one file, for “personalpeft import” on another machine. The file contains everything, so store it safely."),
      h("div", { class: "row" }, button("Download everything", () => take(() => user.export(), `${user.id}.personal`)), peft)));

  // A redraw would move the slider that the user is dragging.
  let dragging = false;

  const load = coalesce(async () => {
    const [layers, revisions] = await Promise.all([user.layers(), user.revisions()]);
    another.load(layers);
    peft.hidden = !layers.some((layer) => layer.head);
    list.replaceChildren(...layers.toReversed().map((layer) => row(layer, revisions)), h("li", { class: "layer base" },
      h("h2", {}, base), h("p", { class: "dim" }, "The base, shared by all users and never changed."),
      layers.length ? null : h("p", {}, "You have no layers yet.")));
  });

  /** @param {Layer} layer @param {Revision[]} revisions */
  function row(layer, revisions) {
    const own = revisions.filter((revision) => revision.layer === layer.name).reverse();
    const name = layerName(layer.name);
    return h("li", { class: `layer ${layer.head ? "" : "is-off"}` },
      h("h2", {}, name, " ", h("span", { class: "id dim" }, layer.head ? shortId(layer.head) : "the bare base")),
      weight(layer, name),
      h("div", { class: "two" },
        h("div", { class: "field" }, h("label", { for: `head-${layer.name}` }, "Live"), heads(layer, own)),
        h("div", { class: "field" }, h("label", { for: `scope-${layer.name}` }, "Attached"), scopes(layer))),
      layer.head ? h("div", { class: "row" }, button("Download for PEFT", () => take(() => user.exportPeft(layer.name), `${user.id}-${layer.name}.zip`), { class: "quiet", "aria-label": `Download ${name} for PEFT` })) : null);
  }

  /** @param {Layer} layer @param {string} name */
  function weight(layer, name) {
    const figure = h("output", { class: "number weight-figure", for: `weight-${layer.name}` }, layer.weight.toFixed(2));
    const slider = h("input", { type: "range", id: `weight-${layer.name}`, min: layer.weight < 0 ? -2 : 0, max: 2, step: 0.05, value: String(layer.weight), disabled: !layer.head });
    const usual = button("As learned", () => set(1), { class: "quiet", disabled: layer.weight === 1 || !layer.head, "aria-label": `Weight of ${name} as learned: 1` });
    slider.addEventListener("input", () => {
      figure.textContent = Number(slider.value).toFixed(2);
    });
    let rest = 0;
    // A key that is held down fires many times; only the final value is sent.
    slider.addEventListener("change", () => {
      clearTimeout(rest);
      rest = setTimeout(() => set(Number(slider.value)), SETTLE_MS);
    });
    /** @param {number} value */
    const set = async (value) => {
      dragging = true;
      if (await act(() => user.setWeight(layer.name, value), `${name} at ${value.toFixed(2)} from the next reply on.`)) {
        slider.value = String(value);
        figure.textContent = value.toFixed(2);
        usual.disabled = value === 1;
      }
      dragging = false;
    };
    return h("div", { class: "weight" }, h("label", { for: slider.id }, "Weight"), slider, figure, usual);
  }

  /** @param {Layer} layer @param {Revision[]} own newest first */
  function heads(layer, own) {
    const choice = h("select", { id: `head-${layer.name}` },
      own.map((each) => h("option", { value: each.id, selected: each.id === layer.head }, `${shortId(each.id)}, ${moment(each.at)}, ${each.verdict}`)),
      h("option", { value: "", selected: !layer.head }, "none: the bare base"));
    choice.addEventListener("change", () => act(() => user.rollback(layer.name, choice.value || null),
      choice.value ? `${layerName(layer.name)}: ${shortId(choice.value)} is live.` : `${layerName(layer.name)}: the bare base is live.`));
    return choice;
  }

  /** @param {Layer} layer */
  function scopes(layer) {
    const choice = h("select", { id: `scope-${layer.name}` },
      Object.entries(SCOPES).map(([value, text]) => h("option", { value, selected: value === layer.scope }, text)));
    choice.addEventListener("change", () => act(() => user.scope(layer.name, choice.value), `${layerName(layer.name)} is attached ${SCOPES[choice.value]}.`));
    return choice;
  }

  /** @param {() => Promise<Blob>} what @param {string} name */
  async function take(what, name) {
    notify.toast("Preparing the file.");
    await notify.attempt(async () => downloadFile(await what(), name), `${name} is in your downloads.`);
  }

  /** @param {() => Promise<any>} what @param {string} done @returns {Promise<boolean>} whether it was done */
  async function act(what, done) {
    const isDone = await notify.attempt(what, done);
    if (!isDone) load();
    return isDone;
  }

  return {
    element,
    title,
    shown: load,
    /** @param {string} about */
    changed: (about) => void (!dragging && ["stack", "learn", "forget"].includes(about) && load()),
  };
}
