/**
 * A prompt and its reply, with the controls for feedback. The same element is shown while the reply streams and afterwards. Drafts
 * in it stay until they are sent or cancelled.
 */

import { marked } from "./diff.js";
import { button, h, icon, inlineText, textBlock } from "./dom.js";
import { render } from "./markdown.js";
import { keepDraft } from "./session.js";
import * as notify from "./notify.js";
import { openWhy } from "./why.js";

/** @typedef {import("./conversations.js").Exchange} Exchange */
/** @typedef {import("./user.js").User} User */

export class ExchangeView {
  /**
   * @param {User} user
   * @param {Exchange} exchange
   * @param {{ regenerate: (view: ExchangeView) => void }} chat
   */
  constructor(user, exchange, { regenerate }) {
    this.user = user;
    this.exchange = exchange;
    /** @type {[string, string, string, () => unknown][]} the key, the icon, the text and the act of each button */
    this.acts = [
      ["+", "good", "Good", () => this.rate(1)],
      ["-", "bad", "Not good", () => this.rate(-1)],
      ["e", "edit", "Correct it", () => this.edit()],
      ["f", "rule", "Add a rule for all replies", () => this.comment()],
      ["c", "copy", "Copy", () => this.copy()],
      ["r", "again", "Regenerate", () => this.isLast && regenerate(this)],
      ["w", "why", "Why this answer?", () => openWhy(user, this.turn)],
    ];
    this.writing = false;
    this.isLast = false;
    this.question = h("h2", { class: "question" }, h("span", { class: "written", dir: "auto" }, exchange.prompt));
    this.body = h("div", { class: "body" });
    this.margin = h("div", { class: "margin" });
    this.tools = h("div", { class: "tools", role: "toolbar", "aria-label": "About this reply" });
    this.element = h("article", { class: "exchange", tabindex: "0", onkeydown: (/** @type {KeyboardEvent} */ event) => this.pressed(event) },
      this.question, this.body, this.margin, this.tools);
    this.show();
  }

  /** Redraws the exchange. */
  show() {
    const { exchange } = this;
    this.element.setAttribute("aria-label", `You asked: ${exchange.prompt.slice(0, 120)}`);
    this.element.setAttribute("aria-busy", String(this.writing));
    if (exchange.edited !== null) this.body.replaceChildren(marked(exchange.reply, exchange.edited));
    else if (exchange.reply || !exchange.turn) this.body.replaceChildren(this.text = reply(exchange.reply));
    else this.body.replaceChildren(h("p", { class: "dim" }, "The reply is empty."));
    this.marks();
    this.tools.replaceChildren(...(exchange.turn ? this.buttons() : []));
  }

  /**
   * Redraws the text alone, since this runs many times a second.
   * @param {string} text the reply so far
   */
  grow(text) {
    this.exchange.reply = text;
    if (this.text) render(this.text, text);
  }

  /** Redraws the margin: the state and the feedback. */
  marks() {
    const { exchange } = this;
    const lines = [];
    if (this.writing) lines.push(h("p", { class: "dim" }, exchange.reply ? "writing …" : "thinking …"));
    if (exchange.stopped) lines.push(h("p", { class: "dim" }, "stopped"));
    if (exchange.rating) lines.push(h("p", { class: "yours" }, exchange.rating > 0 ? "Rated good" : "Rated not good"));
    if (exchange.edited !== null) lines.push(h("p", { class: "yours" }, "Corrected by you"), this.switcher());
    lines.push(...exchange.comments.map((text) => h("p", { class: "yours" }, "Rule: ", inlineText(text))));
    this.margin.replaceChildren(...lines);
  }

  /** Returns the button that switches between the original reply and the marked edit. */
  switcher() {
    let former = false;
    const press = button("Show the original", () => {
      former = !former;
      const { reply: original, edited } = this.exchange;
      this.body.replaceChildren(former ? reply(original) : marked(original, edited ?? original));
      press.textContent = former ? "Show the correction" : "Show the original";
    }, { class: "link" });
    return press;
  }

