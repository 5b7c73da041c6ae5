{{- define "cotenant.labels" -}}
app.kubernetes.io/name: cotenant
app.kubernetes.io/part-of: cotenant
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "cotenant.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "cotenant.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "cotenant.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "cotenant.frontEndSettings" -}}
# Settings of the front end; docs/reference.md has all of them. Models are ServedModel resources.
model_control_mode = "kubernetes"
model_repository = "/models"
backend = "none" # devices are those of the agents
host = "0.0.0.0"
grace = "30s"
log_format = "json"
log_level = "info"

{{- with .Values.frontEnd.settings }}
{{ . }}
{{- end }}

[cluster]
token = "/etc/cotenant/cluster/token"

[kubernetes]
lease = "cotenant"
service = "cotenant"
{{- end }}

{{- define "cotenant.agentSettings" -}}
# Settings of the agents: what each offers of its node.
backend = {{ .Values.agent.backend | quote }}
log_format = "json"
log_level = "info"

{{- with .Values.agent.settings }}
{{ . }}
{{- end }}

[cluster]
token = "/etc/cotenant/cluster/token"

[node]
host = "0.0.0.0"
port = 8010
cache = "/var/cache/cotenant/models"
{{- end }}
