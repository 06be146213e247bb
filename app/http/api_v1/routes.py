"""The old name of ``blueprint``, for one release."""

from personalpeft.deprecation import warn_renamed
from personalpeft_app.http.api_v1.blueprint import ApiV1 as ApiV1

warn_renamed(__name__, "personalpeft_app.http.api_v1.blueprint")
