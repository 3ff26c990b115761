"""Templates of the Helm chart, made from the manifests of `deploy/kubernetes`: their text, with
values in place of some lines.

`docs/site/generated.py` writes them; a test compares what Helm renders with what kustomize makes,
object by object. Only `values.yaml`, the helpers, the ConfigMaps, the notes and what
`values.schema.json` says of other values than `podProfile` and `config` are written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ft_service import __version__
from ft_service.launcher.kubernetes.profile import PodProfile
from ft_service.settings import OTHER_VARIABLES, Settings

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
_NOTES = """\
        prometheus.io/scrape: "true"
        prometheus.io/port: "%d"
        prometheus.io/path: /metrics
"""
_POD_FIELDS = """\
      serviceAccountName: ft-%s
      automountServiceAccountToken: %s
      enableServiceLinks: false
      terminationGracePeriodSeconds: 30
"""
_INGRESS_NOTES = """\
    nginx.ingress.kubernetes.io/proxy-body-size: 513m
    nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
    nginx.ingress.kubernetes.io/proxy-buffering: "off"
    nginx.ingress.kubernetes.io/proxy-read-timeout: "3600"
    nginx.ingress.kubernetes.io/proxy-send-timeout: "3600"
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


def _merged(lines: str, path: str) -> tuple[str, str]:
    """Return an edit of fields of one level: an operator's value (a map) replaces those of its own
    keys, and adds others. A key that stood there twice would be no YAML.
    """
    indent = len(lines) - len(lines.lstrip(" "))
    plain = "".join(line[indent:] for line in lines.splitlines(keepends=True))
    merged = f"mergeOverwrite (fromYaml `{plain}`) {path}"
    return lines, f"{' ' * indent}{{{{- {merged} | toYaml | nindent {indent} }}}}\n"


def _deployment(name: str, arguments: str, resources: str, port: int) -> Edits:
    """Values of a Deployment: image, resources, security context, and any other field of its
    pods. `port`: of its metrics.
    """
    token = "true" if name == "reconciler" else "false"
    values = f".Values.{name}"
    source = (
        f"          args: [{arguments}]\n          envFrom:\n            - configMapRef: {{ "
        "name: ft-config }\n"
    )
    notes = "      annotations:\n"
    pods = _optional(".Values.imagePullSecrets", 8, "imagePullSecrets")
    return (
        (
            "image: ft-api\n",
            'image: {{ include "ft.image" (dict "image" .Values.images.api "chart" .Chart) }}\n',
        ),
        (notes, notes + _CHECKSUM),
        _merged(_NOTES % port, f"{values}.podAnnotations"),
        _merged(_POD_FIELDS % (name, token), f"{values}.podFields"),
        (_SECURITY, "      securityContext:\n" + _block(".Values.podSecurityContext", 8) + pods),
        (source, source + _STORAGE_SECRET + _optional(f"{values}.envFrom", 12)),
        (resources, "          resources:\n" + _block(f"{values}.resources", 12)),
        ("          persistentVolumeClaim: { claimName: ft-home }\n", _HOME),
        (_PROFILE_MOUNT, _PROFILE_MOUNT + _optional(".Values.extraVolumeMounts", 12)),
        (_PROFILE_VOLUME, _PROFILE_VOLUME + _optional(".Values.extraVolumes", 8)),
    )


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