  buttons() {
    const { rating } = this.exchange;
    /** @type {Record<string, Record<string, string>>} */
    const props = { good: { "aria-pressed": String(rating > 0) }, bad: { "aria-pressed": String(rating < 0) } };
    return this.acts.filter(([, shape]) => shape !== "again" || this.isLast)
      .map(([, shape, text, act]) => icon(shape, text, act, props[shape]));
  }

  /** @returns {string} */
  get turn() {
    return /** @type {string} */ (this.exchange.turn);
  }

  /** @param {KeyboardEvent} event */
  pressed(event) {
    // Only if the reply itself has the focus, so that typing in a field does nothing else.
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey || !this.exchange.turn) return;
    const act = this.acts.find(([key]) => key === event.key)?.[3];
    const aside = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (aside) {
      event.preventDefault();
      /** @type {HTMLElement | null} */ (this.element[/** @type {"nextElementSibling"} */ (aside)])?.focus();
    } else if (act) {
      event.preventDefault();
      act();
    }
  }

  /** @param {1 | -1} rating */
  async rate(rating) {
    if (this.exchange.rating === rating) return notify.announce("That rating is recorded already.");
    await notify.attempt(async () => {
      await this.user.feedback(this.turn, { rating });
      this.exchange.rating = rating;
      this.show();
      notify.announce(rating > 0 ? "Recorded: good." : "Recorded: not good.");
    });
    return undefined;
  }

  async copy() {
    const text = this.exchange.edited ?? this.exchange.reply;
    try {
      await copyText(text);
      notify.toast("Copied.");
      this.user.recordImplicitFeedback(this.turn, "copied");
    } catch {
      notify.toast("This browser does not let the page copy; select the text and copy it.");
    }
  }

  /** Opens the reply in a text field, in its place. */
  edit() {
    if (this.body.querySelector("textarea")) return;
    const { exchange } = this;
    this.form({
      place: `edit.${this.turn}`, label: "The reply as it should have been", text: exchange.edited ?? exchange.reply,
      keep: "Save correction", inPlace: true,
      save: async (text) => {
        await this.user.feedback(this.turn, { edit: text });
        exchange.edited = text;
        notify.toast("Recorded. The next learn trains on it.");
      },
    });
  }

  /** Opens a field for a rule, below the reply. */
  comment() {
    if (this.body.querySelector("textarea")) return;
    this.form({
      place: `rule.${this.turn}`, label: "A rule for all replies", text: "", keep: "Save rule", inPlace: false,
      save: async (text) => {
        await this.user.feedback(this.turn, { comment: text });
        this.exchange.comments.push(text);
        notify.toast("Recorded. It is in every prompt from the next reply on.");
      },
    });
  }

  /** @param {{ place: string, label: string, text: string, keep: string, inPlace: boolean, save: (text: string) => Promise<void> }} what */
  form({ place, label, text, keep, inPlace, save }) {
    const field = h("textarea", { class: "editing", "aria-label": label, dir: "auto", rows: 2, value: text });
    const kept = keepDraft(field, place);
    const leave = () => {
      this.show();
      this.element.focus();
    };
    const done = async () => {
      const now = field.value.trim();
      if (!now || now === text) return leave();
      save_.disabled = true;
      if (await notify.attempt(() => save(now))) {
        kept.clear();
        leave();
      } else save_.disabled = false;
      return undefined;
    };
    const save_ = button(keep, done, { class: "go" });
    const drop = button("Cancel", () => {
      kept.clear();
      leave();
    });
    field.addEventListener("input", () => fit(field));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const form = h("div", { class: "inline-form" }, h("p", { class: "form-label", "aria-hidden": "true" }, label), field, h("div", { class: "row" }, save_, drop));
    if (inPlace) this.body.replaceChildren(form);
    else this.body.append(form);
    this.tools.replaceChildren();
    fit(field);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/**
 * Renders the text of a reply.
 * @param {string} text
 */
export const reply = (text) => render(textBlock("", "reply"), text);

/**
 * Fits the height of a field to its text.
 * @param {HTMLTextAreaElement} field
 */
export function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** @param {string} text */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers offer no clipboard to pages loaded over plain HTTP from another machine.
  const field = h("textarea", { class: "unseen", value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("no clipboard");
  return undefined;
}
