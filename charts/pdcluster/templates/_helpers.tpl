{{- define "pdcluster.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Names of cluster-scoped objects: two releases in two namespaces must not share them. */}}
{{- define "pdcluster.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "pdcluster.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "pdcluster.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdcluster.labels" -}}
{{ include "pdcluster.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "pdcluster.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (printf "%s-operator" (include "pdcluster.name" .)) .Values.serviceAccount.name }}{{ else }}{{ required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "pdcluster.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "pdcluster.subjects" -}}
subjects:
  - kind: ServiceAccount
    name: {{ include "pdcluster.serviceAccount" . }}
    namespace: {{ .Release.Namespace }}
{{- end }}

{{/* What the operator does in every namespace it watches: pdoperator.kube.verbs.CLUSTER_RULES, one to one. */}}
{{- define "pdcluster.rules" -}}
- apiGroups: [pdcluster.io]
  resources: [pdclusters]
  verbs: [get, list, watch]
- apiGroups: [pdcluster.io]
  resources: [pdclusters/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, create, patch, delete]
# Written, never read: who takes over the operator's token can not read what users keep in Secrets.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch{{ if .Values.rbac.podEvents }}, list{{ end }}]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, create, patch, delete]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch, delete]
{{- end }}
