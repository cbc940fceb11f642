"""What a build of this engine raises."""

from __future__ import annotations


class NotExportable(Exception):
    """The ahead-of-time engine cannot serve this model as eager does; the message is the reason, for the report."""
