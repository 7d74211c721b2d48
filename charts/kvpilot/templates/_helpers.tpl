{{- define "kvpilot.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvpilot.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "kvpilot.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvpilot.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvpilot.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvpilot.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "kvpilot.labels" -}}
{{ include "kvpilot.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvpilot
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvpilot.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvpilot.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvpilot.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* The namespaces that the operator acts in, as a comma-separated list; empty means all. */}}
{{- define "kvpilot.watchNamespaces" -}}
{{- if not .Values.rbac.clusterScoped }}
{{- join "," (default (list .Release.Namespace) .Values.watchNamespaces) }}
{{- end }}
{{- end }}

{{- /* What the operator may do in each namespace it acts in. One list for Role and ClusterRole; each rule has its reason. */}}
{{- define "kvpilot.rules" -}}
# the objects themselves
- apiGroups: [kvpilot.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
# conditions, decisions, learned limits
- apiGroups: [kvpilot.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# entering External mode writes the running count once, before an HPA takes over
- apiGroups: [kvpilot.dev]
  resources: [llmdeployments/scale]
  verbs: [patch]
# OpenShift checks this for owner references that block deletion
- apiGroups: [kvpilot.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
# engine pods
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch]
# replicas are written here only
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
# the pod template as it was accepted, so that an operator upgrade rolls nothing
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [list, watch, create, patch]
# the Service in front of the engine; the tuning file and what was learned
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch]
# observe pods; touch their annotations (tuning, deletion cost); end one that is in back-off after its cap changed
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
# say what happened
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{- /* In the operator's own namespace only: one operator at a time. */}}
{{- define "kvpilot.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end }}
