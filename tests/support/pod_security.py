"""The level `restricted` of Kubernetes' Pod Security Standards (kubernetes.io,
concepts/security).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def pods_in(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod spec of every object that makes pods."""
    for item in objects:
        spec = item.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec and "containers" in spec["template"].get("spec", {}):
            yield f"{item['kind']} {item['metadata']['name']}", spec["template"]["spec"]


def violations(pod: dict[str, Any]) -> list[str]:
    """What the level refuses of a pod; its operating system is not named, so all of it applies."""
    context = pod.get("securityContext", {})
    found = [f"{name}: true" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    found += [
        f"volume {volume['name']}"
        for volume in pod.get("volumes", [])
        if set(volume) - {"name"} - VOLUMES
    ]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        merged = {**context, **own}
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities.drop": "ALL" in own.get("capabilities", {}).get("drop", []),
            "capabilities.add": set(own.get("capabilities", {}).get("add", []))
            <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": merged.get("runAsNonRoot") is True,
            "runAsUser": merged.get("runAsUser") != 0,
            "seccompProfile": merged.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
            "procMount": own.get("procMount", "Default") == "Default",
        }
        found += [f"{container['name']}: {name}" for name, right in checks.items() if not right]
    return found
