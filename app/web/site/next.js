/**
 * What the next thing that somebody writes plainly says of the reply before it: thanks for it, or contradicts it. Rather nothing
 * than wrong, and in English alone.
 */

const THANKS = /^(?:(?:great|perfect|nice|good|cool|wow|okay|ok|yes)[,!. ]+)*(?:many thanks|thanks|thank you|thx)\b/i;
const AGAINST = new RegExp([
  "^(?:no[,.! ]+)?(?:that|this|it)(?:[’']s| is| was) (?:all )?not what i (?:asked|meant|said)\\b",
  "^(?:no[,.! ]+)?(?:that|this|it)(?:[’']s| is| was) (?:all )?(?:wrong|false|incorrect|not (?:right|true|correct))(?= because\\b|[.,;!]|$)",
  "^(?:no[,.! ]+)?(?:you are|you[’']re|you were) (?:wrong|mistaken)(?= because\\b|[.,;!]|$)",
  "^(?:no[,.! ]+)?(?:wrong|incorrect|not true)(?=[.,;!]|$)",
  "^no[,.! ]+i (?:asked|meant|said)\\b",
].join("|"), "i");

/**
 * @param {string} text
 * @param {string} reply the one before it
 * @returns {"thanked" | "contradicted" | null}
 */
export function opinion(text, reply) {
  const said = text.trim();
  if (THANKS.test(said)) return /\b(?:but|however|though)\b/i.test(said) ? null : "thanked";
  // Who was asked something answers that.
  return AGAINST.test(said) && !reply.trimEnd().endsWith("?") ? "contradicted" : null;
}
