"""The old name of ``blueprint``, for one release."""

import warnings

from personalpeft_app.http.api_v1.blueprint import ApiV1

__all__ = ["ApiV1"]

warnings.warn(
    f"{__name__} is now called blueprint; the old name goes with the next release.",
    DeprecationWarning,
    stacklevel=2,
)
