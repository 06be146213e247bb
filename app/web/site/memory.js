/** The room of what it knows of the person: rules, facts and everything else that was said, each with where it is from. */

import { button, h, said, written } from "./dom.js";
import { askToForget } from "./forget.js";
import { coalesce } from "./coalesce.js";
import * as notify from "./notify.js";
import { draft } from "./session.js";
import { day, excerpt, kindName, layerName, saidBy } from "./format.js";

/** @typedef {import("./user.js").Item} Item */
/** @typedef {import("./user.js").Account} Account */

const PAGE = 30;
/** @type {Record<string, string>} */
const USES = {
  "acts now": "acts from the next reply on",
  "to be learned": "waits to be learned",
  "learned": "learned",
  "learned, not live": "learned, not live now",
  "held back to judge by": "held back to judge what is learned",
  "left out: the layer is full": "left out, since the layer is full",
  "only kept": "only kept",
};

/**
 * @param {import("./user.js").Person} person
 * @param {{ follow: (job: any) => Promise<any> }} learning
 */
export function memoryView(person, learning) {
  const title = h("h1", { tabindex: "-1" }, "Memory");
  const kept = draft("fact");
  const field = h("input", { type: "text", id: "fact", maxlength: 2000, dir: "auto", autocomplete: "off", value: kept.read(), "aria-describedby": "fact-hint" });
  field.addEventListener("input", () => kept.write(field.value));
  const form = h("form", { class: "field", onsubmit: remember },
    h("label", { for: "fact" }, "Tell it a fact about you"),
    h("div", { class: "row nowrap" }, field, h("button", { type: "submit", class: "go" }, "Remember")),
    h("p", { class: "hint", id: "fact-hint" }, "As “My dog is called Biscuit.” It is looked up when a question is near it."));
  const asked = draft("teach.prompt");
  const answered = draft("teach.answer");
  const prompt = h("textarea", { id: "teach-prompt", rows: 2, dir: "auto", maxlength: 100000, value: asked.read() });
  const answer = h("textarea", { id: "teach-answer", rows: 3, dir: "auto", maxlength: 100000, value: answered.read() });
  const skill = h("input", { type: "text", id: "teach-skill", maxlength: 32, pattern: "[a-z0-9][a-z0-9_\\-]*", autocomplete: "off", autocapitalize: "none", spellcheck: "false", "aria-describedby": "teach-hint" });
  prompt.addEventListener("input", () => asked.write(prompt.value));
  answer.addEventListener("input", () => answered.write(answer.value));
  const show = h("details", { open: Boolean(asked.read() || answered.read()) }, h("summary", {}, "Show it how you want something answered"),
    h("form", { onsubmit: teach },
      h("div", { class: "field" }, h("label", { for: "teach-prompt" }, "When somebody asks"), prompt),
      h("div", { class: "field" }, h("label", { for: "teach-answer" }, "The answer that you want"), answer),
      h("div", { class: "field" }, h("label", { for: "teach-skill" }, "Skill"), skill,
        h("p", { class: "hint", id: "teach-hint" }, "Empty: it belongs to your style. A short name, as “email”, makes a layer of its own.")),
      h("div", { class: "row" }, h("button", { type: "submit", class: "go" }, "Keep the answer"))));
  const rules = part("Rules", "What you said it should always do. Say one below any reply, with its speech mark.");
  const facts = part("Facts", "Nothing yet.");
  const rest = part("Corrections and everything else", "Nothing yet. Correct a reply, or say whether it was good.");
  const element = h("div", { class: "room" }, title,
    h("p", { class: "lead" }, "All that it goes by, and where each thing is from. What you switch off stays on record; what you forget is destroyed, with everything that was built from it."),
    h("div", { class: "part" }, form, show), rules.element, facts.element, rest.element);
  let shown = PAGE;

  /** @param {Event} event */
  async function remember(event) {
    event.preventDefault();
    const text = field.value.trim();
    if (!text) return;
    try {
      await person.remember(text, {});
      field.value = "";
      kept.write("");
      notify.toast("Remembered.");
    } catch (error) {
      notify.error(error);
    }
  }

  /** @param {Event} event */
  async function teach(event) {
    event.preventDefault();
    const empty = [prompt, answer].find((each) => !each.value.trim());
    if (empty) return empty.focus();
    try {
      await person.teach(prompt.value.trim(), answer.value.trim(), skill.value || null);
      for (const each of [prompt, answer]) each.value = "";
      asked.write("");
      answered.write("");
      notify.toast("Kept. The next learn learns from it.");
    } catch (error) {
      notify.error(error);
    }
    return undefined;
  }

  const load = coalesce(async () => {
    try {
      const [items, accounts] = await Promise.all([person.items(), person.lessons()]);
      const byId = new Map(accounts.map((account) => [account.signal.id, account]));
      const kinds = Map.groupBy(items, (item) => item.kind);
      rules.fill((kinds.get("rule") ?? []).toReversed().map((item) => itemRow(item, byId.get(item.id))));
      facts.fill((kinds.get("fact") ?? []).toReversed().map((item) => itemRow(item, byId.get(item.id))));
      const acting = new Set(items.map((item) => item.id));
      const others = accounts.filter((account) => !acting.has(account.signal.id)).reverse();
      const draw = () => {
        const rows = others.slice(0, shown).map(accountRow);
        if (others.length > shown) rows.push(h("li", { class: "thing" }, button("Show older", () => {
          shown += PAGE;
          draw();
        })));
        rest.fill(rows);
      };
      draw();
    } catch (error) {
      notify.error(error);
    }
  });

  /** @param {Item} item @param {Account | undefined} account */
  function itemRow(item, account) {
    const text = written(item.text, "words");
    const about = { "aria-label": `${item.kind}: ${excerpt(item.text, 60)}` };
    const tools = h("div", { class: "row", role: "group", ...about },
      button("Change", () => change(row, item), { class: "quiet" }),
      button("Switch off", () => act(() => person.removeItem(item.id), "Switched off."), { class: "quiet" }),
      button("Forget …", () => askToForget(person, learning, item.id, item.text), { class: "quiet harm" }));
    const row = h("li", { class: "thing" }, text, origin(account, item.at), tools);
    return row;
  }

  /** @param {Account} account */
  function accountRow(account) {
    const { signal } = account;
    const text = saidBy(signal);
    const use = USES[account.use] ?? account.use;
    const where = account.layer && account.use !== "only kept" ? `${layerName(account.layer)}: ${use}` : use;
    return h("li", { class: "thing" },
      h("p", { class: "thing-kind" }, h("span", {}, kindName(signal.kind)), " ", h("span", { class: "dim" }, where)),
      written(excerpt(text, 400), "words"), origin(account, signal.at),
      h("div", { class: "row" }, button("Forget …", () => askToForget(person, learning, signal.id, text), { class: "quiet harm", "aria-label": `Forget this ${kindName(signal.kind)}: ${excerpt(text, 60)}` })));
  }

  /**
   * When it was said, and about what.
   * @param {Account | undefined} account
   * @param {string} at
   */
  function origin(account, at) {
    const signal = account?.signal;
    const who = !signal || signal.source === "person" ? "You said so" : `From ${signal.source}`;
    const line = h("p", { class: "dim origin" }, `${who} on ${day(at)}`);
    if (signal?.turn) {
      person.turn(signal.turn).then((turn) => {
        const asked = turn?.messages.at(-1)?.content;
        if (asked) line.append(", about ", h("q", {}, said(excerpt(asked, 80))));
      });
    } else if (signal?.payload.prompt) line.append(", about ", h("q", {}, said(excerpt(signal.payload.prompt, 80))));
    return line;
  }

  /** @param {HTMLElement} row @param {Item} item */
  function change(row, item) {
    const typed = draft(`item.${item.id}`);
    const field = h("textarea", { rows: 2, dir: "auto", maxlength: 2000, "aria-label": `The ${item.kind}, said anew`, value: typed.read() || item.text });
    field.addEventListener("input", () => typed.write(field.value));
    const leave = () => {
      typed.write("");
      field.remove();
      return load();
    };
    const save = async () => {
      const text = field.value.trim();
      if (text && text !== item.text && !(await act(() => person.editItem(item.id, text), "Changed."))) return;
      await leave();
    };
    row.replaceChildren(field, h("div", { class: "row" }, button("Keep", save, { class: "go" }), button("Cancel", leave)));
    field.focus();
  }

  /** @param {() => Promise<void>} what @param {string} done @returns {Promise<boolean>} whether it was done */
  async function act(what, done) {
    try {
      await what();
      notify.toast(done);
      return true;
    } catch (error) {
      notify.error(error);
      return false;
    }
  }

  return {
    element,
    title,
    shown: load,
    /** @param {string} about */
    // What is being written anew is not drawn over.
    changed: (about) => void (about !== "talked" && !element.querySelector(".thing textarea") && load()),
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
