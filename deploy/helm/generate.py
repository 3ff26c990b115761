"""Templates of the Helm chart, made from the manifests of `deploy/kubernetes`: their text, with
values in place of some lines.

`docs/site/generated.py` writes them; a test compares what Helm renders with what kustomize makes,
object by object. Only `values.yaml`, `values.schema.json`, the helpers, the ConfigMaps and the
notes are written by hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ft_service import __version__

KUBERNETES = Path(__file__).parents[1] / "kubernetes"
CHART = "deploy/helm/ft-service"
VALUES = "deploy/helm/values"
NOTICE = "{{- /* Made from deploy/kubernetes/%s by `make docs`. */}}\n"

Edits = tuple[tuple[str, str], ...]
"""Text of the manifest → text of the template. Each must occur."""


@dataclass(frozen=True)
class Template:
    """A template of the chart, from one manifest."""

    manifest: str
    """Path below `deploy/kubernetes`."""
    edits: Edits = ()
    when: str = ""
    """Condition of the template; empty: always."""
    labelled: bool = True
    """Whether the kustomization gives the objects its common labels."""
    per_namespace: bool = False
    """Whether further namespaces of workers get the objects too."""


_SECURITY = """\
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: { type: RuntimeDefault }
"""
_BACKUP_SECURITY = "".join(f"    {line}" for line in _SECURITY.splitlines(keepends=True))
_CHECKSUM = """\
        checksum/config: {{ list (include "ft.config" .) (include "ft.podProfile" .) | toJson | sha256sum }}
"""
_STORAGE_SECRET = """\
            {{- if .Values.storage }}
            - secretRef: { name: ft-storage, optional: true }
            {{- end }}
"""
_HOME = """\
          {{- if .Values.storage }}
          emptyDir: { sizeLimit: {{ .Values.scratchSize }} }
          {{- else }}
          persistentVolumeClaim: { claimName: ft-home }
          {{- end }}
"""
_PROFILE_MOUNT = """\
            - { name: profile, mountPath: /etc/ft, readOnly: true }
"""
"""A mount of the container that the init container has not."""
_PROFILE_VOLUME = """\
        - name: profile
          configMap: { name: ft-pod-profile }
