{{- define "ft.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/part-of: ft-service
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* An image by digest, else by tag, else of the chart's version. */}}
{{- define "ft.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (.image.tag | default .chart.AppVersion | toString) }}
{{- end }}
{{- end }}

{{- define "ft.config" -}}
{{- $config := merge (dict) .Values.config }}
{{- with .Values.storage }}
{{- $config = set $config "FT_STORAGE" . }}
{{- end }}
{{- range $name, $value := $config }}
{{ $name }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }} {{- /* a number is 1e+10 to toString */}}
{{- end }}
{{- end }}

{{- /* The pod profile: its image is that of images.worker, unless it names one; its instance is the release. */}}
{{- define "ft.podProfile" -}}
{{- $profile := dict "image" (include "ft.image" (dict "image" .Values.images.worker "chart" .Chart)) }}
{{- if ne .Release.Name "ft" }}
{{- $profile = set $profile "labels" (dict "app.kubernetes.io/instance" .Release.Name) }}
{{- end }}
{{- if not .Values.networkPolicies }}
{{- $profile = set $profile "network_policy" false }}
{{- end }}
{{- toYaml (mergeOverwrite $profile .Values.podProfile) }}
{{- end }}
