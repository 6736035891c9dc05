"""OpenTelemetry spans of requests (extra `[otel]`)."""
