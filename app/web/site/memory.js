/** The memory view: rules, facts and all other feedback, each with its source. */

import { button, h, inlineText, textBlock } from "./dom.js";
import { confirmForget, confirmForgetUser } from "./forget.js";
import { coalesce } from "./coalesce.js";
import * as notify from "./notify.js";
import { keepDraft } from "./session.js";
import { day, excerpt, kindName, layerName, signalText } from "./format.js";

/** @typedef {import("./user.js").Item} Item */
/** @typedef {import("./user.js").SignalStatus} SignalStatus */

const PAGE = 30;
/** @type {Record<string, string>} */
const USES = {
  in_prompt: "in the prompt from the next reply on",
  pending: "waits for the next learn",
  learned: "learned",
  learned_not_live: "learned, not live",
  held_out: "held out, for the gate",
  no_capacity: "left out, since the layer is full",
  unused: "not used for training",
};

/**
 * @param {import("./user.js").User} user
 * @param {{ follow: (job: any) => Promise<any> }} learning
 * @param {(note: string) => void} leave leaves the page of a user who was erased, with a message
 */
export function memoryView(user, learning, leave) {
  const title = h("h1", { tabindex: "-1" }, "Memory");
  const field = h("input", { type: "text", id: "fact", maxlength: 2000, dir: "auto", autocomplete: "off", "aria-describedby": "fact-hint" });
  const kept = keepDraft(field, "fact");
  const form = h("form", { class: "field", onsubmit: remember },
    h("label", { for: "fact" }, "A fact about you"),
    h("div", { class: "row nowrap" }, field, h("button", { type: "submit", class: "go" }, "Remember")),
    h("p", { class: "hint", id: "fact-hint" }, "For example “My dog is called Biscuit.” It is added to the prompt of similar questions."));
  const prompt = h("textarea", { id: "teach-prompt", rows: 2, dir: "auto", maxlength: 100000 });
  const answer = h("textarea", { id: "teach-answer", rows: 3, dir: "auto", maxlength: 100000 });
  const skill = h("input", { type: "text", id: "teach-skill", maxlength: 32, pattern: "[a-z0-9][a-z0-9_\\-]*", autocomplete: "off", autocapitalize: "none", spellcheck: "false", "aria-describedby": "teach-hint" });
  const taught = [keepDraft(prompt, "teach.prompt"), keepDraft(answer, "teach.answer")];
  const show = h("details", { open: Boolean(prompt.value || answer.value) }, h("summary", {}, "Show an answer that you want"),
    h("form", { onsubmit: teach },
      h("div", { class: "field" }, h("label", { for: "teach-prompt" }, "Prompt"), prompt),
      h("div", { class: "field" }, h("label", { for: "teach-answer" }, "Wanted answer"), answer),
      h("div", { class: "field" }, h("label", { for: "teach-skill" }, "Skill"), skill,
        h("p", { class: "hint", id: "teach-hint" }, "Empty for your style. A short name, for example “email”, is a layer of its own.")),
      h("div", { class: "row" }, h("button", { type: "submit", class: "go" }, "Save the answer"))));
  const rules = part("Rules", "No rules yet. Add one below any reply.");
  const facts = part("Facts", "Nothing yet.");
  const rest = part("Other feedback", "Nothing yet. Correct or rate a reply.");
  const training = h("input", { type: "checkbox", id: "training", "aria-describedby": "training-hint" });
  training.addEventListener("change", () => notify.attempt(() => user.setTraining(training.checked),
    training.checked ? "New feedback is trained on." : "New feedback is not trained on."));
  const consent = h("div", { class: "part field" },
    h("label", { for: "training" }, training, " Train my layers on new feedback"),
    h("p", { class: "hint", id: "training-hint" }, "Switched off, rules and facts still act in the prompt. Earlier feedback stays as it is."));
  const everything = h("section", { class: "part", "aria-labelledby": "everything" }, h("h2", { id: "everything" }, "Everything"),
    h("p", { class: "hint" }, "Erases your conversations, feedback, layers, published copies and API keys on this server."),
    h("div", { class: "row" }, button("Forget everything …", () => confirmForgetUser(user, leave), { class: "do harm", "aria-haspopup": "dialog" })));
  const element = h("div", { class: "view" }, title,
    h("p", { class: "lead" }, "Your rules, facts and other feedback, each with its source. Switched off, it stays on record. Forgotten, it is erased, and so is every revision trained on it."),
    h("div", { class: "part" }, form, show), consent, rules.element, facts.element, rest.element, everything);
  let shown = PAGE;

  /** @param {Event} event */
  async function remember(event) {
    event.preventDefault();
    const text = field.value.trim();
    if (!text) return;
    if (await notify.attempt(() => user.remember(text), "Remembered.")) kept.clear();
  }

  /** @param {Event} event */
  async function teach(event) {
    event.preventDefault();
    const empty = [prompt, answer].find((each) => !each.value.trim());
    if (empty) return empty.focus();
    const isDone = await notify.attempt(() => user.teach(prompt.value.trim(), answer.value.trim(), skill.value || null),
      training.checked ? "Recorded. The next learn trains on it." : "Recorded. Nothing is trained on it.");
    if (isDone) taught.forEach((each) => each.clear());
    return undefined;
  }

  const load = coalesce(async () => {
    const [items, statuses, summary] = await Promise.all([user.items(), user.signalStatuses(), user.summary()]);
    training.checked = summary.training;
    const byId = new Map(statuses.map((status) => [status.signal.id, status]));
    const kinds = Map.groupBy(items, (item) => item.kind);
    rules.fill((kinds.get("rule") ?? []).toReversed().map((item) => itemRow(item, byId.get(item.id))));
    facts.fill((kinds.get("fact") ?? []).toReversed().map((item) => itemRow(item, byId.get(item.id))));
    const active = new Set(items.map((item) => item.id));
    const others = statuses.filter((status) => !active.has(status.signal.id)).reverse();
    const draw = () => {
      const rows = others.slice(0, shown).map(statusRow);
      if (others.length > shown) rows.push(h("li", { class: "thing" }, button("Show older", () => {
        shown += PAGE;
        draw();
      })));
      rest.fill(rows);
    };
    draw();
  });

  /** @param {Item} item @param {SignalStatus | undefined} status */
  function itemRow(item, status) {
    const text = textBlock(item.text, "words");
    const about = { "aria-label": `${item.kind}: ${excerpt(item.text, 60)}` };
    const tools = h("div", { class: "row", role: "group", ...about },
      button("Change", () => change(row, item), { class: "quiet" }),
      button("Switch off", () => notify.attempt(() => user.retractItem(item.id), "Switched off."), { class: "quiet" }),
      button("Forget …", () => confirmForget(user, learning, item.id, item.text), { class: "quiet harm" }));
    const row = h("li", { class: "thing" }, text, origin(status, item.at), tools);
    return row;
  }

  /** @param {SignalStatus} status */
  function statusRow(status) {
    const { signal } = status;
    const text = signalText(signal);
    const use = USES[status.use_code] ?? status.use;
    const where = status.layer && status.use_code !== "unused" ? `${layerName(status.layer)}: ${use}` : use;
    return h("li", { class: "thing" },
      h("p", { class: "thing-kind" }, h("span", {}, kindName(signal.kind)), " ", h("span", { class: "dim" }, where)),
      textBlock(excerpt(text, 400), "words"), origin(status, signal.at),
      h("div", { class: "row" }, button("Forget …", () => confirmForget(user, learning, signal.id, text), { class: "quiet harm", "aria-label": `Forget this ${kindName(signal.kind)}: ${excerpt(text, 60)}` })));
  }

  /**
   * The date, the source and the prompt of a signal.
   * @param {SignalStatus | undefined} status
   * @param {string} at
   */
  function origin(status, at) {
    const signal = status?.signal;
    const source = !signal || signal.source === "person" ? "From you" : `From ${signal.source}`;
    const consent = signal?.payload.trains === false ? ", never trained on" : "";
    const line = h("p", { class: "dim origin" }, `${source} on ${day(at)}${consent}`);
    if (signal?.turn) {
      user.turn(signal.turn).then((turn) => {
        const asked = turn?.messages.at(-1)?.content;
        if (asked) line.append(", about ", h("q", {}, inlineText(excerpt(asked, 80))));
      });
    } else if (signal?.payload.prompt) line.append(", about ", h("q", {}, inlineText(excerpt(signal.payload.prompt, 80))));
    return line;
  }

  /** @param {HTMLElement} row @param {Item} item */
  function change(row, item) {
    const field = h("textarea", { rows: 2, dir: "auto", maxlength: 2000, "aria-label": `The ${item.kind}, new text`, value: item.text });
    const typed = keepDraft(field, `item.${item.id}`);
    const leave = () => {
      typed.clear();
      field.remove();
      return load();
    };
    const save = async () => {
      const text = field.value.trim();
      if (text && text !== item.text && !(await notify.attempt(() => user.editItem(item.id, text), "Changed."))) return;
      await leave();
    };
    row.replaceChildren(field, h("div", { class: "row" }, button("Save", save, { class: "go" }), button("Cancel", leave)));
    field.focus();
  }

  return {
    element,
    title,
    shown: load,
    /** @param {string} about */
    // A redraw would discard the text that is being edited.
    changed: (about) => void (about !== "chat" && !element.querySelector(".thing textarea") && load()),
  };
}

/** @param {string} name @param {string} nothing */
function part(name, nothing) {
  const list = h("ul", { class: "things" });
  const number = h("span", { class: "dim number" });
  const element = h("section", { class: "part" }, h("h2", {}, name, " ", number), list);
  return {
    element,
    /** @param {HTMLElement[]} rows */
    fill(rows) {
      number.textContent = rows.length ? String(rows.length) : "";
      list.replaceChildren(...(rows.length ? rows : [h("li", { class: "empty" }, nothing)]));
    },
  };
}
