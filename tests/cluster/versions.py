"""The Kubernetes versions whose schemas everything must fit: oldest, one in the middle, newest."""

from __future__ import annotations

import kubernetes_validate

KUBERNETES_VERSIONS = ["1.30", "1.33", kubernetes_validate.latest_version()]
