"""Implicit feedback: what a person does with a reply instead of rating it.

An app reports that a reply was copied. A chat knows that a reply was regenerated. This module
classifies messages that thank or contradict, by the phrases below. Each must be a clause of its own.
A contradiction begins a message. Thanks are the whole of it: "Thanks. It crashes now." is no praise.
A missed case costs nothing, a wrong one trains the wrong way.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Literal

IMPLICIT_RATINGS: Mapping[str, int] = {
    "copied": 1,
    "thanked": 1,
    "regenerated": -1,
    "contradicted": -1,
}
"""The kinds of implicit feedback, and the rating that each amounts to."""


def _normalize(text: str) -> str:
    """Return a text without case, symbols and repeated spaces."""
    text = unicodedata.normalize("NFC", text).replace("’", "'").casefold()
    kept = (c if unicodedata.category(c)[0] in "LMN" or c == "'" else " " for c in text)
    return " ".join("".join(kept).split())


def _phrases(text: str) -> frozenset[str]:
    return frozenset(_normalize(each) for each in re.split(r"[|\n]", text) if each.strip())


# Phrases of the languages that most people write to a model, without punctuation or case.
_THANKS = _phrases("""
    thanks for that|thanks for this|thanks for the help|thanks for your help|thank you for that
    thank you for this|thank you for the help|thank you for your help|thanks again|thanks
    thank you|thanks a lot|thanks so much|thank you so much|thank you very much|many thanks|thx
    danke|danke schön|danke dir|danke sehr|vielen dank|besten dank|herzlichen dank
    merci|merci beaucoup|merci bien|gracias|muchas gracias|mil gracias
    grazie|grazie mille|molte grazie|obrigado|obrigada|muito obrigado|muito obrigada
    moltes gràcies|gràcies|mulțumesc|mulțumesc mult|bedankt|dank je|dank je wel|dank u wel
    tack|tack så mycket|tusen tack|tak|mange tak|takk|tusen takk|mange takk|kiitos|kiitos paljon
    dziękuję|dziękuję bardzo|dzięki|děkuji|děkuju|díky|ďakujem|köszönöm|köszi|hvala|hvala lepa
    спасибо|спасибо большое|большое спасибо|благодарю|дякую|щиро дякую|благодаря|хвала
    ευχαριστώ|ευχαριστώ πολύ|teşekkürler|teşekkür ederim|çok teşekkürler|sağ ol
    תודה|תודה רבה|شكرا|شكرا جزيلا|شكرا لك|ممنون|متشکرم|خیلی ممنون|شکریہ
    धन्यवाद|बहुत धन्यवाद|शुक्रिया|ধন্যবাদ|நன்றி|ధన్యవాదాలు|ขอบคุณ|ขอบคุณครับ|ขอบคุณค่ะ
    cảm ơn|cảm ơn bạn|terima kasih|terima kasih banyak|salamat|maraming salamat|asante|asante sana
    谢谢|谢谢你|多谢|感谢|非常感谢|謝謝|謝謝你|多謝|感謝
    ありがとう|ありがとうございます|どうもありがとう|どうもありがとうございます
    감사합니다|고마워|고마워요|고맙습니다
""")
_CONTRADICTIONS = _phrases("""
    wrong|incorrect|not true|that is wrong|that's wrong|thats wrong|it's wrong
    that is not right|that's not right|that is not true|that's not true|that is incorrect
    that's incorrect|that is false|that's false|you are wrong|you're wrong|you are mistaken
    that is not what i asked|that's not what i asked|that is not what i meant
    that's not what i meant|that's not what i asked for|that is not what i asked for
    falsch|das ist falsch|das stimmt nicht|stimmt nicht|das ist nicht richtig
    das habe ich nicht gefragt
    c'est faux|faux|ce n'est pas vrai|ce n'est pas correct
    ce n'est pas ce que j'ai demandé|tu te trompes
    eso está mal|está mal|eso no es cierto|eso es incorrecto
    incorrecto|no es lo que pregunté|te equivocas
    è sbagliato|sbagliato|non è vero|non è corretto|non è quello che ho chiesto|ti sbagli
    está errado|isso está errado|errado|não é verdade|isso não está certo|não foi isso que perguntei
    dat klopt niet|klopt niet|dat is fout|fout|dat is niet waar|dat is niet wat ik vroeg
    det är fel|fel|det stämmer inte|det er feil|feil|det stemmer ikke|det er forkert|forkert
    väärin|se on väärin|ei pidä paikkaansa|to nieprawda|nieprawda|to jest źle|źle|to błąd|mylisz się
    to je špatně|špatně|to není pravda|ez nem igaz|ez rossz|nu e adevărat|greșit
    неправильно|это неправильно|неверно|это неверно|это не так|ты ошибаешься|вы ошибаетесь|неправда
    це неправильно|неправильно|це не так|λάθος|αυτό είναι λάθος|yanlış|bu yanlış|bu doğru değil
    זה לא נכון|לא נכון|خطأ|هذا خطأ|هذا غير صحيح|غير صحيح|اشتباه است|درست نیست
    गलत|यह गलत है|ये गलत है|यह सही नहीं है|ভুল|এটা ভুল|ผิด|ไม่ถูกต้อง|sai rồi|không đúng|salah|itu salah
    不对|这不对|错了|你错了|不正确|不是这样|不對|錯了|這不對|我问的不是这个
    違います|違う|間違っています|間違い|それは違います|틀렸어|틀렸습니다|아니에요 틀렸어요|그게 아니에요
""")
# A clause with one of these may precede a contradiction: "No, that is wrong".
_DENIALS = _phrases("""
    no|nope|nein|non|nee|nej|nei|ei|nie|ne|nem|nu|não|нет|ні|όχι|hayır|לא|لا|नहीं|không|tidak|不|いいえ|아니요
""")
# One of these may stand beside both: "Perfect, thanks", "Thanks, great".
_APPROVALS = _phrases("""
    great|perfect|nice|good|cool|wow|ok|okay|yes|super|toll|ja|oui|sí|sì|sim|да|так|是|はい|네
    parfait|perfecto|perfetto|perfeito|genial|prima|bra|отлично|好的|いいね|좋아요
""")
# The end of a clause, in the punctuation of any of these languages.
_CLAUSE_END = re.compile(r"[.,;:!?¡¿…\n。、，！？；।॥؟،؛()]+|\s[-–—]\s")


def classify_message(message: str, reply: str) -> Literal["thanked", "contradicted"] | None:
    """Return whether a message thanks for the reply before it or contradicts it, else None.

    An answer to a question of the reply never contradicts it.
    """
    clauses = [each for each in map(_normalize, _CLAUSE_END.split(message)) if each]
    # After thanks any other clause may object, in words that no list has in all languages.
    if not _THANKS.isdisjoint(clauses) and set(clauses) <= _THANKS | _APPROVALS:
        return "thanked"
    asks = reply.rstrip().endswith(("?", "？", "؟", ";"))
    opinion = next((each for each in clauses if each not in _DENIALS | _APPROVALS), None)
    return "contradicted" if opinion in _CONTRADICTIONS and not asks else None
