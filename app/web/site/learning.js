/**
 * What is being learned now, and the button that begins it; at the side of every room. Invariant: a learn goes on in the server
 * whatever becomes of this page, which finds it again when it is loaded anew.
 */

import { button, h, said } from "./dom.js";
import { inTurn } from "./inturn.js";
import { headline } from "./report.js";
import { complain, tell } from "./say.js";
import { count, percent } from "./words.js";

/** @typedef {import("./person.js").Job} Job */

/**
 * @param {import("./person.js").Person} person
 * @param {HTMLElement} place
 */
export function learningStrip(person, place) {
  const text = h("p", { class: "learning-text" });
  const bar = h("progress", { max: 1, value: 0, "aria-label": "How far the learn is", hidden: true });
  const press = button("Learn", () => (job ? cancel() : begin()), { id: "learn" });
  place.replaceChildren(text, bar, press);
  place.hidden = false;

  /** @type {Job | null} */
  let job = null;

  function draw() {
    bar.hidden = !job;
    press.textContent = job ? "Cancel" : "Learn";
    press.disabled = job?.state === "stopping";
    if (!job) return;
    // A stage that has only begun says nothing of how long it takes.
    const done = job.progress ? ` ${percent(job.progress)}` : "";
    text.replaceChildren(job.state === "stopping" ? "Stopping after this step …" : said(`${job.stage || "Beginning"}${done}`));
    bar.value = job.progress;
  }

  const look = inTurn(async () => {
    if (job) return;
    try {
      const pending = await person.pending();
      if (!job) text.textContent = waiting(pending);
    } catch (error) {
      text.textContent = "What there is to learn is not known now.";
      complain(error);
    }
  });

  async function begin() {
    try {
      await follow(await person.learn());
    } catch (error) {
      complain(error);
    }
  }

  async function cancel() {
    if (!job) return;
    try {
      await person.cancel(job.id);
    } catch (error) {
      complain(error);
    }
  }

  /** @param {Job} begun @returns {Promise<Job>} as it is when it is over */
  async function follow(begun) {
    job = begun;
    draw();
    let now = begun;
    try {
      for await (now of person.follow(begun.id)) {
        job = now;
        draw();
      }
    } finally {
      job = null;
      draw();
    }
    ended(now);
    return now;
  }

  /** @param {Job} over */
  function ended(over) {
    if (!over.ended) tell("The server went away in the middle of it. The next learn goes on from there.");
    else if (over.error && over.state !== "cancelled") tell(`${over.error.message} ${over.error.hint}`.trim());
    else if (over.state === "cancelled") tell("Stopped. The next learn goes on from there.");
    else if (over.report) tell([over.report, ...over.report.above].map(headline).join(". ") + ".");
    person.changed(over.kind === "forget" ? "forgotten" : "learned");
  }

  person.addEventListener("changed", look);
  look();
  person.running().then(async (found) => {
    if (found && !job) await follow(found);
  }).catch(complain);
  return { begin, follow };
}

/** @param {{ news: { kind: string, layer: string }[], too_few: Record<string, number> }} pending */
export function waiting(pending) {
  const lessons = pending.news.filter((news) => news.kind === "lesson").length;
  if (lessons) return `${count(lessons, "thing")} to learn from`;
  if (pending.news.some((news) => news.kind === "begun")) return "A learn was begun and can go on";
  if (pending.news.length) return "Something it stands on has changed";
  const few = Object.values(pending.too_few).reduce((sum, number) => sum + number, 0);
  if (few) return `${count(few, "correction")} so far; a first learn takes a few more`;
  return "Nothing new to learn";
}
