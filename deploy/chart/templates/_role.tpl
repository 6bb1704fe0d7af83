{{- define "springtide.image" -}}
{{ with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "springtide.labels" -}}
app.kubernetes.io/name: springtide
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "springtide.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "springtide.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "springtide.store" -}}
- name: SPRINGTIDE__POLICY__STORE
  value: {{ .Values.relaySpec.enabled | ternary (printf "%s://%s-relay:8004" (empty .Values.tls.secretName | ternary "http" "https") .Release.Name) .Values.store.url | quote }}
{{- if .Values.relaySpec.enabled }}
- { name: SPRINGTIDE__POLICY__STORE_API_KEY, valueFrom: { secretKeyRef: { name: {{ .Values.secrets.prefix }}-follow, key: caller-key } } }
{{- end }}
{{- end }}

{{- /* The container of a role. Gives: role, port, root, spec, and whether it uses the database. */ -}}
{{- define "springtide.container" -}}
name: {{ .role }}
image: {{ include "springtide.image" (dict "root" .root "repository" (eq .role "train" | ternary .root.Values.image.trainerRepository .root.Values.image.repository)) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [--config, /etc/springtide/springtide.toml, {{ .role }}]
ports: [{ name: http, containerPort: {{ .port }} }]
securityContext: {{- include "springtide.security" . | nindent 2 }}
readinessProbe: { httpGet: { path: /health, port: http, scheme: {{ empty .root.Values.tls.secretName | ternary "HTTP" "HTTPS" }} }, periodSeconds: 3, failureThreshold: 2 }
livenessProbe: { tcpSocket: { port: http }, initialDelaySeconds: 60, periodSeconds: 10, failureThreshold: 6 }
resources: {{- toYaml .spec.resources | nindent 2 }}
envFrom: [{ secretRef: { name: {{ .root.Values.store.secretName }}, optional: true } }]
env:
  - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
  - { name: POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
  - { name: SPRINGTIDE__POLICY__KEYS, value: /secrets/{{ eq .role "ingest" | ternary "serve" .role }} }
  {{- if ne .role "relay" }}
  - { name: SPRINGTIDE__POSTGRES__URL, valueFrom: { secretKeyRef: { name: {{ .root.Values.postgres.secretName }}, key: {{ .role }} } } }
  - { name: SPRINGTIDE__POSTGRES__URLS__{{ upper .role }}, valueFrom: { secretKeyRef: { name: {{ .root.Values.postgres.secretName }}, key: {{ .role }} } } }
  {{- end }}
  {{- if eq .role "serve" }}
  {{- include "springtide.store" .root | nindent 2 }}
  - { name: SPRINGTIDE__SERVE__REPLICA, value: $(POD_NAME) }
  - { name: SPRINGTIDE__SERVE__ADDRESS, value: "{{ empty .root.Values.tls.secretName | ternary "http" "https" }}://$(POD_IP):8000" }
  - { name: SPRINGTIDE__SERVE__SAMPLER_KEY, value: /secrets/serve/$(POD_NAME).sampler-key }
  - { name: SPRINGTIDE__SERVE__API_KEY, valueFrom: { secretKeyRef: { name: {{ .root.Values.secrets.prefix }}-serve, key: api-key } } }
  {{- with include "springtide.engines" .root }}
  - { name: CALLER_KEY, valueFrom: { secretKeyRef: { name: {{ $.root.Values.secrets.prefix }}-follow, key: caller-key } } }
  - name: SPRINGTIDE__SERVE__REMOTE__VLLM
    value: {{ printf "[%s]" (trimSuffix ", " .) | quote }}
  {{- end }}
  {{- else if eq .role "train" }}
  - { name: SPRINGTIDE__TRAINER__API_KEY, valueFrom: { secretKeyRef: { name: {{ .root.Values.secrets.prefix }}-train, key: api-key } } }
  {{- else if eq .role "relay" }}
  - { name: SPRINGTIDE__RELAY__CALLER_KEY, valueFrom: { secretKeyRef: { name: {{ .root.Values.secrets.prefix }}-follow, key: caller-key } } }
  {{- end }}
  {{- range $name, $value := .spec.env }}
  - { name: {{ $name }}, value: {{ $value | quote }} }
  {{- end }}
volumeMounts:
  - { name: config, mountPath: /etc/springtide }
  - { name: kafka, mountPath: /etc/springtide-kafka }
  - { name: state, mountPath: /var/lib/springtide }
  - { name: tmp, mountPath: /tmp }
  {{- if ne .role "relay" }}
  - { name: keys, mountPath: /secrets/{{ eq .role "ingest" | ternary "serve" .role }} }
  {{- end }}
  {{- if .root.Values.tls.secretName }}
  - { name: tls, mountPath: /tls }
  {{- end }}
  {{- with .root.Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* The servers that the router passes requests to: every pod of every model. */ -}}
{{- define "springtide.engines" -}}
{{- range $model := .Values.servingEngineSpec.modelSpec }}
{{- $name := printf "%s-engine-%s" $.Release.Name $model.name }}
{{- range $i := until (int $model.replicaCount) -}}
{ url = "http://{{ $name }}-{{ $i }}.{{ $name }}:8005", control = false, api_key = "$(CALLER_KEY)" }, {{ end }}
{{- end }}
{{- end }}

{{- define "springtide.volumes" -}}
- { name: config, configMap: { name: {{ .root.Release.Name }}-config } }
- { name: kafka, secret: { secretName: {{ .root.Values.kafka.secretName }}, defaultMode: 0440 } }
- { name: tmp, emptyDir: {} }
{{- if ne .role "relay" }}
- name: keys
  secret: { secretName: {{ .root.Values.secrets.prefix }}-{{ eq .role "ingest" | ternary "serve" .role }}, defaultMode: 0440 }
{{- end }}
{{- if .root.Values.tls.secretName }}
- { name: tls, secret: { secretName: {{ .root.Values.tls.secretName }}, defaultMode: 0440 } }
{{- end }}
{{- with .root.Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Deployment or StatefulSet, Service and disruption budget of a role. */ -}}
{{- define "springtide.role" -}}
{{- $stateful := has .role (list "serve" "train") -}}
{{- $persistent := and $stateful .spec.persistence.enabled -}}
apiVersion: apps/v1
kind: {{ $stateful | ternary "StatefulSet" "Deployment" }}
metadata:
  name: {{ .root.Release.Name }}-{{ .role }}
  labels: {{- include "springtide.labels" . | nindent 4 }}
spec:
  {{- if not (and .spec.autoscaling .spec.autoscaling.enabled) }}
  replicas: {{ .spec.replicaCount | default 1 }}
  {{- end }}
  selector: { matchLabels: {{ include "springtide.labels" . | fromYaml | toJson }} }
  {{- if $stateful }}
  serviceName: {{ .root.Release.Name }}-{{ .role }}
  podManagementPolicy: Parallel
  {{- else if eq .role "relay" }}
  strategy: { type: Recreate }
  {{- else }}
  strategy: { rollingUpdate: { maxUnavailable: 0, maxSurge: 1 } }
  {{- end }}
  template:
    metadata:
      labels: {{- include "springtide.labels" . | nindent 8 }}
      annotations: { checksum/config: {{ include (print .root.Template.BasePath "/config.yaml") .root | sha256sum }} }
    spec:
      terminationGracePeriodSeconds: 45
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext: {{- include "springtide.podSecurity" . | nindent 8 }}
      {{- with .root.Values.serviceAccountName }}
      serviceAccountName: {{ . }}
      {{- end }}
      {{- with .root.Values.image.pullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .root.Values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .root.Values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: { matchLabels: {{ include "springtide.labels" . | fromYaml | toJson }} }
      containers:
        - {{- include "springtide.container" . | nindent 10 }}
      volumes:
        {{- include "springtide.volumes" . | nindent 8 }}
        {{- if not $persistent }}
        - { name: state, emptyDir: {} }
        {{- end }}
  {{- if $persistent }}
  volumeClaimTemplates:
    - metadata: { name: state }
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ .spec.persistence.storageClassName }}
        resources: { requests: { storage: {{ .spec.persistence.size }} } }
  {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ .root.Release.Name }}-{{ .role }}
  labels: {{- include "springtide.labels" . | nindent 4 }}
spec:
  selector: {{- include "springtide.labels" . | nindent 4 }}
  ports: [{ name: http, port: {{ .port }}, targetPort: http }]
{{- if and .root.Values.podDisruptionBudget.enabled (gt (int .spec.replicaCount) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: { name: {{ .root.Release.Name }}-{{ .role }} }
spec:
  maxUnavailable: 1
  selector: { matchLabels: {{ include "springtide.labels" . | fromYaml | toJson }} }
{{- end }}
{{- if .root.Values.serviceMonitor.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ .root.Release.Name }}-{{ .role }}
  labels: {{- include "springtide.labels" . | nindent 4 }}
spec:
  jobLabel: app.kubernetes.io/name
  selector: { matchLabels: {{ include "springtide.labels" . | fromYaml | toJson }} }
  endpoints:
    - port: http
      interval: {{ .root.Values.serviceMonitor.interval }}
      scheme: {{ empty .root.Values.tls.secretName | ternary "http" "https" }}
      authorization: { credentials: { name: {{ .root.Values.secrets.prefix }}-prometheus, key: api-key } }
{{- end }}
{{- end }}