"""


def _block(path: str, indent: int) -> str:
    """Return a value as YAML below its key."""
    return f"{' ' * indent}{{{{- toYaml {path} | nindent {indent} }}}}\n"


def _optional(path: str, indent: int, key: str = "") -> str:
    """Return a value as YAML, and its key before it, unless it is empty."""
    pad = " " * (indent - 2 if key else indent)
    head = f"{pad}{key}:\n" if key else ""
    return f"{pad}{{{{- with {path} }}}}\n{head}{_block('.', indent)}{pad}{{{{- end }}}}\n"


def _deployment(name: str, arguments: str, resources: str) -> Edits:
    """Values of a Deployment: image, resources, security context, and any other field of its
    pods.
    """
    values = f".Values.{name}"
    source = (
        f"          args: [{arguments}]\n          envFrom:\n            - configMapRef: {{ "
        "name: ft-config }\n"
    )
    notes = "      annotations:\n"
    pods = _optional(".Values.imagePullSecrets", 8, "imagePullSecrets") + _optional(
        f"{values}.podFields", 6
    )
    return (
        (
            "image: ft-api\n",
            'image: {{ include "ft.image" (dict "image" .Values.images.api "chart" .Chart) }}\n',
        ),
        (notes, notes + _CHECKSUM + _optional(f"{values}.podAnnotations", 8)),
        (_SECURITY, "      securityContext:\n" + _block(".Values.podSecurityContext", 8) + pods),
        (source, source + _STORAGE_SECRET + _optional(f"{values}.envFrom", 12)),
        (resources, "          resources:\n" + _block(f"{values}.resources", 12)),
        ("          persistentVolumeClaim: { claimName: ft-home }\n", _HOME),
        (_PROFILE_MOUNT, _PROFILE_MOUNT + _optional(".Values.extraVolumeMounts", 12)),
        (_PROFILE_VOLUME, _PROFILE_VOLUME + _optional(".Values.extraVolumes", 8)),
    )


_EACH_NAMESPACE = "{{- range $namespace := prepend .Values.workerNamespaces .Release.Namespace }}\n"
_SPREAD = """\
      {{- if and (gt (int .Values.api.replicas) 1) (not (hasKey .Values.api.podFields "topologySpreadConstraints")) }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: { matchLabels: { app.kubernetes.io/name: ft-api } }
          matchLabelKeys: [pod-template-hash]
      {{- end }}
"""
_PRE_STOP = """\
          {{- if gt (int .Values.api.replicas) 1 }}
          lifecycle:
            # Until every node has heard that the pod leaves, requests still come here.
            preStop: { sleep: { seconds: 5 } }
          {{- end }}
"""


def _claim(name: str, size: str) -> Edits:
    values = f".Values.persistence.{name}"
    head = f"  name: ft-{name}\nspec:\n"
    optional = "".join(
        f"  {{{{- with {values}.{value} }}}}\n  {field}: {{{{ . }}}}\n  {{{{- end }}}}\n"
        for value, field in (("storageClass", "storageClassName"), ("volumeName", "volumeName"))
    )
    return (
        (
            f"{head}  accessModes: [ReadWriteMany]\n",
            f"{head}  accessModes: {{{{ toJson {values}.accessModes }}}}\n{optional}",
        ),
        (f"      storage: {size}\n", f"      storage: {{{{ {values}.size }}}}\n"),
    )


_API_RESOURCES = """\
          resources:
            requests: { cpu: 250m, memory: 256Mi }
            limits: { memory: 1Gi }
"""
_RECONCILER_RESOURCES = """\
          resources:
            # The processes that count tokens hold a tokenizer each.
            requests: { cpu: 250m, memory: 512Mi }
            limits: { memory: 2Gi }
"""

TEMPLATES: dict[str, Template] = {
    "api": Template(
        "base/api.yaml",
        (
            *_deployment("api", "serve, --api-only", _API_RESOURCES),
            ("replicas: 1\n", "replicas: {{ .Values.api.replicas }}\n"),
            ("      initContainers:\n", _SPREAD + "      initContainers:\n"),
            ("          startupProbe:\n", _PRE_STOP + "          startupProbe:\n"),
            ("type: ClusterIP", "type: {{ .Values.service.type }}"),
        ),
    ),
    "reconciler": Template(
        "base/reconciler.yaml", _deployment("reconciler", "reconcile", _RECONCILER_RESOURCES)
    ),
    "rbac": Template("base/rbac.yaml"),
    "workers-rbac": Template("base/workers/rbac.yaml", per_namespace=True),
    "workers-network": Template(
        "base/workers/network.yaml", when=".Values.networkPolicies", per_namespace=True
    ),
    "storage": Template(
        "base/storage.yaml", (*_claim("home", "200Gi"), *_claim("models", "500Gi"))
    ),
    "network": Template("base/network.yaml", when=".Values.networkPolicies"),
    "postgres": Template("overlays/local/postgres.yaml", when=".Values.postgres", labelled=False),
    "kueue-queue": Template(
        "overlays/kueue/queue.yaml",
        (
            ("  name: ft-training\n", "  name: {{ .Values.kueue.localQueue }}\n"),
            ("clusterQueue: training", "clusterQueue: {{ .Values.kueue.clusterQueue }}"),
        ),
        when=".Values.kueue.clusterQueue",
        labelled=False,
    ),
    "kueue-rbac": Template(
        "overlays/kueue/rights/rbac.yaml",
        when=".Values.kueue.clusterQueue",
        labelled=False,
        per_namespace=True,
    ),
    "coscheduling": Template(
        "components/coscheduling/rbac.yaml",
        when=".Values.coscheduling",
        labelled=False,
        per_namespace=True,
    ),
    "workers-storage": Template(
        "overlays/s3/network.yaml",
        when="and .Values.storage .Values.networkPolicies",
        labelled=False,
        per_namespace=True,
    ),
    "pod-monitor": Template(
        "components/monitoring/pod-monitor.yaml", when=".Values.monitoring", labelled=False
    ),
    "rules": Template(
        "components/monitoring/rules.yaml", when=".Values.monitoring", labelled=False
    ),
    "ingress": Template(
        "components/ingress/ingress.yaml",
        (
            ("ft.example.com", "{{ .Values.ingress.host }}"),
            ("ingressClassName: nginx", "ingressClassName: {{ .Values.ingress.className }}"),
            ("secretName: ft-tls", "secretName: {{ .Values.ingress.tlsSecret }}"),
            ("  annotations:\n", "  annotations:\n" + _optional(".Values.ingress.annotations", 4)),
        ),
        when=".Values.ingress.host",
        labelled=False,
    ),
    "external-secrets": Template(
        "components/external-secrets/secrets.yaml",
        (
            (
                "{ kind: ClusterSecretStore, name: secrets }",
                "{{ toJson .Values.externalSecrets.store }}",
            ),
        ),
        when=".Values.externalSecrets.store",
        labelled=False,
    ),
    "backup": Template(
        "components/backup/backup.yaml",
        (
            ('schedule: "17 2 * * *"', "schedule: {{ .Values.backup.schedule | quote }}"),
            ('value: "14"', "value: {{ .Values.backup.keep | quote }}"),
            ("storage: 20Gi", "storage: {{ .Values.backup.size }}"),
            ("image: postgres:17", "image: {{ .Values.backup.image }}"),
            (
                _BACKUP_SECURITY,
                "          securityContext:\n" + _block(".Values.podSecurityContext", 12),
            ),
        ),
        when=".Values.backup.schedule",
        labelled=False,
    ),
    "disruption-budget": Template(
        "components/two-replicas/disruption-budget.yaml",
        when="gt (int .Values.api.replicas) 1",
        labelled=False,
    ),
}


def template(name: str) -> str:
    """Return the text of a template."""
    made = TEMPLATES[name]
    text = (KUBERNETES / made.manifest).read_text(encoding="utf-8").replace("{{", '{{ "{{" }}')
    for old, new in made.edits:
        assert old in text, f"{made.manifest} has no {old!r} any more"
        text = text.replace(old, new)
    text = "---\n".join(_metadata(document, made) for document in text.split("---\n"))
    if name == "storage":
        home, models = text.split("---\n")
        conditions = (
            "and .Values.persistence.home.create (not .Values.storage)",
            ".Values.persistence.models.create",
        )
        text = "---\n".join(map(_if, conditions, (home, models)))
    if made.per_namespace:
        text = (
            "{{- range $namespace := prepend .Values.workerNamespaces .Release.Namespace "
            f"}}}}\n---\n{text}{{{{- end }}}}\n"
        )
        text = text.replace("{{ .Release.Namespace }}", "{{ $namespace }}").replace(
            '"ft.labels" .', '"ft.labels" $'
        )
        text = text.replace(
            "    name: ft-reconciler\n",
            "    name: ft-reconciler\n    namespace: {{ $.Release.Namespace }}\n",
        )
    return NOTICE % made.manifest + (_if(made.when, text) if made.when else text)


def _if(condition: str, text: str) -> str:
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def _metadata(document: str, made: Template) -> str:
    """Give an object its namespace, and the object and its pods the common labels."""
    document = re.sub(
        r"(?m)^metadata:\n  name: .+\n",
        r"\g<0>  namespace: {{ .Release.Namespace }}\n",
        document,
        count=1,
    )
    # Data outlives a release, and a value that leaves its claim out.
    claim = r"(?m)^kind: PersistentVolumeClaim\nmetadata:\n  name: .+\n  namespace: .+\n"
    document = re.sub(claim, r"\g<0>  annotations:\n    helm.sh/resource-policy: keep\n", document)
    account = re.search(r"(?m)^kind: ServiceAccount\nmetadata:\n  name: ft-(\w+)$", document)
    if account:
        annotations = (
            f"  {{{{- with $.Values.serviceAccountAnnotations.{account[1]} }}}}\n  annotations:\n"
        )
        annotations += "    {{- toYaml . | nindent 4 }}\n  {{- end }}\n"
        document = document.replace(
            "automountServiceAccountToken", annotations + "automountServiceAccountToken"
        )
    if not made.labelled:
        instance = document.replace(
            "app.kubernetes.io/instance: ft\n", "app.kubernetes.io/instance: {{ .Release.Name }}\n"
        )
        return instance.replace("managed-by: kustomize", "managed-by: {{ .Release.Service }}")
    include = '{{{{- include "ft.labels" . | nindent {} }}}}\n'
    if not re.search(r"(?m)^metadata:\n(  .*\n)*?  labels:\n", document):
        labels = "  labels:\n    " + include.format(4)
        return re.sub(r"(?m)^  namespace: .+\n", lambda found: found[0] + labels, document, count=1)

    def labelled(found: re.Match[str]) -> str:
        indent = len(found[1]) + 2
        return found[0] + " " * indent + include.format(indent)

    return re.sub(r"(?m)^( +)labels:\n", labelled, document)


def chart_yaml() -> str:
    return f"""\
# Made by `make docs`.
apiVersion: v2
name: ft-service
description: A self-hosted fine-tuning service. LoRA and QLoRA jobs by an OpenAI-compatible API, trained by pods.
type: application
version: {__version__}
appVersion: {__version__}
kubeVersion: ">=1.30.0-0"
"""


OVERLAYS: dict[str, tuple[str, str]] = {
    "gpu": ("NVIDIA GPUs and a shared volume", ""),
    "kueue": ("The same with Kueue as the queue", "kueue:\n  clusterQueue: training # yours\n"),
    "s3": ("The same without a shared volume", "storage: s3://your-bucket/ft\n"),
    "local": (
        "kind or minikube with one node and no GPU",
        """\
images:
  api: { tag: dev }
  worker: { tag: dev }
config:
  FT_MODELS: /var/lib/ft/models
  FT_STOP_GRACE_SECONDS: 60
persistence:
  home: { accessModes: [ReadWriteOnce], size: 10Gi }
  models: { accessModes: [ReadWriteOnce], size: 1Gi }
postgres: true
""",
    ),
}
"""Overlay → its title, and the values that it sets besides the pod profile."""


def overlay_values(name: str) -> str:
    """Return the values with which the chart is the overlay."""
    title, more = OVERLAYS[name]
    profile = (KUBERNETES / "overlays" / name / "pod-profile.yaml").read_text(encoding="utf-8")
    lines = [line for line in profile.splitlines() if not line.startswith("image:")]
    indented = "\n".join(f"  {line}" if line else "" for line in lines)
    return (
        f"# {title}: what deploy/kubernetes/overlays/{name} is. Made by `make "
        f"docs`.\n{more}podProfile:\n{indented}\n"
    )