_DNS = """\
        - { port: 53, protocol: UDP }
        - { port: 53, protocol: TCP }
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
            *_deployment("api", "serve, --api-only", _API_RESOURCES, 8000),
            ("replicas: 1\n", "replicas: {{ .Values.api.replicas }}\n"),
            ("      initContainers:\n", _SPREAD + "      initContainers:\n"),
            ("          startupProbe:\n", _PRE_STOP + "          startupProbe:\n"),
            ("type: ClusterIP", "type: {{ .Values.service.type }}"),
        ),
    ),
    "reconciler": Template(
        "base/reconciler.yaml", _deployment("reconciler", "reconcile", _RECONCILER_RESOURCES, 9090)
    ),
    "rbac": Template("base/rbac.yaml"),
    "workers-rbac": Template("base/workers/rbac.yaml", per_namespace=True),
    "workers-network": Template(
        "base/workers/network.yaml",
        (
            (
                _DNS,
                _DNS + _optional("$.Values.workerEgress", 4),
            ),
        ),
        when=".Values.networkPolicies",
        per_namespace=True,
    ),
    "storage": Template(
        "base/storage.yaml", (*_claim("home", "200Gi"), *_claim("models", "500Gi"))
    ),
    "network": Template("base/network.yaml", when=".Values.networkPolicies"),
    "postgres": Template(
        "overlays/local/postgres.yaml",
        (
            ("image: postgres:17", "image: {{ .Values.images.postgres }}"),
            (
                "      containers:\n",
                _optional(".Values.imagePullSecrets", 8, "imagePullSecrets")
                + "      containers:\n",
            ),
        ),
        when=".Values.postgres",
        labelled=False,
    ),
    "kueue-queue": Template(
        "overlays/kueue/queue.yaml",
        (
            ("  name: ft-training\n", "  name: {{ $.Values.kueue.localQueue }}\n"),
            ("clusterQueue: training", "clusterQueue: {{ $.Values.kueue.clusterQueue }}"),
        ),
        when=".Values.kueue.clusterQueue",
        labelled=False,
        per_namespace=True,
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
        "components/monitoring/pod-monitor.yaml",
        tuple(
            (
                f"    - {{ port: {port}, path: /metrics, interval: 30s }}\n",
                f"    - port: {port}\n      path: /metrics\n      interval: 30s\n"
                "      {{- with .Values.metricsSecret }}\n"
                "      authorization: { credentials: { name: {{ . }}, key: key } }\n"
                "      {{- end }}\n",
            )
            for port in ("http", "metrics")
        ),
        when=".Values.monitoring",
        labelled=False,
    ),
    "rules": Template(
        "components/monitoring/rules.yaml",
        (("runbook_url: docs/runbook.md", "runbook_url: {{ .Values.runbookUrl }}"),),
        when=".Values.monitoring",
        labelled=False,
    ),
    "ingress": Template(
        "components/ingress/ingress.yaml",
        (
            ("ft.example.com", "{{ .Values.ingress.host }}"),
            ("ingressClassName: nginx", "ingressClassName: {{ .Values.ingress.className }}"),
            (
                "      secretName: ft-tls\n",
                "      {{- with .Values.ingress.tlsSecret }}\n      secretName: {{ . }}\n"
                "      {{- end }}\n",
            ),
            _merged(_INGRESS_NOTES, ".Values.ingress.annotations"),
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
                "          containers:\n",
                _optional(".Values.imagePullSecrets", 12, "imagePullSecrets")
                + "          containers:\n",
            ),
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


SCALAR = {"type": ["string", "number", "boolean"]}
_SECRET_URL = "database_url"
"""Holds a password: FT_DATABASE_URL_FILE names the file of a Secret."""
_WORDS = ("title", "description", "default")
_NOT_FT = "^([A-EG-Z]|F([A-SU-Z0-9_]|T([A-Z0-9]|$)|$))[A-Z0-9_]*$"
"""Variables of other programs, such as HTTPS_PROXY."""


def values_schema() -> str:
    """Return the schema of values, with `podProfile` and `config` as the service takes them."""
    text = (KUBERNETES.parents[1] / CHART / "values.schema.json").read_text(encoding="utf-8")
    fields = {name: _of_values(made) for name, made in _properties(PodProfile)}
    named = "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"
    own = {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/podProfileFields"}]}
    several = {"type": "object", "propertyNames": {"pattern": named}, "additionalProperties": own}
    shared = {
        name: {"$ref": f"#/definitions/podProfileFields/properties/{name}"} for name in fields
    }
    settings = {
        f"FT_{name.upper()}": SCALAR
        for name, made in _properties(Settings)
        if name != _SECRET_URL and "writeOnly" not in json.dumps(made)
    }
    settings |= dict.fromkeys(OTHER_VARIABLES, SCALAR)
    for name, properties, more in (
        ("podProfile", {**shared, "profiles": several}, {}),
        ("podProfileFields", fields, {}),
        ("config", settings, {"patternProperties": {_NOT_FT: SCALAR}}),
    ):
        lines = ",\n".join(
            f"        {json.dumps(key)}: {json.dumps(made)}" for key, made in properties.items()
        )
        rest = "".join(f"      {json.dumps(key)}: {json.dumps(of)},\n" for key, of in more.items())
        block = (
            f'    "{name}": {{\n      "$comment": "Made by `make docs`.",\n      "type": "object",\n'
            f'      "additionalProperties": false,\n{rest}'
            f'      "properties": {{\n{lines}\n      }}\n    }}'
        )
        found = re.compile(rf'(?ms)^    "{name}": \{{\n.*?^    \}}(?=,?$)')
        text, times = found.subn(lambda _, block=block: block, text, count=1)
        assert times == 1, f"values.schema.json has no {name}"
    return text


def _properties(model: type[BaseModel]) -> Iterable[tuple[str, Any]]:
    return model.model_json_schema()["properties"].items()


def _of_values(made: Any) -> Any:
    """Return a JSON schema without what only people read."""
    if isinstance(made, list):
        return [_of_values(item) for item in made]
    if not isinstance(made, dict):
        return made
    return {key: _of_values(of) for key, of in made.items() if key not in _WORDS}


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
