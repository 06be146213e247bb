/**
 * What the next thing that somebody writes plainly says of the reply before it: thanks for it, or contradicts it. Rather nothing
 * than wrong, and in English alone: it has to be said at the beginning and by itself.
 */

const THANKS = /^(?:(?:great|perfect|nice|good|cool|wow|okay|ok|yes)[,!. ]+)*(?:many thanks|thanks|thank you|thx)(?: (?:so much|very much|a lot|again|for (?:that|this|your help|the help)))?(?=[.,;!]|$)/i;
const TAKEN_BACK = /\b(?:but|however|though|wrong|incorrect|false|not|nothing)\b|n[’']t\b/i;
const AGAINST = new RegExp([
  "^(?:no[,.! ]+)?(?:that|this|it)(?:[’']s| is| was) (?:all )?not what i (?:asked|meant|said)(?: for)?(?=[.,;!]|$)",
  "^(?:no[,.! ]+)?(?:that|it)(?:[’']s| is| was) (?:all )?(?:wrong|false|incorrect|not (?:right|true|correct))(?=[.,;!]|$)",
  "^(?:no[,.! ]+)?(?:you are|you[’']re|you were) (?:wrong|mistaken)(?=[.,;!]|$)",
  "^(?:no[,.! ]+)?(?:wrong|incorrect|not true)(?=[.,;!]|$)",
  "^no[,.!] ?i (?:asked|meant)\\b",
].join("|"), "i");

/**
 * @param {string} text
 * @param {string} reply the one before it
 * @returns {"thanked" | "contradicted" | null}
 */
export function classify(text, reply) {
  const said = text.trim();
  if (THANKS.test(said)) return TAKEN_BACK.test(said) ? null : "thanked";
  // Who was asked something answers that.
  return AGAINST.test(said) && !reply.trimEnd().endsWith("?") ? "contradicted" : null;
}
