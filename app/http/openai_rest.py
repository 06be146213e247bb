"""OpenAI's and Anthropic's ``/v1/models``, and OpenAI's ``/v1/embeddings``."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Annotated, Literal

from annotated_types import Len
from flask import Blueprint, Response, jsonify, request

from personalpeft import Runtime
from personalpeft_app.http import validation
from personalpeft_app.http.error_responses import InvalidParameter, UnknownModel
from personalpeft_app.http.models import Models
from personalpeft_app.http.validation import Body, Ignored, LongText

_MAX_TEXTS = 2048
_PAGE, _LONGEST_PAGE = 100, 1000


class EmbeddingBody(Body):
    """The body of ``/v1/embeddings``."""

    model: Annotated[str, Len(1, 256)]
    input: LongText | Annotated[list[LongText], Len(1, _MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    user: Ignored = None


def blueprint(runtime: Runtime, models: Models) -> Blueprint:
    routes = Blueprint("openai_rest", __name__)

    @routes.get("/v1/models")
    def list_models() -> Response:
        names, more = models.page(*_paging())
        data = [_model(*each) for each in names]
        ids = [each["id"] for each in data] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1]}
        return jsonify({"object": "list", "data": data, **ends, "has_more": more})

    @routes.get("/v1/models/<path:name>")
    def get_model(name: str) -> Response:
        if name == runtime.embedder:
            return jsonify(_model(name, 0))
        model = models.resolve(name)
        return jsonify(_model(model.name, models.created_at(model)))

    @routes.post("/v1/embeddings")
    def embeddings() -> Response:
        body = validation.read_body(EmbeddingBody)
        if body.model != runtime.embedder:
            raise UnknownModel(
                f"Texts become vectors by the model {runtime.embedder} here, and by no other."
            )
        texts = (body.input,) if isinstance(body.input, str) else tuple(body.input)
        found = runtime.embed(texts)
        data = [
            {
                "object": "embedding",
                "index": n,
                "embedding": vector.tolist()
                if body.encoding_format == "float"
                else base64.b64encode(vector.astype("<f4").tobytes()).decode(),
            }
            for n, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return jsonify({"object": "list", "data": data, "model": found.model, "usage": usage})

    return routes


def _paging() -> tuple[str | None, int]:
    """Return the name before a page and its length, for either client."""
    if "before_id" in request.args:
        raise InvalidParameter("before_id", "is not supported: pages go forward, by after")
    limit = request.args.get("limit", str(_PAGE))
    if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= _LONGEST_PAGE:
        raise InvalidParameter("limit", f"must be a whole number from 1 to {_LONGEST_PAGE}")
    return request.args.get("after", request.args.get("after_id")), int(limit)


def _model(name: str, since: int) -> dict[str, object]:
    """Return a model in the format of both."""
    openai = {"object": "model", "created": since, "owned_by": "personalpeft"}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(since, UTC).isoformat(),
    }
    return {"id": name, **openai, **anthropic}
