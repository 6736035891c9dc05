"""Variables that Kubernetes puts into every pod for each service beside it, named after the service: for one that is
called penstock, or penstock-something, they begin like ours.

https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
"""

from __future__ import annotations

import re

_NAME = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")


def is_service_link(variable: str, value: str) -> bool:
    """Most are told by their names; PENSTOCK_HTTP_PORT, which is a setting, too, by its value."""
    return bool(_NAME.fullmatch(variable) or (variable.endswith("_PORT") and _ADDRESS.fullmatch(value)))
