/**
 * What is being learned now, and the button that begins it; at the side of every room. Invariants: a learn goes on in the server
 * whatever becomes of this page, which finds it again when it is loaded anew; what another program learns is shown while it
 * does, and can be stopped only there.
 */

import { button, h, said } from "./dom.js";
import { coalesce } from "./coalesce.js";
import { headline } from "./report.js";
import * as notify from "./notify.js";
import { count, layerName, percent } from "./format.js";

/** @typedef {import("./user.js").Job} Job */
/** @typedef {import("./user.js").Learning} Learning */

// Milliseconds between two looks at what others learn: while they do, while they do not, and when nobody answers.
const BEAT = 1000;
const REST = 3000;
const TROUBLE = 15000;

/**
 * @param {import("./user.js").Person} person
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
  // How many jobs this page has followed: an answer from before the last of them says nothing any more.
  let followed = 0;
  /** @type {Learning | null} what another program learns */
  let elsewhere = null;

  function draw() {
    bar.hidden = !job && !elsewhere;
    press.textContent = job ? "Cancel" : "Learn";
    press.hidden = !job && Boolean(elsewhere);
    press.disabled = press.hidden || job?.state === "stopping";
    if (elsewhere && !job) {
      text.replaceChildren(said(whatIsLearned(elsewhere)), h("span", { class: "dim block" }, "in another program"));
      bar.value = elsewhere.steps ? elsewhere.step / elsewhere.steps : 0;
    }
    if (!job) return;
    // A stage that has only begun says nothing of how long it takes.
    const done = job.progress ? ` ${percent(job.progress)}` : "";
    text.replaceChildren(job.state === "stopping" ? "Stopping after this step …" : said(`${job.stage || "Beginning"}${done}`));
    bar.value = job.progress;
  }

  const look = coalesce(async () => {
    if (job || elsewhere) return;
    try {
      const pending = await person.pending();
      if (!job && !elsewhere) text.textContent = waiting(pending);
    } catch (error) {
      text.textContent = "What there is to learn is not known now.";
      notify.error(error);
    }
  });

  async function begin() {
    try {
      await follow(await person.learn());
    } catch (error) {
      notify.error(error);
    }
  }

  async function cancel() {
    if (!job) return;
    try {
      await person.cancel(job.id);
    } catch (error) {
      notify.error(error);
    }
  }

  /** @param {Job} begun @returns {Promise<Job>} as it is when it is over */
  async function follow(begun) {
    // Found by itself before the answer to who began it was here.
    if (job?.id === begun.id) return begun;
    job = begun;
    elsewhere = null;
    followed += 1;
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
    if (!over.ended) notify.toast("The server went away in the middle of it. The next learn goes on from there.");
    else if (over.error && over.state !== "cancelled") notify.toast(`${over.error.message} ${over.error.hint}`.trim());
    else if (over.state === "cancelled") notify.toast("Stopped. The next learn goes on from there.");
    else if (over.report) notify.toast([over.report, ...over.report.above].map(headline).join(". ") + ".");
    person.changed(over.kind === "forget" ? "forgotten" : "learned");
  }

  async function glimpse() {
    const at = followed;
    const now = await person.learning();
    // What this server does for another page can be followed from here too.
    const own = now && !elsewhere ? await person.running() : null;
    if (job || followed !== at) return;
    if (own) return void (await follow(own));
    const before = elsewhere;
    elsewhere = now;
    draw();
    if (before && before.since !== now?.since) await endedElsewhere(before);
  }

  /** @param {Learning} before */
  async function endedElsewhere(before) {
    try {
      const { reports } = await person.digest(before.since);
      if (reports.length) notify.toast(`${reports.map(headline).join(". ")}.`);
    } finally {
      person.changed("learned");
    }
  }

  async function watch() {
    for (;;) {
      let rest = REST;
      try {
        if (!job) await glimpse();
        if (elsewhere) rest = BEAT;
      } catch {
        // The next thing that is asked for says what is wrong; who only looks on keeps silent.
        rest = TROUBLE;
      }
      await new Promise((done) => setTimeout(done, rest));
      if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    }
  }

  person.addEventListener("changed", look);
  look();
  person.running().then(async (found) => {
    if (found && !job) await follow(found);
  }).catch(notify.error);
  watch();
  return { begin, follow };
}

/** @param {Learning} learning */
function whatIsLearned({ layer, stage, step, steps }) {
  const part = stage === "Practising" ? "round" : "step";
  const what = stage === "Judging" || !steps ? stage.toLowerCase() || "beginning" : `${part} ${step} of ${steps}`;
  return layer ? `${layerName(layer)}: ${what}` : "Something is being learned";
}

/** @param {{ news: { kind: string, layer: string }[], too_few: Record<string, number> }} pending */
export function waiting(pending) {
  const lessons = pending.news.filter((news) => news.kind === "lesson").length;
  if (lessons) return `${count(lessons, "thing")} to learn from`;
  if (pending.news.some((news) => news.kind === "begun")) return "A learn was begun and can go on";
  if (pending.news.some((news) => news.kind === "taken back")) return "Something that was learned was taken back";
  if (pending.news.length) return "Something it stands on has changed";
  const few = Object.values(pending.too_few).reduce((sum, number) => sum + number, 0);
  if (few) return `${count(few, "correction")} so far; a first learn takes a few more`;
  return "Nothing new to learn";
}
